"""A finished run evaluated again from its checkpoints."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from p2pfl.errors import CheckpointError, P2pflError, RunFolderError
from p2pfl.run_file.load import load
from p2pfl.run_folder.folder import RunFolder
from p2pfl.session import checkpoint, metrics
from p2pfl.session.metrics import plain
from p2pfl.session.scoring import device_named, evaluate_run
from p2pfl.simulation.simulate import simulate
from tests.golden.runs import RUNS
from tests.launcher_fixtures import Invoke

SCORED = (
    "local",
    "pfedsim, one joins late",
    "ditto, some take part",
    "fedproto, some take part",
    "mapl, with a budget",
    "dfml",
    "fedrolex",
    "fedstyle, simsiam",
    "l2c, pruned",
)
"""Runs that differ in how a model predicts, or in which rounds take part."""
SHARED = set(SCORED) - {"local", "dfml", "mapl, with a budget"}
"""Not executed again with a test set of all classes: these share their run with other tests."""


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in SCORED else pytest.mark.slow) for name in RUNS]
)
def test_equals_the_last_record_of_the_run(
    name: str, tmp_path: Path, make_run: Any, prepare: Any, simulated: Callable[[str], RunFolder]
) -> None:
    if name in SHARED:
        folder = simulated(name)
        run = load(folder.run_file)
    else:
        shorter = "budget" not in name and "joins_at" not in RUNS[name]
        rounds = 2 if shorter else RUNS[name].get("rounds", 3)
        run = make_run(**{**RUNS[name], "rounds": rounds}, global_test="dirichlet" not in str(RUNS[name].get("data")))
        folder = prepare(tmp_path / "run", run)
        simulate(run, folder)
    found = list(evaluate_run(run, folder))
    assert [one.peer for one in found] == list(range(run.peers))
    for one in found:
        last = metrics.read(folder.peer(one.peer).metrics)[-1]
        assert plain(one.evaluations.personal) == last["personal"] is not None
        assert plain(one.evaluations.whole) == last["global"]
        extra = {name: plain(evaluation) for name, evaluation in one.evaluations.extra.items()}
        assert extra == last["extra_metrics"]
        if name == "dfml":
            assert {"peak", "peak_global"} <= set(extra)


@pytest.fixture
def finished(tmp_path: Path, make_run: Any, prepare: Any) -> tuple[Any, RunFolder]:
    run = make_run(rounds=2, peers=2)
    folder = prepare(tmp_path / "run", run)
    simulate(run, folder)
    return run, folder


@pytest.mark.exhaustive
def test_masked_decides_which_of_both_is_the_accuracy(finished: Any) -> None:
    run, folder = finished
    plain_ones, masked = (list(evaluate_run(run, folder, masked=which)) for which in (None, True))
    for one, other in zip(plain_ones, masked, strict=True):
        a, b = one.evaluations.personal, other.evaluations.personal
        assert a is not None
        assert b is not None
        assert (a.accuracy, b.accuracy) == (a.unmasked_accuracy, b.masked_accuracy)
        assert replace(b, accuracy=a.accuracy, loss=a.loss, correct=a.correct) == a


def test_changes_nothing_in_the_folder(finished: Any) -> None:
    run, folder = finished
    newest = folder.peer(1).checkpoint
    newest.write_bytes(newest.read_bytes()[:-1])  # damaged: the previous one is the same state
    before = {path: path.read_bytes() for path in folder.root.rglob("*") if path.is_file()}
    assert len(list(evaluate_run(run, folder))) == 2
    assert {path: path.read_bytes() for path in folder.root.rglob("*") if path.is_file()} == before


@pytest.mark.exhaustive
def test_peer_that_has_not_finished_is_an_error(finished: Any) -> None:
    run, folder = finished
    result = folder.peer(1).result()
    folder.peer(1).write_result(replace(result, phase="stopped", rounds_done=1))
    with pytest.raises(RunFolderError, match=r"peer 1 has not finished: 1 of 2 rounds done; .*`p2pfl resume .*run`"):
        next(evaluate_run(run, folder))


@pytest.mark.exhaustive
def test_missing_checkpoint_is_an_error(finished: Any) -> None:
    run, folder = finished
    for path in (folder.peer(0).checkpoint, checkpoint.previous(folder.peer(0).checkpoint)):
        path.unlink()
    with pytest.raises(CheckpointError, match=r"checkpoint\.pt: not found, but it holds what peer 0 has learned"):
        next(evaluate_run(run, folder))


@pytest.mark.exhaustive
def test_checkpoint_of_an_earlier_round_is_an_error(finished: Any, make_run: Any) -> None:
    _, folder = finished
    with pytest.raises(CheckpointError, match="newest usable checkpoint has 2 of 7 rounds"):
        next(evaluate_run(make_run(rounds=7, peers=2), folder))


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a host without a GPU")
def test_cuda_without_gpu_is_an_error() -> None:
    assert device_named("cpu") == torch.device("cpu")
    with pytest.raises(P2pflError, match="finds no GPU"):
        device_named("cuda")


@pytest.mark.exhaustive
def test_command_prints_both_accuracies(finished: Any, invoke: Invoke) -> None:
    run, folder = finished
    folder.run_file.write_text(run.to_yaml())
    outcome = invoke("evaluate", folder.root)
    assert outcome.exit_code == 0
    assert " ".join(outcome.stdout.splitlines()[0].split()) == "peer model samples unmasked % masked %"
    whole = json.loads(invoke("evaluate", folder.root, "--masked", "--json").stdout)
    assert whole["masked_test"] is True
    for peer in whole["peers"]:
        result = folder.peer(peer["peer"]).result()
        assert result is not None
        assert peer["personal"]["accuracy"] == result.masked_accuracies["personal"]
        assert peer["personal"]["unmasked_accuracy"] == result.accuracy
    assert whole["accuracy"] == whole["masked_accuracies"]["personal"]
