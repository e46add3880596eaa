"""p2pfl: peer-to-peer personalized learning. What a peer learns and sends, without sockets or processes.

The Python API (p2pfl/api.py) is imported when it is first used: torch takes seconds.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from p2pfl.api import LaunchedRun, PlannedRun, RecordedRun, load, open_run

for _name in ("fcntl", "resource", "termios", "pwd"):
    try:
        importlib.import_module(_name)
    except ImportError:
        raise ImportError(
            f"p2pfl needs Linux: this Python has no module {_name}; use WSL 2 on Windows, and a container elsewhere "
            "(docs/deploy.md)"
        ) from None

__all__ = ["LaunchedRun", "PeerId", "PlannedRun", "RecordedRun", "load", "open_run"]

PeerId = int
"""0 to ``peers - 1``."""
MAX_PEERS = 100_000
"""Most peers of a run: checking a run file takes a second for that many."""


def __getattr__(name: str) -> Any:
    if name in __all__:
        return getattr(importlib.import_module("p2pfl.api"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
