"""Graph: the parameters of one generator or file of a run file's ``graph`` section."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar

from p2pfl import rng
from p2pfl.errors import Problem, RunFileError
from p2pfl.messaging.topology import Edge, Rounds, Topology
from p2pfl.options import Options
from p2pfl.registry import Table, options_decorator

DRAWS = 100
"""Maximum draws of a random graph until one is connected."""
KEPT = 64
"""Graphs of rounds that are kept once they were computed."""


class Schedule:
    """The graph of each round, which every peer computes locally, without communication.

    Args:
        rounds: returns it.
        period: rounds after which the graphs repeat; None if they do not.
        fields: parameters that replace the names of files in a resolved run file.
    """

    def __init__(self, rounds: Rounds, period: int | None, fields: Mapping[str, Any] | None = None) -> None:
        self.rounds = rounds
        self.period = period
        self.fields = dict(fields or {})
        self._cached = lru_cache(KEPT)(rounds)

    def __call__(self, t: int) -> Topology:
        return self._cached(t if self.period is None else t % self.period)


@dataclass(frozen=True, kw_only=True)
class Graph(Options):
    """Base of all graphs. A subclass implements ``edges_of``; a random one also sets ``random``."""

    random: ClassVar[bool] = False
    required: ClassVar[tuple[str, ...]] = ("edges_of",)
    """The methods that a subclass must define."""

    allow_disconnected: bool = False
    """Accept a graph in which some peers cannot reach each other."""

    def plan(self, peers: int, seed: int, base: Path, rounds: int) -> tuple[Topology, Schedule | None]:
        """Build the graph over which the peers connect, and the graph of each round if they differ.

        Args:
            base: the folder that relative paths start from.
            rounds: of the run.

        Raises:
            RunFileError: the parameters do not fit ``peers`` or ``rounds``, or the graph is not connected.
        """
        return self.build(peers, seed, base), None

    @property
    def files(self) -> tuple[Path, ...]:
        """The files that the parameters name, relative to the folder of the run file."""
        return ()

    def build(self, peers: int, seed: int, base: Path) -> Topology:
        """Build the graph. A random one is drawn up to ``DRAWS`` times, until it is connected.

        Args:
            base: the folder that relative paths start from.

        Raises:
            RunFileError: the parameters do not fit ``peers``, or the graph is not connected.
        """
        for attempt in range(DRAWS if self.random else 1):
            draw = int(rng.shared(seed, "graph", attempt).integers(2**32))
            topology = Topology.from_edges(peers, self._checked(self.edges_of(peers, draw, base), peers))
            if topology.connected or self.allow_disconnected:
                return topology
        if self.random:
            raise disconnected(f"none of {DRAWS} draws is connected; the last one", topology, "draw more edges")
        raise disconnected("not connected; it", topology)

    def edges_of(self, peers: int, seed: int, base: Path) -> Iterable[Edge]:
        """Return the edges, in any order and direction. Raises RunFileError if the parameters do not fit."""
        raise NotImplementedError

    def resolved(self, name: str, topology: Topology, schedule: Schedule | None = None) -> dict[str, Any]:
        """The section as written to a resolved run file, which must not depend on other files."""
        return {"name": name, **self.to_dict(), **(schedule.fields if schedule is not None else {})}

    def _checked(self, edges: Iterable[Edge], peers: int) -> Iterable[Edge]:
        for edge in listed(edges, "edges_of"):
            try:
                i, j = edge
                i, j = int(i), int(j)
            except (TypeError, ValueError):
                raise graph_error(f"an edge should be a pair of peers (i, j), not {edge!r}") from None
            check_edge(i, j, peers)
            yield i, j


GRAPHS: Table[type[Graph]] = Table("graph")

graph = options_decorator(GRAPHS, Graph)
"""Register a subclass of ``p2pfl.graphs.Graph``, or of ``TimeVaryingGraph``: they list edges."""


def listed(edges: Any, method: str) -> Iterable[Any]:
    """Return the edges that a method has returned. Raises RunFileError if it has returned something else."""
    if not isinstance(edges, Iterable):
        raise graph_error(f"{method} should return edges, e.g. a list of pairs, not {type(edges).__name__}")
    return edges


def check_edge(i: int, j: int, peers: int) -> None:
    """Raise RunFileError if an edge connects a peer to itself or to one that does not exist."""
    if i == j:
        raise graph_error(f"edge {i}-{j} connects a peer to itself")
    for end in (i, j):
        if not 0 <= end < peers:
            raise graph_error(f"edge {i}-{j}: no peer {end}; the {peers} peers are 0 to {peers - 1}")


def check_regular(degree: int, peers: int) -> None:
    """Raise RunFileError if no graph gives every peer this number of neighbors."""
    if degree >= peers:
        raise graph_error(f"degree {degree} needs more than {degree} peers; there are {peers}")
    if degree * peers % 2:
        raise graph_error(f"degree {degree} with {peers} peers: degree or peers must be even")


def disconnected(prefix: str, topology: Topology, remedy: str = "add edges") -> RunFileError:
    return graph_error(
        f"{prefix} has the components {shortened(topology.components)}; {remedy}, or set allow_disconnected: true"
    )


def shortened(components: tuple[tuple[int, ...], ...], most: int = 4) -> str:
    """``0 1 2 3 … (17 peers) | 4 | 6 | and 2 more``."""

    def text(component: tuple[int, ...]) -> str:
        start = " ".join(map(str, component[:most]))
        return start if len(component) <= most else f"{start} … ({len(component)} peers)"

    more = [f"and {len(components) - most} more"] if len(components) > most else []
    return " | ".join([*map(text, components[:most]), *more])


def graph_error(message: str) -> RunFileError:
    return RunFileError([Problem("", "", message)])
