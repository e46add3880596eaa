"""Why a run has failed."""

from __future__ import annotations

from pathlib import Path

from p2pfl.run_folder.folder import RunFolder

MOST_PEERS, MOST_LINES = 3, 5
"""Listed at most: errors of peers, or the last lines of the launcher."""


def why_failed(folder: RunFolder, log: Path) -> list[str]:
    """Return the errors of the peers in one line, or else the last lines of what the launcher wrote to ``log``."""
    statuses = [files.status() for files in folder.peers()] if folder.run_file.exists() else []
    failed = [status for status in statuses if status is not None and status.error]
    if failed:
        return ["; ".join(f"peer {each.peer}: {each.error.splitlines()[0]}" for each in failed[:MOST_PEERS])]
    lines = log.read_text(errors="replace").strip().splitlines()
    return lines[-MOST_LINES:] or ["the launcher ended without a message"]
