"""Compute slots: as many peers of a host compute at once as there is room for, in the order in which they ask.

A slot is an exclusive lock on a file, so that the kernel takes it back from a peer that dies. Whoever wants one
first waits in line for the turnstile; only the first in line looks for a free slot.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
from pathlib import Path

from p2pfl.runfolder import writing

LOOK_EVERY = 0.002
"""Seconds between two looks of the first in line for a free slot."""
LINE_EVERY = 0.05
"""Seconds between two looks of the others at the turnstile."""
IN_LINE = 1.0
"""Seconds after which the others look for a free slot too. The first in line, who looks far more often, gets it
before them, unless its process stands still (SIGSTOP)."""


class HostSlot:
    """One peer's claim on the slots in ``folder``; ``count`` of them on this host."""

    def __init__(self, folder: Path, count: int, prefix: str = "") -> None:
        self._turnstile = _open(folder / f"{prefix}turnstile")
        self._slots = [_open(folder / f"{prefix}{number}") for number in range(count)]
        self._held: int | None = None

    async def acquire(self) -> None:
        looks = 0
        while not _try(self._turnstile):
            await asyncio.sleep(LINE_EVERY)
            looks += 1
            if looks * LINE_EVERY > IN_LINE and self._look():
                return
        try:
            while not self._look():
                await asyncio.sleep(LOOK_EVERY)
        finally:
            fcntl.flock(self._turnstile, fcntl.LOCK_UN)

    def _look(self) -> bool:
        """Take a free slot. False if there is none."""
        self._held = next((slot for slot in self._slots if _try(slot)), None)
        return self._held is not None

    def release(self) -> None:
        if self._held is not None:
            fcntl.flock(self._held, fcntl.LOCK_UN)
            self._held = None


def _open(path: Path) -> int:
    with writing(path):
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)


def _try(lock: int) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
