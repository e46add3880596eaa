"""Whole runs in one process, of every algorithm: stopped, resumed, joined late, with damaged checkpoints."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from p2pfl import algorithms
from p2pfl.run_file.run import Run
from p2pfl.run_folder.folder import Result, RunFolder
from p2pfl.session import checkpoint, metrics, saving
from p2pfl.session.session import Session, Stopped
from p2pfl.simulation.simulate import simulate
from p2pfl.tensors import digest
from tests.golden.runs import COVERED
from tests.sessions import in_process


def stop_all_after(run: Run, folder: RunFolder, rounds: int) -> None:
    """Stop every peer after ``rounds`` completed rounds."""

    async def life(sessions: list[Session]) -> None:
        for session in sessions:
            session.on_round = lambda peer, t: sessions[peer].stop() if t + 1 == rounds else None
        ends = await asyncio.gather(*(session.run() for session in sessions), return_exceptions=True)
        assert all(isinstance(end, Stopped) for end in ends)

    in_process(run, folder, life)


def run_uninterrupted(run: Run) -> tuple[list[Result], list[list[str]]]:
    """The results, and each peer's state digest after each round."""
    digests: list[list[str]] = [[] for _ in range(run.peers)]

    async def life(sessions: list[Session]) -> list[Result]:
        for session in sessions:
            session.on_round = lambda peer, t: digests[peer].append(digest(sessions[peer].algorithm.state_dict()))
        return await asyncio.gather(*(session.run() for session in sessions))

    return in_process(run, None, life), digests


SSL = {"batch": 16, "momentum": 0.9, "local_epochs": 1, "probe_samples": 50, "probe_epochs": 2, "probe_steps": 1}
ALGORITHMS = {
    "local": {"name": "local", "batch": 16},
    "dpsgd": {"name": "dpsgd", "batch": 16, "momentum": 0.9, "local_steps": 2},
    "fedavg": {"name": "fedavg", "batch": 16, "participation": 0.5},
    "lg-fedavg": {"name": "lg-fedavg", "batch": 16, "optimizer": "adam"},
    "fedsim": {"name": "fedsim", "batch": 16, "momentum": 0.9, "participation": 0.5},
    "fedclassavg": {"name": "fedclassavg", "batch": 16, "lr": 0.001},
    "pfedsim": {"name": "pfedsim", "batch": 16, "momentum": 0.9, "generalization": 0.25},
    "flt": {"name": "flt", "batch": 16, "encoder_epochs": 2, "latent": 8, "manifold": "none", "threshold": 0.08},
    "ditto": {"name": "ditto", "batch": 16, "momentum": 0.9, "participation": 0.5, "personal_epochs": 2},
    "dfedavgm": {"name": "dfedavgm", "batch": 8},
    "fedproto": {"name": "fedproto", "batch": 16, "momentum": 0.9, "participation": 0.5},
    "fedtgp": {"name": "fedtgp", "batch": 16, "prototype_epochs": 5},
    "feddistill": {"name": "feddistill", "batch": 16, "momentum": 0.9, "participation": 0.5},
    "fml": {"name": "fml", "batch": 16, "momentum": 0.9, "participation": 0.5},
    "fedgen": {"name": "fedgen", "batch": 16, "momentum": 0.9},
    "fedkd": {"name": "fedkd", "batch": 16, "momentum": 0.9},
    "dfml": {"name": "dfml", "batch": 16, "mutual_epochs": 2, "period": 2},
    "fedavg-dec": {"name": "fedavg-dec", "batch": 16},
    "fedprox-dec": {"name": "fedprox-dec", "batch": 16},
    "fml-dec": {"name": "fml-dec", "batch": 16},
    "def-kt": {"name": "def-kt", "batch": 16},
    "heterofl": {"name": "heterofl", "batch": 16},
    "fedrolex": {"name": "fedrolex", "batch": 16},
    "mapl": {"name": "mapl", "warmup": 1, "batch": 16, "lr": 0.01, "projector_hidden": 16, "graph_lr": 5.0},
    "fedstyle": {"name": "fedstyle", "style_epochs": 2, "participation": 0.5, **SSL},
    "fedavg-ssl": {"name": "fedavg-ssl", **SSL},
    "fedper-ssl": {"name": "fedper-ssl", **SSL},
    "fedprox-ssl": {"name": "fedprox-ssl", **SSL},
    "fedrep-ssl": {"name": "fedrep-ssl", **SSL},
    "apfl-ssl": {"name": "apfl-ssl", **SSL},
    "ditto-ssl": {"name": "ditto-ssl", "participation": 0.5, **SSL},
    "mapl+": {"name": "mapl+", "warmup": 1, "batch": 16, "lr": 0.01, "projector_hidden": 16, "graph_lr": 5.0},
    "l2c": {"name": "l2c", "local_epochs": 1, "momentum": 0.9, "prune_round": 2, "prune_to": 1, "spool": True},
    "cga": {"name": "cga", "batch": 16, "momentum": 0.9},
    "fedfomo": {"name": "fedfomo", "batch": 16, "momentum": 0.9, "models": 1, "exploration": 0.5},
    "meta-l2c": {"name": "meta-l2c", "local_epochs": 1, "prune_round": 2, "prune_to": 1},
    "gossip": {"name": "gossip", "batch": 16, "momentum": 0.9},
    "ad-psgd": {"name": "ad-psgd", "batch": 16, "momentum": 0.9, "local_steps": 2},
    "sgp": {"name": "sgp", "batch": 16, "momentum": 0.9, "local_steps": 2},
    "swift": {"name": "swift", "batch": 16, "momentum": 0.9, "local_steps": 2, "average_every": 2},
    "divshare": {"name": "divshare", "batch": 16, "momentum": 0.9, "receivers": 2},
}
GRAPHS = {"ad-psgd": "star"}
"""Of methods that refuse a complete graph."""
DATA = {
    "partition": {"name": "clusters", "clusters": 2, "per_class": 8, "test_per_class": 5, "validation": 0.25},
}
"""Data that suits every algorithm."""
AUGMENTED = ("local", "mapl", "fedstyle")
"""One algorithm for each way of drawing augmented batches."""
EACH = [pytest.param(name, marks=pytest.mark.slow if name in COVERED else []) for name in ALGORITHMS]


