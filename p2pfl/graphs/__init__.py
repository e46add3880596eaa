"""The ``graph`` section of a run file: generators, files, and time-varying graphs.

A :class:`Graph` holds the parameters of one of them; ``plan`` makes the :class:`Topology`, and the :class:`Schedule`
of a time-varying one. Equal seeds give equal graphs on every host. :data:`GRAPHS` maps the names in run files to
classes.
"""

from __future__ import annotations

from p2pfl.graphs import sequences, static, time_varying
from p2pfl.graphs.base import GRAPHS as GRAPHS
from p2pfl.graphs.base import Graph as Graph
from p2pfl.graphs.base import Schedule as Schedule
from p2pfl.graphs.base import graph as graph
from p2pfl.graphs.time_varying import TimeVaryingGraph as TimeVaryingGraph

for _name, _graph in {
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
    "one-peer-exponential": time_varying.OnePeerExponential,
    "base-k": time_varying.BaseK,
    "el-oracle": time_varying.ElOracle,
    "el-local": time_varying.ElLocal,
    "matchings": time_varying.Matchings,
    "list": sequences.GraphList,
    "trace": sequences.Trace,
}.items():
    graph(_name)(_graph)
