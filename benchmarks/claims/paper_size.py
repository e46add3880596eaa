"""Claims at the papers' own size, from the run files in topologies/paper; run with DEVICE=cuda."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from functools import cache
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
    return {key: value for key, value in deepcopy(_content(file)).items() if key not in SKIPPED}


@cache
def _content(file: Path) -> Mapping[str, Any]:
    tree: dict[str, Any] = yaml.safe_load(file.read_text(encoding="utf-8"))
    return tree


def runs_of(
    file: str,
    methods: Mapping[str, Mapping[str, Any]],
    data: Mapping[str, Any] | None = None,
    changes: Mapping[str, Any] | None = None,
    series: str = "accuracy",
    best_round: bool = False,
) -> dict[str, Settings]:
    """Return a run of each method, with the data and networks of a run file in topologies/paper.

    Args:
        file: run file of the paper's own method.
        methods: {label: hyper-parameters}; the label is the method unless they have a ``name``. Those of the file's
            own method are added to the file's.
        data: replaces keys of the file's section ``data``.
        changes: replaces other sections of the file.
        series, best_round: as in ``Settings``.
    """
    tree = {**tree_of(TOPOLOGIES / "paper" / f"{file}.yaml"), **(changes or {})}
    tree["data"] = {**tree["data"], **(data or {})}
    own = tree["algorithm"]

    def settings(label: str) -> Settings:
        hyper = {"name": label, **methods[label]}
        family = hyper["name"].rstrip("+") == own["name"].rstrip("+")
        algorithm = {**(own if family else {}), **hyper}
        return Settings({**tree, "algorithm": algorithm}, 0.0, series=series, best_round=best_round)

    return {label: settings(label) for label in methods}


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
        file, methods, data, changes, series, best_round: as in ``runs_of``.
        compared: {(method, other method): the paper's difference}.
        label: names dataset and setting.
    """
    runs = runs_of(file, methods, data, changes, series, best_round)

    def score(run: Summary) -> float:
        found = next((name for name in ("peak", "own_head") if name in run.curves), series)
        return run.highest(found) if best_round else run.settled(found)

    return [
        Claim(
            f"{one} against {other}, {label}, the paper's size",
            where,
            {m: runs[m] for m in (one, other)},
            difference(one, other, score),
            paper,
            scale,
            relation=relation,
            dear=True,
        )
        for (one, other), paper in compared.items()
    ]
