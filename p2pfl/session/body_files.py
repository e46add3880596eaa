"""Bodies of a journal in files: written once by their peer, and mapped by its neighbors on the same host.

A segment is a file that only grows: a body is written before any reader learns of it, and the file is deleted as a
whole. So what is mapped can neither change nor shrink. A segment's number is never used again.
"""

from __future__ import annotations

import mmap
import os
import secrets
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from p2pfl import PeerId
from p2pfl.messaging.journal import BodyStore, Place
from p2pfl.messaging.wire import ALIGNMENT, Buffer, Encoded
from p2pfl.run_folder.files import sync, write_errors
from p2pfl.session.free_memory import forget

SEGMENT = 1 << 20
"""Bytes after which a segment is full. A larger body ends its segment."""
MAX_PARTS = 512
"""Buffers written by one system call."""
_MADV_POPULATE_READ = 22
"""From <asm-generic/mman-common.h>, since Linux 5.14."""


class FileStore(BodyStore):
    """The bodies of this peer's journal, in a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._name = str(folder)
        self._lock = threading.Lock()
        self._file = -1
        self._size = 0
        with write_errors(folder):
            folder.mkdir(mode=0o700, exist_ok=True)
            for old in folder.glob("token-*"):
                old.unlink()
            self.token = f"token-{secrets.token_hex(16)}"
            os.close(os.open(folder / self.token, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
            # Random, because checkpoints and references may still name segments that were deleted.
            self.current = 1 + secrets.randbits(51)

    def _numbers(self) -> set[int]:
        return {int(path.name) for path in self.folder.iterdir() if path.name.isdecimal()}

    def write(self, encoded: Encoded) -> Place:
        path = self._path(self.current)
        with write_errors(path):
            if self._file < 0:
                self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
                self._size = 0
            place = Place(self.current, -(-self._size // ALIGNMENT) * ALIGNMENT)
            if place.at + encoded.size >= SEGMENT:  # allocated at once: half the time
                # Where Python or the file system lacks it, the write tells what fails.
                with suppress(AttributeError, OSError):
                    os.posix_fallocate(self._file, place.at, encoded.size)
            end = _write(self._file, list(encoded.parts()), place.at)
        self._size = end
        if end >= SEGMENT:
            os.close(self._file)
            self._file, self.current = -1, self.current + 1
        return place

    def read(self, place: Place, offset: int, length: int) -> Buffer:
        file = os.open(self._path(place.segment), os.O_RDONLY | os.O_CLOEXEC)
        try:
            data = os.pread(file, length, place.at + offset)
        finally:
            os.close(file)
        if len(data) < length:
            raise OSError(f"{self._path(place.segment)}: truncated")
        return data

    def map(self, place: Place, size: int) -> Tensor:
        return map_body(self._path(place.segment), place.at, size)

    def release(self, segment: int) -> None:
        with suppress(OSError):
            os.unlink(self._path(segment))

    def restore(self, segments: Iterable[int]) -> set[int]:
        kept = set(segments)
        present = self._numbers()
        for segment in present - kept:
            self.release(segment)
        return present & kept

    def sync(self, segments: Iterable[int]) -> None:
        for segment in segments:
            path = self._path(segment)
            with suppress(FileNotFoundError):
                file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
                try:
                    with write_errors(path):
                        os.fdatasync(file)
                finally:
                    os.close(file)
        sync(self.folder)  # the names of new segments

    def close(self) -> None:
        """Close the open segment, after the last write."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def _path(self, segment: int) -> str:
        return _path(self._name, segment)


class NeighborJournals:
    """The journals of neighbors on the same host, as this process can read them.

    Args:
        token: the name of a file in this peer's journal folder.
        folder_of: returns where a neighbor's journal would be. This peer's run folder determines that, never what the
            neighbor says: a neighbor may only name numbered files in it.
    """

    def __init__(self, token: str, folder_of: Callable[[PeerId], Path]) -> None:
        self.own = (boot_id(), token)
        self._folder_of = cache(lambda peer: str(folder_of(peer)))

    def can_open(self, peer: PeerId, boot: str, token: str) -> bool:
        """Return whether a neighbor's journal is here: same host, same run folder, readable by this user."""
        if not boot or boot != self.own[0] or not token.startswith("token-") or "/" in token or "\0" in token:
            return False
        return os.access(f"{self._folder_of(peer)}/{token}", os.R_OK)

    def open_body(self, peer: PeerId, segment: int, at: int, size: int) -> Tensor:
        """Map a body copy-on-write; it is unmapped with its last tensor. Raises OSError."""
        return map_body(_path(self._folder_of(peer), segment), at, size, populate=True)

    def forget(self, body: Tensor) -> None:
        """Free the memory of a body from ``open_body``, which was not modified, until it is read again."""
        forget(body)


def _write(file: int, parts: list[memoryview], at: int) -> int:
    """Write all of ``parts`` at an offset and return the end."""
    while parts:
        written = os.pwritev(file, parts[:MAX_PARTS], at)
        at += written
        while parts and written >= len(parts[0]):
            written -= len(parts.pop(0))
        if written:
            parts[0] = parts[0][written:]
    return at


def _path(folder: str, segment: int) -> str:
    # Not a ``Path``: each interns the names in it, and the table of interned strings would grow with every segment.
    return f"{folder}/{segment}"


def map_body(path: str, at: int, size: int, *, populate: bool = False) -> Tensor:
    """Map a body copy-on-write, uint8 [size]. Raises OSError.

    Args:
        populate: read all of it now.
    """
    start = at - at % mmap.ALLOCATIONGRANULARITY
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # a named pipe must not block
    try:
        if at % ALIGNMENT or os.fstat(file).st_size < at + size:
            raise OSError(0, "not as large as announced")
        pages = mmap.mmap(
            file, at + size - start, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE, offset=start
        )
    except ValueError as error:
        raise OSError(0, str(error)) from None
    finally:
        os.close(file)
    if populate:
        with suppress(OSError):  # one system call instead of a fault per page
            pages.madvise(_MADV_POPULATE_READ)
    return torch.frombuffer(pages, dtype=torch.uint8, count=size, offset=at - start)


def boot_id() -> str:
    """Return what identifies a running kernel; empty if that is unknown."""
    with suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return ""
