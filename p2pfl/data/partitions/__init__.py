"""Partitions of a dataset among peers: a module per paper, and the table of their names.

A partition is a pure function of the labels, the number of peers, the seed and its parameters: every peer computes
all subsets and uses its own. Random draws that may fail are repeated a bounded number of times.
"""

from p2pfl.data.partitions.base import (
    PARTITIONS,
    DatasetLabels,
    Indices,
    Labels,
    Partition,
    Subset,
    check_subsets,
    partition,
)
from p2pfl.data.partitions.dfml import DirichletTrain, IidTrain
from p2pfl.data.partitions.fedstyle import Styles
from p2pfl.data.partitions.fedtgp import Dirichlet, Pathological
from p2pfl.data.partitions.flwr import Flwr
from p2pfl.data.partitions.l2c import Groups, Shards
from p2pfl.data.partitions.mapl import Clusters
from p2pfl.data.partitions.natural import FromFile, Natural
from p2pfl.data.partitions.uniform import FractionOfAll, Iid

for _name, _class in {
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
    "natural": Natural,
    "indices": FromFile,
    "flwr": Flwr,
}.items():
    partition(_name)(_class)

__all__ = ["PARTITIONS", "DatasetLabels", "Indices", "Labels", "Partition", "Subset", "check_subsets", "partition"]
