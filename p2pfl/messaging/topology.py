"""The graph over which peers exchange messages: neighbors, components, spanning tree, mixing weights.

A run's graph is a :class:`Topology`. A time-varying graph has one per round, which may be a
:class:`WeightedTopology`; the peers are connected over the union of all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

T = TypeVar("T")

Edge = tuple[int, int]
Rounds = Callable[[int], "Topology"]
"""The graph of each round."""


class SpanningTree(NamedTuple):
    """A rooted tree per connected component; every field is indexed by peer."""

    parent: tuple[int | None, ...]
    """None at a root."""
    children: tuple[tuple[int, ...], ...]
    root: tuple[int, ...]
    """The root of the peer's component."""
    height: tuple[int, ...]
    """Edges between the peer and its farthest descendant."""
    size: tuple[int, ...]
    """Peers in the subtree of the peer, itself included."""


@dataclass(frozen=True)
class Topology:
    """An undirected graph over peers 0 to ``peers - 1``; ``neighbors[i]``: the neighbors of peer i, ascending."""

    neighbors: tuple[tuple[int, ...], ...]

    @classmethod
    def from_edges(cls, peers: int, edges: Iterable[Edge]) -> Topology:
        """Build a topology; the direction of an edge does not matter, and duplicates are ignored."""
        neighbors: list[set[int]] = [set() for _ in range(peers)]
        for i, j in edges:
            neighbors[i].add(j)
            neighbors[j].add(i)
        return cls(tuple(tuple(sorted(ids)) for ids in neighbors))

    @property
    def peers(self) -> int:
        return len(self.neighbors)

    @property
    def edges(self) -> list[Edge]:
        """Each edge once, as (i, j) with i < j, in ascending order."""
        return [(i, j) for i, neighbors in enumerate(self.neighbors) for j in neighbors if i < j]

    def memoized(self, key: Hashable, compute: Callable[[], T]) -> T:
        """Return ``compute()``, which depends on this graph and ``key`` only; simulated peers do it once."""
        if key not in self._memo:
            self._memo[key] = compute()
        found: T = self._memo[key]
        return found

    @cached_property
    def _memo(self) -> dict[Hashable, Any]:
        return {}

    def without(self, peers: Collection[int]) -> Topology:
        """Return the same peers without the edges of ``peers``."""
        edges = ((i, j) for i, j in self.edges if i not in peers and j not in peers)
        return Topology.from_edges(self.peers, edges)

    def degree(self, peer: int) -> int:
        return len(self.neighbors[peer])

    @property
    def sources(self) -> Sequence[tuple[int, ...]]:
        """The neighbors that send to each peer, ascending."""
        return self.neighbors

    @property
    def receivers(self) -> Sequence[tuple[int, ...]]:
        """The neighbors that each peer sends to, ascending."""
        return self.neighbors

    @property
    def directed(self) -> bool:
        """Whether some peer sends to another that does not send to it."""
        return False

    def row(self, peer: int) -> dict[int, float]:
        """Return W_ij, with which peer i averages what each source j sends, ascending; W_ii is what remains to 1.

        Here, these are the Metropolis weights 1 / (1 + max(d_i, d_j)) of the degrees.
        """
        own = self.degree(peer)
        return {j: 1.0 / (1 + max(own, self.degree(j))) for j in self.neighbors[peer]}

    def mixing_matrix(self) -> NDArray[np.float64]:
        """Return W, shape (peers, peers): rows sum to 1."""
        weights = np.zeros((self.peers, self.peers))
        for i in range(self.peers):
            for j, weight in self.row(i).items():
                weights[i, j] = weight
        np.fill_diagonal(weights, 1.0 - weights.sum(axis=1))
        return weights

    @property
    def connected(self) -> bool:
        return len(self.components) == 1

    @cached_property
    def components(self) -> tuple[tuple[int, ...], ...]:
        """Connected components, ascending by their lowest id, with ascending ids."""
        components: dict[int, list[int]] = {}
        for peer, root in enumerate(self.spanning_tree.root):
            components.setdefault(root, []).append(peer)
        return tuple(map(tuple, components.values()))

    @cached_property
    def sides(self) -> tuple[int, ...]:
        """The side of each peer, 0 or 1, such that neighbors are on different sides if the graph is bipartite.

        In each connected component, side 0 is the larger one; of equal ones, that of the lowest id.
        """
        tree, sides = self.spanning_tree, [0] * self.peers
        for component in self.components:
            reached = [component[0]]
            for peer in reached:
                for child in tree.children[peer]:
                    sides[child] = 1 - sides[peer]
                    reached.append(child)
            if 2 * sum(sides[peer] for peer in component) > len(component):
                for peer in component:
                    sides[peer] = 1 - sides[peer]
        return tuple(sides)

    @cached_property
    def diameter(self) -> int | None:
        """Hops between the two peers farthest apart; None if the graph is disconnected."""
        if not self.connected:
            return None
        import networkx as nx  # takes 12 MiB, which peers do without

        return int(nx.diameter(nx.Graph(self.edges))) if self.edges else 0

    @cached_property
    def spectral_gap(self) -> float:
        """1 minus the second largest singular value of W: 0 never averages, 1 averages in one step."""
        return averaging_gap([self])

    @cached_property
    def spanning_tree(self) -> SpanningTree:
        """The breadth-first tree from the lowest id of each component, the same on every peer.

        Neighbors are visited in ascending order.
        """
        parent: list[int | None] = [None] * self.peers
        children: list[list[int]] = [[] for _ in range(self.peers)]
        root, height, size = [-1] * self.peers, [0] * self.peers, [1] * self.peers
        for first in range(self.peers):
            if root[first] >= 0:
                continue
            root[first] = first
            queue = [first]
            for peer in queue:
                for neighbor in self.neighbors[peer]:
                    if root[neighbor] < 0:
                        root[neighbor], parent[neighbor] = first, peer
                        children[peer].append(neighbor)
                        queue.append(neighbor)
            for peer in reversed(queue):
                height[peer] = max((height[child] + 1 for child in children[peer]), default=0)
                size[peer] = 1 + sum(size[child] for child in children[peer])
        return SpanningTree(tuple(parent), tuple(map(tuple, children)), tuple(root), tuple(height), tuple(size))


