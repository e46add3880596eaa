"""What run.json says: which run this is, and where, when and with what it was begun."""

from __future__ import annotations

import hashlib
import os
import platform
import shlex
import socket
import sys
from datetime import datetime
from importlib import metadata
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from p2pfl.config import Run


def about_run(run: Run, run_id: str, started: datetime | None = None) -> dict[str, Any]:
    """The contents of run.json. ``run_id``: 16 hex digits; peers of other runs are refused."""
    return {
        "id": run_id,
        "digest": run.digest(),
        "started": (started or datetime.now().astimezone()).isoformat(timespec="seconds"),
        "command": shlex.join(["p2pfl", *sys.argv[1:]]),
        "host": socket.gethostname(),
        "cores": len(os.sched_getaffinity(0)),
        "launcher_pid": os.getpid(),
        "versions": _versions(),
    }


def id_of(run: Run) -> str:
    """The run id on which peers agree that have only the run file in common."""
    return hashlib.sha256(f"{run.name} {run.digest()}".encode()).hexdigest()[:16]


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for package in ("torch", "numpy", "pyzmq", "p2pfl-mesh"):
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = "not installed"
    return found
