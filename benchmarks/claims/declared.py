"""The claims of the papers, from the files in ``papers``, ``left.yaml`` and ``paper_size.yaml``.

Keys of a paper's file:
    tables, figures
                how many the paper has
    scales      sizes of the paper's runs that several claims have
    defaults    keys of all claims that do not say otherwise
    runs        by name: keys of a run file, keys of ``Settings``, and ``of``, the run that has the other keys.
                Mappings are merged, but a mapping with another ``name`` replaces the other run's, except `algorithm`
    claims      the keys of ``Claim``; ``runs`` has a run of each label, or a list of runs that are their own labels;
                ``difference`` or ``figure`` is a function's name in ``figures``; claims in a claim have its keys
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from copy import deepcopy
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from benchmarks.claims import figures
from benchmarks.claims.claim import Claim, Left, Paper, Settings, difference
from benchmarks.claims.summary import Summary

HERE = Path(__file__).parent
TOPOLOGIES = HERE.parents[1] / "topologies"
SKIPPED = ("name", "seed", "device", "checkpoint_every", "checkpoint_copies")
SETTINGS = ("seconds", "rates", "series", "best_round", "probe", "changes", "length")
"""Keys of a run that its run file does not have."""


@cache
def _content(file: Path) -> Mapping[str, Any]:
    tree: dict[str, Any] = yaml.safe_load(file.read_text(encoding="utf-8"))
    return tree


def tree_of(file: Path) -> dict[str, Any]:
    """Return the run file's keys, without those that differ between runs."""
    return {key: value for key, value in deepcopy(_content(file)).items() if key not in SKIPPED}


def merged(other: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``given`` with the keys of ``other`` that it lacks."""
    found = dict(other)
    for key, value in given.items():
        before = other.get(key)
        if isinstance(value, Mapping) and isinstance(before, Mapping):
            replaces = key != "algorithm" and value.get("name", before.get("name")) != before.get("name")
            value = value if replaces else merged(before, value)
        found[key] = value
    return found


def _settings(keys: Mapping[str, Any]) -> Settings:
    tree = {key: value for key, value in keys.items() if key not in SETTINGS}
    return Settings(tree, **{key: keys[key] for key in SETTINGS if key in keys})


def _claims(declared: Mapping[str, Any]) -> Iterator[Claim]:
    named: dict[str, Mapping[str, Any]] = {}

    def keys(run: str | Mapping[str, Any]) -> Mapping[str, Any]:
        if isinstance(run, str):
            return named[run]
        return merged(named[run["of"]], {key: value for key, value in run.items() if key != "of"})

    for name, run in declared["runs"].items():
        named[name] = keys(run) if "of" in run else run
    for group in declared["claims"]:
        for row in group.get("claims", [{}]):
            given = {**declared["defaults"], **group, **row}
            runs = given["runs"] if isinstance(given["runs"], Mapping) else {name: name for name in given["runs"]}
            given["runs"] = {label: _settings(keys(run)) for label, run in runs.items()}
            read = given.pop("difference", None)
            if "figure" in given:
                given["figure"] = getattr(figures, given["figure"])
            else:
                one, other = runs
                given["figure"] = difference(one, other, getattr(figures, read))
            given.pop("claims", None)
            yield Claim(**given)


def _at_paper_size(paper: str) -> Iterator[Claim]:
    """Yield a paper's claims at its own size: paper_size.yaml, which says what its keys are.

    Accuracies are of peak models or own heads, where a method has them.
    """
    declared = _content(HERE / "paper_size.yaml").get(paper, {"cells": []})
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
            how = {"series": series, "best_round": best_round}
            yield Claim(
                name=f"{cell['method']} against {other}, {cell['label']}, the paper's size",
                where=cell["where"],
                runs={name: settings(name, **how) for name in (cell["method"], other)},
                figure=difference(cell["method"], other, score),
                paper=difference_in_paper,
                scale=cell["scale"],
                relation=cell.get("relation", ">"),
                hours=tuple(cell["hours"][other]),
            )


def paper(key: str) -> Paper:
    """Read all that is declared of a paper."""
    declared = _content(HERE / "papers" / f"{key}.yaml")
    tables, pictures = (
        [f"{kind} {n}" for n in range(1, declared[count] + 1)]
        for kind, count in (("Table", "tables"), ("Fig.", "figures"))
    )
    return Paper(
        key,
        [*tables, *pictures],
        [*_claims(declared), *_at_paper_size(key)],
        [Left(**row) for row in _content(HERE / "left.yaml")[key]],
    )


PAPERS = tuple(map(paper, ("mapl", "l2c", "fedtgp", "dfml", "fedstyle")))
