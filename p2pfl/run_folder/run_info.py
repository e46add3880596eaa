"""The contents of run.json: the run's identity, and where, when and with which versions it was started."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import shlex
import socket
import sys
from datetime import datetime
from typing import TYPE_CHECKING, Any

from p2pfl.config_hash import settings_of
from p2pfl.control_groups import usable_cores

if TYPE_CHECKING:
    from p2pfl.run_file.run import Run

MAX_SETTINGS = 20_000
"""Most characters of settings in run.json, in addition to their hash, to name what was changed."""


def describe_run(
    run: Run, run_id: str, started: datetime | None = None, launcher_pid: int | None = None
) -> dict[str, Any]:
    """Return the contents of run.json. ``run_id``: 16 hex digits; peers of other runs are rejected."""
    settings = run.settings()
    return {
        "id": run_id,
        "config_hash": run.config_hash(),
        "settings": settings if len(json.dumps(settings)) <= MAX_SETTINGS else {},
        "started": (started or datetime.now().astimezone()).isoformat(timespec="seconds"),  # noqa: TID251  # for people
        "command": shlex.join(["p2pfl", *sys.argv[1:]]),
        "host": socket.gethostname(),
        "cores": usable_cores(),
        "launcher_pid": launcher_pid or os.getpid(),
        "versions": _versions(),
    }


def derive_run_id(run: Run) -> str:
    """Return a run id for peers that share nothing but the run file."""
    # Without the plug-ins' code: peers with different versions of it then refuse each other, and name the plug-ins.
    return hashlib.sha256(f"{run.name} {settings_of(run.config_hash())}".encode()).hexdigest()[:16]


def _versions() -> dict[str, str]:
    from importlib import metadata  # takes tens of milliseconds, and `p2pfl stop` needs none

    versions = {"python": platform.python_version()}
    for package in ("torch", "numpy", "pyzmq", "p2pfl-mesh"):
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            versions[package] = "not installed"
    return versions
