"""``hosts.json`` in the launcher's run folder: which peers run on other hosts, and which launcher follows them.

{"launcher": 4711, "running": {"3": "beta"}}        launcher 0: none; ``running`` is what the hosts reported last
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from p2pfl import PeerId
from p2pfl.errors import RunFolderError
from p2pfl.session.files import read_json, write_json

NAME = "hosts.json"


@dataclass(frozen=True)
class HostState:
    """The peers of a run that run on hosts, by the name of the host, and the process id of the launcher."""

    launcher: int = 0
    running: Mapping[PeerId, str] = field(default_factory=dict)

    @classmethod
    def read(cls, root: Path) -> HostState | None:
        """Return the state in the run folder ``root``; None for a run that never had other hosts."""
        with suppress(RunFolderError, ValueError, KeyError, TypeError, AttributeError):
            if (found := read_json(root / NAME)) is not None:
                return cls(int(found["launcher"]), {int(peer): str(host) for peer, host in found["running"].items()})
        return None

    def write(self, root: Path) -> None:
        write_json(root / NAME, {"launcher": self.launcher, "running": self.running})

    def process(self, root: Path) -> psutil.Process | None:
        """Return the launcher if it lives."""
        with suppress(psutil.Error):
            process = psutil.Process(self.launcher) if self.launcher else None
            if process is not None and " ".join(process.cmdline()).rstrip() == launcher_title(root):
                return process
        return None


def launcher_title(root: Path) -> str:
    """Return the process title of a launcher whose peers are on other hosts."""
    return f"p2pfl launch {root}"
