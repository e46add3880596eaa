"""Give unneeded memory back to the system. Does nothing where libc or /proc lacks the means."""

from __future__ import annotations

import ctypes
import math
import mmap
import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

_MAPPING = re.compile(r"([0-9a-f]+)-([0-9a-f]+) \S+p \S+ \S+ \S+ +/")
"""First line in /proc/self/smaps of a private mapping of a file."""
KEPT = 1 << 24
"""Bytes of freed memory that a peer keeps for its next round: those of a small model. Large blocks return at once."""
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8
"""From <malloc.h>."""


@cache
def _function(name: str, *types: type) -> Callable[..., int]:
    try:
        function = getattr(ctypes.CDLL(None), name)
    except (OSError, AttributeError):
        return lambda *arguments: 0
    function.argtypes = types
    return function  # type: ignore[no-any-return]


def _madvise() -> Callable[..., int]:
    return _function("madvise", ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


def keep_heap() -> None:
    """Have malloc keep up to KEPT bytes that are freed, in one heap for all threads. Does nothing without glibc.

    Otherwise each tensor of a round faults in zeroed pages again, which takes longer than a training step of a small
    model.
    """
    configure = _function("mallopt", ctypes.c_int, ctypes.c_int)
    for parameter, value in ((_M_ARENA_MAX, 1), (_M_MMAP_THRESHOLD, KEPT), (_M_TRIM_THRESHOLD, KEPT)):
        configure(parameter, value)


def free_heap(keep: int = 0) -> None:
    """Return the unused pages of malloc's heap, if there are more than ``keep`` bytes. Does nothing without glibc.

    A peer that waits for its neighbors allocates nothing, and others compute meanwhile.
    """
    if keep < _unused_heap():
        _function("malloc_trim", ctypes.c_size_t)(0)


class _HeapUse(ctypes.Structure):
    """What ``mallinfo2`` returns, in bytes."""

    _fields_ = (("before", ctypes.c_size_t * 8), ("fordblks", ctypes.c_size_t), ("keepcost", ctypes.c_size_t))


def _unused_heap() -> float:
    """Return the bytes of freed memory in the heap, also of pages that were returned; infinity if that is unknown."""
    try:
        mallinfo = ctypes.CDLL(None).mallinfo2
    except (OSError, AttributeError):  # not glibc, or before 2.33
        return math.inf
    mallinfo.restype = _HeapUse
    return mallinfo().fordblks  # type: ignore[no-any-return]


def forget_files() -> None:
    """Drop the unmodified pages of mapped files from this process; a later access maps them again.

    Importing torch touches 150 MiB of its libraries that no peer uses afterwards.
    """
    madvise = _madvise()
    with suppress(OSError):
        for start, end in _unmodified(Path("/proc/self/smaps").read_text(encoding="utf-8", errors="replace")):
            madvise(start, end - start, mmap.MADV_DONTNEED)


def forget(body: Tensor) -> None:
    """Drop the pages of an unmodified private mapping of a file from this process; a later access maps them again.

    Args:
        body: uint8 [N] in the mapping. Anything else in its pages would be lost.
    """
    page = mmap.PAGESIZE
    start, end = body.data_ptr() // page * page, -(-(body.data_ptr() + body.numel()) // page) * page
    _madvise()(start, end - start, mmap.MADV_DONTNEED)


def _unmodified(smaps: str) -> Iterator[tuple[int, int]]:
    """Return (start, end) of the private mappings of files without a modified page, in memory or swapped out."""
    start = end = modified = 0
    for line in smaps.splitlines():
        name, _, value = line.partition(" ")
        if name in ("Anonymous:", "Swap:"):
            modified += int(value.split()[0])
        elif name == "VmFlags:" and start < end and not modified:
            yield start, end
        elif not name.endswith(":"):
            match = _MAPPING.match(line)
            start, end = (int(match[1], 16), int(match[2], 16)) if match else (0, 0)
            modified = 0
