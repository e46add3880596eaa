"""Running peers: their processes are found, listed, stopped, and their logs followed. The peers are fake."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil

from launcher.backends.stop import stop
from launcher.facts import logs
from launcher.facts.host_state import HostState
from launcher.facts.processes import find_process
from launcher.facts.registration import REQUESTS, launcher_title
from launcher.facts.runs import find_runs
from launcher.sweep.jobs import Job
from p2pfl.run_folder.folder import Status
from tests.launcher_fixtures import Invoke, MakeFolder


def test_identifies_a_peer_by_process_title_and_id(make_folder: MakeFolder, make_process: Any) -> None:
    folder, other = make_folder("one"), make_folder("other")
    process = make_process(folder, 0)
    found = find_process(folder, 0)
    assert found is not None
    assert found.pid == process.pid
    # The process of this test has that id, but not the title.
    folder.peer(1).write_status(Status(1, os.getpid(), "training"))
    assert find_process(folder, 1) is None
    # The same peer of another run whose status has that process id.
    other.peer(0).write_status(Status(0, process.pid, "training"))
    assert find_process(other, 0) is None
    process.kill()
    process.wait()
    assert find_process(folder, 0) is None


def test_stops_running_peers(make_folder: MakeFolder, make_process: Any, invoke: Invoke) -> None:
    folder = make_folder()
    process = make_process(folder, 1)
    folder.peer(1).clear_result()
    outcome = invoke("stop", folder.root)
    assert outcome.stdout == "peer 1: died\n"
    assert outcome.exit_code == 0
    assert not psutil.pid_exists(process.pid)
    assert invoke("stop", folder.root).stdout == "no peer of this run is running\n"


def test_stop_times_out_and_kill_does_not_wait(make_folder: MakeFolder, make_process: Any, invoke: Invoke) -> None:
    folder = make_folder()
    process = make_process(folder, 0, ignore_sigterm=True)
    (stopped,) = stop(folder, kill=False, timeout=0.1)
    assert stopped.ended is None
    outcome = invoke("stop", folder.root, "--kill")
    assert outcome.stdout == "peer 0: killed by SIGKILL\n"
    assert not psutil.pid_exists(process.pid)


def test_lists_a_running_run(make_folder: MakeFolder, make_process: Any, tmp_path: Path, invoke: Invoke) -> None:
    make_process(make_folder("running", results={0: None}), 0)
    (line,) = find_runs(tmp_path)
    assert (line.state, line.alive) == ("running", 1)
    assert "running (1 of 2 peers)" in invoke("list", tmp_path).stdout


def test_follow_yields_the_last_entry_of_the_last_peer(make_folder: MakeFolder, make_process: Any) -> None:
    folder = make_folder()
    process = make_process(folder, 0)
    folder.peer(0).log.write_text("2026-11-21T02:41:01.000 INFO    round 0\n")
    files = logs.open_logs(folder, [0])
    found: list[logs.LogEntry] = []
    reader = threading.Thread(target=lambda: found.extend(logs.follow(folder, files, bool)))
    reader.start()
    with folder.peer(0).log.open("a") as file:
        file.write("2026-11-21T02:41:09.000 INFO    finished\n")
    folder.peer(0).write_status(Status(0, process.pid, "finished"))
    reader.join(200)
    assert not reader.is_alive()
    assert [entry.text[-8:] for entry in found] == [" round 0", "finished"]


def test_follow_does_not_wait_for_a_dead_peer(make_folder: MakeFolder, make_process: Any) -> None:
    folder = make_folder()
    process = make_process(folder, 0)
    assert not logs.has_ended(folder, folder.peer(0))
    process.kill()
    process.wait()
    assert logs.has_ended(folder, folder.peer(0))


def test_an_adopted_run_of_a_sweep_is_stopped_also_if_its_peers_start_later(
    make_folder: MakeFolder, make_process: Any
) -> None:
    folder = make_folder()
    sweep: Any = SimpleNamespace(run=lambda name: folder)
    job = Job(sweep, "seed=3", adopt=True)
    job.stop()
    first, second = make_process(folder, 0), make_process(folder, 1, ignore_sigterm=True)
    job.stop()
    assert first.wait(200) == -signal.SIGTERM
    job.stop(kill=True)
    assert second.wait(200) == -signal.SIGKILL
    assert (folder.root / REQUESTS).read_text() == "stop\nkill\n"  # a launcher restarts nobody


def test_the_launcher_of_an_adopted_run_on_hosts_is_asked_once(make_folder: MakeFolder, make_process: Any) -> None:
    """It would take a request beside the signal for a second Ctrl-C, and kill the peers."""
    folder = make_folder()
    launcher = make_process(folder, 0, title=launcher_title(folder.root))
    HostState(launcher.pid, {0: "beta"}).write(folder.root)
    sweep: Any = SimpleNamespace(run=lambda name: folder)
    Job(sweep, "seed=3", adopt=True).stop()
    assert launcher.wait(200) == -signal.SIGTERM
    assert not (folder.root / REQUESTS).exists()
