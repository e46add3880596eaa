"""Runs of claims that are launched: the same records, and no peer survives an ended command."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil

from benchmarks.claims.execute import cpu_seconds, execute
from benchmarks.claims.plan import Task
from tests.claims_fixtures import TREE

PROJECT = Path(__file__).parents[2]
MAPL: dict[str, Any] = {
    **TREE,
    "peers": 4,
    "seed": 0,
    "device": "cpu",
    "algorithm": {"name": "mapl", "batch": 32, "warmup": 1, "cgl": False},
}


def test_cpu_time_includes_that_of_ended_processes() -> None:
    before = cpu_seconds()
    burn = "import time\nwhile time.process_time() < 0.5: pass"
    subprocess.run([sys.executable, "-c", burn], check=True)
    assert cpu_seconds() - before >= 0.5 - 0.02  # two ticks


def test_launched_runs_have_the_records_of_simulated_ones() -> None:
    simulated, launched = (execute(Task("00", 0, MAPL, "heads"), sockets) for sockets in (False, True))
    assert launched["summary"] == simulated["summary"]
    assert [record.get("sockets", False) for record in (simulated, launched)] == [False, True]
    assert simulated["summary"]["probe"]["inside"] > 0.0


def test_no_peer_survives_a_terminated_command(tmp_path: Path, until: Any) -> None:
    command = [sys.executable, "-m", "benchmarks.claims", "run", "--only", "mapl", "--claim", "numbers sent"]
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    with subprocess.Popen(
        [*command, "--sockets", "--store", str(tmp_path / "store")], cwd=PROJECT, env=environment
    ) as process:
        until(lambda: len([*tmp_path.glob("*/run/peers/*/status.json")]) == 10)
        descendants = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 128 + signal.SIGTERM
    assert len(descendants) > 10  # the launcher, too
    until(lambda: not any(child.is_running() and child.status() != psutil.STATUS_ZOMBIE for child in descendants))
