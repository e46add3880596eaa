"""Faults on purpose, and coming back after having been given up: real processes, real signals, real sockets."""

from __future__ import annotations

import logging
import os
import signal
import threading
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from p2pfl import metrics
from p2pfl.simulate import simulate
from peers import faults
from peers.faults import Injector

DPSGD = {"name": "dpsgd", "batch": 16}
MAPL = {"name": "mapl", "warmup": 2, "batch": 16, "lr": 0.01, "projector_hidden": 16}


def rounds_done(folder: Any, peer: int) -> int:
    status = folder.peer(peer).status()
    return 0 if status is None else int(status.rounds_done)


def log_of(folder: Any, peer: int) -> str:
    return str(folder.peer(peer).log.read_text())


def said_at(folder: Any, peer: int, text: str) -> datetime:
    """When the log first says so."""
    (line, *_) = [line for line in log_of(folder, peer).splitlines() if text in line]
    return datetime.fromisoformat(line.split()[0])


def follow(warm: Any, folder: Any) -> int:
    """Run all peers and start again those that were killed, as the launcher does. How often that was."""
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


def same_as_calm(folder: Any, run: Any) -> bool:
    results = [place.result() for place in folder.peers()]
    calm = simulate(run)
    assert [r.phase for r in results] == ["finished"] * run.peers
    return [(r.digest, r.out, r.inn, r.missing) for r in results] == [(r.digest, r.out, r.inn, 0) for r in calm]


# ---- a peer that was given up comes back


