"""Peers that share a GPU. Run by scripts/check-gpu; skipped without one."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

QUICK4 = Path(__file__).parents[2] / "topologies" / "quick4.yaml"

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device; scripts/check-gpu runs it"),
]


def launch(run: Path, *sets: str) -> dict[str, object]:
    command = [sys.executable, "-m", "launcher.cli", "launch", str(QUICK4), "--run-dir", str(run), "--json"]
    for assignment in ("device=cuda", *sets):
        command += ["--set", assignment]
    summary: dict[str, object] = json.loads(subprocess.run(command, check=True, capture_output=True).stdout)
    return summary


def test_four_peers_share_a_gpu(tmp_path: Path) -> None:
    summary = launch(tmp_path / "run", "gpu.peers_per_gpu=2")
    assert summary["finished"] is True
    for peer in range(4):
        log = (tmp_path / "run" / "peers" / f"{peer:02d}" / "peer.log").read_text()
        assert f"on cuda:{peer % torch.cuda.device_count()}" in log


def test_peer_is_limited_to_its_fraction_of_gpu_memory(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "launcher.cli", "launch", str(QUICK4), "--run-dir", str(tmp_path / "run")]
    command += ["--set", "device=cuda", "--set", "gpu.memory_fraction=0.000001"]
    assert subprocess.run(command, capture_output=True).returncode == 1
    assert "out of memory" in (tmp_path / "run" / "peers" / "00" / "peer.log").read_text().lower()