def test_the_tables_have_every_algorithm() -> None:
    assert {settings["name"] for settings in ALGORITHMS.values()} == set(algorithms.ALGORITHMS)


@pytest.mark.parametrize("name", EACH)
def test_stop_and_resume_is_bit_identical(name: str, tmp_path: Path, make_run: Any, prepare: Any) -> None:
    data = {**DATA, "augment": "mapl" if name in AUGMENTED else "none"}
    graph = GRAPHS.get(name, "complete")
    run = make_run(rounds=4, peers=3, graph=graph, algorithm=ALGORITHMS[name], data=data, checkpoint_every=100)
    whole, digests = run_uninterrupted(run)
    folder = prepare(tmp_path / "run", run)
    for rounds in (1, 3):
        stop_all_after(run, folder, rounds)
        for peer_folder in folder.peers():
            result, status = peer_folder.result(), peer_folder.status()
            assert result is not None
            assert status is not None
            assert result.phase == status.phase == "stopped"
            assert (result.rounds_done, result.digest) == (rounds, digests[result.peer][rounds - 1])
    for expected, result in zip(whole, simulate(run, folder), strict=True):
        assert (result.phase, result.rounds_done) == ("finished", 4)
        assert (result.digest, result.sent, result.received) == (expected.digest, expected.sent, expected.received)
        assert (result.accuracy, result.best) == (expected.accuracy, expected.best)
        assert (result.weights, result.extra_metrics) == (expected.weights, expected.extra_metrics)
        assert [record["t"] for record in metrics.read(folder.peer(result.peer).metrics)] == [0, 1, 2, 3]


@pytest.mark.parametrize("name", EACH)
def test_late_joiners_take_part_from_their_round(name: str, tmp_path: Path, make_run: Any, prepare: Any) -> None:
    graph = GRAPHS.get(name, "complete")
    changes = {"graph": graph, "data": DATA, "joins_at": {3: 1, 1: 3}, "eval_every": 100}
    run = make_run(peers=4, rounds=4, algorithm=ALGORITHMS[name], **changes)
    folder = prepare(tmp_path / "run", run)
    results = simulate(run, folder)
    assert [(result.phase, result.rounds_done, result.missing) for result in results] == [("finished", 4, 0)] * 4
    for peer, joins in enumerate((0, 3, 0, 1)):
        records = list(metrics.read(folder.peer(peer).metrics))
        assert [record["t"] for record in records] == list(range(joins, 4))
        for record in records:
            assert all({"3": 1, "1": 3}.get(neighbor, 0) <= record["t"] for neighbor in record["received"])


def _shorter(run: Run, rounds: int) -> dict[str, Any]:
    return {**run.resolved(), "rounds": rounds}


async def stop_in_the_third_round(sessions: list[Session]) -> None:
    """Run the first session until its second batch of round 2."""
    session, batches = sessions[0], 0
    after_batch = session.algorithm.after_batch

    def stop() -> None:
        nonlocal batches
        batches += session.rounds_done == 2
        if batches == 2:
            session.stop()
        after_batch()

    session.algorithm.after_batch = stop
    with pytest.raises(Stopped):
        await session.run()


def test_stop_during_a_round_rolls_back_to_its_start(tmp_path: Path, make_run: Any, prepare: Any) -> None:
    run = make_run(rounds=50, peers=2, algorithm={"name": "local", "batch": 4}, checkpoint_every=100)
    folder = prepare(tmp_path / "run", run)
    in_process(run, folder, stop_in_the_third_round)
    result = folder.peer(0).result()
    assert result is not None
    assert (result.phase, result.rounds_done) == ("stopped", 2)
    assert result.digest == simulate(make_run(**_shorter(run, 2)))[0].digest
    assert [record["t"] for record in metrics.read(folder.peer(0).metrics)] == [0, 1]


