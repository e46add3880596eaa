"""The undirected graph over which peers exchange messages: neighbors, components, spanning tree, mixing weights."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Edge = tuple[int, int]


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
    """An undirected graph over peers 0 to ``peers - 1``; ``neighbors[i]`` lists those of peer i, ascending."""

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

    def without(self, peers: Collection[int]) -> Topology:
        """Return the same peers without the edges of ``peers``."""
        edges = ((i, j) for i, j in self.edges if i not in peers and j not in peers)
        return Topology.from_edges(self.peers, edges)

    def degree(self, peer: int) -> int:
        return len(self.neighbors[peer])

    @property
    def connected(self) -> bool:
        return len(self.components) == 1

    @cached_property
    def components(self) -> tuple[tuple[int, ...], ...]:
        """Connected components, ascending by their lowest id, with ascending ids."""
        components, seen = [], set[int]()
        for first in range(self.peers):
            if first not in seen:
                component = [first]
                seen.add(first)
                for peer in component:
                    new = [neighbor for neighbor in self.neighbors[peer] if neighbor not in seen]
                    seen.update(new)
                    component.extend(new)
                components.append(tuple(sorted(component)))
        return tuple(components)

    @cached_property
    def diameter(self) -> int | None:
        """Hops between the two peers farthest apart; None if the graph is disconnected."""
        if not self.connected:
            return None
        import networkx as nx  # takes 12 MiB, which peers do without

        return int(nx.diameter(nx.Graph(self.edges))) if self.edges else 0

    def metropolis(self) -> NDArray[np.float64]:
        """Return Metropolis-Hastings mixing weights, shape (peers, peers): symmetric, doubly stochastic."""
        weights = np.zeros((self.peers, self.peers))
        for i, j in self.edges:
            weights[i, j] = weights[j, i] = 1.0 / (1 + max(self.degree(i), self.degree(j)))
        np.fill_diagonal(weights, 1.0 - weights.sum(axis=1))
        return weights

    @cached_property
    def spectral_gap(self) -> float:
        """1 minus the second largest |eigenvalue| of ``metropolis()``: 0 never averages, 1 averages in one step."""
        if self.peers == 1:
            return 1.0
        magnitudes = np.sort(np.abs(np.linalg.eigvalsh(self.metropolis())))
        return max(0.0, 1.0 - float(magnitudes[-2]))

    @cached_property
    def spanning_tree(self) -> SpanningTree:
        """The breadth-first tree from the lowest id of each component, the same on every peer.

        Neighbors are visited in ascending order.
        """
        parent: list[int | None] = [None] * self.peers
        children: list[list[int]] = [[] for _ in range(self.peers)]
        root, height, size = list(range(self.peers)), [0] * self.peers, [1] * self.peers
        for component in self.components:
            seen, queue = {component[0]}, [component[0]]
            for peer in queue:
                for neighbor in self.neighbors[peer]:
                    if neighbor not in seen:
                        seen.add(neighbor)
                        queue.append(neighbor)
                        parent[neighbor] = peer
                        children[peer].append(neighbor)
                        root[neighbor] = component[0]
            for peer in reversed(queue):
                height[peer] = max((height[child] + 1 for child in children[peer]), default=0)
                size[peer] = 1 + sum(size[child] for child in children[peer])
        return SpanningTree(tuple(parent), tuple(map(tuple, children)), tuple(root), tuple(height), tuple(size))
