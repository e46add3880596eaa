"""Trackers as processes: libraries that hang or raise hurt nobody, and the offline modes of real ones work."""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from launcher.tracking import processes
from launcher.tracking.processes import tracking
from p2pfl.run_folder.folder import RunFolder
from tests.launcher_fixtures import Invoke, MakeFolder

HANGS = "import os, time\ndef init(**options):\n    open({mark!r}, 'w').close()\n    time.sleep(1e6)\n"
RAISES = "def init(**options):\n    raise PermissionError('no key \\x1b[31mhere')\n"


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Replace the library wandb of other processes by ``source``."""

    def replace(source: str) -> None:
        (tmp_path / "fake").mkdir()
        (tmp_path / "fake" / "wandb.py").write_text(source)
        path = os.pathsep.join([str(tmp_path / "fake"), str(Path(__file__).parents[2])])
        monkeypatch.setenv("PYTHONPATH", path)

    return replace


@pytest.fixture
def folder(make_folder: MakeFolder) -> RunFolder:
    """A finished run of two peers and two rounds, with the tracker wandb."""
    folder = make_folder()
    run = yaml.safe_load(folder.run_file.read_text())
    folder.run_file.write_text(yaml.safe_dump({**run, "track": [{"name": "wandb"}]}))
    for files in folder.peers():
        lines = [{"peer": files.peer, "t": t, "personal": {"accuracy": 0.5 + t / 10}} for t in range(2)]
        files.metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def test_a_tracker_that_hangs_is_killed_in_bounded_time(
    folder: RunFolder, library: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, until: Any
) -> None:
    mark = tmp_path / "hangs"
    library(HANGS.format(mark=str(mark)))
    monkeypatch.setattr(processes, "TIMEOUT", 0.5)
    printed: list[str] = []
    with tracking(folder, printed.append) as trackers:
        trackers._processes[0].end()  # or it looks for records after its interval only
        until(mark.exists)
        assert trackers.failures() == []
        began = time.monotonic()
    assert time.monotonic() - began < 20
    assert printed[0] == "waiting up to 0 s for trackers that send the last records: wandb"
    assert printed[1].startswith("tracker wandb did not end and was killed")
    assert len(printed) == 2


def test_a_tracker_that_raises_is_reported_once(folder: RunFolder, library: Any, until: Any) -> None:
    library(RAISES)
    printed: list[str] = []
    with tracking(folder, printed.append) as trackers:
        trackers._processes[0].end()
        [line] = until(trackers.failures)
    reason = "PermissionError: no key \\x1b[31mhere; the run is not affected"
    assert line.startswith(f"tracker wandb failed: {reason}")
    assert printed == []


def test_only_one_process_passes_a_run_on(folder: RunFolder, invoke: Invoke, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "PATIENCE", 200.0)  # or it says that it waits for a process that is slow to start
    (folder.root / "tracking").mkdir()
    with (folder.root / "tracking" / "wandb.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        printed: list[str] = []
        with tracking(folder, printed.append):
            pass
        assert printed == []
        outcome = invoke("track", folder.root)
        assert (outcome.exit_code, outcome.stderr) == (0, "tracker wandb: another process follows this run already\n")


def test_a_tracker_that_cannot_start_does_not_stop_the_run(folder: RunFolder) -> None:
    (folder.root / "tracking").write_text("not a folder")
    printed: list[str] = []
    with tracking(folder, printed.append) as trackers:
        assert trackers.failures() == []
    assert printed[0].startswith("without trackers: ")


@pytest.mark.exhaustive
@pytest.mark.usefixtures("fast_children")
def test_a_run_ends_normally_although_its_tracker_raises(tmp_path: Path, file: Path, library: Any) -> None:
    library(RAISES)
    file.write_text(file.read_text() + "track: [wandb]\n")
    command = [sys.executable, "-P", "-m", "launcher.cli", "launch", str(file), "--run-dir", str(tmp_path / "run")]
    outcome = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert outcome.returncode == 0, outcome.stdout + outcome.stderr
    assert "tracker wandb failed: PermissionError: no key" in outcome.stdout
    assert all(files.status().phase == "finished" for files in RunFolder.open(tmp_path / "run").peers())  # type: ignore[union-attr]


@pytest.mark.exhaustive
def test_wandb_keeps_a_run_offline(folder: RunFolder, invoke: Invoke, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    outcome = invoke("track", folder.root)
    assert (outcome.exit_code, outcome.stderr) == (0, "")
    kept = sorted(path.name.split("-")[-1] for path in (folder.root / "tracking" / "wandb").glob("offline-run-*"))
    assert kept == ["00", "01", "mean"]
    assert all(list(path.glob("*.wandb")) for path in (folder.root / "tracking" / "wandb").glob("offline-run-*"))


@pytest.mark.exhaustive
@pytest.mark.parametrize("pooled", [True, False])
def test_mlflow_keeps_a_run_in_a_folder(
    folder: RunFolder, invoke: Invoke, monkeypatch: pytest.MonkeyPatch, pooled: bool
) -> None:
    pytest.importorskip("mlflow")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    outcome = invoke("track", folder.root, "--to", "mlflow", *(["--pooled"] if pooled else []))
    assert (outcome.exit_code, outcome.stderr) == (0, "")
    files = sorted((folder.root.parent / "mlruns").glob("*/*/metrics/accuracy*"))
    if pooled:
        [accuracies] = [path for path in files if path.name == "accuracy"]
        assert {path.name for path in accuracies.iterdir()} == {"peer-00", "peer-01", "mean"}
        curve = accuracies / "mean"
    else:
        curve = next(path for path in files if path.name == "accuracy")
        assert len([path for path in files if path.name == "accuracy"]) == 3
    assert [line.split()[1:] for line in curve.read_text().splitlines()] == [["0.5", "0"], ["0.6", "1"]]


def test_the_process_of_a_tracker_does_not_import_torch() -> None:
    code = (
        "import sys; import launcher.tracking.__main__; "
        "print(sorted({'torch', 'zmq', 'wandb', 'mlflow', 'tensorboard', 'pydantic'} & sys.modules.keys()))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("[]\n", "")
