"""Graphs that stay the same for the whole run: generators and files."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import combinations, pairwise
from pathlib import Path
from statistics import median_low
from types import ModuleType
from typing import Annotated, Any, ClassVar
from xml.etree.ElementTree import ParseError

from pydantic import Field, PositiveInt

from p2pfl.errors import RunFileError
from p2pfl.graphs.base import Graph, Schedule, check_regular, graph_error
from p2pfl.messaging.topology import Edge, Topology
from p2pfl.paths import ExpandedPath

Probability = Annotated[float, Field(ge=0.0, le=1.0)]


class Complete(Graph):
    """All peers are neighbors of each other."""

    def edges_of(self, peers: int, seed: int, base: Path) -> Iterable[Edge]:
        return combinations(range(peers), 2)


class Ring(Graph):
    """Peer i is a neighbor of i-1 and i+1, the last peer of the first."""

    def edges_of(self, peers: int, seed: int, base: Path) -> Iterable[Edge]:
        return _torus(1, peers)


class Line(Graph):
    """Peer i is a neighbor of i-1 and i+1."""

    def edges_of(self, peers: int, seed: int, base: Path) -> Iterable[Edge]:
        return pairwise(range(peers))


class Star(Graph):
    """All peers are neighbors of peer 0."""

    def edges_of(self, peers: int, seed: int, base: Path) -> Iterable[Edge]:
        return ((0, i) for i in range(1, peers))


@dataclass(frozen=True, kw_only=True)
class Torus(Graph):
    """A grid with connected opposite borders; peers are numbered row by row."""

    rows: PositiveInt | None = None
    """Default: the most square grid."""
    cols: PositiveInt | None = None
    """Default: the most square grid."""

    def edges_of(self, peers: int, seed: int, base: Path) -> Iterable[Edge]:
        return _torus(*self._shape(peers))

    def _shape(self, peers: int) -> tuple[int, int]:
        rows = self.rows or (peers // self.cols if self.cols else _most_square(peers))
        cols = self.cols or peers // rows
        if rows * cols != peers:
            requested = " x ".join("?" if size is None else str(size) for size in (self.rows, self.cols))
            raise graph_error(f"{peers} peers do not fill a torus of {requested} (rows x cols)")
        if rows == 1 and self.rows is None and self.cols is None:
            raise graph_error(
                f"{peers} peers make no grid of at least 2 x 2; use another number of peers, the graph ring, "
                "or rows: 1"
            )
        return rows, cols


@dataclass(frozen=True, kw_only=True)
class Regular(Graph):
    """A random graph in which every peer has the same number of neighbors."""

    random: ClassVar[bool] = True

    degree: PositiveInt
    """Number of neighbors of each peer."""

    def edges_of(self, peers: int, seed: int, base: Path) -> Iterable[Edge]:
        check_regular(self.degree, peers)
        yield from _networkx().random_regular_graph(self.degree, peers, seed=seed).edges


@dataclass(frozen=True, kw_only=True)
class ErdosRenyi(Graph):
    """A random graph in which each pair of peers is connected with the same probability."""

    random: ClassVar[bool] = True

    p: Probability
    """Probability of each edge."""

    def edges_of(self, peers: int, seed: int, base: Path) -> Iterable[Edge]:
        yield from _networkx().gnp_random_graph(peers, self.p, seed=seed).edges


@dataclass(frozen=True, kw_only=True)
class SmallWorld(Graph):
    """Watts and Strogatz: a ring lattice, some of whose edges are rewired at random."""

    random: ClassVar[bool] = True

    degree: PositiveInt
    """Number of neighbors of each peer before rewiring; even."""
    p: Probability
    """Probability that an edge is rewired."""

    def edges_of(self, peers: int, seed: int, base: Path) -> Iterable[Edge]:
        if self.degree % 2:
            raise graph_error(
                f"degree {self.degree} is odd; it must be even (half of the neighbors on each side of the ring)"
            )
        check_regular(self.degree, peers)
        yield from _networkx().watts_strogatz_graph(peers, self.degree, self.p, seed=seed).edges


@dataclass(frozen=True, kw_only=True)
class BarabasiAlbert(Graph):
    """Preferential attachment: each new peer connects preferably to peers with many edges."""

    random: ClassVar[bool] = True

    links: PositiveInt
    """Number of edges that each new peer adds."""

    def edges_of(self, peers: int, seed: int, base: Path) -> Iterable[Edge]:
        if self.links >= peers:
            raise graph_error(f"links {self.links} needs more than {self.links} peers; there are {peers}")
        yield from _networkx().barabasi_albert_graph(peers, self.links, seed=seed).edges


class Bridge(Graph):
    """DFML, Fig. 23: one clique of even ids, one of odd ids, and an edge between their median peers."""

    def edges_of(self, peers: int, seed: int, base: Path) -> Iterable[Edge]:
        if peers < 2:
            raise graph_error("a bridge connects two cliques, which takes at least 2 peers")
        cliques = range(0, peers, 2), range(1, peers, 2)
        yield from (edge for clique in cliques for edge in combinations(clique, 2))
        yield median_low(cliques[0]), median_low(cliques[1])


@dataclass(frozen=True, kw_only=True)
class Edges(Graph):
    """An explicit list of edges."""

    edges: tuple[Edge, ...]
    """Pairs of peer ids; edges are undirected and listed once."""

    def edges_of(self, peers: int, seed: int, base: Path) -> Iterable[Edge]:
        return self.edges


@dataclass(frozen=True, kw_only=True)
class FromFile(Graph):
    """A GraphML file (.graphml), or a text file with two peer ids per line; # starts a comment."""

    path: ExpandedPath
    """Relative to the folder of the run file."""

    def edges_of(self, peers: int, seed: int, base: Path) -> Iterable[Edge]:
        file = base / self.path
        try:
            return _graphml(file, peers) if file.suffix == ".graphml" else _edge_list(file, peers)
        except (OSError, UnicodeDecodeError) as error:
            raise unreadable(file, error) from None

    @property
    def files(self) -> tuple[Path, ...]:
        return (self.path,)

    def resolved(self, name: str, topology: Topology, schedule: Schedule | None = None) -> dict[str, Any]:
        edges = Edges(edges=tuple(topology.edges), allow_disconnected=self.allow_disconnected)
        return edges.resolved("edges", topology, schedule)