@dataclass(frozen=True)
class WeightedTopology(Topology):
    """A graph whose edges have a direction, a weight, or both. Neighbors are those in either direction."""

    rows: tuple[Mapping[int, float], ...]
    """``rows[i][j]`` is W_ij, with which peer i averages what its source j sends; j ascending."""

    @classmethod
    def from_arcs(cls, peers: int, arcs: Iterable[tuple[int, int, float]]) -> WeightedTopology:
        """Build a graph from (sender, receiver, weight). Of equal arcs, the last one counts."""
        rows: list[dict[int, float]] = [{} for _ in range(peers)]
        neighbors: list[set[int]] = [set() for _ in range(peers)]
        for sender, receiver, weight in arcs:
            rows[receiver][sender] = weight
            neighbors[sender].add(receiver)
            neighbors[receiver].add(sender)
        return cls(tuple(tuple(sorted(ids)) for ids in neighbors), tuple(dict(sorted(row.items())) for row in rows))

    @classmethod
    def averaging(cls, peers: int, arcs: Iterable[Edge]) -> WeightedTopology:
        """Build a graph from (sender, receiver) where each peer averages its values and the received ones equally."""
        pairs = sorted(set(arcs))
        received = [0] * peers
        for _, receiver in pairs:
            received[receiver] += 1
        return cls.from_arcs(peers, ((i, j, 1.0 / (1 + received[j])) for i, j in pairs))

    @cached_property
    def sources(self) -> Sequence[tuple[int, ...]]:
        return tuple(tuple(row) for row in self.rows)

    @cached_property
    def receivers(self) -> Sequence[tuple[int, ...]]:
        receivers: list[list[int]] = [[] for _ in self.rows]
        for receiver, row in enumerate(self.rows):
            for sender in row:
                receivers[sender].append(receiver)
        return tuple(map(tuple, receivers))

    @property
    def directed(self) -> bool:
        return self.sources != self.receivers

    def row(self, peer: int) -> dict[int, float]:
        return dict(self.rows[peer])

    def without(self, peers: Collection[int]) -> WeightedTopology:
        """Return the graph without the edges of ``peers``; the other ends add their weights to their own."""
        arcs = (
            (sender, receiver, weight)
            for receiver, row in enumerate(self.rows)
            for sender, weight in row.items()
            if sender not in peers and receiver not in peers
        )
        return WeightedTopology.from_arcs(self.peers, arcs)


def averaging_gap(rounds: Iterable[Topology]) -> float:
    """Return by what fraction these rounds, one after the other, reduce the disagreement of the peers, at least.

    That is 1 - ‖(I - J) W(t+k-1) ⋯ W(t)‖₂ with J = 11ᵀ/n: 1 if the peers agree in the end, whatever they start with.
    For a single round with symmetric W it is the spectral gap.
    """
    product: NDArray[np.float64] | None = None
    for topology in rounds:
        weights = topology.mixing_matrix()
        product = weights if product is None else weights @ product
    if product is None or len(product) == 1:
        return 1.0
    return max(0.0, 1.0 - float(np.linalg.norm(product - product.mean(axis=0), ord=2)))
