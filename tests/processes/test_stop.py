"""`p2pfl stop` of a run that a launcher on this host follows."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from launcher.backends.stop import stop
from launcher.facts.processes import find_process
from launcher.facts.registration import REQUESTS, find_launcher
from launcher.facts.runs import RunLine, find_runs
from launcher.facts.status import RunStatus
from launcher.prepare import LaunchRequest
from p2pfl.run_folder.folder import RunFolder
from tests.fast_python.fixture import FastPython

ENDLESS = 1_000_000


PLUGIN = """
import os
from p2pfl import plugins

if "PIPE" in os.environ:
    open(os.environ["PIPE"]).read()

@plugins.metric("half")
def half(scores, labels):
    return 0.5
"""
"""Waits for somebody to write to the pipe."""


@pytest.fixture
def folder(tmp_path: Path, make_run: Any) -> RunFolder:
    (tmp_path / "waits.py").write_text(PLUGIN)
    run = make_run(peers=2, rounds=ENDLESS, plugins=[str(tmp_path / "waits.py")])
    return LaunchRequest(tmp_path / "run.yaml", run_dir=tmp_path / "run").prepare(run)


@pytest.fixture
def resume(folder: RunFolder, fast_python: FastPython) -> Iterator[Any]:
    """Start `p2pfl resume`, and kill it at the end of the test."""
    started: list[subprocess.Popen[str]] = []

    def resume(*options: str, **environment: str) -> subprocess.Popen[str]:
        command = [fast_python.executable, "-m", "launcher.cli", "resume", str(folder.root), *options]
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env={**os.environ, **environment}
        )
        started.append(process)
        return process

    yield resume
    for process in started:
        process.kill()
        process.communicate()


def state(folder: RunFolder) -> str:
    (line,) = find_runs(folder.root.parent)
    assert isinstance(line, RunLine)
    return line.state


def rounds(folder: RunFolder) -> list[int]:
    """Completed rounds by peer."""
    return [status.rounds_done if (status := files.status()) else 0 for files in folder.peers()]


def has_trained(folder: RunFolder) -> bool:
    return min(rounds(folder)) > 0


@pytest.mark.parametrize(
    ("kill", "restart", "ended"),
    [(True, "on-failure", "killed by SIGKILL"), (False, "always", "stopped"), (False, "on-failure", "stopped")],
)
def test_launcher_restarts_no_peer_that_was_stopped(
    kill: bool, restart: str, ended: str, folder: RunFolder, resume: Any, until: Any
) -> None:
    launcher = resume("--restart", restart)
    until(lambda: has_trained(folder))
    assert [(one.peer, one.ended) for one in stop(folder, kill=kill)] == [(0, ended), (1, ended)]
    output, _ = launcher.communicate(timeout=200)
    assert launcher.returncode == 1
    assert "restarting" not in output
    assert not any(find_process(folder, peer) for peer in range(2))


def test_peers_train_on_without_a_killed_launcher(folder: RunFolder, resume: Any, until: Any) -> None:
    """And nobody restarts them."""
    process = resume()
    until(lambda: has_trained(folder))
    launcher = find_launcher(folder)
    assert launcher is not None
    launcher.kill()
    process.wait(100)
    before = rounds(folder)
    until(lambda: all(now > t + 1 for now, t in zip(rounds(folder), before, strict=True)))
    killed = find_process(folder, 0)
    assert killed is not None
    killed.kill()
    until(lambda: find_process(folder, 0) is None)
    assert [(one.peer, one.ended) for one in stop(folder, kill=False)] == [(1, "stopped")]
    assert state(folder) == "died"


def test_launcher_that_is_about_to_start_the_peers_is_stopped(
    folder: RunFolder, resume: Any, until: Any, tmp_path: Path
) -> None:
    os.mkfifo(tmp_path / "pipe")
    launcher = resume(PIPE=str(tmp_path / "pipe"))
    until(lambda: find_launcher(folder))
    with ThreadPoolExecutor() as threads:
        stopping = threads.submit(stop, folder, kill=False)
        until((folder.root / REQUESTS).exists)
        assert state(folder) == "starting"
        assert {peer.state for peer in RunStatus.take(folder).peers} == {"starting"}
        (tmp_path / "pipe").write_text("")  # now it goes on
        assert stopping.result(timeout=200) == []
    output, _ = launcher.communicate(timeout=200)
    assert "stopping" in output
    assert [files.status() for files in folder.peers()] == [None, None]


@pytest.fixture
def pretend_launcher(folder: RunFolder, fast_python: FastPython) -> Any:
    """Run a process with a title, which the run's folder names as the launcher, until the end of a block."""

    @contextmanager
    def pretend(title: str) -> Iterator[None]:
        code = (
            "import sys; from setproctitle import setproctitle; setproctitle(sys.argv[1])\n"
            "print(flush=True); sys.stdin.read()"
        )
        command = [fast_python.executable, "-c", code, title.format(root=folder.root)]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
            assert process.stdout is not None
            process.stdout.readline()
            folder.write_info({**folder.info, "launcher_pid": fast_python.pid(process)})
            assert find_launcher(folder)
            yield

    return pretend


@pytest.mark.parametrize("title", ["p2pfl launch {root}", "p2pfl simulate {root}", "p2pfl peer 0 {root}"])
def test_peers_without_status_are_starting_while_their_launcher_lives(
    title: str, folder: RunFolder, pretend_launcher: Any
) -> None:
    with pretend_launcher(title):
        assert {peer.state for peer in RunStatus.take(folder).peers} == {"starting"}
    assert {peer.state for peer in RunStatus.take(folder).peers} == {"never started"}


def test_stops_peers_that_the_launcher_forks_after_the_first(
    folder: RunFolder, pretend_launcher: Any, make_process: Any, until: Any
) -> None:
    with ThreadPoolExecutor() as threads, pretend_launcher("p2pfl launch {root}"):
        first = make_process(folder, 0)
        stopping = threads.submit(stop, folder, kill=False)
        until(lambda: not psutil.pid_exists(first.pid))
        make_process(folder, 1)
        assert [(one.peer, one.ended) for one in stopping.result(timeout=200)] == [(0, "died"), (1, "died")]


def test_a_launcher_that_the_run_folder_does_not_name_is_asked_too(folder: RunFolder, make_process: Any) -> None:
    """Another launcher may have been the first, and have ended since."""
    make_process(folder, 0)
    stop(folder, kill=True)
    assert (folder.root / REQUESTS).read_text() == "kill\n"


def test_finds_no_launcher_whose_process_id_was_used_again(folder: RunFolder) -> None:
    folder.write_info({**folder.info, "launcher_pid": os.getppid()})
    assert find_launcher(folder) is None
    assert state(folder) != "starting"
    assert {peer.state for peer in RunStatus.take(folder).peers} == {"never started"}
