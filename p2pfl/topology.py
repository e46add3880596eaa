"""Who may talk to whom: the graph section of a run file, and the undirected graph that comes out of it.

A :class:`Graph` holds the parameters of one generator or file; ``build`` makes the :class:`Topology`, the
same one for the same seed on every host. :data:`GRAPHS` maps the names that a run file may use to classes.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import median_low
from typing import Annotated, Any, ClassVar, NamedTuple
from xml.etree.ElementTree import ParseError

import networkx as nx
import numpy as np
from numpy.typing import NDArray
from pydantic import Field, PositiveInt

from p2pfl import rng
from p2pfl.errors import Problem, RunFileError
from p2pfl.options import Options, Table

DRAWS = 100
"""Random graphs drawn, at most, in search of a connected one."""

Edge = tuple[int, int]
Probability = Annotated[float, Field(ge=0.0, le=1.0)]


class SpanningTree(NamedTuple):
    """Per peer: its parent (None at a root), its children, the root above it, and how many edges lie between it
    and the farthest peer below."""

    parent: tuple[int | None, ...]
    children: tuple[tuple[int, ...], ...]
    root: tuple[int, ...]
    height: tuple[int, ...]


@dataclass(frozen=True)
class Topology:
    """An undirected graph over peers 0 to ``peers - 1``; ``neighbors[i]`` are those of peer i, ascending."""

    neighbors: tuple[tuple[int, ...], ...]

    @classmethod
    def from_edges(cls, peers: int, edges: Iterable[Edge]) -> Topology:
        """Both directions of an edge are the same edge, and giving it twice changes nothing."""
        near: list[set[int]] = [set() for _ in range(peers)]
        for i, j in edges:
            near[i].add(j)
            near[j].add(i)
        return cls(tuple(tuple(sorted(one)) for one in near))

    @property
    def peers(self) -> int:
        return len(self.neighbors)

    @property
    def edges(self) -> list[Edge]:
        """Each edge once, as (i, j) with i < j, in ascending order."""
        return [(i, j) for i, near in enumerate(self.neighbors) for j in near if i < j]

    def without(self, peers: Collection[int]) -> Topology:
        """The same peers without the edges of ``peers``."""
        edges = ((i, j) for i, j in self.edges if i not in peers and j not in peers)
        return Topology.from_edges(self.peers, edges)

    def degree(self, peer: int) -> int:
        return len(self.neighbors[peer])

    @property
    def connected(self) -> bool:
        return len(self.components) == 1

    @cached_property
    def components(self) -> tuple[tuple[int, ...], ...]:
        """Peers that can reach one another, ascending within a component and by the lowest id among them."""
        return tuple(sorted(tuple(sorted(component)) for component in nx.connected_components(self._graph)))

    @cached_property
    def diameter(self) -> int | None:
        """Hops between the two peers farthest apart; None if some cannot reach each other."""
        return int(nx.diameter(self._graph)) if self.connected else None

    def metropolis(self) -> NDArray[np.float64]:
        """Metropolis-Hastings mixing weights: symmetric, doubly stochastic, from the degrees alone."""
        weights = np.zeros((self.peers, self.peers))
        for i, j in self.edges:
            weights[i, j] = weights[j, i] = 1.0 / (1 + max(self.degree(i), self.degree(j)))
        np.fill_diagonal(weights, 1.0 - weights.sum(axis=1))
        return weights

    @cached_property
    def spectral_gap(self) -> float:
        """1 - the second largest |eigenvalue| of ``metropolis()``: 0 never averages, 1 averages at once."""
        if self.peers == 1:
            return 1.0
        magnitudes = np.sort(np.abs(np.linalg.eigvalsh(self.metropolis())))
        return max(0.0, 1.0 - float(magnitudes[-2]))

    @cached_property
    def spanning_tree(self) -> SpanningTree:
        """The breadth-first tree from the lowest id of each component; every peer finds the same one.

        Neighbours are visited ascending.
        """
        parent: list[int | None] = [None] * self.peers
        children: list[list[int]] = [[] for _ in range(self.peers)]
        root, height = list(range(self.peers)), [0] * self.peers
        for component in self.components:
            seen, queue = {component[0]}, [component[0]]
            for here in queue:
                for there in self.neighbors[here]:
                    if there not in seen:
                        seen.add(there)
                        queue.append(there)
                        parent[there] = here
                        children[here].append(there)
                        root[there] = component[0]
            for here in reversed(queue):
                height[here] = max((height[below] + 1 for below in children[here]), default=0)
        return SpanningTree(tuple(parent), tuple(map(tuple, children)), tuple(root), tuple(height))

    @cached_property
    def _graph(self) -> nx.Graph:
        graph = nx.Graph(self.edges)
        graph.add_nodes_from(range(self.peers))
        return graph


# ---- what a run file can ask for --------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Graph(Options):
    """Base of all graph sections. A subclass gives ``edges_of``; a random one also sets ``random``."""

    random: ClassVar[bool] = False

    allow_disconnected: bool = False
    """Accept a graph in which some peers cannot reach each other."""

    def build(self, peers: int, seed: int, base: Path) -> Topology:
        """The graph over ``peers`` peers; ``base`` is the folder that relative paths start from.

        A random graph is drawn anew, up to 100 times, until it is connected. Raises RunFileError.
        """
        for attempt in range(DRAWS if self.random else 1):
            draw = int(rng.shared(seed, "graph", attempt).integers(2**32))
            topology = Topology.from_edges(peers, self._checked(self.edges_of(peers, draw, base), peers))
            if topology.connected or self.allow_disconnected:
                return topology
        drawn = f"none of {DRAWS} draws is connected; the last one" if self.random else "not connected; it"
        raise _refuse(
            f"{drawn} has the components {_shortened(topology.components)}; "
            "add edges, or accept this with allow_disconnected: true"
        )

    def edges_of(self, peers: int, seed: int, base: Path) -> Iterable[Edge]:
        """The edges, in any order and direction. Raises RunFileError if the parameters do not fit."""
        raise NotImplementedError

    def resolved(self, name: str, topology: Topology) -> dict[str, Any]:
        """The section as it stands in a resolved run file, which must not need other files."""
        return {"name": name, **self.to_dict()}

    def _checked(self, edges: Iterable[Edge], peers: int) -> Iterable[Edge]:
        for i, j in edges:
            if i == j:
                raise _refuse(f"edge {i}-{j} leads from a peer to itself")
            for end in (i, j):
                if not 0 <= end < peers:
                    raise _refuse(f"edge {i}-{j}: no peer {end}; the {peers} peers are 0 to {peers - 1}")
            yield i, j


class Complete(Graph):
    """Everyone talks to everyone."""

    def edges_of(self, peers: int, seed: int, base: Path) -> Iterable[Edge]:
        yield from nx.complete_graph(peers).edges


class Ring(Graph):
    """Peer i talks to i-1 and i+1, the last one to the first."""

    def edges_of(self, peers: int, seed: int, base: Path) -> Iterable[Edge]:
        return _torus(1, peers)


class Line(Graph):
    """Peer i talks to i-1 and i+1."""

    def edges_of(self, peers: int, seed: int, base: Path) -> Iterable[Edge]:
        yield from nx.path_graph(peers).edges


class Star(Graph):
    """Everyone talks to peer 0."""

    def edges_of(self, peers: int, seed: int, base: Path) -> Iterable[Edge]:
        yield from nx.star_graph(peers - 1).edges


@dataclass(frozen=True, kw_only=True)
class Torus(Graph):
    """A grid whose opposite borders touch; peer ids count along the rows."""

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
            asked = " x ".join("?" if size is None else str(size) for size in (self.rows, self.cols))
            raise _refuse(f"{peers} peers do not fill a torus of {asked} (rows x cols)")
        if rows == 1 and self.rows is None and self.cols is None:
            raise _refuse(
                f"{peers} peers make no grid of at least 2 x 2; use another number of peers, the graph ring, "
                "or say rows: 1"
            )
        return rows, cols


@dataclass(frozen=True, kw_only=True)
class Regular(Graph):
    """A random graph in which every peer has the same number of neighbours."""

    random: ClassVar[bool] = True

    degree: PositiveInt
    """Neighbours of each peer."""

    def edges_of(self, peers: int, seed: int, base: Path) -> Iterable[Edge]:
        if self.degree >= peers:
            raise _refuse(f"degree {self.degree} needs more than {self.degree} peers; there are {peers}")
        if self.degree * peers % 2:
            raise _refuse(f"degree {self.degree} with {peers} peers: one of the two must be even")
        yield from nx.random_regular_graph(self.degree, peers, seed=seed).edges


@dataclass(frozen=True, kw_only=True)
class ErdosRenyi(Graph):
    """A random graph in which each pair of peers is linked with the same probability."""

    random: ClassVar[bool] = True

    p: Probability
    """Probability of each edge."""

    def edges_of(self, peers: int, seed: int, base: Path) -> Iterable[Edge]:
        yield from nx.gnp_random_graph(peers, self.p, seed=seed).edges


@dataclass(frozen=True, kw_only=True)
class SmallWorld(Graph):
    """Watts and Strogatz: a ring of near neighbours, some of whose edges are rewired at random."""

    random: ClassVar[bool] = True

    degree: PositiveInt
    """Neighbours of each peer before rewiring; even."""
    p: Probability
    """Probability that an edge is rewired."""

    def edges_of(self, peers: int, seed: int, base: Path) -> Iterable[Edge]:
        if self.degree % 2:
            raise _refuse(f"degree {self.degree} is odd; a ring has as many near neighbours left as right")
        if self.degree >= peers:
            raise _refuse(f"degree {self.degree} needs more than {self.degree} peers; there are {peers}")
        yield from nx.watts_strogatz_graph(peers, self.degree, self.p, seed=seed).edges


@dataclass(frozen=True, kw_only=True)
class BarabasiAlbert(Graph):
    """Preferential attachment: each new peer links to those that already have many links."""

    random: ClassVar[bool] = True

    links: PositiveInt
    """Edges that each new peer brings."""

    def edges_of(self, peers: int, seed: int, base: Path) -> Iterable[Edge]:
        if self.links >= peers:
            raise _refuse(f"links {self.links} needs more than {self.links} peers; there are {peers}")
        yield from nx.barabasi_albert_graph(peers, self.links, seed=seed).edges


class Bridge(Graph):
    """DFML, Fig. 23: even ids are one clique, odd ids another, one edge joins their median peers."""

    def edges_of(self, peers: int, seed: int, base: Path) -> Iterable[Edge]:
        if peers < 2:
            raise _refuse("a bridge joins two cliques, which takes at least 2 peers")
        cliques = range(0, peers, 2), range(1, peers, 2)
        yield from (edge for clique in cliques for edge in nx.complete_graph(clique).edges)
        yield median_low(cliques[0]), median_low(cliques[1])


@dataclass(frozen=True, kw_only=True)
class Edges(Graph):
    """The edges themselves."""

    edges: tuple[Edge, ...]
    """Pairs of peer ids; an edge is given once and carries both ways."""

    def edges_of(self, peers: int, seed: int, base: Path) -> Iterable[Edge]:
        return self.edges


@dataclass(frozen=True, kw_only=True)
class FromFile(Graph):
    """A GraphML file (.graphml), or text with one edge a line: two peer ids, # starts a comment."""

    path: Path
    """Relative to the folder of the run file."""

    def edges_of(self, peers: int, seed: int, base: Path) -> Iterable[Edge]:
        file = base / self.path
        try:
            return _graphml(file, peers) if file.suffix == ".graphml" else _edge_list(file, peers)
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
            raise _refuse(f"{file}: cannot be read: {reason}") from None

    def resolved(self, name: str, topology: Topology) -> dict[str, Any]:
        edges = Edges(edges=tuple(topology.edges), allow_disconnected=self.allow_disconnected)
        return edges.resolved("edges", topology)


