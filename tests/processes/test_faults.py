"""Fault injection, and peers that rejoin after being declared dead, with real processes, signals and sockets."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import threading
import time
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from p2pfl.session import metrics
from p2pfl.simulation.simulate import simulate
from peers.faults import Injector

DPSGD = {"name": "dpsgd", "batch": 16}
MAPL = {"name": "mapl", "warmup": 2, "batch": 16, "lr": 0.01, "projector_hidden": 16}


def rounds_done(folder: Any, peer: int) -> int:
    status = folder.peer(peer).status()
    return 0 if status is None else int(status.rounds_done)


def log_of(folder: Any, peer: int) -> str:
    return str(folder.peer(peer).log.read_text())


def logged_at(folder: Any, peer: int, text: str) -> datetime:
    """Return when the log first contains ``text``."""
    (line, *_) = [line for line in log_of(folder, peer).splitlines() if text in line]
    return datetime.fromisoformat(line.split()[0])


def follow(warm: Any, folder: Any) -> int:
    """Run all peers and restart those that were killed, as the launcher does. Return the number of restarts."""
    pids = warm.start(folder)
    again = 0
    while pids:
        peer = warm.next_of(pids)
        code = warm.wait({peer: pids.pop(peer)})[peer]
        assert code in (0, -signal.SIGKILL)
        if code != 0:
            pids |= warm.start(folder, [peer])
            again += 1
    return again


def matches_simulate(folder: Any, run: Any) -> bool:
    results = [files.result() for files in folder.peers()]
    calm = simulate(run)
    assert [r.phase for r in results] == ["finished"] * run.peers
    return [(r.digest, r.sent, r.received, r.missing) for r in results] == [
        (r.digest, r.sent, r.received, 0) for r in calm
    ]


# ---- peers that were declared dead rejoin


@pytest.mark.parametrize(
    ("graph", "dead", "algorithm"),
    [
        pytest.param("complete", [2], DPSGD, id="one"),
        pytest.param("ring", [1, 2], DPSGD, id="two neighbors"),
        # Peers must not wait on an edge that the other side dropped and they do not remember dropping.
        pytest.param("complete", [2, 4], {**MAPL, "graph_lr": 3.0}, id="pruned"),
    ],
)
def test_peers_declared_dead_rejoin_in_their_neighbors_round(
    graph: str, dead: list[int], algorithm: Any, make_run: Any, prepare: Any, gated_warm: Any, hold: Any, until: Any,
    tmp_path: Path,
) -> None:  # fmt: skip
    run = make_run(peers=5, rounds=20, graph=graph, algorithm=algorithm, transport={"give_up": 0.4})
    folder = prepare(tmp_path / "run", run)
    hold(folder, 5)
    pids = gated_warm.start(folder)
    until(lambda: all(rounds_done(folder, peer) >= 3 for peer in pids))
    for peer in dead:
        os.kill(pids[peer], signal.SIGKILL)
    gated_warm.wait({peer: pids[peer] for peer in dead})
    hold(folder, 12)
    others = [peer for peer in range(5) if peer not in dead]
    near = [peer for peer in others if any(d in run.topology.neighbors[peer] for d in dead)]
    missed = [(peer, d) for peer in near for d in dead if d in run.topology.neighbors[peer]]
    until(lambda: all(rounds_done(folder, peer) == 12 for peer in others))
    pids.update(gated_warm.start(folder, dead))
    until(lambda: all(f"neighbor reconnected peer={d}\n" in log_of(folder, peer) for peer, d in missed))
    hold(folder, None)
    assert set(gated_warm.wait(pids).values()) == {0}
    for peer in dead:
        result = folder.peer(peer).result()
        assert (result.phase, result.rounds_done) == ("finished", 20)
        assert result.skipped_rounds >= 3
        assert "the neighbors continued without this peer" in log_of(folder, peer)
        done = [record["t"] for record in metrics.read(folder.peer(peer).metrics)]
        assert len(done) == 20 - result.skipped_rounds
        assert done == sorted(set(done))
        assert done[-1] == 19
    for peer, d in missed:
        assert f"neighbor declared dead peer={d}: no connection for 0.4 s" in log_of(folder, peer)
    for peer in near:
        assert folder.peer(peer).result().skipped_rounds == 0
        last = list(metrics.read(folder.peer(peer).metrics))[-1]
        assert last["missing"] == {}
        if algorithm == DPSGD:  # in the end all peers receive from each other again
            assert set(last["received"]) == set(map(str, run.topology.neighbors[peer]))


# ---- faults of the run file


def test_injected_kills_change_nothing(make_run: Any, prepare: Any, warm: Any, tmp_path: Path) -> None:
    run = make_run(rounds=8, checkpoint_every=3, algorithm=MAPL, chaos={"kill": {"times": 2}})
    folder = prepare(tmp_path / "run", run)
    assert follow(warm, folder) == 8
    assert matches_simulate(folder, run)
    for files in folder.peers():
        assert [fault["name"] for fault in files.injected()] == ["kill 0.0", "kill 0.1"]
        assert log_of(folder, files.peer).count("fault injected: kill t=") == 2


def test_pauses_and_stragglers_change_only_times(make_run: Any, prepare: Any, warm: Any, tmp_path: Path) -> None:
    chaos = {
        "pause": [{"peer": 1, "round": 2, "seconds": 1.5}],
        "straggler": {"peer": 3, "factor": 20},
        "seed": 5,
    }
    run = make_run(rounds=5, chaos=chaos)
    folder = prepare(tmp_path / "run", run)
    assert follow(warm, folder) == 0
    assert matches_simulate(folder, run)
    assert folder.peer(1).injected()[0]["seconds"] == 1.5
    began = logged_at(folder, 1, "fault injected: pause t=2 seconds=1.5")
    for peer in range(4):  # no peer completes the next round before peer 1 continues
        assert logged_at(folder, peer, "round done t=3 ") - began > timedelta(seconds=1.4)
    # The fastest round of each: the host may delay any other.
    training = [
        min(record["seconds"]["training"] for record in metrics.read(files.metrics)) for files in folder.peers()
    ]
    assert training[3] > 3 * min(training[0], training[2])


def test_straggler_does_not_stretch_waits(make_run: Any, prepare: Any, monkeypatch: Any, tmp_path: Path) -> None:
    run = make_run(chaos={"straggler": {"peer": 1, "factor": 4}})
    clock, slept = [0.0], list[float]()
    injector = Injector(run, 1, prepare(tmp_path / "run", run).peer(1), lambda peers: None, logging.getLogger("t"))
    monkeypatch.setattr(time, "perf_counter", lambda: clock[0])
    monkeypatch.setattr(time, "sleep", slept.append)
    injector.begins(0)
    clock[0] += 2.0  # a batch
    injector.batch()
    clock[0] += 100.0  # a wait
    injector.wait_ended()
    clock[0] += 1.0
    injector.batch()
    assert slept == [6.0, 3.0]


def test_round_does_not_end_before_its_faults(make_run: Any, prepare: Any, monkeypatch: Any, tmp_path: Path) -> None:
    """The disk may be slow to record it. A kill must not come after the last round."""
    run = make_run(chaos={"pause": {"peer": 1, "round": 0, "seconds": 1}})
    injector = Injector(run, 1, prepare(tmp_path / "run", run).peer(1), lambda peers: None, logging.getLogger("t"))
    writing, written = threading.Event(), threading.Event()

    def remember(entry: Any) -> None:
        writing.set()
        written.wait()

    paused: list[Any] = []
    monkeypatch.setattr(injector, "_last_round", 0.0)
    monkeypatch.setattr(injector, "_record", remember)
    monkeypatch.setattr(subprocess, "run", lambda *arguments, **options: paused.append(arguments))
    injector.begins(0)
    writing.wait()
    end = threading.Thread(target=injector.ends, args=[0])
    end.start()
    end.join(0.2)
    assert end.is_alive()
    written.set()
    end.join()
    assert len(paused) == 1


def test_delay_loss_and_bandwidth_change_nothing(make_run: Any, prepare: Any, warm: Any, tmp_path: Path) -> None:
    link = {"delay": 0.05, "jitter": 0.02, "loss": 0.15, "bandwidth": 2e6}
    run = make_run(rounds=6, chaos={"link": link})
    folder = prepare(tmp_path / "run", run)
    assert follow(warm, folder) == 0
    assert matches_simulate(folder, run)
    logs = "".join(log_of(folder, peer) for peer in range(4))
    assert "fault injected: message and connection lost" in logs
    waiting = [[record["seconds"]["waiting"] for record in metrics.read(files.metrics)] for files in folder.peers()]
    # The last to send does not wait that long.
    assert sum(map(max, zip(*waiting, strict=True))) >= 6 * 0.05


HALVES = [[0, 1], [2, 3]]


def test_partitioned_halves_continue_and_reunite(
    make_run: Any, prepare: Any, gated_warm: Any, hold: Any, until: Any, tmp_path: Path
) -> None:
    partition = {"groups": HALVES, "round": 3, "rounds": 4}
    run = make_run(rounds=12, chaos={"partition": partition}, transport={"give_up": 0.5})
    folder = prepare(tmp_path / "run", run)
    # All are cut off, and connected again, in the same round.
    hold(folder, 3)
    pids = gated_warm.start(folder)
    for t in (3, 7, 8):
        hold(folder, t)
        until(lambda t=t: all(rounds_done(folder, peer) == t for peer in pids))
    until(lambda: all(log_of(folder, peer).count("neighbor reconnected") == 2 for peer in pids))
    hold(folder, None)
    assert set(gated_warm.wait(pids).values()) == {0}
    for files in folder.peers():
        result = files.result()
        assert (result.phase, result.rounds_done) == ("finished", 12)
        records = {record["t"]: record for record in metrics.read(files.metrics)}
        mine = next(half for half in HALVES if files.peer in half)
        for t in (4, 5, 6):  # messages of round 3 may have been under way
            assert set(records[t]["received"]) == {str(peer) for peer in mine if peer != files.peer}
            assert all(len(absent) == 2 for absent in records[t]["missing"].values())
        for t in (9, 10, 11):
            assert records[t]["missing"] == {}
            assert len(records[t]["received"]) == 3
        assert "cut_off=2 peers" in log_of(folder, files.peer)
        assert "partition healed" in log_of(folder, files.peer)


def test_partition_that_heals_before_give_up_changes_nothing(
    make_run: Any, prepare: Any, warm: Any, tmp_path: Path
) -> None:
    partition = {"groups": [[0], [1, 2, 3]], "round": 2, "seconds": 0.8}
    run = make_run(rounds=6, chaos={"partition": partition})
    folder = prepare(tmp_path / "run", run)
    assert follow(warm, folder) == 0
    assert matches_simulate(folder, run)
    assert [fault["name"] for fault in folder.peer(0).injected()] == ["partition 0"]
    assert "partition healed" in log_of(folder, 0)


def test_partitions_heal_while_others_begin(make_run: Any, prepare: Any, tmp_path: Path) -> None:
    """Each is recorded durably before the next one begins, which takes longer than it lasts."""
    partition = {"groups": [[0, 2], [1, 3]], "round": 0, "seconds": 0.0005}
    run = make_run(chaos={"partition": [partition] * 8})
    files = prepare(tmp_path / "run", run).peer(1)
    cut: list[frozenset[int]] = []
    healed = threading.Event()

    def remember(peers: frozenset[int]) -> None:
        cut.append(peers)
        if not peers and frozenset({0, 2}) in cut:
            healed.set()

    Injector(run, 1, files, remember, logging.getLogger("t")).begins(0)
    assert healed.wait(30)
    assert [entry["what"] for entry in files.injected()] == ["partition"] * 8
