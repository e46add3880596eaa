"""Record the system calls that write files, and fail from any of them on, as if the disk broke or power failed."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Callable
from typing import Any

import pytest

from p2pfl.errors import RunFolderError


def calls_of(do: Callable[[], object], monkeypatch: pytest.MonkeyPatch, fail_at: int | None = None) -> list[str]:
    """Return the calls (write, fsync, rename) of ``do``. From call ``fail_at`` on, all of them fail."""
    made: list[str] = []

    def watched(name: str, function: Any) -> Any:
        def call(*arguments: Any, **options: Any) -> Any:
            made.append(name)
            if fail_at is not None and len(made) > fail_at:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            return function(*arguments, **options)

        return call

    with monkeypatch.context() as patch:
        for name, function in (("write", "pwrite"), ("fsync", "fsync"), ("rename", "replace")):
            patch.setattr(os, function, watched(name, getattr(os, function)))
        with contextlib.suppress(RunFolderError):
            do()
    return made