GRAPHS: Table[type[Graph]] = Table(
    "graph",
    {
        "complete": Complete,
        "ring": Ring,
        "line": Line,
        "star": Star,
        "torus": Torus,
        "regular": Regular,
        "erdos-renyi": ErdosRenyi,
        "small-world": SmallWorld,
        "barabasi-albert": BarabasiAlbert,
        "bridge": Bridge,
        "edges": Edges,
        "file": FromFile,
    },
)


# ---- files and helpers ------------------------------------------------------------------------------------


def _edge_list(file: Path, peers: int) -> list[Edge]:
    edges = []
    for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), start=1):
        ends = re.split(r"[\s,;]+", line.partition("#")[0].strip())
        if ends == [""]:
            continue
        if len(ends) != 2:
            raise _refuse(f"{file}:{number}: expected two peer ids, found {line.strip()!r}")
        edges.append((_peer(ends[0], peers, f"{file}:{number}"), _peer(ends[1], peers, f"{file}:{number}")))
    return edges


def _graphml(file: Path, peers: int) -> list[Edge]:
    try:
        graph = nx.read_graphml(file)
    except (ParseError, nx.NetworkXError, KeyError, ValueError) as error:
        raise _refuse(f"{file}: not GraphML: {error}") from None
    if graph.is_directed():
        raise _refuse(f'{file}: is a directed graph; links carry both ways (edgedefault="undirected")')
    for node in graph.nodes:
        _peer(node, peers, str(file))
    return [(int(i), int(j)) for i, j in graph.edges()]


