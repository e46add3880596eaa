"""Record the system calls that write files, and fail from any of them on, as if the disk broke or power failed."""

from __future__ import annotations

import contextlib
import errno
import io
import os
from collections.abc import Callable
from pathlib import Path
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

    class Watched(io.FileIO):
        write = watched("write", io.FileIO.write)

    with monkeypatch.context() as patch:
        opened = Path.open
        patch.setattr(
            Path,
            "open",
            lambda self, mode="r", **options: Watched(self, mode) if mode == "wb" else opened(self, mode, **options),
        )
        patch.setattr(os, "pwrite", watched("write", os.pwrite))
        patch.setattr(os, "fsync", watched("fsync", os.fsync))
        patch.setattr(Path, "replace", watched("rename", Path.replace))
        with contextlib.suppress(RunFolderError):
            do()
    return made
