"""Give unneeded memory back to the system. Does nothing where libc or /proc lacks the means."""

from __future__ import annotations

import ctypes
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


def free_heap() -> None:
    """Return the unused pages of malloc's heaps.

    glibc keeps freed blocks for the next allocation. A peer that waits for its neighbors allocates nothing, and
    others compute meanwhile.
    """
    _function("malloc_trim", ctypes.c_size_t)(0)  # glibc only


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
