"""Peers as processes: stopping, dying, and restarting."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from p2pfl.session import checkpoint, metrics
from p2pfl.session.session import Stopped
from p2pfl.simulation.simulate import simulate
from peers.runtime import stop_by_exception
from tests.peer_processes import ENDLESS, LOCAL, log_of, rounds_done


def resolved(run: Any, **changes: Any) -> dict[str, Any]:
    return {**run.resolved(), **changes}


# ---- stopping


def test_sigterm_checkpoints_and_the_run_resumes_from_there(
    make_run: Any, prepare: Any, warm: Any, until: Any, tmp_path: Path
) -> None:
    run = make_run(peers=2, rounds=ENDLESS, algorithm=LOCAL, checkpoint_every=ENDLESS)
    folder = prepare(tmp_path / "run", run)
    pids = warm.start(folder)
    until(lambda: all(rounds_done(folder, peer) > 1 for peer in pids))
    for number, pid in zip((signal.SIGTERM, signal.SIGINT), pids.values(), strict=True):
        os.kill(pid, number)
    assert warm.wait(pids) == {0: 0, 1: 0}
    done = []
    for files in folder.peers():
        result, status = files.result(), files.status()
        assert result.phase == status.phase == "stopped"
        saved = checkpoint.load(files.checkpoint, folder.info["id"], files.peer)
        assert saved is not None
        assert saved["rounds_done"] == result.rounds_done == len(metrics.read(files.metrics)) > 1
        assert f"stopped rounds_done={result.rounds_done}" in log_of(folder, files.peer)
        assert result.digest == simulate(make_run(**resolved(run, rounds=result.rounds_done)))[files.peer].digest
        done.append(result.rounds_done)

    longer = make_run(**resolved(run, rounds=max(done) + 2))
    folder.run_file.write_text(longer.to_yaml())
    assert warm.run(folder) == {0: 0, 1: 0}
    for files, expected in zip(folder.peers(), simulate(longer), strict=True):
        assert files.result().digest == expected.digest
        assert [record["t"] for record in metrics.read(files.metrics)] == list(range(longer.rounds))
        assert (files.status().starts, files.status().resumes) == (2, 1)


@pytest.mark.parametrize("algorithm", ["dpsgd", "mapl"])
def test_resuming_all_peers_in_the_same_round_changes_nothing(
    algorithm: str, make_run: Any, prepare: Any, warm: Any, tmp_path: Path
) -> None:
    options = {"dpsgd": {"momentum": 0.9}, "mapl": {"warmup": 1, "projector_hidden": 16, "graph_lr": 5.0}}
    run = make_run(
        rounds=2, algorithm={"name": algorithm, "batch": 16, **options[algorithm]}, chaos={"link": {"jitter": 0.01}}
    )
    folder = prepare(tmp_path / "run", run)
    assert set(warm.run(folder).values()) == {0}
    longer = make_run(**resolved(run, rounds=4))
    folder.run_file.write_text(longer.to_yaml())
    assert set(warm.run(folder).values()) == {0}
    for files, expected in zip(folder.peers(), simulate(longer), strict=True):
        result = files.result()
        assert (result.digest, result.sent, result.received) == (expected.digest, expected.sent, expected.received)
        assert "resumed t=2" in log_of(folder, files.peer)


def test_sigterm_ends_a_wait_for_a_missing_neighbor(
    make_run: Any, prepare: Any, warm: Any, until: Any, tmp_path: Path
) -> None:
    folder = prepare(tmp_path / "run", make_run(peers=2, transport={"deadline": 1000}))
    pids = warm.start(folder, [1])
    until(lambda: (status := folder.peer(1).status()) and status.phase == "waiting" and status.waiting_for == [0])
    os.kill(pids[1], signal.SIGTERM)
    assert warm.wait(pids) == {1: 0}
    assert folder.peer(1).result().phase == "stopped"


def test_sigterm_right_after_the_fork_stops_a_peer(make_run: Any, prepare: Any, warm: Any, tmp_path: Path) -> None:
    folder = prepare(tmp_path / "run", make_run(peers=2))
    os.mkfifo(folder.peer(0).output)  # opening this blocks, before the peer handles signals
    pids = warm.start(folder, [0])
    os.kill(pids[0], signal.SIGTERM)
    reader = os.open(folder.peer(0).output, os.O_RDONLY | os.O_NONBLOCK)
    assert warm.wait(pids) == {0: 0}
    os.close(reader)
    assert folder.peer(0).status().phase == "stopped"
    assert "stopped before the first round" in log_of(folder, 0)


@pytest.mark.usefixtures("fast_children")
def test_sigterm_before_the_first_round(
    make_run: Any, prepare: Any, tmp_path: Path, until: Any, monkeypatch: Any
) -> None:
    folder = prepare(tmp_path / "run", make_run(peers=2))
    # Reading this blocks.
    folder.run_file.unlink()
    os.mkfifo(folder.run_file)
    with subprocess.Popen([sys.executable, "-c", START, str(folder.root)]) as process:
        until(folder.peer(0).status)
        process.send_signal(signal.SIGTERM)
        assert process.wait(200) == 0
    assert folder.peer(0).status().phase == "stopped"


START = """
import sys
from pathlib import Path
from p2pfl.run_folder.folder import RunFolder
from peers.runtime import run_peer
sys.exit(run_peer(RunFolder(Path(sys.argv[1])), 0))
"""


def test_a_stop_is_not_lost_in_a_library_that_replaces_exceptions() -> None:
    def serialize() -> None:
        try:
            os.kill(os.getpid(), signal.SIGTERM)
        except Stopped as error:
            raise ValueError("error calling a function") from error

    with pytest.raises(Stopped), stop_by_exception():
        serialize()
    with pytest.raises(ValueError, match="unrelated"), stop_by_exception():
        raise ValueError("unrelated")


# ---- dying


def test_others_finish_without_a_killed_peer_and_log_it(
    make_run: Any, prepare: Any, warm: Any, hold: Any, until: Any, tmp_path: Path
) -> None:
    rounds = 20
    folder = prepare(
        tmp_path / "run", make_run(rounds=rounds, chaos={"link": {"jitter": 0.03}}, transport={"give_up": 0.3})
    )
    hold(folder, 10)
    pids = warm.start(folder)
    until(lambda: rounds_done(folder, 2) > 1)
    os.kill(pids[2], signal.SIGKILL)
    hold(folder, None)
    assert warm.wait(pids) == {0: 0, 1: 0, 2: -signal.SIGKILL, 3: 0}
    assert folder.peer(2).result() is None
    for peer in (0, 1, 3):
        result = folder.peer(peer).result()
        assert (result.phase, result.rounds_done) == ("finished", rounds)
        records = metrics.read(folder.peer(peer).metrics)
        without = [record["t"] for record in records if record["missing"] == {"Parameters": [2]}]
        assert without == list(range(without[0], rounds))
        assert all(record["missing"] == {} for record in records[: without[0]])
        assert result.missing == len(without) > 0
        assert all("2" not in records[t]["received"] for t in without)
        assert f"missing kind=Parameters peers=2 t={without[0]}" in log_of(folder, peer)
        assert "neighbor declared dead peer=2: no connection for 0.3 s" in log_of(folder, peer)


def test_stopped_peer_is_waited_for_until_give_up(
    make_run: Any, prepare: Any, warm: Any, hold: Any, until: Any, tmp_path: Path
) -> None:
    transport = {"give_up": 0.5, "deadline": 1000}
    folder = prepare(tmp_path / "run", make_run(rounds=20, chaos={"link": {"jitter": 0.02}}, transport=transport))
    hold(folder, 10)
    pids = warm.start(folder)
    until(lambda: rounds_done(folder, 3) > 1)
    os.kill(pids[3], signal.SIGTERM)
    assert warm.wait({3: pids.pop(3)}) == {3: 0}
    hold(folder, None)
    assert set(warm.wait(pids).values()) == {0}
    assert folder.peer(3).result().phase == "stopped"
    for peer in range(3):
        assert folder.peer(peer).result().rounds_done == 20
        assert "neighbor declared dead peer=3: no connection for 0.5 s" in log_of(folder, peer)


@pytest.mark.parametrize(
    "method",
    ["mapl, pruned", *(pytest.param(name, marks=pytest.mark.slow) for name in ("dpsgd", "mapl", "meta-l2c, pruned"))],
)
def test_killing_and_restarting_peers_changes_nothing(
    method: str, make_run: Any, prepare: Any, warm: Any, hold: Any, until: Any, tmp_path: Path
) -> None:
    """The promise: a crash is invisible. Each peer is killed twice, two at once."""
    mapl = {"name": "mapl", "warmup": 3, "batch": 16, "lr": 0.01, "projector_hidden": 16}
    algorithm = {
        "dpsgd": {"name": "dpsgd", "batch": 16},
        "mapl": mapl,
        "mapl, pruned": {**mapl, "graph_lr": 1.5},
        "meta-l2c, pruned": {"name": "meta-l2c", "local_epochs": 1, "prune_round": 4, "prune_to": 1, "spool": True},
    }
    run = make_run(
        algorithm=algorithm[method],
        data={"partition": {"name": "groups", "groups": 2, "per_class": 10, "validation": 0.3}},
        rounds=14,
        checkpoint_every=3,
        graph="ring",
        chaos={"link": {"jitter": 0.02}},
    )
    folder, calm = prepare(tmp_path / "run", run), prepare(tmp_path / "calm", run)
    expected = simulate(run, calm)
    hold(folder, 3)
    pids = warm.start(folder)
    for at, victims in ((1, [0]), (3, [1, 2]), (5, [3]), (7, [2, 3]), (9, [0, 1])):
        until(lambda victims=victims, at=at: all(rounds_done(folder, peer) >= at for peer in victims))
        for peer in victims:
            os.kill(pids[peer], signal.SIGKILL)
        assert warm.wait({peer: pids[peer] for peer in victims}) == dict.fromkeys(victims, -signal.SIGKILL)
        hold(folder, at + 4)
        pids.update(warm.start(folder, victims))
    hold(folder, None)
    assert warm.wait(pids) == dict.fromkeys(range(4), 0)
    for files, calm_result in zip(folder.peers(), expected, strict=True):
        result = files.result()
        assert (result.phase, result.rounds_done, result.missing) == ("finished", 14, 0)
        assert (result.digest, result.sent, result.received) == (
            calm_result.digest,
            calm_result.sent,
            calm_result.received,
        )
        assert [record["t"] for record in metrics.read(files.metrics)] == list(range(14))
        assert "resumed t=" in log_of(folder, files.peer)


@pytest.mark.parametrize("method", ["dpsgd", pytest.param("mapl, pruned", marks=pytest.mark.slow)])
def test_damaged_checkpoints_change_nothing(
    method: str, make_run: Any, prepare: Any, warm: Any, hold: Any, until: Any, tmp_path: Path
) -> None:
    """Two neighbors are killed at once and find their last checkpoints damaged; so does one that has finished."""
    mapl = {"name": "mapl", "warmup": 3, "batch": 16, "lr": 0.01, "projector_hidden": 16, "graph_lr": 1.5}
    run = make_run(
        algorithm={"dpsgd": {"name": "dpsgd", "batch": 16}, "mapl, pruned": mapl}[method],
        rounds=12,
        checkpoint_every=2,
        graph="ring",
        chaos={"link": {"jitter": 0.02}},
    )
    folder, longer = prepare(tmp_path / "run", run), make_run(**resolved(run, rounds=14))

    def damage(peer: int) -> None:
        path = folder.peer(peer).checkpoint
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes(data)

    def saved(peer: int) -> int:
        state = checkpoint.load(folder.peer(peer).checkpoint, folder.info["id"], peer, repair=False)
        return 0 if state is None else int(state["rounds_done"])

    hold(folder, 7)
    pids = warm.start(folder)
    until(lambda: all(rounds_done(folder, peer) == 7 for peer in (1, 2)))
    # A thread writes them: killed between its two renames, a peer would have no checkpoint to damage.
    until(lambda: all(saved(peer) == 6 for peer in (1, 2)))
    for peer in (1, 2):
        os.kill(pids[peer], signal.SIGKILL)
    assert warm.wait({peer: pids[peer] for peer in (1, 2)}) == dict.fromkeys((1, 2), -signal.SIGKILL)
    for peer in (1, 2):
        damage(peer)
    hold(folder, None)
    pids.update(warm.start(folder, [1, 2]))
    assert warm.wait(pids) == dict.fromkeys(range(4), 0)
    for peer in (1, 2):
        assert "checkpoint.pt: damaged: checksum mismatch; resuming from" in log_of(folder, peer)

    folder.run_file.write_text(longer.to_yaml())
    damage(3)
    assert warm.run(folder) == dict.fromkeys(range(4), 0)
    assert "resuming from the previous checkpoint, after round 11" in log_of(folder, 3)
    for files, calm in zip(folder.peers(), simulate(longer), strict=True):
        result = files.result()
        assert (result.phase, result.rounds_done, result.missing) == ("finished", 14, 0)
        assert (result.digest, result.sent, result.received) == (calm.digest, calm.sent, calm.received)
        assert [record["t"] for record in metrics.read(files.metrics)] == list(range(14))


def test_peers_finish_without_the_warm_process(
    make_run: Any, prepare: Any, another_warm: Any, hold: Any, until: Any, tmp_path: Path
) -> None:
    folder = prepare(tmp_path / "run", make_run(rounds=12, chaos={"link": {"jitter": 0.03}}))
    hold(folder, 6)
    pids = another_warm.start(folder)
    peers = [psutil.Process(pid) for pid in pids.values()]
    until(lambda: rounds_done(folder, 0) > 0)
    another_warm.kill()
    another_warm.running.clear()
    hold(folder, None)
    _, alive = psutil.wait_procs(peers, 200)
    assert not alive
    assert [files.result().rounds_done for files in folder.peers()] == [12] * 4
    assert not list(folder.addresses.iterdir())
