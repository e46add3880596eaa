"""DFML on the part of CIFAR-10, with 375 training samples a peer: 30 rounds, and 105 with curves."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from benchmarks.claims.claim import Settings
from benchmarks.claims.dfml_figures import MAXIMA
from benchmarks.claims.dfml_runs import (
    IID,
    NON_IID,
    claim,
    faster,
    faster_as_trained,
    fewer_rounds,
    gains_more,
    run,
    up_to_date,
)

ROUNDS = MAXIMA[-1]


def colors(
    name: str, seconds: float, rounds: int, eval_every: int, partition: Mapping[str, Any] = NON_IID
) -> Settings:
    found = run(name, seconds, {**partition, "validation": 0.875}, rounds=rounds, eval_every=eval_every)
    return replace(found, tree={**found.tree, "data": {**found.tree["data"], "dataset": "cifar10-part"}})


def with_curves(partition: Mapping[str, Any]) -> Mapping[str, Settings]:
    """105 rounds of DFML against 100, each at the learning rate chosen without curves: of DFML's after 30 rounds."""
    return {
        "dfml": colors("dfml", 120, 30, 30, partition).longer(ROUNDS, 5),
        "fedavg-dec": colors("fedavg-dec", 100, 100, 100, partition).longer(100, 10),
    }


NON_IID_RUNS, IID_RUNS = with_curves(NON_IID), with_curves(IID)
ABOVE, ABOVE_IID = (
    claim(
        f"above decentralized FedAvg, CIFAR-10, {label}, {ROUNDS} rounds",
        "Table 6",
        runs["dfml"],
        {"fedavg-dec": runs["fedavg-dec"]},
        paper,
    )
    for label, runs, paper in (
        ("non-IID", NON_IID_RUNS, "+30.52 ± 2.2 (74.30 against 43.78)"),
        ("IID", IID_RUNS, "+11.22 ± 0.46 (83.87 against 72.65)"),
    )
)

CLAIMS = (
    claim(
        "above decentralized FedAvg, CIFAR-10, non-IID",
        "Table 6",
        colors("dfml", 120, 30, 30),
        {"fedavg-dec": colors("fedavg-dec", 100, 100, 100)},
        "+30.52 ± 2.2 (74.30 against 43.78)",
    ),
    *(each for above in (ABOVE, ABOVE_IID) for each in (above, up_to_date(above))),
    *(
        each
        for above in (ABOVE, ABOVE_IID)
        for each in (faster(above, "Fig. 17"), faster_as_trained(above, "Fig. 17"))
    ),
    fewer_rounds(NON_IID_RUNS, ", CIFAR-10"),
    fewer_rounds(IID_RUNS, ", CIFAR-10, IID", "10"),
    gains_more(ABOVE, NON_IID_RUNS, IID_RUNS, f", CIFAR-10, {ROUNDS} rounds"),
)