@pytest.mark.parametrize(
    ("graph", "dead", "algorithm"),
    [
        pytest.param("complete", [2], DPSGD, id="one"),
        pytest.param("ring", [1, 2], DPSGD, id="two neighbours"),
        # Edges that one side has dropped and the other does not remember to have dropped must not be waited on.
        pytest.param("complete", [2, 4], {**MAPL, "graph_lr": 3.0}, id="pruned"),
    ],
)
def test_peers_that_were_given_up_come_back_in_their_neighbours_round(
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
    until(lambda: all(f"peer {d} is back" in log_of(folder, peer) for peer, d in missed))
    hold(folder, None)
    assert set(gated_warm.wait(pids).values()) == {0}
    for peer in dead:
        result = folder.peer(peer).result()
        assert (result.phase, result.rounds_done) == ("finished", 20)
        assert result.left_out >= 3
        assert "the neighbours went on without us and are in round" in log_of(folder, peer)
        done = [record["t"] for record in metrics.read(folder.peer(peer).metrics)]
        assert len(done) == 20 - result.left_out
        assert done == sorted(set(done))
        assert done[-1] == 19
    for peer, d in missed:
        assert f"peer {d} is gone: lost for 0.4 s" in log_of(folder, peer)
    for peer in near:
        assert folder.peer(peer).result().left_out == 0
        last = list(metrics.read(folder.peer(peer).metrics))[-1]
        assert last["missing"] == {}
        if algorithm == DPSGD:  # in the end everybody hears everybody again
            assert set(last["in"]) == set(map(str, run.topology.neighbors[peer]))


# ---- what the run file asks for


@pytest.mark.parametrize("algorithm", [DPSGD, MAPL], ids=["dpsgd", "mapl"])
def test_peers_that_kill_themselves_change_nothing(
    algorithm: Any, make_run: Any, prepare: Any, warm: Any, tmp_path: Path
) -> None:
    run = make_run(rounds=8, checkpoint_every=3, algorithm=algorithm, chaos={"kill": {"times": 2}})
    folder = prepare(tmp_path / "run", run)
    assert follow(warm, folder) == 8
    assert same_as_calm(folder, run)
    for place in folder.peers():
        assert [blow["name"] for blow in place.injected()] == ["kill 0.0", "kill 0.1"]
        assert log_of(folder, place.peer).count("chaos: kill in round") == 2


def test_pauses_and_stragglers_change_nothing_but_the_time(
    make_run: Any, prepare: Any, warm: Any, tmp_path: Path
) -> None:
    chaos = {
        "pause": [{"peer": 1, "round": 2, "seconds": 1.5}],
        "straggler": {"peer": 3, "factor": 20},
        "seed": 5,
    }
    run = make_run(rounds=5, chaos=chaos)
    folder = prepare(tmp_path / "run", run)
    assert follow(warm, folder) == 0
    assert same_as_calm(folder, run)
    assert folder.peer(1).injected()[0]["seconds"] == 1.5
    began = said_at(folder, 1, "chaos: pause in round 2 for 1.5 s")
    for peer in range(4):  # nobody is done with the next round before peer 1 has gone on
        assert said_at(folder, peer, "round 3 | ") - began > timedelta(seconds=1.4)
    # The fastest round of each: any other may have been held up by something else.
    training = [
        min(record["seconds"]["training"] for record in metrics.read(place.metrics)) for place in folder.peers()
    ]
    assert training[3] > 3 * min(training[0], training[2])


def test_a_straggler_does_not_stretch_its_waits(
    make_run: Any, prepare: Any, monkeypatch: Any, tmp_path: Path
) -> None:
    run = make_run(chaos={"straggler": {"peer": 1, "factor": 4}})
    clock, slept = [0.0], list[float]()
    injector = Injector(run, 1, prepare(tmp_path / "run", run).peer(1), lambda peers: None, logging.getLogger("t"))
    monkeypatch.setattr(faults.time, "perf_counter", lambda: clock[0])
    monkeypatch.setattr(faults.time, "sleep", slept.append)
    injector.begins(0)
    clock[0] += 2.0  # a batch
    injector.batch()
    clock[0] += 100.0  # a wait
    injector.goes_on()
    clock[0] += 1.0
    injector.batch()
    assert slept == [6.0, 3.0]


def test_a_round_is_not_over_before_what_hits_it_is(
    make_run: Any, prepare: Any, monkeypatch: Any, tmp_path: Path
) -> None:
    """The disk may take its time to remember it. A kill must not come after the last round: nobody asked for that."""
    run = make_run(chaos={"pause": {"peer": 1, "round": 0, "seconds": 1}})
    injector = Injector(run, 1, prepare(tmp_path / "run", run).peer(1), lambda peers: None, logging.getLogger("t"))
    writing, written = threading.Event(), threading.Event()

    def remember(entry: Any) -> None:
        writing.set()
        written.wait()

    paused: list[Any] = []
    monkeypatch.setattr(injector, "_typical", 0.0)
    monkeypatch.setattr(injector, "_remember", remember)
    monkeypatch.setattr(faults.subprocess, "run", lambda *arguments, **options: paused.append(arguments))
    injector.begins(0)
    writing.wait()
    end = threading.Thread(target=injector.ends, args=[0])
    end.start()
    end.join(0.2)
    assert end.is_alive()
    written.set()
    end.join()
    assert len(paused) == 1


def test_a_link_that_delays_breaks_and_is_narrow_changes_nothing(
    make_run: Any, prepare: Any, warm: Any, tmp_path: Path
) -> None:
    link = {"delay": 0.05, "jitter": 0.02, "loss": 0.15, "bandwidth": 2e6}
    run = make_run(rounds=6, chaos={"link": link})
    folder = prepare(tmp_path / "run", run)
    assert follow(warm, folder) == 0
    assert same_as_calm(folder, run)
    logs = "".join(log_of(folder, peer) for peer in range(4))
    assert "is lost, and the connection" in logs
    waiting = [[record["seconds"]["waiting"] for record in metrics.read(place.metrics)] for place in folder.peers()]
    # Whoever is the last to say something waits for nobody as long as that.
    assert sum(map(max, zip(*waiting, strict=True))) >= 6 * 0.05


HALVES = [[0, 1], [2, 3]]


def test_halves_that_are_parted_for_some_rounds_go_on_and_find_together_again(
    make_run: Any, prepare: Any, gated_warm: Any, hold: Any, until: Any, tmp_path: Path
) -> None:
    partition = {"groups": HALVES, "round": 3, "rounds": 4}
    run = make_run(rounds=12, chaos={"partition": partition}, transport={"give_up": 0.5})
    folder = prepare(tmp_path / "run", run)
    # They are parted, and connected again, in the same round, and go on together.
    hold(folder, 3)
    pids = gated_warm.start(folder)
    for t in (3, 7, 8):
        hold(folder, t)
        until(lambda t=t: all(rounds_done(folder, peer) == t for peer in pids))
    until(lambda: all(log_of(folder, peer).count(" is back") == 2 for peer in pids))
    hold(folder, None)
    assert set(gated_warm.wait(pids).values()) == {0}
    for place in folder.peers():
        result = place.result()
        assert (result.phase, result.rounds_done) == ("finished", 12)
        records = {record["t"]: record for record in metrics.read(place.metrics)}
        mine = next(half for half in HALVES if place.peer in half)
        for t in (4, 5, 6):  # in round 3 messages may have been under way
            assert set(records[t]["in"]) == {str(peer) for peer in mine if peer != place.peer}
            assert all(len(absent) == 2 for absent in records[t]["missing"].values())
        for t in (9, 10, 11):
            assert records[t]["missing"] == {}
            assert len(records[t]["in"]) == 3
        assert "chaos: cut off from 2 peers" in log_of(folder, place.peer)
        assert "chaos: connected again" in log_of(folder, place.peer)


def test_a_partition_that_heals_in_time_changes_nothing(
    make_run: Any, prepare: Any, warm: Any, tmp_path: Path
) -> None:
    partition = {"groups": [[0], [1, 2, 3]], "round": 2, "seconds": 0.8}
    run = make_run(rounds=6, chaos={"partition": partition})
    folder = prepare(tmp_path / "run", run)
    assert follow(warm, folder) == 0
    assert same_as_calm(folder, run)
    assert [blow["name"] for blow in folder.peer(0).injected()] == ["partition 0"]
    assert "chaos: connected again" in log_of(folder, 0)
