"""The warm process: its death, its limits, and the threads of the peers that it forks."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from launcher.prepare import LaunchRequest
from p2pfl.simulation.simulate import simulate
from tests.fast_python.fixture import FastPython


def rounds_done(folder: Any, peer: int) -> int:
    status = folder.peer(peer).status()
    return 0 if status is None else int(status.rounds_done)


def digests(folder: Any) -> list[str]:
    return [files.result().digest for files in folder.peers()]


def test_restarts_peers_after_kill_9_of_the_warm_process(
    make_run: Any, until: Any, fast_python: FastPython, tmp_path: Path
) -> None:
    run = make_run(rounds=24, checkpoint_every=5, chaos={"link": {"delay": 0.1, "jitter": 0.05}})
    folder = LaunchRequest(tmp_path / "run.yaml", run_dir=tmp_path / "run").prepare(run)
    command = [fast_python.executable, "-m", "launcher.cli", "resume", str(folder.root)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as launcher:
        until(lambda: all(rounds_done(folder, peer) >= 6 for peer in range(4)))
        until(lambda: all(folder.peer(peer).checkpoint.exists() for peer in (1, 3)))  # threads write them
        (warm,) = psutil.Process(fast_python.pid(launcher)).children()
        warm.kill()
        for peer in (1, 3):
            status = folder.peer(peer).status()
            assert status is not None
            assert status.phase != "finished"
            psutil.Process(status.pid).kill()
        printed, _ = launcher.communicate(timeout=200)
    assert launcher.returncode == 0, printed
    assert "the warm process, which forks peers, was killed by SIGKILL; the peers keep running" in printed
    assert "starting another warm process" in printed
    assert digests(folder) == [result.digest for result in simulate(run)]
    assert all("resumed t=" in folder.peer(peer).log.read_text() for peer in (1, 3))


def test_forks_no_peer_if_its_client_is_gone_when_the_data_are_loaded(
    make_run: Any, another_warm: Any, tmp_path: Path
) -> None:
    """The peers would run on after `p2pfl stop` had found none of them."""
    plugin, pipe = tmp_path / "waits.py", tmp_path / "pipe"
    plugin.write_text(f"""
import os
from p2pfl import plugins

if os.path.exists({str(pipe)!r}):
    open({str(pipe)!r}).read()

@plugins.metric("half")
def half(scores, labels):
    return 0.5
""")
    run = make_run(plugins=[str(plugin)])
    folder = LaunchRequest(tmp_path / "run.yaml", run_dir=tmp_path / "run").prepare(run)
    os.mkfifo(pipe)
    another_warm.process.stdin.write(json.dumps({"run": str(folder.root), "peers": [0, 1, 2, 3]}).encode() + b"\n")
    with pipe.open("w"):  # once the warm process loads the run
        another_warm.process.stdin.close()
    assert another_warm.process.wait(200) == 0
    assert another_warm.process.stdout.read() == b""
    assert [files.status() for files in folder.peers()] == [None] * 4


@pytest.mark.slow
def test_forks_more_peers_than_it_may_open_files(
    make_run: Any, prepare: Any, another_warm: Any, tmp_path: Path
) -> None:
    folder = prepare(tmp_path / "run", make_run(rounds=1, peers=12, algorithm={"name": "local", "batch": 16}))
    pid = another_warm.pid
    _, hard = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    # The peers raise their soft limit. Twice: the first time it opens what it loads, and keeps some of it.
    assert set(another_warm.run(folder).values()) == {0}
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (psutil.Process(pid).num_fds() + 8, hard))
    assert another_warm.run(folder) == dict.fromkeys(range(12), 0)


@pytest.fixture
def threads() -> Iterator[None]:
    """Restore the number of threads, which ``simulate`` sets."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


CLONES = {"peers": 2, "slots": 2, "models": "tiny-mixer", "algorithm": "fedprox-dec"}
"""Building these peers copies large tensors, which several threads do if they may."""


@pytest.mark.slow
@pytest.mark.usefixtures("threads")
def test_warm_process_starts_no_threads_that_its_forks_would_wait_for(make_run: Any, tmp_path: Path) -> None:
    run = make_run(rounds=2, threads=2, **CLONES)
    folder = LaunchRequest(tmp_path / "run.yaml", run_dir=tmp_path / "run").prepare(run)
    command = [sys.executable, "-m", "launcher.cli", "resume", str(folder.root)]
    environment = {**os.environ, "OMP_NUM_THREADS": "2"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as launcher:
        try:
            printed, _ = launcher.communicate(timeout=200)
        except subprocess.TimeoutExpired:
            for process in (launcher, *psutil.Process(launcher.pid).children(recursive=True)):
                process.kill()
            raise
    assert launcher.returncode == 0, printed
    assert digests(folder) == [result.digest for result in simulate(run)]


PRELUDE = """
import os
from p2pfl.algorithms.fedavg_dec import FedAvgDec

train = FedAvgDec.train

def counting_train(self, **options):
    train(self, **options)
    print(len(os.listdir("/proc/self/task")), flush=True)

FedAvgDec.train = counting_train
"""


@pytest.mark.usefixtures("threads")
def test_peers_compute_with_the_threads_of_the_run_file(
    make_run: Any, prepare: Any, altered_warm: Any, tmp_path: Path
) -> None:
    counts = []
    for threads in (1, 2):
        run = make_run(rounds=2, threads=threads, **CLONES)
        folder = prepare(tmp_path / f"{threads}", run)
        assert altered_warm.run(folder) == {0: 0, 1: 0}
        assert digests(folder) == [result.digest for result in simulate(run)]
        counts.append([files.output.read_text().split()[0] for files in folder.peers()])
    one, two = counts
    assert [int(count) for count in two] == [int(count) + 1 for count in one]
