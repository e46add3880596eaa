"""Check the limits of this host before peers start: on processes and on open files.

A launch that exceeds one would otherwise fail halfway, with errors that do not name it.
"""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from launcher.errors import LaunchError
from p2pfl import PeerId
from p2pfl.control_groups import control_groups

if TYPE_CHECKING:
    from p2pfl.run_file.run import Run

TASKS_PER_PEER = 9
"""Threads of a peer that computes with one thread: 7 or 8 as measured, and the writer of checkpoints."""
FILES_PER_PEER = 64
"""Open files of a peer without neighbors: 35 as measured, and further files for a moment."""
FILES_PER_NEIGHBOR = 6
"""Open files per neighbor: 5 as measured, and one while it reconnects."""
TASKS = "processes and threads"


@dataclass(frozen=True)
class TaskLimit:
    """A limit on processes and threads, which the kernel counts alike."""

    name: str
    value: int
    used: int
    raised_by: str
    """How to raise it to ``{value}``."""


def check_limits(run: Run, peers: Sequence[PeerId]) -> None:
    """Raise RunFileError if this host does not allow the processes or open files that ``peers`` need."""
    each = TASKS_PER_PEER + run.file.threads - 1
    needed = each * len(peers)
    for limit in task_limits():
        if limit.used + needed > limit.value:
            problem = (
                f"{len(peers)} peers on this host need about {needed} {TASKS} ({each} each), but {limit.name} is "
                f"{limit.value}, of which {limit.used} are in use: raise it with "
                f"`{limit.raised_by.format(value=limit.used + needed)}`, or start peers on several hosts"
            )
            raise run.error_at("peers", LaunchError(problem))
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)  # peers raise their soft limit to the hard one
    hub = max(peers, key=run.topology.degree)
    files = FILES_PER_PEER + FILES_PER_NEIGHBOR * run.topology.degree(hub)
    if most != resource.RLIM_INFINITY and files > most:
        problem = (
            f"peer {hub} has {run.topology.degree(hub)} neighbors and needs about {files} open files, but the hard "
            f"limit on open files is {most}: raise it with `ulimit -Hn {files}` as root, or use a graph with fewer "
            "neighbors"
        )
        raise run.error_at("graph", LaunchError(problem))


def task_limits(root: Path = Path("/")) -> Iterator[TaskLimit]:
    """Yield the limits on processes and threads of this process. ``root`` contains ``proc`` and ``sys``."""
    most, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    if most != resource.RLIM_INFINITY and os.getuid() != 0:  # root is exempt
        used = sum(
            process.info["num_threads"] or 0
            for process in psutil.process_iter(["uids", "num_threads"])
            if process.info["uids"] and process.info["uids"].real == os.getuid()
        )
        yield TaskLimit(f"the limit on {TASKS} of this user", most, used, "ulimit -u {value}")
    used = int((root / "proc/loadavg").read_text().split()[3].partition("/")[2])
    for name in ("pid_max", "threads-max"):
        value = int((root / "proc/sys/kernel" / name).read_text())
        yield TaskLimit(f"kernel.{name}", value, used, f"sysctl kernel.{name}={{value}}")
    for group in control_groups(root, "pids"):
        file = group / "pids.max"
        with suppress(OSError, ValueError):  # no such file, or "max"
            value, used = int(file.read_text()), int((group / "pids.current").read_text())
            yield TaskLimit(str(file), value, used, f"echo {{value}} > {file}")
