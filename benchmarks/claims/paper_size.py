"""Claims at the papers' own size, from the run files in topologies/paper; run with DEVICE=cuda."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from benchmarks.claims.claim import Claim, Settings, difference
from benchmarks.claims.statistics import Relation
from benchmarks.claims.summary import Summary

TOPOLOGIES = Path(__file__).parents[2] / "topologies"
SKIPPED = ("name", "seed", "device", "checkpoint_every", "checkpoint_copies")


def tree_of(file: Path) -> dict[str, Any]:
    """Return the run file's keys, without those that differ between runs."""
    tree: dict[str, Any] = yaml.safe_load(file.read_text(encoding="utf-8"))
    return {key: value for key, value in tree.items() if key not in SKIPPED}


def at_paper_size(
    file: str,
    where: str,
    scale: str,
    methods: Mapping[str, Mapping[str, Any]],
    data: Mapping[str, Any],
    compared: Mapping[tuple[str, str], str],
    label: str,
    relation: Relation = ">",
    series: str = "accuracy",
    best_round: bool = False,
    changes: Mapping[str, Any] | None = None,
) -> list[Claim]:
    """Return a claim for each pair of compared methods.

    Accuracies are those of peak models or own heads, where a method has them.

    Args:
        file: run file of the paper's own method.
        methods: {method: hyper-parameters}; those of the file's own method are added to the file's.
        data: replaces keys of the file's section ``data``.
        compared: {(method, other method): the paper's difference}.
        label: names dataset and setting.
        best_round: the best evaluated round counts.
        changes: replaces other sections of the file.
    """
    tree = {**tree_of(TOPOLOGIES / "paper" / f"{file}.yaml"), **(changes or {})}
    tree["data"] = {**tree["data"], **data}
    own = tree["algorithm"]

    def settings(method: str) -> Settings:
        family = method.rstrip("+") == own["name"].rstrip("+")
        hyper = {**(own if family else {}), **methods[method], "name": method}
        return Settings({**tree, "algorithm": hyper}, 0.0, series=series, best_round=best_round)

    def score(run: Summary) -> float:
        found = next((name for name in ("peak", "own_head") if name in run.curves), series)
        return run.highest(found) if best_round else run.settled(found)

    return [
        Claim(
            f"{one} against {other}, {label}, the paper's size",
            where,
            {m: settings(m) for m in (one, other)},
            difference(one, other, score),
            paper,
            scale,
            relation=relation,
            dear=True,
        )
        for (one, other), paper in compared.items()
    ]
