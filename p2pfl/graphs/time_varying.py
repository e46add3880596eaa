"""Time-varying graphs: each peer computes W(t) locally, from the round and the seed.

Peers open connections once, over the union of all rounds, so a round finds its connections open. The graph of a
round decides who sends to whom in it, and with which weights.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray
from pydantic import PositiveInt

from p2pfl import rng
from p2pfl.errors import RunFileError
from p2pfl.graphs.base import Graph, Schedule, check_edge, check_regular, disconnected, graph_error, listed
from p2pfl.graphs.finite_time import Round, WeightedEdge, base_graph
from p2pfl.messaging.topology import Edge, Rounds, Topology, WeightedTopology

MOST = 1.0 + 1e-9
"""Maximum sum of the weights that a peer gives to others."""


@dataclass(frozen=True, kw_only=True)
class TimeVaryingGraph(Graph):
    """Base of all time-varying graphs. A subclass implements ``edges_at``; the result depends on nothing else.

    Edges without weights get Metropolis weights; with ``directed``, each peer takes the mean of what it has and
    receives.
    """

    required: ClassVar[tuple[str, ...]] = ("edges_at",)
    directed: ClassVar[bool] = False
    """An edge (i, j) means that i sends to j, and not the reverse."""

    def edges_at(self, t: int, peers: int, seed: int, base: Path) -> Iterable[Edge | WeightedEdge]:
        """The edges of round ``t``: (i, j), or (i, j, w) if j averages what i sends with the weight w.

        Args:
            seed: of this graph; equal on all peers.
            base: the folder that relative paths start from.
        """
        raise NotImplementedError

    def period(self, peers: int) -> int | None:
        """Return after how many rounds the graphs repeat, so that ``t`` stays below that; None if they do not."""
        return None

    def plan(self, peers: int, seed: int, base: Path, rounds: int) -> tuple[Topology, Schedule]:
        schedule = self.schedule(peers, int(rng.shared(seed, "graph").integers(2**32)), base, rounds)
        if schedule.rounds(0) != schedule.rounds(0):
            raise graph_error(
                "the edges of round 0 differ between two calls; draw them from p2pfl.rng.shared(seed, name, t)"
            )
        union = _union(schedule, peers, min(schedule.period or rounds, rounds), stop=self.random)
        if not (union.connected or self.allow_disconnected):
            raise disconnected("the graphs of all rounds together are not connected; their union", union)
        return union, schedule

    def schedule(self, peers: int, seed: int, base: Path, rounds: int) -> Schedule:
        """Return the graph of each round. Raises RunFileError if the parameters do not fit.

        Args:
            seed: of this graph.
        """
        return Schedule(partial(self._at, peers=peers, seed=seed, base=base), self.period(peers))

    def _at(self, t: int, peers: int, seed: int, base: Path) -> Topology:
        try:
            return topology_of(
                list(listed(self.edges_at(t, peers, seed, base), "edges_at")), peers, directed=self.directed
            )
        except RunFileError as error:
            raise graph_error(f"round {t}: {error.problems[0].message}") from None


def topology_of(edges: Sequence[Any], peers: int, *, directed: bool) -> Topology:
    """Return the graph of a round with these edges, after checking them. Raises RunFileError."""
    pairs: list[Edge] = []
    weights: list[float] = []
    for edge in edges:
        try:
            i, j, *rest = edge
            pairs.append((int(i), int(j)))
            weights.extend(map(float, rest))
            problem = len(rest) > 1
        except (TypeError, ValueError):
            problem = True
        if problem:
            raise graph_error(f"an edge should be (i, j) or (i, j, weight), not {edge!r}")
        check_edge(*pairs[-1], peers)
    if not weights:
        return WeightedTopology.averaging(peers, pairs) if directed else Topology.from_edges(peers, pairs)
    if len(weights) < len(pairs):
        raise graph_error("some edges have a weight and some have none; give all of them one, or none")
    once = Counter(pair if directed else tuple(sorted(pair)) for pair in pairs)
    if twice := [pair for pair, count in once.items() if count > 1]:
        raise graph_error(f"edge {twice[0][0]}-{twice[0][1]} is listed twice; which weight counts?")
    arcs = [(i, j, weight) for (i, j), weight in zip(pairs, weights, strict=True)]
    arcs += [] if directed else [(j, i, weight) for i, j, weight in arcs]
    for i, j, weight in arcs:
        if not 0.0 < weight <= 1.0:
            raise graph_error(f"edge {i}-{j}: the weight should be above 0 and at most 1 (found {weight})")
    topology = WeightedTopology.from_arcs(peers, arcs)
    for peer, row in enumerate(topology.rows):
        if (total := math.fsum(row.values())) > MOST:
            raise graph_error(f"the weights that peer {peer} gives to others sum to {total:g}; at most 1")
    return topology


def _union(at: Rounds, peers: int, rounds: int, *, stop: bool) -> Topology:
    """Return the union of the graphs of these rounds.

    Args:
        stop: once it is complete: nothing is left to check in later rounds.
    """
    edges: set[Edge] = set()
    for t in range(rounds):
        edges.update(at(t).edges)
        if stop and 2 * len(edges) == peers * (peers - 1):
            break
    return Topology.from_edges(peers, edges)


class OnePeerExponential(TimeVaryingGraph):
    """One-peer exponential graph (Ying et al., NeurIPS 2021): peer i sends to i + 1, i + 2, i + 4, …, one in a round.

    In round t it is i + 2^(t mod ⌈log2 n⌉), and W_ii = W_ij = 1/2. If n is a power of 2, all peers hold the exact
    average after log2 n rounds.
    """

    directed: ClassVar[bool] = True

    def period(self, peers: int) -> int:
        return max(1, (peers - 1).bit_length())

    def edges_at(self, t: int, peers: int, seed: int, base: Path) -> Iterator[WeightedEdge]:
        step = 2 ** (t % self.period(peers))
        return ((i, (i + step) % peers, 0.5) for i in range(peers if peers > 1 else 0))


@dataclass(frozen=True, kw_only=True)
class BaseK(TimeVaryingGraph):
    """Base-(k+1) Graph (Takezawa et al., NeurIPS 2023): the exact average after O(log n) rounds, for any n."""

    degree: PositiveInt = 1
    """k, maximum number of neighbors of a peer in a round."""

    def period(self, peers: int) -> int:
        return max(1, len(_base_rounds(peers, self.degree)))

    def edges_at(self, t: int, peers: int, seed: int, base: Path) -> Iterable[WeightedEdge]:
        rounds = _base_rounds(peers, self.degree)
        return rounds[t % len(rounds)] if rounds else []


@cache
def _base_rounds(peers: int, k: int) -> list[Round]:
    return base_graph(range(peers), k)


@dataclass(frozen=True, kw_only=True)
class ElOracle(TimeVaryingGraph):
    """EL-Oracle (Epidemic Learning; de Vos et al., NeurIPS 2023): a new random regular graph in every round."""

    random: ClassVar[bool] = True

    degree: PositiveInt
    """s, number of neighbors of each peer in a round."""

    def edges_at(self, t: int, peers: int, seed: int, base: Path) -> Iterable[Edge]:
        check_regular(self.degree, peers)
        stream = rng.shared(seed, "el-oracle", t)
        while (edges := _random_regular(peers, self.degree, stream)) is None:
            pass
        return edges


def _random_regular(peers: int, degree: int, stream: np.random.Generator) -> list[Edge] | None:
    """Draw a random regular graph by pairing (Steger and Wormald, 1999); None if no pair is left at some point."""
    edges: set[Edge] = set()
    stubs: NDArray[np.int64] = np.repeat(np.arange(peers), degree)
    while len(stubs):
        left = []
        for i, j in stream.permutation(stubs).reshape(-1, 2).tolist():
            edge = (min(i, j), max(i, j))
            if i == j or edge in edges:
                left += [i, j]
            else:
                edges.add(edge)
        if not any((i, j) not in edges for i in set(left) for j in set(left) if i < j) and left:
            return None
        stubs = np.array(left, dtype=np.int64)
    return sorted(edges)


@dataclass(frozen=True, kw_only=True)
class ElLocal(TimeVaryingGraph):
    """EL-Local (Epidemic Learning): each peer sends to random others, and takes the mean of what it has and receives.

    How many send to a peer varies. The draw is shared, so that every peer knows whom to wait for.
    """

    random: ClassVar[bool] = True
    directed: ClassVar[bool] = True

    receivers: PositiveInt
    """s, number of random peers that each peer sends to in a round."""

    def edges_at(self, t: int, peers: int, seed: int, base: Path) -> Iterator[Edge]:
        if self.receivers >= peers:
            raise graph_error(f"{self.receivers} receivers need more than {self.receivers} peers; there are {peers}")
        order = rng.shared(seed, "el-local", t).random((peers, peers - 1))
        for i, drawn in enumerate(np.argpartition(order, self.receivers - 1, axis=1)[:, : self.receivers].tolist()):
            yield from ((i, j + (j >= i)) for j in drawn)


class Matchings(TimeVaryingGraph):
    """Random pairs: each peer has one neighbor in a round, a random one; of an odd number of peers, one has none."""

    random: ClassVar[bool] = True

    def edges_at(self, t: int, peers: int, seed: int, base: Path) -> Iterator[Edge]:
        order = rng.shared(seed, "matchings", t).permutation(peers).tolist()
        return zip(order[0::2], order[1::2], strict=False)
