"""How many CPUs and how much memory this process may use: what the host has, within the limits of control groups.

Containers, Slurm, Kubernetes and systemd limit CPUs by a quota of time, which neither the number of cores nor
``sched_getaffinity`` shows. Each group that the process is in may have a limit: the lowest one counts.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

MEMORY = (("memory", "memory.limit_in_bytes", "memory.usage_in_bytes"), ("", "memory.max", "memory.current"))
"""Of versions 1 and 2: the controller, and the files with the limit and with what is in use."""


def control_groups(root: Path, controller: str) -> Iterator[Path]:
    """Yield the control groups of this process that a controller may limit, from the innermost to the outermost.

    A container may see its group as the outermost one, whether or not ``/proc`` names it like this.

    Args:
        root: contains ``proc`` and ``sys``.
        controller: of version 1, e.g. ``pids``; the groups of version 2 are always among them.
    """
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:  # a kernel without control groups
        return
    mounts = root / "sys/fs/cgroup"
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers:
            folders = [mounts, mounts / "unified"]  # the latter beside groups of version 1
        elif controller in controllers.split(","):
            folders = [mounts / controller, mounts / controllers]
        else:
            continue
        mount = next((folder for folder in reversed(folders) if folder.is_dir()), folders[0])
        group = mount / path.lstrip("/")
        while mount in (group, *group.parents):
            yield group
            group = group.parent


@dataclass(frozen=True)
class Quota:
    """The CPUs that a control group allows, 1.5 for three halves of a CPU, and the file that says so."""

    cpus: float
    file: Path


def cpu_quota(root: Path = Path("/")) -> Quota | None:
    """Return the lowest quota; None if there is none. ``root`` contains ``proc`` and ``sys``."""
    found = []
    for group in control_groups(root, "cpu"):
        with suppress(OSError, ValueError, ZeroDivisionError):  # no such file, or "max"
            quota, period = (group / "cpu.max").read_text().split()
            found.append(Quota(int(quota) / int(period), group / "cpu.max"))
        with suppress(OSError, ValueError, ZeroDivisionError):
            file = group / "cpu.cfs_quota_us"
            quota, period = file.read_text(), (group / "cpu.cfs_period_us").read_text()
            if int(quota) > 0:  # -1: no quota
                found.append(Quota(int(quota) / int(period), file))
    return min(found, key=lambda quota: quota.cpus, default=None)


def cores() -> int:
    """Return the cores that this process may run on: its affinity."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def usable_cores(root: Path = Path("/")) -> int:
    """Return how many threads may compute at the same time without being throttled, at least 1.

    A quota is rounded down: threads that wait for the next period delay messages of other peers.
    """
    quota = cpu_quota(root)
    return cores() if quota is None else max(1, min(cores(), int(quota.cpus)))


def available_memory(root: Path = Path("/")) -> int:
    """Return the memory in bytes that new processes can have. ``root`` contains ``proc`` and ``sys``."""
    import psutil

    free: int = psutil.virtual_memory().available
    for controller, limit, used in MEMORY:
        for group in control_groups(root, controller):
            with suppress(OSError, ValueError, KeyError):  # no such file, or "max"
                stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
                reclaimable = int(stat.get("total_inactive_file") or stat["inactive_file"])
                taken = int((group / used).read_text()) - reclaimable
                free = min(free, int((group / limit).read_text()) - taken)
    return max(0, free)


def total_memory(root: Path = Path("/")) -> int:
    """Return the memory in bytes of the host, or what the control groups allow if that is less."""
    import psutil

    least: int = psutil.virtual_memory().total
    for controller, limit, _ in MEMORY:
        for group in control_groups(root, controller):
            with suppress(OSError, ValueError):
                least = min(least, int((group / limit).read_text()))
    return least
