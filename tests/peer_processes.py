"""What tests of peers as processes read from a run folder, and what their runs have in common."""

from __future__ import annotations

from typing import Any

ENDLESS = 1_000_000
LOCAL = {"name": "local", "batch": 16}


def rounds_done(folder: Any, peer: int) -> int:
    status = folder.peer(peer).status()
    return 0 if status is None else status.rounds_done


def log_of(folder: Any, peer: int) -> str:
    return str(folder.peer(peer).log.read_text())
