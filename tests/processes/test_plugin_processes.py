"""Plug-ins that start processes: `simulate` and `launch` take the same ones, nothing hangs, and nothing is left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from multiprocessing import Process
from pathlib import Path
from typing import Any

import psutil
import pytest

from p2pfl.run_folder.folder import RunFolder
from p2pfl.session.child_processes import children_of_plugins
from peers.slots import HostSlot
from tests.fast_python.fixture import FastPython
from tests.run_file_texts import SMALLEST

Command = Callable[[str, str], subprocess.CompletedProcess[str]]
RUN = f"{SMALLEST}slots: 1\nplugins: [pools.py]\nmetrics: [pooled]\n"
HEAD = """
import multiprocessing as mp
from concurrent.futures import ProcessPoolExecutor
from p2pfl import plugins

def double(x):
    return 2.0 * x

@plugins.metric("pooled")
def pooled(scores, labels):
"""
POOL = "    with mp.Pool(2) as pool:\n        return sum(pool.map(double, [1, 2, 3]))\n"
EXECUTOR = "    with ProcessPoolExecutor(2) as pool:\n        return sum(pool.map(double, [1, 2, 3]))\n"
SPAWNED = '    with mp.get_context("spawn").Pool(1) as pool:\n        return sum(pool.map(double, [1, 2, 3]))\n'
SERVED = SPAWNED.replace("spawn", "forkserver")
KEPT = "    global KEPT\n    KEPT = mp.Pool(2)\n    return sum(KEPT.map(double, [1, 2, 3]))\n"
IMPORTED = "    return 1.0\n\nKEPT = mp.Pool(2)\n"


@pytest.fixture
def command(tmp_path: Path, fast_python: FastPython) -> Command:
    """``command("launch", plugin)``: run a command in ``tmp_path``, with the body of the metric."""

    def run(name: str, plugin: str) -> subprocess.CompletedProcess[str]:
        (tmp_path / "run.yaml").write_text(RUN)
        (tmp_path / "pools.py").write_text(HEAD + plugin)
        command, *options = name.split()
        return subprocess.run(
            [fast_python.executable, "-P", "-m", "launcher.cli", command, "run.yaml", "--run-dir", "run", *options],
            cwd=tmp_path, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False,
        )  # fmt: skip

    return run


@pytest.mark.parametrize("name", ["simulate", "simulate --jobs 2", "launch"])
@pytest.mark.parametrize(
    "plugin",
    [
        pytest.param(POOL, id="pool"),
        pytest.param(EXECUTOR, id="executor"),
        pytest.param(SPAWNED, id="spawn", marks=pytest.mark.slow),  # each pool imports torch anew
        pytest.param(SERVED, id="forkserver", marks=pytest.mark.slow),
    ],
)
def test_a_metric_may_start_processes(tmp_path: Path, command: Command, name: str, plugin: str) -> None:
    done = command(name, plugin)
    assert done.returncode == 0, done.stderr
    results = [files.result() for files in RunFolder.open(tmp_path / "run").peers()]
    assert [result.metrics for result in results if result] == [{"pooled": 12.0}] * 2


@pytest.mark.parametrize("name", ["simulate", "launch"])
@pytest.mark.parametrize(
    ("plugin", "problem"),
    [(KEPT, "pools.py:9: metric 'pooled'"), (IMPORTED, "pools.py:1: importing it")],
    ids=["metric", "import"],
)
def test_processes_that_stay_are_refused_with_the_line(
    tmp_path: Path, command: Command, name: str, plugin: str, problem: str
) -> None:
    done = command(name, plugin)
    assert done.returncode == 2
    assert f"error: {problem} leaves 2 processes running, which peers cannot use" in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "run").exists()


# ---- one process


def handler(number: int, frame: Any) -> None:
    """Does not end the process."""


def test_a_fork_is_ended_by_sigterm_although_this_process_handles_it() -> None:
    before = signal.signal(signal.SIGTERM, handler)
    try:
        with children_of_plugins():
            for _ in range(20):
                pid = os.fork()
                if not pid:
                    signal.pause()
                    os._exit(0)
                os.kill(pid, signal.SIGTERM)  # perhaps before the fork has run
                assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGTERM
        assert signal.getsignal(signal.SIGTERM) is handler
        assert signal.SIGTERM not in signal.pthread_sigmask(signal.SIG_BLOCK, ())
    finally:
        signal.signal(signal.SIGTERM, before)


def test_what_still_runs_at_the_end_is_killed_and_nothing_else(until: Any) -> None:
    earlier = subprocess.Popen(["sleep", "600"])
    try:
        with children_of_plugins():
            child = subprocess.Popen(["sh", "-c", "sleep 600 & wait; exec sleep 600"])  # outlives a killed grandchild
            (grandchild,) = until(lambda: psutil.Process(child.pid).children())
        assert child.wait(60) == -signal.SIGKILL
        psutil.wait_procs([grandchild], 60)
        assert not grandchild.is_running() or grandchild.status() == psutil.STATUS_ZOMBIE
        assert earlier.poll() is None
    finally:
        earlier.kill()
        earlier.wait()


def test_in_a_process_of_the_user_nothing_is_killed() -> None:
    with children_of_plugins(kill=False):
        child = subprocess.Popen(["sleep", "600"])
    assert child.poll() is None
    child.kill()
    child.wait()


def test_a_fork_ignores_the_interrupt_that_its_parent_ignores() -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with children_of_plugins():
            pid = os.fork()
            if not pid:
                os._exit(signal.getsignal(signal.SIGINT) is signal.SIG_IGN)
            assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 1
    finally:
        signal.signal(signal.SIGINT, before)


ORPHAN = """
import os, signal
from p2pfl.session.child_processes import children_of_plugins
with children_of_plugins():
    pid = os.fork()
    if not pid:
        signal.pause()
    print(pid, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_fork_ends_with_a_process_that_is_killed() -> None:
    done = subprocess.run([sys.executable, "-c", ORPHAN], stdout=subprocess.PIPE, text=True, check=False)
    assert done.returncode == -signal.SIGKILL
    try:
        psutil.Process(int(done.stdout)).wait(60)  # it may have ended
    except psutil.NoSuchProcess:
        pass


async def test_a_pool_does_not_hold_the_slot_in_which_it_was_started(tmp_path: Path) -> None:
    one, other = HostSlot(tmp_path, 1), HostSlot(tmp_path, 1)
    await one.acquire()
    worker = Process(target=signal.pause)
    worker.start()
    try:
        one.release()
        await other.acquire()
        other.release()
    finally:
        worker.kill()
        worker.join()
