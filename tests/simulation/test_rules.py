"""Runs with rules of aggregation in one process: stopped and resumed, over graphs that change, with attackers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from p2pfl.aggregation import AGGREGATIONS
from p2pfl.run_folder.folder import Result
from p2pfl.simulation.simulate import simulate
from tests.golden.runs import RUNS
from tests.simulation.test_stop_and_resume import stop_all_after

MODELS = {"algorithm": {"name": "dpsgd", "batch": 16, "local_epochs": 1}, "models": "tiny-cnn", "peers": 5}
CLIPPED = {"name": "centered-clipping", "radius": 1.0}
PARAMETERS: dict[str, dict[str, Any]] = {
    "caf": {"f": 2},
    "centered-clipping": {"radius": 1.0},
    "clip": {"radius": 0.05},
    "geometric-median": {"nu": 0.001},
    "norm-clip": {"factor": 0.5},
    "self-centered-clipping": {"radius": 0.1},
}
"""Of rules that give the mean here with their defaults, or have none."""
RULES: dict[str, tuple[Any, dict[str, Any]]] = {
    **{
        name: ({"name": name, **PARAMETERS.get(name, {})}, MODELS)
        for name in AGGREGATIONS
        if name not in ("mean", "list")
    },
    "several": (["norm-clip", "nnm", CLIPPED], RUNS["dpsgd, el-local"]),  # another graph in each round
    "some take part": (["arc", CLIPPED], RUNS["fedavg, some take part"]),
    "per class": (CLIPPED, RUNS["fedproto, some take part"]),
    "per entry": (["nnm", CLIPPED], RUNS["heterofl"]),
    "heads": (["nnm", "trimmed-mean"], RUNS["lg-fedavg"]),
    "learned weights": ({"name": "self-centered-clipping", "radius": 0.1}, RUNS["l2c, on disk"]),
}
QUICK = ("ubar", "several", "per class")
"""Those with a state or a loss; the others are slow tests, as they differ in what they compute only."""


def outcome(results: list[Result]) -> list[tuple[Any, ...]]:
    return [(r.digest, r.sent, r.received, r.accuracy, r.missing) for r in results]


@pytest.mark.parametrize("name", [pytest.param(n, marks=[] if n in QUICK else [pytest.mark.slow]) for n in RULES])
def test_a_run_that_is_stopped_and_resumed_ends_with_the_same_bits(
    name: str, make_run: Any, prepare: Any, tmp_path: Path
) -> None:
    rule, settings = RULES[name]
    run = make_run(**settings | {"rounds": 3}, aggregation=rule)
    folder = prepare(tmp_path / "run", run)
    stop_all_after(run, folder, 2)
    found = outcome(simulate(run, folder))
    assert found == outcome(simulate(run))
    assert found != outcome(simulate(make_run(**settings | {"rounds": 3})))


def test_what_auto_stands_for_is_logged_once(make_run: Any, prepare: Any, tmp_path: Path) -> None:
    run = make_run(**MODELS, rounds=2, aggregation=["nnm", {"name": "krum", "f": 1}])
    folder = prepare(tmp_path / "run", run)
    simulate(run, folder)
    lines = [line for line in folder.peer(2).log.read_text().splitlines() if "nnm" in line]
    assert [line.partition("INFO")[2].split() for line in lines] == [
        ["aggregation", "t=0", "contributions=5", "nnm.f=1"]
    ]