def test_stop_with_automatic_checkpoints_repeats_the_rounds_since_the_last_kept_state(
    tmp_path: Path, make_run: Any, prepare: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(saving, "MAX_AGE", math.inf)
    monkeypatch.setattr(saving.Saver, "is_due", lambda saver, rounds_done: False)
    run = make_run(rounds=4, peers=2, algorithm={"name": "local", "batch": 4}, checkpoint_every="auto")
    folder = prepare(tmp_path / "run", run)
    in_process(run, folder, stop_in_the_third_round)
    result, status = folder.peer(0).result(), folder.peer(0).status()
    assert result is not None
    assert status is not None
    assert (result.phase, result.rounds_done, status.rounds_done, result.seconds) == ("stopped", 0, 0, {})
    expected = simulate(run)
    for resumed, whole in zip(simulate(run, folder), expected, strict=True):
        assert (resumed.digest, resumed.accuracy, resumed.best) == (whole.digest, whole.accuracy, whole.best)
    assert [record["t"] for record in metrics.read(folder.peer(0).metrics)] == [0, 1, 2, 3]


def test_stop_ends_the_wait_for_a_neighbor(tmp_path: Path, make_run: Any, prepare: Any) -> None:
    run = make_run()
    folder = prepare(tmp_path / "run", run)

    async def life(sessions: list[Session]) -> None:
        running = asyncio.create_task(sessions[0].run())
        while not sessions[0].endpoint.mailbox.waits_for:
            await asyncio.sleep(0)
        sessions[0].stop()
        sessions[0].interrupt()
        with pytest.raises(Stopped):
            await running

    in_process(run, folder, life)
    saved = checkpoint.load(folder.peer(0).checkpoint, folder.info["id"], 0)
    assert saved is not None
    assert saved["rounds_done"] == 0


def test_resume_rewrites_records_after_the_checkpoint(tmp_path: Path, make_run: Any, prepare: Any) -> None:
    run = make_run(rounds=4, peers=2, algorithm="local")
    folder = prepare(tmp_path / "run", run)
    stop_all_after(run, folder, 2)
    with folder.peer(0).metrics.open("a") as file:  # as if it had been killed later, while it wrote
        file.write(json.dumps({"peer": 0, "t": 2}) + '\n{"peer": 0, "t": 3, "lo')
    simulate(run, folder)
    assert [record["t"] for record in metrics.read(folder.peer(0).metrics)] == [0, 1, 2, 3]


def test_damaged_checkpoint_only_repeats_rounds(tmp_path: Path, make_run: Any, prepare: Any) -> None:
    apart = {"name": "edges", "edges": [], "allow_disconnected": True}  # whose peers need no messages again
    run = make_run(rounds=8, peers=2, graph=apart, algorithm="local", checkpoint_every=2)
    folder = prepare(tmp_path / "run", run)
    stop_all_after(run, folder, 5)
    peer_folder = folder.peer(1)
    peer_folder.checkpoint.write_bytes(peer_folder.checkpoint.read_bytes()[:-1])
    for result, expected in zip(simulate(run, folder), simulate(run), strict=True):
        assert (result.phase, result.digest) == ("finished", expected.digest)
        assert [record["t"] for record in metrics.read(folder.peer(result.peer).metrics)] == list(range(8))
    log = peer_folder.log.read_text()
    assert "checkpoint.pt: damaged: checksum mismatch; resuming from" in log
    assert "resuming from the previous checkpoint, after round 3" in log
    assert "resumed t=4" in log


def test_announces_the_round_of_the_previous_checkpoint(tmp_path: Path, make_run: Any, prepare: Any) -> None:
    run = make_run(rounds=7, peers=2, algorithm="local", checkpoint_every=2)
    folder = prepare(tmp_path / "run", run)
    announced: list[Mapping[int, int]] = []

    def run_until(rounds: int) -> None:
        async def life(sessions: list[Session]) -> None:
            session = sessions[0]
            session.endpoint.link.checkpointed = announced.append  # type: ignore[assignment, method-assign]
            session.on_round = lambda peer, t: session.stop() if t + 1 == rounds else None
            with contextlib.suppress(Stopped):
                await session.run()

        in_process(run, folder, life)

    run_until(rounds=5)
    assert announced == [{1: 0}, {1: 2}, {1: 4}]  # at 2, at 4 and at the stop
    saved = checkpoint.load(folder.peer(0).checkpoint, folder.info["id"], 0)
    assert saved is not None
    assert saved["rounds_done"] == 5
    run_until(rounds=8)
    assert announced[3:] == [{1: 5}, {1: 6}, {1: 7}]  # at 6, at the end, and once more for the previous checkpoint
    before = checkpoint.read(checkpoint.previous(folder.peer(0).checkpoint))
    assert before["rounds_done"] == 7
