"""`p2pfl peer --stay`: a finished peer remains as a small process until SIGTERM."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psutil
import pytest

ENDLESS = 1_000_000


@pytest.fixture
def start() -> Iterator[Any]:
    """Start a peer with --stay."""
    with ExitStack() as processes:

        def start(folder: Any, peer: int) -> subprocess.Popen[str]:
            process = subprocess.Popen(
                [sys.executable, "-m", "peers", "--stay", "--run", str(folder.root), "--me", str(peer)],
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            processes.enter_context(process)
            processes.callback(process.kill)
            return process

        yield start


def health(folder: Any, *options: str) -> tuple[int, str]:
    command = [sys.executable, "-m", "peers", "--health", "--run", str(folder.root), "--me", "0", *options]
    asked = subprocess.run(command, capture_output=True, text=True)
    return asked.returncode, asked.stdout


def test_a_finished_peer_stays_small_and_healthy_until_sigterm(
    make_run: Any, prepare: Any, start: Any, until: Any, tmp_path: Path
) -> None:
    folder = prepare(tmp_path / "run", make_run(peers=2, rounds=2))
    processes = [start(folder, peer) for peer in range(2)]
    for peer, process in enumerate(processes):
        until(lambda process=process: "sigwait" in " ".join(psutil.Process(process.pid).cmdline()))
        assert psutil.Process(process.pid).memory_info().rss < 50e6  # bytes
        result = folder.peer(peer).result()
        assert (result.phase, result.rounds_done) == ("finished", 2)
    assert health(folder, "--stay") == (0, "peer 0 has finished\n")
    assert health(folder) == (1, "peer 0 does not answer: last seen finished\n")
    digest = folder.peer(0).result().digest
    for process in processes:
        process.terminate()
    outputs = [process.communicate()[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0]
    assert outputs[0].splitlines()[-1] == "peer 0: finished; waiting for SIGTERM"

    again = start(folder, 0)  # its neighbor does not run anymore
    until(lambda: "sigwait" in " ".join(psutil.Process(again.pid).cmdline()))
    assert folder.peer(0).result().digest == digest


@pytest.mark.usefixtures("fast_children")
def test_a_peer_that_is_stopped_before_the_end_does_not_stay(
    make_run: Any, prepare: Any, start: Any, until: Any, tmp_path: Path
) -> None:
    folder = prepare(tmp_path / "run", make_run(peers=2, rounds=ENDLESS))
    processes = [start(folder, peer) for peer in range(2)]
    until(lambda: (status := folder.peer(0).status()) and status.rounds_done > 1)
    for process in processes:
        process.send_signal(signal.SIGTERM)
    assert [process.wait() for process in processes] == [0, 0]
    assert folder.peer(0).result().phase == "stopped"
    assert health(folder, "--stay") == (1, "peer 0 does not answer: last seen stopped\n")
