"""Base-(k+1) Graphs: rounds with at most k neighbors each after which all peers hold the exact average.

Yuki Takezawa, Ryoma Sato, Han Bao, Kenta Niwa, Makoto Yamada: "Beyond Exponential Graph: Communication-Efficient
Topologies for Decentralized Learning via Finite-time Convergence", NeurIPS 2023. https://arxiv.org/abs/2305.11420

A round is a list of edges (i, j, W_ij), W symmetric; what remains to 1 is W_ii.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache
from itertools import combinations, zip_longest
from math import prod

WeightedEdge = tuple[int, int, float]
Round = list[WeightedEdge]


def base_graph(nodes: Sequence[int], k: int) -> list[Round]:
    """Return the rounds of the Base-(k+1) Graph, Algorithm 3; none for a single node.

    With n = p q, where p has the prime factors of n up to k + 1: groups of q average among themselves, then groups of
    one node of each. The Simple Base-(k+1) Graph is taken if it is not longer.
    """
    simple = simple_base_graph(nodes, k)
    q = len(nodes)
    for factor in range(2, k + 2):
        while q % factor == 0:
            q //= factor
    p = len(nodes) // q
    groups = [nodes[start : start + q] for start in range(0, len(nodes), q)]
    across = [[group[position] for group in groups] for position in range(q)]
    rounds = [
        *_together(simple_base_graph(group, k) for group in groups),
        *(_together(hyper_hypercube(group, k) for group in across) if p > 1 else []),
    ]
    return rounds if len(rounds) < len(simple) else simple


def simple_base_graph(nodes: Sequence[int], k: int) -> list[Round]:
    """Return the rounds of the Simple Base-(k+1) Graph, Algorithm 2.

    With the base-(k+1) digits of n: n = Σ_l a_l (k+1)^{p_l}, V is split into V_l of a_l blocks of (k+1)^{p_l} nodes.
    """
    if _factors(len(nodes), k + 1) is not None:
        return hyper_hypercube(nodes, k)
    digits = _digits(len(nodes), k + 1)
    parts, start = [], 0
    for a, size in digits:
        parts.append([nodes[start + block * size : start + (block + 1) * size] for block in range(a)])
        start += a * size
    # Each V_l averages.
    rounds = _together(hyper_hypercube([node for block in blocks for node in block], k) for blocks in parts)
    later: list[list[Round]] = []
    for number, blocks in enumerate(parts[:-1]):
        # Each node of V_{l+1} ∪ … ∪ V_L meets one of each block of V_l: then each block has the average of all,
        rest = [node for others in parts[number + 1 :] for block in others for node in block]
        weight = len(blocks[0]) / (len(blocks) * len(blocks[0]) + len(rest))
        rounds.append([(block[position], node, weight) for block in blocks for position, node in enumerate(rest)])
        # and averages within.
        later.append([*([] for _ in rounds), *_together(hyper_hypercube(block, k) for block in blocks)])
    return _together([rounds, *later])


def hyper_hypercube(nodes: Sequence[int], k: int) -> list[Round]:
    """Return the rounds of the k-peer Hyper-Hypercube Graph, Algorithm 1: n = n_1 ⋯ n_L with n_l ≤ k + 1.

    In round l, the nodes that differ only in digit l average.
    """
    factors = _factors(len(nodes), k + 1)
    assert factors is not None
    rounds = []
    for number, factor in enumerate(factors):
        stride = prod(factors[:number])
        rounds.append(
            [
                (nodes[first + a * stride], nodes[first + b * stride], 1.0 / factor)
                for first in range(len(nodes))
                if first // stride % factor == 0
                for a, b in combinations(range(factor), 2)
            ]
        )
    return rounds


def _together(graphs: Iterable[list[Round]]) -> list[Round]:
    """Return the rounds of several graphs at once; the shorter ones end earlier."""
    none: Round = []
    return [[edge for part in parts for edge in part] for parts in zip_longest(*graphs, fillvalue=none)]


@cache
def _factors(n: int, largest: int) -> tuple[int, ...] | None:
    """Return the fewest factors of ``n``, none above ``largest``; None if there are none."""
    if n == 1:
        return ()
    found = [
        (*shorter, factor)
        for factor in range(2, min(n, largest) + 1)
        if n % factor == 0 and (shorter := _factors(n // factor, largest)) is not None
    ]
    return min(found, key=len, default=None)


def _digits(n: int, base: int) -> list[tuple[int, int]]:
    """Return (a_l, base^{p_l}) of the digits of ``n`` that are not 0, the highest first."""
    digits, size = [], 1
    while n:
        n, a = divmod(n, base)
        if a:
            digits.append((a, size))
        size *= base
    return digits[::-1]
