"""The figures that MAPL's claims are about, computed of one seed's runs."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import accumulate
from statistics import fmean
from typing import Any

from benchmarks.claims.claim import difference
from benchmarks.claims.summary import Summary


def series(run: Summary) -> str:
    """Name the curve to compare: of the peers' own heads, where released codes evaluate before averaging heads."""
    return "own_head" if "own_head" in run.curves else "accuracy"


def settled(one: str, other: str) -> Any:
    return difference(one, other, lambda run: run.settled(series(run)))


def blocks(runs: Mapping[str, Summary]) -> float:
    """Weight of another cluster's peer in percent of that of a peer of the same cluster."""
    (run,) = runs.values()
    return 100.0 * run.last("across") / run.last("inside")


def uneven(runs: Mapping[str, Summary]) -> float:
    """Largest minus smallest weight of the other peers of a cluster, in percent of their mean; mean over peers."""
    (run,) = runs.values()
    found = []
    for i, weights in enumerate(run.weights):
        inside = [
            weights.get(str(j), 0.0) for j, classes in enumerate(run.classes) if j != i and classes == run.classes[i]
        ]
        found.append(100.0 * (max(inside) - min(inside)) / fmean(inside))
    return fmean(found)


def prototypes(run: Summary) -> list[float]:
    return [messages for _, messages in run.curves["sent Prototypes"]]


def saved(runs: Mapping[str, Summary]) -> float:
    return 100.0 * (1.0 - sum(prototypes(runs["mapl"])) / sum(prototypes(runs["without graph"])))


def within_budget(runs: Mapping[str, Summary]) -> float:
    """Accuracy with a learned graph minus without, when both have sent 43 % of what a run without a graph sends."""
    limit = 0.43 * sum(prototypes(runs["without graph"]))
    rounds = {name: sum(spent <= limit for spent in accumulate(prototypes(run))) for name, run in runs.items()}
    return runs["mapl"].settled(until=rounds["mapl"]) - runs["without graph"].settled(until=rounds["without graph"])


def cost_of_steps(runs: Mapping[str, Summary]) -> float:
    """Accuracy with one step on the graph minus the mean with more."""
    return runs["E_g 1"].last() - fmean(run.last() for name, run in runs.items() if name != "E_g 1")


def head_gap(run: Summary) -> float:
    return run.probe["inside"] - run.probe["across"]


def payload(runs: Mapping[str, Summary]) -> float:
    """Numbers in the payload of a run without pruning, as a ratio to 2·N_e·(d·K·T + |φ|·(T − T_thr)).

    The paper counts heads from the first round on.
    """
    sent = sum(run.messages[kind][1] for run in runs.values() for kind in ("Prototypes", "Head")) / 4
    peers, rounds, warmup, prototype = 10, 30, 8, 64 * 10
    return sent / (peers * (peers - 1) * prototype * (rounds + rounds - warmup))
