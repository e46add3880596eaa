"""Compute slots: limit how many peers of a host compute at once.

Peers queue in the kernel for one lock, the turnstile. Its holder takes the first free slot; if there is none, it
sleeps until the kernel reports one. Nothing polls.

A slot is a FIFO. Its holder has it open for writing, with an exclusive lock on that descriptor. Closing the
descriptor frees the slot, and if the peer dies, the kernel closes it. Either way the kernel drops the lock and then
reports a hang-up to those who have the FIFO open for reading, so that a hang-up means a slot that can be locked.
"""

from __future__ import annotations

import asyncio
import errno
import fcntl
import os
import threading
from contextlib import suppress
from pathlib import Path
from weakref import WeakSet

from p2pfl.errors import UnsuitableFileSystem
from p2pfl.file_locks import RUN_FOLDER, lock
from p2pfl.run_folder.files import write_errors
from p2pfl.session.free_memory import KEPT, free_heap

NO_FIFOS = (errno.EPERM, errno.ENOSYS, errno.EOPNOTSUPP)
"""How file systems without FIFOs refuse to create one, e.g. FAT and some in user space."""
FIRST_TIMEOUT = 1.0
"""Seconds in the queue after which a peer tries to take a slot out of turn; they double with each attempt.

The first peer of the queue takes a free slot within milliseconds, unless its process is suspended (SIGSTOP).
"""


class HostSlot:
    """One peer's access to the ``count`` slots in ``folder``, for one task at a time.

    Args:
        folder: folder of the lock files.
        count: slots on this host or device.
        prefix: prefix of the lock files' names, distinct for each host and device.
    """

    def __init__(self, folder: Path, count: int, prefix: str = "") -> None:
        self._turnstile = _Turnstile(folder / f"{prefix}turnstile")
        fifos = [folder / f"{prefix}{number}.fifo" for number in range(count)]
        self._readers = {_open_fifo(path): path for path in fifos}
        self._held: int | None = None
        _SLOTS.add(self)

    async def acquire(self) -> None:
        """Wait for a slot. A cancelled call leaves the queue and holds none."""
        woken = asyncio.Event()
        timeout, out_of_turn = FIRST_TIMEOUT, False
        try:
            self._turnstile.enter(woken)
            while not ((self._turnstile.passed or out_of_turn) and self._take_free_slot()):
                out_of_turn = not await self._wait(woken, timeout)
                if out_of_turn:
                    timeout *= 2
        finally:
            self._turnstile.leave()

    async def _wait(self, woken: asyncio.Event, timeout: float) -> bool:
        """Wait until this peer is the first of the queue, or is and a slot is free. Return False after a timeout."""
        woken.clear()
        loop = asyncio.get_running_loop()
        watched = list(self._readers) if self._turnstile.passed else []
        for reader in watched:
            loop.add_reader(reader, woken.set)
        try:
            async with asyncio.timeout(timeout):
                await woken.wait()
        except TimeoutError:
            return False
        finally:
            for reader in watched:
                loop.remove_reader(reader)
        return True

    def _take_free_slot(self) -> bool:
        for reader, path in self._readers.items():
            if (slot := _try_to_hold(reader, path)) is not None:
                self._held = slot
                return True
        return False

    def release(self) -> None:
        if self._held is not None:
            os.close(self._held)
            self._held = None
            free_heap(KEPT)  # for the peer that computes next


_SLOTS: WeakSet[HostSlot] = WeakSet()


def _leave_to_parent() -> None:
    """Close the slots in a fork, e.g. of a plug-in's pool: it would hold them as long as it lives."""
    for slot in _SLOTS:
        slot.release()


os.register_at_fork(after_in_child=_leave_to_parent)


class _Turnstile:
    """A lock that a thread of this process queues for, so that the event loop continues.

    The kernel's queue has no way to withdraw from it. The thread of a request that was withdrawn stays, and unlocks
    at once when its turn comes; a new request before that takes its place in the queue. It does not delay the exit.

    Where the lock fails, no peer queues: each slot has a lock too.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        with write_errors(path):
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._guard = threading.Lock()
        self._queued = False
        self._request: tuple[asyncio.AbstractEventLoop, asyncio.Event] | None = None
        self.passed = False
        """Whether this process holds the lock."""

    def enter(self, passed: asyncio.Event) -> None:
        """Request the lock. Unless that succeeds at once, set ``passed`` when it does."""
        with self._guard:
            self._request = asyncio.get_running_loop(), passed
            if not self._queued:
                with suppress(UnsuitableFileSystem):
                    self._queued = not lock(self._file, self._path)
                self.passed = not self._queued
                if self._queued:
                    threading.Thread(target=self._queue, name="compute slot", daemon=True).start()

    def _queue(self) -> None:
        with suppress(OSError):
            fcntl.flock(self._file, fcntl.LOCK_EX)
        with self._guard:
            self._queued, self.passed = False, True
            if self._request is not None:
                loop, passed = self._request
                with suppress(RuntimeError):  # the event loop is closed
                    loop.call_soon_threadsafe(passed.set)
                    return
            self._unlock()

    def leave(self) -> None:
        """Unlock, or withdraw the request."""
        with self._guard:
            self._request = None
            if self.passed:
                self._unlock()

    def _unlock(self) -> None:
        self.passed = False
        with suppress(OSError):
            fcntl.flock(self._file, fcntl.LOCK_UN)


def _open_fifo(path: Path) -> int:
    """Open a FIFO for reading, and create it if it does not exist."""
    with write_errors(path):
        try:
            os.mkfifo(path, 0o600)
        except FileExistsError:
            pass
        except OSError as error:
            if error.errno not in NO_FIFOS:
                raise
            raise UnsuitableFileSystem(path, "created as a FIFO", error, RUN_FOLDER) from error
        return os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)


def _try_to_hold(reader: int, path: Path) -> int | None:
    """Take the slot that ``reader`` reads if it is free. Return the descriptor that holds it."""
    # Open it again, since a copy of the descriptor would share its lock. The path may have been removed.
    slot = os.open(f"/proc/self/fd/{reader}", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        locked = lock(slot, path)
    except UnsuitableFileSystem:
        os.close(slot)
        raise
    if not locked:
        os.close(slot)
        return None
    return slot
