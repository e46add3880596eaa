"""Execute one run of a claim, and make the record that the store keeps."""

from __future__ import annotations

import os
import subprocess
import time
from functools import cache
from pathlib import Path
from typing import Any

import torch

from benchmarks.claims.plan import Task
from benchmarks.claims.summary import executed


@cache
def version() -> str:
    """The commit and torch's version, for the record."""
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--abbrev=7"]
    try:
        commit = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        commit = "unknown"
    return f"{commit}, torch {torch.__version__.partition('+')[0]}"


def execute(task: Task, sockets: bool) -> dict[str, Any]:
    """Execute a run and return its record. Raises P2pflError.

    Args:
        sockets: each peer is a process.
    """
    tree = task.tree
    began, cpu = time.perf_counter(), cpu_seconds()
    summary = executed(tree, task.probe, sockets=sockets)
    return {
        "key": task.key,
        "seed": task.seed,
        "about": f"{tree['algorithm']['name']}, {tree['peers']} peers, {tree['rounds']} rounds",
        "seconds": round(time.perf_counter() - began, 1),
        "cpu_seconds": round(cpu_seconds() - cpu, 1),
        "device": tree["device"],
        **({"sockets": True} if sockets else {}),
        "code": version(),
        "summary": summary.to_dict(),
    }


def cpu_seconds() -> float:
    """Seconds of CPU time of this process and of the peers that have ended."""
    return sum(os.times()[:4])
