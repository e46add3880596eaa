"""Processes that are paused (SIGSTOP) and continue (SIGCONT)."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import psutil
import torch

from launcher.prepare import LaunchRequest
from p2pfl.simulation.simulate import simulate
from peers.device import slots_on
from peers.slots import HostSlot
from tests.fast_python.fixture import FastPython

PRELUDE = """
import peers.zmq_sockets
peers.zmq_sockets.HEARTBEAT_INTERVAL, peers.zmq_sockets.HEARTBEAT_TIMEOUT = 0.3, 1.0
"""
"""A connection counts as dead after a second instead of half a minute."""

ENDLESS = 1_000_000
SLOW = {"link": {"jitter": 0.02}}


def rounds_done(folder: Any, peer: int) -> int:
    status = folder.peer(peer).status()
    return 0 if status is None else int(status.rounds_done)


def logged(folder: Any, peer: int, text: str) -> bool:
    return text in folder.peer(peer).log.read_text()


def test_pausing_a_peer_until_its_connections_are_lost_changes_nothing(
    make_run: Any, prepare: Any, altered_warm: Any, hold: Any, until: Any, tmp_path: Path
) -> None:
    run = make_run(rounds=8, graph="ring", chaos=SLOW)
    folder = prepare(tmp_path / "run", run)
    hold(folder, 4)
    pids = altered_warm.start(folder)
    until(lambda: all(rounds_done(folder, peer) >= 2 for peer in pids))
    os.kill(pids[1], signal.SIGSTOP)
    until(lambda: all(logged(folder, neighbor, "connection lost peer=1") for neighbor in (0, 2)))
    os.kill(pids[1], signal.SIGCONT)
    hold(folder, None)
    assert altered_warm.wait(pids) == dict.fromkeys(range(4), 0)
    for files, calm in zip(folder.peers(), simulate(run), strict=True):
        result = files.result()
        assert (result.digest, result.sent, result.received, result.missing) == (
            calm.digest,
            calm.sent,
            calm.received,
            0,
        )


def test_peer_paused_beyond_give_up_rejoins_in_its_neighbors_round(
    make_run: Any, prepare: Any, altered_warm: Any, until: Any, tmp_path: Path
) -> None:
    run = make_run(rounds=ENDLESS, graph="ring", chaos=SLOW, transport={"give_up": 1}, checkpoint_every=1)
    folder = prepare(tmp_path / "run", run)
    pids = altered_warm.start(folder)
    until(lambda: all(rounds_done(folder, peer) >= 2 for peer in pids))
    os.kill(pids[1], signal.SIGSTOP)
    until(
        lambda: all(
            logged(folder, neighbor, "neighbor declared dead peer=1: no connection for 1 s") for neighbor in (0, 2)
        )
    )
    until(lambda: all(rounds_done(folder, other) > rounds_done(folder, 1) + 10 for other in (0, 2, 3)))
    os.kill(pids[1], signal.SIGCONT)
    until(lambda: logged(folder, 1, "the neighbors continued without this peer"))
    until(lambda: all(logged(folder, neighbor, "neighbor reconnected peer=1") for neighbor in (0, 2)))
    rejoined = rounds_done(folder, 1)
    until(lambda: rounds_done(folder, 1) > rejoined + 3)
    for pid in pids.values():
        os.kill(pid, signal.SIGTERM)
    assert altered_warm.wait(pids) == dict.fromkeys(range(4), 0)
    assert folder.peer(1).result().skipped_rounds > 0
    for other in (0, 2, 3):
        result = folder.peer(other).result()
        assert result.phase == "stopped"
        # Unless the host gave it no CPU time for that long.
        missed = any(
            logged(folder, one, f"neighbor declared dead peer={other}: no connection")
            for one in run.topology.neighbors[other]
        )
        assert missed or result.skipped_rounds == 0


def test_pausing_the_launcher_changes_nothing(
    make_run: Any, tmp_path: Path, until: Any, fast_python: FastPython
) -> None:
    """The warm process is paused with it."""
    run = make_run(rounds=8, slots=1)
    folder = LaunchRequest(tmp_path / "run.yaml", run_dir=tmp_path / "run").prepare(run)
    slot = HostSlot(folder.slots, *slots_on(run.file, torch.device("cpu")))
    asyncio.run(slot.acquire())  # so that no peer finishes before the pause
    command = [fast_python.executable, "-m", "launcher.cli", "resume", str(folder.root), "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as launcher:
        until(lambda: all((status := files.status()) and status.phase == "queued" for files in folder.peers()))
        command_itself = psutil.Process(fast_python.pid(launcher))
        (warm,) = command_itself.children()
        for process in (command_itself, warm):
            process.send_signal(signal.SIGSTOP)
        slot.release()
        until(lambda: all(folder.peer(peer).result() for peer in range(4)))
        for process in (warm, command_itself):
            process.send_signal(signal.SIGCONT)
        output, _ = launcher.communicate(timeout=200)
    assert launcher.returncode == 0
    summary = json.loads(output)
    assert [peer["digest"] for peer in summary["peers"]] == [result.digest for result in simulate(run)]
