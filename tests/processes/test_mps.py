"""NVIDIA's Multi-Process Service, with a fake control program and fake peers."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from launcher.backends import mps
from launcher.backends.mps import CONTROL, LIMIT, multi_process_service
from launcher.errors import LaunchError


@pytest.fixture
def control(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A fake control program that records its calls."""
    calls = tmp_path / "calls"
    program = tmp_path / "bin" / CONTROL
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\necho "$CUDA_MPS_PIPE_DIRECTORY|$*|$(cat)" >> {calls}\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    return calls


def environment(root: Path) -> Any:
    return json.loads((root / "environment.json").read_text())


def test_peers_are_clients_of_mps(launch: Any, control: Path) -> None:
    outcome, root = launch(["finishes", "finishes"], "--set", "gpu.mps=true")
    assert outcome.exit_code == 0
    pipes = environment(root)["CUDA_MPS_PIPE_DIRECTORY"]
    assert control.read_text().splitlines() == [f"{pipes}|-d|", f"{pipes}||quit"]


def test_mps_runs_as_long_as_the_context(control: Path, tmp_path: Path) -> None:
    with multi_process_service(tmp_path / "mps", 3, print) as environment:
        pipes = environment["CUDA_MPS_PIPE_DIRECTORY"]
        assert control.read_text().splitlines() == [f"{pipes}|-d|"]
        assert Path(pipes).is_dir()
        assert len(pipes) < 60
        assert environment["CUDA_MPS_LOG_DIRECTORY"] == str(tmp_path / "mps")
        assert environment[LIMIT] == "33"
    assert control.read_text().splitlines()[1:] == [f"{pipes}||quit"]
    assert not Path(pipes).exists()


def test_clients_of_mps_are_limited_only_by_peers_per_gpu(control: Path, tmp_path: Path) -> None:
    with multi_process_service(tmp_path / "mps", None, print) as environment:
        assert sorted(environment) == ["CUDA_MPS_LOG_DIRECTORY", "CUDA_MPS_PIPE_DIRECTORY"]


def test_reports_that_mps_is_not_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with (
        pytest.raises(LaunchError, match=f"gpu.mps needs {CONTROL}"),
        multi_process_service(tmp_path / "mps", 1, print),
    ):
        pass


def test_reports_that_mps_does_not_start(control: Path, tmp_path: Path) -> None:
    (tmp_path / "bin" / CONTROL).write_text("#!/bin/sh\nexit 1\n")
    with (
        pytest.raises(LaunchError, match="failed with exit code 1"),
        multi_process_service(tmp_path / "mps", 1, print),
    ):
        pass


def test_reports_that_mps_hangs_at_the_start(
    control: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, launch: Any
) -> None:
    (tmp_path / "bin" / CONTROL).write_text("#!/bin/sh\nexec sleep 1000\n")
    monkeypatch.setattr(mps, "TIMEOUT", 0.1)
    outcome, root = launch(["finishes", "finishes"], "--set", "gpu.mps=true")
    assert outcome.exit_code == 1
    assert outcome.stderr == (
        f"error: {CONTROL} did not answer within 0.1 s; see {root}/mps/control.log and nvidia-smi, "
        "or set gpu.mps: false\n"
    )


@pytest.mark.parametrize(
    ("body", "timeout", "problem"),
    [("exec sleep 1000", 1, "did not answer within 1 s"), ("exit 4", mps.TIMEOUT, "failed with exit code 4")],
)
def test_a_run_keeps_its_summary_if_mps_does_not_end(
    control: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    launch: Any,
    body: str,
    timeout: float,
    problem: str,
) -> None:
    (tmp_path / "bin" / CONTROL).write_text(f'#!/bin/sh\n[ "$1" = -d ] || {body}\n')
    monkeypatch.setattr(mps, "TIMEOUT", timeout)
    outcome, _ = launch(["finishes", "finishes"], "--set", "gpu.mps=true", "--json")
    assert outcome.exit_code == 0
    assert json.loads(outcome.stdout)["finished"]
    assert f"{CONTROL} {problem}; " in outcome.stderr
    assert "its daemon may still be running: end it with `pkill nvidia-cuda-mps`" in outcome.stderr
