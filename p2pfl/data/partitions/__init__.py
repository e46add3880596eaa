"""Who gets which samples: one class per partition, a module per paper, and the table of their names.

A partition is a pure function of labels, number of peers, seed and its own parameters: every peer computes
the whole of it for itself and keeps its own share. What needs luck is tried a bounded number of times.
"""

from p2pfl.data.partitions.base import Indices, Labelled, Labels, Partition, Share
from p2pfl.data.partitions.dfml import DirichletTrain, IidTrain
from p2pfl.data.partitions.fedstyle import Styles
from p2pfl.data.partitions.fedtgp import Dirichlet, Pathological
from p2pfl.data.partitions.l2c import Groups, Shards
from p2pfl.data.partitions.mapl import Clusters
from p2pfl.data.partitions.plain import FractionOfAll, Iid
from p2pfl.options import Table

PARTITIONS: Table[type[Partition]] = Table(
    "partition",
    {
        "iid": Iid,
        "fraction": FractionOfAll,
        "clusters": Clusters,
        "shards": Shards,
        "groups": Groups,
        "pathological": Pathological,
        "dirichlet": Dirichlet,
        "dirichlet-train": DirichletTrain,
        "iid-train": IidTrain,
        "styles": Styles,
    },
)

__all__ = ["PARTITIONS", "Indices", "Labelled", "Labels", "Partition", "Share"]
