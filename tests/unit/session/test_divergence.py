"""Divergence in whole runs: never of constants, counted where it made peers skip something."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from p2pfl.algorithms import ALGORITHMS
from p2pfl.models import Model
from p2pfl.outcomes import Outcomes
from p2pfl.run_file.run import Run
from p2pfl.run_folder.folder import Result, RunFolder
from p2pfl.session import build as building
from p2pfl.session import metrics
from p2pfl.session.metrics import Totals
from p2pfl.session.session import Session
from p2pfl.simulation.simulate import simulate
from tests.golden.runs import COVERED, RUNS
from tests.sessions import in_process

MAKE = Callable[..., Run]
DIRICHLET = {"partition": {"name": "dirichlet"}}
"""All samples."""
SMALL_RUNS = {
    changes["algorithm"]["name"]: {
        **{key: value for key, value in changes.items() if (key, value) != ("data", DIRICHLET)},
        "rounds": max(2, 1 + max(changes.get("joins_at", {0: 0}).values())),
    }
    for changes in RUNS.values()
}
"""A run of each method, on few samples: two rounds, or until everybody has joined."""
MASK = torch.full((3, 3), -torch.inf).triu(1)
LARGE = torch.tensor([0.0, -(2.0**24), 2.0**100])


def with_constants(monkeypatch: pytest.MonkeyPatch, mask: Tensor, large: Tensor, unset: Tensor) -> None:
    """Build all networks with constants that no output depends on: as buffers, frozen and trainable parameters."""
    build: Callable[..., Model] = vars(building)["build"]

    def build_with_constants(*args: Any) -> Model:
        model = build(*args)
        for name, value in (("mask", mask), ("large", large), ("unset", unset)):
            model.backbone.register_buffer(f"{name}_buffer", value.clone())
        model.backbone.register_buffer("ids", torch.arange(3) * 10**9)
        for name, value in (("mask", mask), ("large", large)):
            model.backbone.register_parameter(f"{name}_frozen", nn.Parameter(value.clone(), requires_grad=False))
        model.backbone.register_parameter("mask_unused", nn.Parameter(mask.clone()))
        return model

    monkeypatch.setattr(building, "build", build_with_constants)


def learned(run: Run) -> tuple[list[dict[str, Tensor]], list[Totals], list[Result]]:
    """Return what the peers' networks have learned, without the constants, and what became of the run."""

    async def life(sessions: list[Session]) -> Any:
        results = await asyncio.gather(*(session.run() for session in sessions))
        states = [session.algorithm.model.state_dict() for session in sessions]
        constants = {"mask_buffer", "large_buffer", "unset_buffer", "mask_frozen", "large_frozen", "mask_unused"}
        learned = [{n: x for n, x in state.items() if n.rpartition(".")[2] not in constants} for state in states]
        return learned, [session.totals for session in sessions], results

    found: tuple[list[dict[str, Tensor]], list[Totals], list[Result]] = in_process(run, None, life)
    return found


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] if name in COVERED else []) for name in ALGORITHMS]
)
def test_constants_that_look_diverged_change_nothing(
    name: str, make_run: MAKE, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run(**SMALL_RUNS[name], eval_every=100)
    with monkeypatch.context() as patch:
        with_constants(patch, torch.zeros(3, 3), torch.zeros(3), torch.zeros(2))
        expected, before, _ = learned(run)
    with_constants(monkeypatch, MASK, LARGE, torch.tensor([torch.nan, 0.0]))
    found, totals, results = learned(run)
    assert [result.phase for result in results] == ["finished"] * run.peers
    assert [(total.outcomes.skipped, total.missing) for total in totals] == [({}, total.missing) for total in before]
    for mine, theirs in zip(found, expected, strict=True):
        for tensor, other in zip(mine.values(), theirs.values(), strict=True):
            assert torch.equal(tensor, other)


def diverging(
    run: Run, rates: dict[int, list[float]], folder: RunFolder | None = None
) -> tuple[list[Result], list[Session]]:
    """Run with other learning rates of some peers, by round."""

    async def life(sessions: list[Session]) -> Any:
        def on_round(peer: int, t: int) -> None:
            (group,) = sessions[peer].algorithm.optimizer.param_groups
            group["lr"] = rates[peer][min(t + 1, len(rates[peer]) - 1)]

        for me in rates:
            sessions[me].on_round = on_round
            on_round(me, -1)
        return await asyncio.gather(*(session.run() for session in sessions)), sessions

    found: tuple[list[Result], list[Session]] = in_process(run, folder, life)
    return found


FEDSIM = {"algorithm": {"name": "fedsim", "batch": 16, "lr": 0.01}, "peers": 3, "rounds": 3}


@pytest.mark.exhaustive
def test_a_peer_whose_every_training_is_rolled_back_fails_and_has_served_its_neighbors(
    make_run: MAKE, prepare: Any, tmp_path: Path
) -> None:
    run = make_run(**FEDSIM)
    folder = prepare(tmp_path / "run", run)
    results, sessions = diverging(run, {2: [1e30]}, folder)
    assert [result.phase for result in results] == ["finished", "finished", "failed"]
    assert re.match(
        r"all 3 trainings were rolled back, because values had diverged: in round 0, model\.\S+ holds \S+; lower the "
        "learning rate",
        results[2].error,
    )
    assert [result.missing for result in results] == [0, 0, 0]
    assert [result.skipped for result in results] == [{}, {}, {"trainings": 3}]
    assert sessions[2].totals.outcomes.tried == {"trainings": 3, "averages": 3, "contributions": 3, "messages": 6}
    assert [record.get("skipped") for record in metrics.read(folder.peer(2).metrics)] == [{"trainings": 1}] * 3
    assert not any("skipped" in record for record in metrics.read(folder.peer(0).metrics))
    status = folder.peer(2).status()
    assert status is not None
    assert (status.phase, status.error, status.skipped) == ("failed", results[2].error, {"trainings": 3})
    again = simulate(run, folder)  # resumed after its last round: nothing is trained, nothing forgotten
    assert [(result.phase, result.error) for result in again] == [(result.phase, result.error) for result in results]


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["dpsgd", "cga", "fedavg"])
def test_a_run_whose_every_training_diverges_fails_whenever_models_are_sent(make_run: MAKE, name: str) -> None:
    results = simulate(make_run(algorithm={"name": name, "lr": 1e20}, peers=3, rounds=4))
    assert [result.phase for result in results] == ["failed"] * 3
    assert all("because values had diverged" in result.error for result in results)


