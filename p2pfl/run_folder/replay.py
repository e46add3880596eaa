"""Replay a run whose rounds did not wait for one another: its order files, for a new run (messaging/newest.py)."""

from __future__ import annotations

import shutil
from pathlib import Path

from p2pfl.errors import RunFolderError
from p2pfl.run_folder.folder import PeerFolder, RunFolder


def order_of(files: PeerFolder) -> Path:
    """Return a peer's file that says which messages each round has taken; it has one if rounds do not wait."""
    return files.root / "order.jsonl"


class Replay:
    """The order in which a finished run has taken messages.

    Raises RunFolderError if the run has not finished, or if its rounds waited for one another.

    Args:
        folder: of that run.
        config_hash: of the new run; it must be that of the other one.
    """

    def __init__(self, folder: RunFolder, config_hash: str) -> None:
        self._peers = list(folder.peers())
        if folder.info.get("config_hash") != config_hash:
            raise RunFolderError(f"{folder.root}: has other settings; give the run.yaml in that folder")
        results = [(files.peer, files.result()) for files in self._peers]
        unfinished = [peer for peer, result in results if result is None or result.phase != "finished"]
        if unfinished:
            others = f" and {len(unfinished) - 1} more" if len(unfinished) > 1 else ""
            reason = f"peer {unfinished[0]}{others} has not finished"
            raise RunFolderError(f"{folder.root}: {reason}; only a finished run can be replayed")
        if not all(order_of(files).exists() for files in self._peers):
            raise RunFolderError(f"{folder.root}: its rounds waited for one another: simulate its run.yaml as it is")

    def copy_order(self, folder: RunFolder) -> None:
        """Have the rounds of a new run take the same messages."""
        for files in self._peers:
            shutil.copyfile(order_of(files), order_of(folder.peer(files.peer)))
