"""Runs with rules of aggregation in one process: stopped and resumed, over graphs that change, with attackers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from p2pfl.aggregation import AGGREGATIONS
from p2pfl.algorithms import ALGORITHMS
from p2pfl.run_folder.folder import Result
from p2pfl.simulation.machine import Machine
from p2pfl.simulation.simulate import simulate
from p2pfl.simulation.virtual import run_virtually
from tests.golden.runs import RUNS
from tests.simulation.test_stop_and_resume import stop_all_after

FLIPPED = {"name": "sign-flip", "scale": 1000}
MODELS = {"algorithm": {"name": "dpsgd", "batch": 16, "local_epochs": 1}, "models": "tiny-cnn", "peers": 5}
SCREENED: dict[str, Any] = {
    "algorithm": {"name": "dpsgd", "batch": 16, "local_steps": 2},  # peers train between sketches and models
    "models": "tiny-cnn",
    "peers": 6,
    "graph": {"name": "list", "graphs": ["complete", {"name": "regular", "degree": 3}]},
    "joins_at": {5: 1},
    "adversaries": [
        {"peers": [1], **FLIPPED},
        {"peers": [4], "name": "equivocate", "attacks": ["none", FLIPPED, {"name": "noise", "std": 1.0}]},
    ],
}
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
        if name not in ("mean", "list", "auto", "age-weighted")
    },
    "several": (["norm-clip", "nnm", CLIPPED], RUNS["dpsgd, el-local"]),  # another graph in each round
    "some take part": (["arc", CLIPPED], RUNS["fedavg, some take part"]),
    "per class": (CLIPPED, RUNS["fedproto, some take part"]),
    "per entry": (["nnm", CLIPPED], RUNS["heterofl"]),
    "heads": (["nnm", "trimmed-mean"], RUNS["lg-fedavg"]),
    "screened": ("sketchguard", SCREENED),
    "learned weights": ({"name": "self-centered-clipping", "radius": 0.1}, RUNS["l2c, on disk"]),
}
QUICK = ("ubar", "several", "per class", "screened")
"""Those with a state, a loss or messages of their own; the others, slow tests, differ in what they compute only."""


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


SCREENING = [name for name, run in RUNS.items() if ALGORITHMS[run["algorithm"]["name"]].screened]
SCREENING.remove("dpsgd, el-local")  # whose edges have one direction


def sent(result: Result, kind: str) -> dict[int, int]:
    """Return how many messages of a kind a peer has sent, by receiver."""
    return {int(to): kinds[kind][0] for to, kinds in result.sent.items() if kind in kinds}


def test_what_is_screened_is_sent_to_those_who_accept_it_alone(make_run: Any) -> None:
    trained = {"name": "dpsgd", "batch": 16, "local_epochs": 1}
    changes = {**SCREENED, "algorithm": trained, "graph": "complete", "joins_at": {}, "rounds": 2}
    results = simulate(make_run(**changes, aggregation="sketchguard"))
    for me in (0, 2, 3, 5):
        to_all = {j: 2 for j in range(6) if j != me}
        assert sent(results[me], "ModelSketch") == sent(results[me], "Parameters") == to_all
    assert sent(results[1], "Parameters") == {}
    assert sent(results[4], "Parameters") == {0: 2, 3: 2}  # j mod 3 = 0: the truth


def test_attacks_change_sketches_only_if_they_name_them(make_run: Any) -> None:
    changes = {**MODELS, "rounds": 1, "aggregation": "sketchguard", "graph": "complete"}

    def fetched(**attack: Any) -> list[int]:
        results = simulate(make_run(**changes, adversaries=[{"peers": [1], **attack}]))
        assert all(sent(results[0], kind)[1] == 1 for kind in ("ModelSketch", "WantedModels"))
        return sorted(sent(results[1], "Parameters"))

    assert fetched(name="none") == [0, 2, 3, 4]
    assert fetched(name="noise", std=0.001) == [0, 2, 3, 4]  # its sketch fits, and is near
    assert fetched(name="noise", std=10.0, messages=["ModelSketch"]) == []


@pytest.mark.parametrize("name", SCREENING)
def test_bytes_of_screened_models_are_predicted_if_all_are_accepted(name: str, make_run: Any) -> None:
    run = make_run(**{**RUNS[name], "rounds": 2}, aggregation={"name": "sketchguard", "gamma": 1e6})
    predicted = run_virtually(run, Machine(cores=4, training_seconds=1.0, evaluation_seconds=1.0))
    expected = [{str(to): kinds for to, kinds in sorted(peer.sent.items())} for peer in predicted.peers]
    assert [result.sent for result in simulate(run)] == expected


def test_what_auto_stands_for_is_logged_once(make_run: Any, prepare: Any, tmp_path: Path) -> None:
    run = make_run(**MODELS, rounds=2, aggregation=["nnm", {"name": "krum", "f": 1}])
    folder = prepare(tmp_path / "run", run)
    simulate(run, folder)
    lines = [line for line in folder.peer(2).log.read_text().splitlines() if "nnm" in line]
    assert [line.partition("INFO")[2].split() for line in lines] == [
        ["aggregation", "t=0", "rule=nnm,krum", "contributions=5", "nnm.f=1"]
    ]
