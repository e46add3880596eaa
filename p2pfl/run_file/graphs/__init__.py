"""The ``graph`` section of a run file: graph generators, files, and graphs that change between rounds.

A :class:`Graph` holds the parameters of one of them; ``plan`` makes the :class:`Topology`, and the :class:`Schedule`
of one that changes. Equal seeds give equal graphs on every host. :data:`GRAPHS` maps the names allowed in a run file
to classes.
"""

from __future__ import annotations

from p2pfl.run_file.graphs import changing, sequences, static
from p2pfl.run_file.graphs.base import Graph as Graph
from p2pfl.run_file.graphs.base import Schedule as Schedule
from p2pfl.run_file.graphs.changing import ChangingGraph as ChangingGraph
from p2pfl.run_file.options import Table

GRAPHS: Table[type[Graph]] = Table(
    {
        "complete": static.Complete,
        "ring": static.Ring,
        "line": static.Line,
        "star": static.Star,
        "torus": static.Torus,
        "regular": static.Regular,
        "erdos-renyi": static.ErdosRenyi,
        "small-world": static.SmallWorld,
        "barabasi-albert": static.BarabasiAlbert,
        "bridge": static.Bridge,
        "edges": static.Edges,
        "file": static.FromFile,
        "one-peer-exponential": changing.OnePeerExponential,
        "base-k": changing.BaseK,
        "el-oracle": changing.ElOracle,
        "el-local": changing.ElLocal,
        "matchings": changing.Matchings,
        "list": sequences.GraphList,
        "trace": sequences.Trace,
    },
)
sequences.register_table(GRAPHS)
