"""Journals of neighbors on the same host, read in place (p2pfl/session/body_files.py)."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path

from torch import Tensor

from p2pfl import PeerId
from p2pfl.session.body_files import body_path, map_body
from p2pfl.session.free_memory import forget


class NeighborJournals:
    """The journals of neighbors on the same host, as this process can read them.

    Args:
        token: the name of a file in this peer's own journal folder.
        folder_of: where a neighbor's journal would be. It is derived from this peer's run folder, never from what the
            neighbor says: a neighbor may only name numbered files in it.
    """

    def __init__(self, token: str, folder_of: Callable[[PeerId], Path]) -> None:
        self.own = (_boot_id(), token)
        self._folder_of = cache(lambda peer: str(folder_of(peer)))

    def can_open(self, peer: PeerId, boot: str, token: str) -> bool:
        """Return whether a neighbor's journal is here: same host, same run folder, readable by this user."""
        if not boot or boot != self.own[0] or not token.startswith("token-") or "/" in token or "\0" in token:
            return False
        return os.access(f"{self._folder_of(peer)}/{token}", os.R_OK)

    def open_body(self, peer: PeerId, segment: int, at: int, size: int) -> Tensor:
        """Map a body copy-on-write; it is unmapped with its last tensor. Raises OSError."""
        return map_body(body_path(self._folder_of(peer), segment), at, size, populate=True)

    def forget(self, body: Tensor) -> None:
        """Free the memory of a body from ``open_body``, which was not modified, until it is read again."""
        forget(body)


def _boot_id() -> str:
    """Return what identifies a running kernel; empty if that is unknown."""
    with suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return ""
