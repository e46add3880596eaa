"""The ``graph`` section of a run file: generators, files, and time-varying graphs.

A :class:`Graph` holds the parameters of one of them; ``plan`` makes the :class:`Topology`, and the :class:`Schedule`
of a time-varying one. Equal seeds give equal graphs on every host. :data:`GRAPHS` maps the names in run files to
classes.
"""

from __future__ import annotations

from p2pfl.graphs.base import GRAPHS as GRAPHS
from p2pfl.graphs.base import Graph as Graph
from p2pfl.graphs.base import Schedule as Schedule
from p2pfl.graphs.base import graph as graph
from p2pfl.graphs.time_varying import TimeVaryingGraph as TimeVaryingGraph
from p2pfl.registry import discover

discover(__name__, GRAPHS)
