"""The dumbbell: two cliques of 5 peers, joined by one edge, with different classes of MNIST.

He, Karimireddy, Jaggi: "Byzantine-Robust Decentralized Learning via ClippedGossip", 2022,
https://arxiv.org/abs/2202.01545. Peers 0-4 have the classes 0-4, peers 5-9 the others; the edge joins peers 4 and 5.
As in the authors' code, a round is a step of SGD with lr 0.01 and momentum 0.9 on 32 samples, after which models are
averaged. Accuracies are on the whole test set: a peer can know half of it without the other clique.

Their attackers know all models. Ours see what their neighbors send, so one that hinders the exchange over the edge is
a neighbor of both of its ends.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations, product
from statistics import fmean
from typing import Any

import numpy as np

from benchmarks.hostile.byzfl_table import labels
from benchmarks.hostile.runs import Results, Settings, mean_and_deviation

CLIQUES = (range(5), range(5, 10))
BRIDGE = (4, 5)
ATTACKS: dict[str, list[tuple[int, int]]] = {
    "none": [],
    "at the edge": [(end, 10) for end in BRIDGE],
    "in the cliques": [(i, attacker) for attacker, clique in enumerate(CLIQUES, start=10) for i in clique],
}
"""The edges of the attackers: one beside the edge, or a sixth member of each clique."""
RULES: dict[str, Any] = {
    "mean": "mean",
    "median": "median",
    "trimmed-mean": {"name": "trimmed-mean", "f": 1},
    "geometric-median": "geometric-median",
    "self-centered-clipping, radius 1": {"name": "self-centered-clipping", "radius": 1.0},
    "self-centered-clipping, auto": "self-centered-clipping",
}
PUBLISHED = {
    "mean": "69.0, 75.6",
    "trimmed-mean": "50.7, 47.3",
    "geometric-median": "50.7, 47.2",
    "self-centered-clipping, radius 1": "71.4, 72.6",
}
"""After 870 rounds without attackers, of each clique's average model, in %: what the authors' repository keeps."""


def attackers(attack: str) -> list[int]:
    return sorted({attacker for _, attacker in ATTACKS[attack]})


def edges(attack: str) -> list[tuple[int, int]]:
    """Return the edges of the graph: of the cliques, between them, and those of the attackers."""
    return [*(edge for clique in CLIQUES for edge in combinations(clique, 2)), BRIDGE, *ATTACKS[attack]]


def shares(attack: str, seed: int) -> list[dict[str, list[int]]]:
    """Divide the training samples of each half of the classes among a clique; attackers have those of an end."""
    stream = np.random.default_rng(seed)
    found: list[dict[str, list[int]]] = []
    for half in (labels() < 5, labels() >= 5):
        order = stream.permutation(np.flatnonzero(half))
        found += [{"train": sorted(map(int, share))} for share in np.array_split(order, len(CLIQUES[0]))]
    return found + [found[end] for end, _ in zip(BRIDGE, attackers(attack), strict=False)]


def settings(rule: str, attack: str, seed: int, rounds: int) -> Settings:
    hostile = attackers(attack)
    return {
        "name": "dumbbell",
        "seed": seed,
        "rounds": rounds,
        "peers": 10 + len(hostile),
        "graph": {"name": "edges", "edges": edges(attack)},
        "data": {"dataset": "mnist", "shares": shares(attack, seed)},
        "models": "mlp-64",
        "algorithm": {
            "name": "dpsgd",
            "order": "atc",
            "local_steps": 1,
            "batch": 32,
            "lr": 0.01,
            "momentum": 0.9,
        },
        "aggregation": RULES[rule],
        "eval_every": rounds,
        "device": "cpu",
        **({"adversaries": [{"peers": hostile, "name": "dissensus"}]} if hostile else {}),
    }


def key(rule: str, attack: str, seed: int, rounds: int) -> str:
    return f"dumbbell: {rule}, attackers {attack}, seed {seed}, {rounds} rounds"


def measure(
    results: Results, rules: Sequence[str], attacks: Sequence[str], seeds: int, rounds: int, seconds: float
) -> None:
    """Simulate what is missing until the CPU seconds are spent."""
    for seed, attack, rule in product(range(seeds), attacks, rules):
        if not results.has(run := key(rule, attack, seed, rounds)):
            if seconds <= 0:
                return
            seconds -= results.of(run, settings(rule, attack, seed, rounds))["cpu_s"]


def table(results: Results, rules: Sequence[str], attacks: Sequence[str], rounds: int) -> str:
    """Return the accuracies of both cliques in percent, over the seeds that are measured."""
    lines = [
        "| rule | attackers | clique of 0-4 | clique of 5-9 | worst peer | seeds | published |",
        "|---|---|---:|---:|---:|---:|---:|",
    ]
    for attack, rule in product(attacks, rules):
        runs: list[dict[int, float]] = []
        while results.has(run := key(rule, attack, len(runs), rounds)):
            peers = results.of(run, {})["peers"]
            runs.append({int(peer): 100 * accuracy for peer, accuracy in peers.items()})
        if runs:
            of_cliques = [mean_and_deviation(fmean(found[i] for i in clique) for found in runs) for clique in CLIQUES]
            worst = mean_and_deviation(min(found.values()) for found in runs)
            published = PUBLISHED.get(rule, "") if attack == "none" else ""
            lines.append(f"| {' | '.join((rule, attack, *of_cliques, worst, str(len(runs)), published))} |")
    return "\n".join(lines)
