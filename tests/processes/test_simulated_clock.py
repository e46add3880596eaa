"""`p2pfl simulate --clock`: what its run folder says, and how it ends when it is stopped."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml

from p2pfl.run_folder.folder import RunFolder
from p2pfl.session import metrics
from tests.conftest import tree
from tests.fast_python.fixture import FastPython


def command(*arguments: object, python: str = sys.executable) -> subprocess.CompletedProcess[str]:
    words = [python, "-m", "launcher.cli", *map(str, arguments)]
    return subprocess.run(words, capture_output=True, text=True, check=False, timeout=200)


def test_a_run_on_a_simulated_clock_records_simulated_seconds(tmp_path: Path, fast_python: FastPython) -> None:
    file = tmp_path / "tiny.yaml"
    time = {"devices": {"speed": 1e6}, "network": {"latency": 5.0}}
    file.write_text(yaml.safe_dump(tree(time=time, transport={"deadline": 6000})))
    run = tmp_path / "run"
    done = command("simulate", file, "--clock", "--run-dir", run, "--json", python=fast_python.executable)
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout)
    assert summary["clock"] == "simulated"
    assert summary["seconds"] == max(peer["seconds"] for peer in summary["peers"]) > 15.0  # three rounds
    shown = command("show", run, python=fast_python.executable)
    assert "simulated time: " in shown.stdout
    again = command("resume", run, python=fast_python.executable)
    assert again.returncode == 1
    assert "its clock is simulated, so there are no checkpoints" in again.stderr


def test_a_run_that_takes_real_time_says_that_it_does(tmp_path: Path, fast_python: FastPython) -> None:
    file = tmp_path / "tiny.yaml"
    file.write_text(yaml.safe_dump(tree(time={}, rounds=1)))
    done = command("simulate", file, "--run-dir", tmp_path / "run", python=fast_python.executable)
    assert "note: this run takes real time; `time` is for `p2pfl simulate --clock`" in done.stderr
    refused = command("simulate", file, "--clock", "--jobs", "2", python=fast_python.executable)
    assert "--clock runs all peers in one process, in the order of a simulated clock; remove --jobs" in refused.stderr


def test_a_stopped_run_ends_without_checkpoints(tmp_path: Path, until: Any) -> None:
    file, folder = tmp_path / "tiny.yaml", RunFolder(tmp_path / "run")
    file.write_text(yaml.safe_dump(tree(rounds=5000)))
    words = [sys.executable, "-m", "launcher.cli", "simulate", str(file), "--clock", "--run-dir", str(folder.root)]
    records = folder.peer(3).metrics
    with (tmp_path / "log").open("wb") as log, subprocess.Popen(words, stdout=log, stderr=log) as process:
        until(lambda: (records.exists() and len(metrics.read(records)) > 1) or process.poll() is not None)
        os.kill(process.pid, signal.SIGTERM)
        assert process.wait(200) == 1
    assert {result.phase for files in folder.peers() if (result := files.result())} == {"stopped"}
    assert not any(files.checkpoint.exists() for files in folder.peers())
    assert "resume from the checkpoints" not in (tmp_path / "log").read_text()