@pytest.mark.exhaustive
def test_a_peer_that_recovers_finishes(make_run: MAKE) -> None:
    results, _ = diverging(make_run(**FEDSIM), {2: [1e30, 1e30, 0.01]})
    assert [result.phase for result in results] == ["finished"] * 3
    assert results[2].skipped == {"trainings": 2}


@pytest.mark.exhaustive
def test_a_peer_whose_model_is_always_left_out_fails_and_its_neighbors_finish(make_run: MAKE) -> None:
    algorithm = {"name": "fedavg", "batch": 16, "lr": 0.01}
    results, _ = diverging(make_run(**{**FEDSIM, "algorithm": algorithm}), {2: [1e30]})
    assert [(result.phase, result.skipped) for result in results] == [
        ("finished", {"messages": 3}),
        ("finished", {"messages": 3}),
        ("failed", {"contributions": 3}),
    ]
    assert "what it had learned was left out of averages all 3 times" in results[2].error
    assert "in round 0, values['" in results[2].error


@pytest.mark.exhaustive
def test_a_peer_that_receives_only_diverged_messages_fails(make_run: MAKE) -> None:
    settings = {**FEDSIM, "algorithm": {"name": "dpsgd", "batch": 16, "local_epochs": 1}, "graph": "line"}
    results, _ = diverging(make_run(**settings), {1: [1e30]})
    assert [(result.phase, result.skipped) for result in results] == [
        ("failed", {"messages": 3}),
        ("failed", {"contributions": 3}),
        ("failed", {"messages": 3}),
    ]
    assert "all 3 messages that it received were dropped, because values had diverged: in round 0" in results[0].error
    assert "of peer 1; the training of its neighbors diverges" in results[0].error


@pytest.mark.exhaustive
def test_divergence_is_told_from_the_initial_values_also_after_a_restart(
    make_run: MAKE, prepare: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_constants(monkeypatch, MASK, LARGE, torch.tensor([torch.nan]))
    folder = prepare(tmp_path / "run", run := make_run(**FEDSIM, checkpoint_every=1))

    async def life(sessions: list[Session]) -> Any:
        await asyncio.gather(*(session.run() for session in sessions))

    in_process(make_run(**{**FEDSIM, "rounds": 2}, checkpoint_every=1), folder, life)
    resumed = Session(run, 0, folder.info["id"], building.load_data(run), folder=folder.peer(0))
    resumed.resume()
    trainer = resumed.algorithm
    assert resumed.rounds_done == 2
    assert trainer.what_diverged(trainer.model.state_dict()) == ""
    with torch.no_grad():
        for parameter in trainer.model.parameters():
            if parameter.isfinite().all() and parameter.abs().max() < 1e3:
                parameter.fill_(2e6)
    assert trainer.what_diverged(trainer.model.state_dict()).startswith("model.backbone.")


def test_totals_are_restored_from_plain_values() -> None:
    totals = Totals(missing=3, outcomes=Outcomes({"a": 1}, {"a": 1}, {"a": "why"}))
    assert Totals.from_state_dict(json.loads(json.dumps(totals.state_dict()))) == totals


def test_a_failure_names_each_thing_that_was_always_skipped() -> None:
    outcomes = Outcomes()
    outcomes.note("averages", "w holds nan")
    outcomes.note("codes", "c holds inf")
    outcomes.note("messages", "x holds nan in Head of peer 3")
    totals = Outcomes()
    totals.add(outcomes.drain(), 4)
    remedy = "lower the learning rate, or check the inputs, the loss and the initial values"
    assert totals.failure() == (
        "none of 1 averages was adopted, because values had diverged: in round 4, w holds nan; "
        f"all 1 codes were discarded, because values had diverged: in round 4, c holds inf; {remedy}"
    )
    for what in ("averages", "codes", "messages"):
        outcomes.note(what)
    outcomes.note("codes", "c holds nan")
    totals.add(outcomes.drain(), 5)
    assert totals.failure() == ""
    assert totals.skipped == {"averages": 1, "codes": 2, "messages": 1}
    assert totals.why["codes"] == "in round 4, c holds inf"