def _edge_list(file: Path, peers: int) -> list[Edge]:
    edges = []
    for number, line in enumerate(file.read_text(encoding="utf-8-sig").splitlines(), start=1):
        ends = re.split(r"[\s,;]+", line.partition("#")[0].strip())
        if ends == [""]:
            continue
        if len(ends) != 2:
            raise graph_error(f"{file}:{number}: expected two peer ids, found {line.strip()!r}")
        edges.append((peer_id(ends[0], peers, f"{file}:{number}"), peer_id(ends[1], peers, f"{file}:{number}")))
    return edges


def unreadable(file: Path, error: OSError | UnicodeDecodeError) -> RunFileError:
    reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
    return graph_error(f"{file}: cannot be read: {reason}")


def _networkx() -> ModuleType:
    """Import networkx when it is needed: it takes 12 MiB."""
    import networkx as nx

    return nx  # type: ignore[no-any-return]


def _graphml(file: Path, peers: int) -> list[Edge]:
    nx = _networkx()
    try:
        graph = nx.read_graphml(file)
    except (ParseError, nx.NetworkXError, KeyError, ValueError) as error:
        raise graph_error(f"{file}: not GraphML: {error}") from None
    if graph.is_directed():
        raise graph_error(f'{file}: the graph is directed; it must be undirected (edgedefault="undirected")')
    for node in graph.nodes:
        peer_id(node, peers, str(file))
    return [(int(i), int(j)) for i, j in graph.edges()]


def peer_id(name: str, peers: int, where: str) -> int:
    """Return the peer that a file names. Raises RunFileError."""
    if name.isascii() and name.isdigit() and int(name) < peers:
        return int(name)
    raise graph_error(f"{where}: {name!r} is not a peer; the {peers} peers are 0 to {peers - 1}")


def _torus(rows: int, cols: int) -> Iterable[Edge]:
    """Both borders wrap around: along a side of 2 this repeats the direct edge, along a side of 1 there is none."""
    for row in range(rows):
        for col in range(cols):
            peer = row * cols + col
            right, below = row * cols + (col + 1) % cols, (row + 1) % rows * cols + col
            yield from ((peer, neighbor) for neighbor in (right, below) if neighbor != peer)


def _most_square(peers: int) -> int:
    return max(rows for rows in range(1, math.isqrt(peers) + 1) if peers % rows == 0)
