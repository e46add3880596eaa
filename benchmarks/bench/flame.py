"""Flame graphs of a run that missed a goal, by py-spy (the extra `bench`)."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import click

from benchmarks.bench import measuring
from benchmarks.bench.measuring import RunTree
from p2pfl.run_folder.folder import RunFolder

RATE = 100
"""Samples per second."""
START_TIMEOUT = 120.0
"""Seconds until peer 0 must have started."""


def find_py_spy() -> str:
    """The path of py-spy. Raises UsageError if it is not installed."""
    beside = Path(sys.executable).with_name("py-spy")
    found = str(beside) if beside.exists() else shutil.which("py-spy")
    if found is None:
        raise click.UsageError("--profile needs py-spy: pip install 'p2pfl-mesh[bench]'")
    return found


def profile_peer(tree: RunTree, svg: Path, seconds: int = 60) -> str:
    """Launch a run again and write a flame graph of its peer 0, for at most ``seconds``. Returns what went wrong."""
    svg.parent.mkdir(parents=True, exist_ok=True)
    with measuring.scratch_folder() as folder:
        file, run = folder / "run.yaml", folder / "run"
        file.write_text(json.dumps(tree))
        command = [sys.executable, "-P", "-m", "launcher.cli", "launch", str(file), "--run-dir", str(run)]
        with (folder / "output").open("wb") as output:
            process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            status, began = None, time.monotonic()
            while status is None:
                if process.poll() is not None or time.monotonic() - began > START_TIMEOUT:
                    return "peer 0 did not start"
                time.sleep(measuring.POLL_INTERVAL)
                status = RunFolder(run).peer(0).status()
            record = [find_py_spy(), "record", "--pid", str(status.pid), "--output", str(svg), "--threads"]
            options = ["--rate", str(RATE), "--duration", str(seconds), "--format", "flamegraph"]
            done = subprocess.run([*record, *options], capture_output=True, text=True, check=False)
            return "" if svg.exists() else " ".join(done.stderr.split())[-300:]
        finally:
            measuring.kill_tree(process)


def file_name(goal: str) -> str:
    """``W1: a round, of bare training`` becomes ``w1-a-round-of-bare-training.svg``."""
    return "-".join(re.findall(r"[a-z0-9]+", goal.lower())) + ".svg"
