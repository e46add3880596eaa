"""Peers that share a GPU. Run by scripts/check-gpu; skipped without one."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch

from launcher.backends.mps import CONTROL
from tests.bodies import GENEROUS_DEADLINE

QUICK4 = Path(__file__).parents[2] / "topologies" / "quick4.yaml"

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device; scripts/check-gpu runs it"),
]


def launch(run: Path, *sets: str) -> dict[str, object]:
    return run_cli("launch", run, *sets)


def run_cli(how: str, run: Path, *sets: str) -> dict[str, object]:
    command = [sys.executable, "-m", "launcher.cli", how, str(QUICK4), "--run-dir", str(run), "--json"]
    for assignment in ("device=cuda", *sets):
        command += ["--set", assignment]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    summary: dict[str, object] = json.loads(done.stdout)
    return summary


def assert_same_states(run: Path, other: Path) -> None:
    command = [sys.executable, "-m", "launcher.cli", "digest", str(run), str(other)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_four_peers_share_a_gpu(tmp_path: Path) -> None:
    summary = launch(tmp_path / "run", "gpu.peers_per_gpu=2")
    assert summary["finished"] is True
    for peer in range(4):
        log = (tmp_path / "run" / "peers" / f"{peer:02d}" / "peer.log").read_text()
        assert f"device=cuda:{peer % torch.cuda.device_count()}" in log


def test_peer_is_limited_to_its_fraction_of_gpu_memory(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "launcher.cli", "launch", str(QUICK4), "--run-dir", str(tmp_path / "run")]
    command += ["--set", "device=cuda", "--set", "gpu.memory_fraction=0.000001"]
    assert subprocess.run(command, capture_output=True).returncode == 1
    assert "out of memory" in (tmp_path / "run" / "peers" / "00" / "peer.log").read_text().lower()


def test_sockets_match_simulate_in_bits_on_a_gpu(tmp_path: Path) -> None:
    run_cli("simulate", tmp_path / "simulated")
    launch(tmp_path / "in turn", "gpu.peers_per_gpu=1")
    launch(tmp_path / "at once", "gpu.peers_per_gpu=4")
    assert_same_states(tmp_path / "simulated", tmp_path / "in turn")
    assert_same_states(tmp_path / "simulated", tmp_path / "at once")


def test_killed_peers_resume_on_a_gpu(tmp_path: Path) -> None:
    run_cli("simulate", tmp_path / "simulated")
    launch(tmp_path / "killed", "chaos.kill={times: 2}")
    logs = [file.read_text() for file in (tmp_path / "killed" / "peers").glob("*/peer.log")]
    assert [log.count("fault injected: kill t=") for log in logs] == [2] * 4
    assert_same_states(tmp_path / "simulated", tmp_path / "killed")


@pytest.mark.skipif(shutil.which(CONTROL) is None, reason=f"needs {CONTROL}")
def test_peers_share_a_gpu_under_mps(tmp_path: Path) -> None:
    # Not the bits of other runs: with part of the multiprocessors, libraries choose other kernels.
    summary = launch(tmp_path / "mps", "gpu.peers_per_gpu=4", "gpu.mps=true")
    assert summary["finished"] is True
    deadline = time.monotonic() + GENEROUS_DEADLINE
    while any(process.info["name"] == CONTROL for process in psutil.process_iter(["name"])):
        assert time.monotonic() < deadline, f"{CONTROL} still runs"
        time.sleep(0.1)
