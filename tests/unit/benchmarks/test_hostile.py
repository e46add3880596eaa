"""What attackers do to methods and rules: the order of the runs, tables from kept results, and the picture."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import p2pfl
from benchmarks.hostile import dumbbell, map_picture, robustness_map, runs
from benchmarks.hostile.robustness_map import METHODS, Cell, attackers, cells, chosen
from benchmarks.hostile.runs import Results

Kept = Callable[[dict[str, dict[int, float]]], Results]


@pytest.fixture
def kept(tmp_path: Path) -> Kept:
    """Return results read from a file, by their keys and with the accuracies of peers."""

    def read(found: dict[str, dict[int, float]]) -> Results:
        file = tmp_path / "kept.jsonl"
        lines = (json.dumps({"key": key, "peers": peers, "cpu_s": 1.0}) for key, peers in found.items())
        file.write_text("\n".join(lines), encoding="utf-8")
        return Results(file)

    return read


@pytest.fixture
def simulated(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Settings of the runs that would be simulated, of two CPU seconds each."""
    found: list[dict[str, Any]] = []

    def simulate(settings: dict[str, Any]) -> dict[str, Any]:
        found.append(settings)
        return {"accuracy": 0.5, "peers": dict.fromkeys(range(settings["peers"]), 0.5), "cpu_s": 2.0}

    monkeypatch.setattr(runs, "_simulate", simulate)
    return found


# ---- the map -------------------------------------------------------------------------------------------------


def test_attackers_are_half_in_each_cluster_and_more_of_them_include_fewer() -> None:
    assert attackers(0) == []
    assert attackers(10) == [9, 19]
    assert attackers(40) == [6, 7, 8, 9, 16, 17, 18, 19]


def test_map_begins_with_each_attack_at_a_fifth_then_none_then_the_most() -> None:
    found = list(cells(METHODS))
    fractions = [cell.fraction for cell in found]
    assert list(dict.fromkeys(fractions)) == [20, 0, 40, 10, 30]
    assert fractions == sorted(fractions, key=[20, 0, 40, 10, 30].index)
    assert len(set(found)) == len(found)
    assert {cell.attack for cell in found if cell.fraction == 0} == {"none"}
    assert {cell.method for cell in found if cell.fraction == 20} == set(METHODS) - {"local"}


@pytest.mark.parametrize("method", METHODS)
def test_runs_of_the_map_are_valid(method: str) -> None:
    methods = {method: METHODS[method]}
    for cell in cells(methods, (20, 0)):
        p2pfl.load(robustness_map.settings(cell, methods[method], seed=0))


def test_map_continues_where_its_time_was_spent(tmp_path: Path, simulated: list[dict[str, Any]]) -> None:
    methods = chosen(["fedavg"], [], None)
    expected = [cell.key(0) for cell in cells(methods)]
    robustness_map.measure(Results(tmp_path / "r.jsonl"), methods, (0, 10, 20, 30, 40), seeds=1, seconds=3.0)
    assert len(simulated) == 2  # of two seconds each
    robustness_map.measure(Results(tmp_path / "r.jsonl"), methods, (0, 10, 20, 30, 40), seeds=1, seconds=1e9)
    lines = (tmp_path / "r.jsonl").read_text(encoding="utf-8").splitlines()
    assert [json.loads(line)["key"] for line in lines] == expected
    assert len(simulated) == len(expected)


def test_table_has_honest_peers_alone_and_marks_what_is_missing(kept: Kept) -> None:
    hostile = set(attackers(20))
    peers = {peer: 0.0 if peer in hostile else 0.8 for peer in range(20)}
    lower = {**peers, 0: 0.32}
    flipped = Cell("fedavg", "mean", "label-flip", 20)
    none = Cell("fedavg", "mean", "none", 0)
    results = kept({flipped.key(0): lower, flipped.key(1): peers, none.key(0): peers})
    methods = chosen(["fedavg", "dfml"], [], None)
    assert robustness_map.table(results, methods, 20).splitlines()[2:] == [
        "| fedavg | mean | 80 (80) | … | … | 78 (56) | – | 1 to 2 |"
    ]
    assert robustness_map.table(results, methods, 0).splitlines()[2:] == ["| fedavg | mean | 64 (0) | 1 |"]


def test_picture_has_a_panel_for_each_method(kept: Kept, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    peers = dict.fromkeys(range(20), 0.5)
    results = kept({cell.key(0): peers for cell in cells(METHODS)})
    map_picture.draw(results, METHODS, tmp_path / "map.svg")
    drawn = (tmp_path / "map.svg").read_text(encoding="utf-8")
    assert all(f">{name}</text>" in drawn for name in METHODS if name != "local")
    assert "local training" in drawn
    map_picture.draw(results, METHODS, tmp_path / "again.svg")
    assert (tmp_path / "again.svg").read_text(encoding="utf-8") == drawn


# ---- the dumbbell --------------------------------------------------------------------------------------------


@pytest.fixture
def few_labels(monkeypatch: pytest.MonkeyPatch) -> np.ndarray:
    found = np.arange(200) % 10
    monkeypatch.setattr(dumbbell, "labels", lambda: found)
    return found


def test_one_edge_joins_the_cliques_and_attackers_are_beside_it_or_in_them() -> None:
    honest = set(dumbbell.edges("none"))
    assert len(honest) == 10 + 10 + 1
    assert set(dumbbell.edges("at the edge")) - honest == {(4, 10), (5, 10)}
    assert len(set(dumbbell.edges("in the cliques")) - honest) == 10


def test_cliques_have_no_class_in_common(few_labels: np.ndarray) -> None:
    shares = dumbbell.shares("in the cliques", seed=0)
    classes = [set(few_labels[share["train"]]) for share in shares]
    assert set.union(*classes[:5], classes[10]) == {0, 1, 2, 3, 4}
    assert set.union(*classes[5:10], classes[11]) == {5, 6, 7, 8, 9}
    honest = [sample for share in shares[:10] for sample in share["train"]]
    assert sorted(honest) == list(range(200))


def test_dumbbell_table_has_both_cliques_without_the_attackers(few_labels: np.ndarray, kept: Kept) -> None:
    honest = {peer: 0.6 if peer < 5 else 0.5 for peer in range(10)}
    results = kept({dumbbell.key("mean", attack, 0, 5): honest for attack in dumbbell.ATTACKS})
    lines = dumbbell.table(results, ["mean", "median"], list(dumbbell.ATTACKS), rounds=5).splitlines()
    assert lines[2:4] == [
        "| mean | none | 60.00 ± 0.00 | 50.00 ± 0.00 | 50.00 ± 0.00 | 1 | 69.0, 75.6 |",
        "| mean | at the edge | 60.00 ± 0.00 | 50.00 ± 0.00 | 50.00 ± 0.00 | 1 |  |",
    ]
    assert len(lines) == 2 + len(dumbbell.ATTACKS)  # the median is not measured


def test_dumbbell_stops_when_its_time_is_spent(
    tmp_path: Path, few_labels: np.ndarray, simulated: list[dict[str, Any]]
) -> None:
    dumbbell.measure(Results(tmp_path / "r.jsonl"), ["mean", "median"], ["none"], seeds=3, rounds=5, seconds=5.0)
    assert [each["aggregation"] for each in simulated] == ["mean", "median", "mean"]
    assert [each["seed"] for each in simulated] == [0, 0, 1]
