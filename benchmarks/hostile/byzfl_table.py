"""ByzFL's heat map on MNIST: 10 honest peers and f attackers on a complete graph, in the worst of several attacks.

Each round is a step of SGD with momentum on a peer's own share. ByzFL's server averages momentum vectors,
m ← 0.9 m + 0.1 g, and steps by 0.1. Peers that step by 0.01 with torch's m ← 0.9 m + g, and average models, do the
same. Its first step, clipping to the norm 2, is clipping of updates to 0.2.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

import p2pfl
from benchmarks.hostile.runs import Results, Settings, mean_and_deviation, shares_by_similarity

HONEST = 10
ATTACKS: dict[str, Settings] = {
    "sign flipping": {"name": "ipm", "epsilon": 1.0, "of": "updates"},
    "optimal IPM": {"name": "ipm", "tune": True, "of": "updates"},
    "optimal ALIE": {"name": "alie", "tune": True},
}
"""ByzFL's sign flipping sends the opposite of the honest mean."""
PUBLISHED = {
    ("trimmed-mean", 0.0): (0.87, 0.61, 0.26, 0.21),
    ("geometric-median", 0.0): (0.87, 0.56, 0.26, 0.27),
    ("trimmed-mean", 1.0): (0.98, 0.98, 0.98, 0.98),
    ("geometric-median", 1.0): (0.98, 0.98, 0.98, 0.98),
}
"""By rule and γ: accuracy for f = 1 to 4."""


SERVER = ("trimmed-mean", "geometric-median")


@cache
def labels() -> npt.NDArray[np.int64]:
    """Return the labels of MNIST's training samples."""
    some = {"name": "labels", "rounds": 1, "peers": 2, "data": {"dataset": "mnist"}, "algorithm": "local"}
    return np.asarray(p2pfl.load(some).dataset().labels.train)


def after_clipping(rule: str, f: int) -> list[Settings]:
    """Return ByzFL's three steps: clipping, nearest-neighbor mixing, and a rule."""
    last: Settings = {"name": rule, "f": f} if rule == "trimmed-mean" else {"name": rule, "nu": 0.001}
    return [{"name": "clip", "radius": 0.2}, {"name": "nnm", "f": f}, last]


def settings(
    rule: Any, gamma: float, f: int, attack: str, seed: int, rounds: int, graph: Any = "complete"
) -> Settings:
    return {
        "name": "byzfl",
        "seed": seed,
        "rounds": rounds,
        "peers": HONEST + f,
        "graph": graph,
        "data": {"dataset": "mnist", "shares": shares_by_similarity(labels(), HONEST, f, gamma, seed)},
        "models": {"module": "benchmarks.hostile.nets.CnnMnist"},
        "algorithm": {
            "name": "dpsgd",
            "order": "atc",
            "local_steps": 1,
            "batch": 25,
            "lr": 0.01,
            "momentum": 0.9,
            "weight_decay": 1e-4,
        },
        "aggregation": rule,
        "adversaries": [{"peers": list(range(HONEST, HONEST + f)), **ATTACKS[attack]}],
        "eval_every": rounds,
        "device": "cpu",
    }


def table(
    results: Results,
    rules: tuple[str, ...],
    gammas: tuple[float, ...],
    attackers: tuple[int, ...],
    seeds: int,
    rounds: int,
) -> str:
    """Return the accuracies of ByzFL's rules in their worst attack beside the published ones."""
    lines = ["| rule | γ | f | worst attack | ByzFL | ours |", "|---|---:|---:|---|---:|---:|"]
    for rule in rules:
        for gamma in gammas:
            for f in attackers:
                runs = {
                    attack: [
                        results.of(
                            f"{rule} γ={gamma:g} f={f} {attack} seed {seed} of {rounds} rounds",
                            settings(after_clipping(rule, f), gamma, f, attack, seed, rounds),
                        )["accuracy"]
                        for seed in range(seeds)
                    ]
                    for attack in ATTACKS
                }
                worst = min(runs, key=lambda attack: sum(runs[attack]))
                published = PUBLISHED[rule, gamma][f - 1]
                ours = mean_and_deviation(runs[worst])
                lines.append(f"| {rule} | {gamma:g} | {f} | {worst} | {published:.2f} | {ours} |")
    return "\n".join(lines)
