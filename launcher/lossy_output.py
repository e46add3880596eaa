"""Output of commands that run something: a failing print must not abandon the run."""

from __future__ import annotations

import errno
import os
import stat
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import IO, Any, cast

from rich.console import Console


@contextmanager
def outliving_readers() -> Iterator[None]:
    """In this block, discard all further output of a stream whose terminal or pipe has been closed.

    Other errors, e.g. of a full disk, are raised.
    """
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = (cast(IO[str], _Stream(stream, _discard_if_unread)) for stream in before)
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before


@contextmanager
def dropping(console: Console) -> Iterator[None]:
    """In this block, drop what cannot be written: the next line may fit on the disk again."""
    file, console.file = console.file, cast(IO[str], _Stream(console.file, lambda stream, error: None))
    try:
        yield
    finally:
        console.file = file


class _Stream:
    """A stream that has ``handle`` decide about errors: to return, or to raise them."""

    def __init__(self, stream: IO[str], handle: Callable[[IO[str], OSError], None]) -> None:
        self._stream = stream
        self._handle = handle

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        self._try(lambda: self._stream.write(text))
        return len(text)

    def flush(self) -> None:
        self._try(self._stream.flush)

    def _try(self, action: Callable[[], object]) -> None:
        try:
            action()
        except OSError as error:
            self._handle(self._stream, error)


def _discard_if_unread(stream: IO[str], error: OSError) -> None:
    unread = error.errno == errno.EPIPE
    unread |= error.errno == errno.EIO and stat.S_ISCHR(os.fstat(stream.fileno()).st_mode)  # else of a disk
    if not unread:
        raise error
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, stream.fileno())  # also discards what is buffered
    os.close(null)
