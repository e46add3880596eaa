"""Processes that stand still for a while (SIGSTOP) and go on (SIGCONT)."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import torch

from launcher.prepare import Order
from p2pfl.simulate import simulate
from peers.device import slots_on
from peers.slots import HostSlot

PRELUDE = """
import peers.sockets
peers.sockets.HEARTBEAT, peers.sockets.SILENCE = 0.3, 1.0
"""
"""A connection counts as dead after a second instead of half a minute."""

ENDLESS = 1_000_000
SLOW = {"link": {"jitter": 0.02}}


def rounds_done(folder: Any, peer: int) -> int:
    status = folder.peer(peer).status()
    return 0 if status is None else int(status.rounds_done)


def says(folder: Any, peer: int, text: str) -> bool:
    return text in folder.peer(peer).log.read_text()


def test_a_peer_that_stands_still_until_it_is_missed_and_goes_on_changes_nothing(
    make_run: Any, prepare: Any, altered_warm: Any, hold: Any, until: Any, tmp_path: Path
) -> None:
    run = make_run(rounds=8, graph="ring", chaos=SLOW)
    folder = prepare(tmp_path / "run", run)
    hold(folder, 4)
    pids = altered_warm.start(folder)
    until(lambda: all(rounds_done(folder, peer) >= 2 for peer in pids))
    os.kill(pids[1], signal.SIGSTOP)
    until(lambda: all(says(folder, neighbor, "peer 1: connection lost") for neighbor in (0, 2)))
    os.kill(pids[1], signal.SIGCONT)
    hold(folder, None)
    assert altered_warm.wait(pids) == dict.fromkeys(range(4), 0)
    for place, calm in zip(folder.peers(), simulate(run), strict=True):
        result = place.result()
        assert (result.digest, result.out, result.inn, result.missing) == (calm.digest, calm.out, calm.inn, 0)


def test_a_peer_that_stands_still_for_too_long_is_left_out_and_goes_on_in_its_neighbours_round(
    make_run: Any, prepare: Any, altered_warm: Any, until: Any, tmp_path: Path
) -> None:
    run = make_run(rounds=ENDLESS, graph="ring", chaos=SLOW, transport={"give_up": 1})
    folder = prepare(tmp_path / "run", run)
    pids = altered_warm.start(folder)
    until(lambda: all(rounds_done(folder, peer) >= 2 for peer in pids))
    os.kill(pids[1], signal.SIGSTOP)
    until(lambda: all(says(folder, neighbor, "peer 1 is gone: lost for 1 s") for neighbor in (0, 2)))
    until(lambda: all(rounds_done(folder, other) > rounds_done(folder, 1) + 30 for other in (0, 2, 3)))
    os.kill(pids[1], signal.SIGCONT)
    until(lambda: says(folder, 1, "the neighbours went on without us"))
    until(lambda: all(says(folder, neighbor, "peer 1 is back") for neighbor in (0, 2)))
    rejoined = rounds_done(folder, 1)
    until(lambda: rounds_done(folder, 1) > rejoined + 3)
    for pid in pids.values():
        os.kill(pid, signal.SIGTERM)
    assert altered_warm.wait(pids) == dict.fromkeys(range(4), 0)
    assert folder.peer(1).result().left_out > 0
    for other in (0, 2, 3):
        result = folder.peer(other).result()
        assert result.phase == "stopped"
        # Unless it got no turn for so long itself.
        missed = any(says(folder, one, f"peer {other} is gone: lost") for one in run.topology.neighbors[other])
        assert missed or result.left_out == 0


def test_a_launcher_that_stands_still_misses_nothing(make_run: Any, tmp_path: Path, until: Any) -> None:
    """Nor does it matter to the peers, nor if the warm process stands still with it."""
    run = make_run(rounds=8, slots=1)
    folder = Order(tmp_path / "run.yaml", run_dir=tmp_path / "run").prepare(run)
    slot = HostSlot(folder.slots, *slots_on(run.file, torch.device("cpu")))
    asyncio.run(slot.acquire())  # so that they have not finished before it stands still
    command = [sys.executable, "-m", "launcher.cli", "resume", folder.root, "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as launcher:
        until(lambda: all((status := place.status()) and status.phase == "queued" for place in folder.peers()))
        (warm,) = psutil.Process(launcher.pid).children()
        for process in (launcher, warm):
            process.send_signal(signal.SIGSTOP)
        slot.release()
        until(lambda: all(folder.peer(peer).result() for peer in range(4)))
        for process in (warm, launcher):
            process.send_signal(signal.SIGCONT)
        said, _ = launcher.communicate(timeout=200)
    assert launcher.returncode == 0
    summary = json.loads(said)
    assert [peer["digest"] for peer in summary["peers"]] == [result.digest for result in simulate(run)]