def _peer(name: str, peers: int, where: str) -> int:
    if name.isascii() and name.isdigit() and int(name) < peers:
        return int(name)
    raise _refuse(f"{where}: node {name!r} is no peer; the {peers} peers are 0 to {peers - 1}")


def _torus(rows: int, cols: int) -> Iterable[Edge]:
    """Both borders wrap: along a side of 2 that is the direct edge again, along a side of 1 there is none."""
    for row in range(rows):
        for col in range(cols):
            here = row * cols + col
            right, below = row * cols + (col + 1) % cols, (row + 1) % rows * cols + col
            yield from ((here, there) for there in (right, below) if there != here)


def _most_square(peers: int) -> int:
    return max(rows for rows in range(1, math.isqrt(peers) + 1) if peers % rows == 0)


def _shortened(components: tuple[tuple[int, ...], ...], most: int = 4) -> str:
    """``0 1 2 3 … (17 peers) | 4 | 6``, and how many more."""

    def one(component: tuple[int, ...]) -> str:
        start = " ".join(map(str, component[:most]))
        return start if len(component) <= most else f"{start} … ({len(component)} peers)"

    more = [f"and {len(components) - most} more"] if len(components) > most else []
    return " | ".join([*map(one, components[:most]), *more])


def _refuse(message: str) -> RunFileError:
    return RunFileError([Problem("", "", message)])
