"""What no run of ours decides: claims at the papers' own size, and rows for which no run is declared."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from copy import deepcopy
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from benchmarks.claims.claim import Claim, Left, Settings, difference
from benchmarks.claims.summary import Summary

TOPOLOGIES = Path(__file__).parents[2] / "topologies"
SKIPPED = ("name", "seed", "device", "checkpoint_every", "checkpoint_copies")


@cache
def _content(file: Path) -> Mapping[str, Any]:
    tree: dict[str, Any] = yaml.safe_load(file.read_text(encoding="utf-8"))
    return tree


def tree_of(file: Path) -> dict[str, Any]:
    """Return the run file's keys, without those that differ between runs."""
    return {key: value for key, value in deepcopy(_content(file)).items() if key not in SKIPPED}


def left(paper: str) -> list[Left]:
    """Return the rows of a paper for which no run is declared: left.yaml."""
    return [Left(**row) for row in _content(Path(__file__).with_name("left.yaml"))[paper]]


def at_paper_size(paper: str) -> Iterator[Claim]:
    """Yield a paper's claims at its own size: paper_size.yaml, which says what its keys are.

    Accuracies are those of peak models or own heads, where a method has them.
    """
    declared = _content(Path(__file__).with_name("paper_size.yaml"))[paper]
    for cell in declared["cells"]:
        tree = {**tree_of(TOPOLOGIES / "paper" / f"{cell['file']}.yaml"), **cell.get("changes", {})}
        tree["data"] = {**tree["data"], **cell.get("data", {})}
        series, best_round = cell.get("series", "accuracy"), cell.get("best_round", False)
        methods = {**declared["methods"], **cell.get("hyper", {})}

        def settings(name: str, tree: Mapping[str, Any] = tree, methods: Any = methods, **how: Any) -> Settings:
            same = name.rstrip("+") == tree["algorithm"]["name"].rstrip("+")
            hyper = {**(tree["algorithm"] if same else {}), "name": name, **methods.get(name, {})}
            return Settings({**tree, "algorithm": hyper}, **how)

        def score(run: Summary, series: str = series, best_round: bool = best_round) -> float:
            found = next((name for name in ("peak", "own_head") if name in run.curves), series)
            return run.highest(found) if best_round else run.settled(found)

        for other, difference_in_paper in cell["against"].items():
            hours = cell["hours"][other]
            seconds = 360.0 * max(0.5, hours[0])  # of one of ten runs; hours are rounded
            how = {"seconds": seconds, "series": series, "best_round": best_round}
            yield Claim(
                f"{cell['method']} against {other}, {cell['label']}, the paper's size",
                cell["where"],
                {name: settings(name, **how) for name in (cell["method"], other)},
                difference(cell["method"], other, score),
                difference_in_paper,
                cell["scale"],
                relation=cell.get("relation", ">"),
                hours=tuple(hours),
            )
