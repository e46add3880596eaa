"""The dumbbell: two cliques of 5 peers, joined by one edge, with different classes of MNIST.

He, Karimireddy, Jaggi: "Byzantine-Robust Decentralized Learning via ClippedGossip", 2022,
https://arxiv.org/abs/2202.01545. Peers 0-4 have the classes 0-4, peers 5-9 the others; the edge joins peers 4 and 5.
As in the authors' code, each of these has an attacker as neighbor, who has no other one, and a round is a step of SGD
with lr 0.01 and momentum 0.9 on 32 samples, after which models are averaged. Accuracies are on the whole test set: a
peer can know half of it without the other clique.
"""

from __future__ import annotations

from itertools import combinations
from statistics import fmean
from typing import Any

import numpy as np

from benchmarks.hostile.byzfl_table import labels
from benchmarks.hostile.runs import Results, Settings, mean_and_deviation

CLIQUES = (range(5), range(5, 10))
BRIDGE = (4, 5)
ATTACKERS = (10, 11)
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
    "self-centered-clipping, radius 1": "71.4",
}
"""After 870 rounds without attackers, of each clique's average model, in %: what the authors' repository keeps."""


def edges(attacked: bool) -> list[tuple[int, int]]:
    """Return the edges of the graph: of the cliques, between them, and those of the attackers."""
    found = [edge for clique in CLIQUES for edge in combinations(clique, 2)]
    return [*found, BRIDGE, *(zip(BRIDGE, ATTACKERS, strict=True) if attacked else ())]


def shares(seed: int, attacked: bool) -> list[dict[str, list[int]]]:
    """Divide the training samples of each half of the classes among a clique; attackers have those of a neighbor."""
    stream = np.random.default_rng(seed)
    found: list[dict[str, list[int]]] = []
    for half in (labels() < 5, labels() >= 5):
        order = stream.permutation(np.flatnonzero(half))
        found += [{"train": sorted(map(int, share))} for share in np.array_split(order, len(CLIQUES[0]))]
    return [*found, *(found[end] for end in BRIDGE if attacked)]


def settings(rule: str, attacked: bool, seed: int, rounds: int) -> Settings:
    dissensus = {"adversaries": [{"peers": list(ATTACKERS), "name": "dissensus"}]} if attacked else {}
    return {
        "name": "dumbbell",
        "seed": seed,
        "rounds": rounds,
        "peers": 12 if attacked else 10,
        "graph": {"name": "edges", "edges": edges(attacked)},
        "data": {"dataset": "mnist", "shares": shares(seed, attacked)},
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
        **dissensus,
    }


def key(rule: str, attacked: bool, seed: int, rounds: int) -> str:
    return f"dumbbell: {rule}, {'dissensus' if attacked else 'no attackers'}, seed {seed}, {rounds} rounds"


def table(results: Results, rules: tuple[str, ...], seeds: int, rounds: int) -> str:
    """Return the accuracies of both cliques in percent, without and with the attackers."""
    lines = [
        "| rule | attackers | clique of 0-4 | clique of 5-9 | worst peer | published |",
        "|---|---|---:|---:|---:|---:|",
    ]
    for attacked in (False, True):
        for rule in rules:
            runs = []
            for seed in range(seeds):
                run = results.of(key(rule, attacked, seed, rounds), settings(rule, attacked, seed, rounds))
                runs.append({int(peer): 100 * accuracy for peer, accuracy in run["peers"].items()})
            of_cliques = [mean_and_deviation(fmean(run[i] for i in clique) for run in runs) for clique in CLIQUES]
            worst = mean_and_deviation(min(run.values()) for run in runs)
            published = "" if attacked else PUBLISHED.get(rule, "")
            shown = (rule, "dissensus" if attacked else "none", *of_cliques, worst, published)
            lines.append(f"| {' | '.join(shown)} |")
    return "\n".join(lines)
