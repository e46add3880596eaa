"""The files below a folder: without the system's files, and through links."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from stat import S_ISDIR, S_ISREG

from p2pfl.errors import DataError
from p2pfl.terminal import printable

SYSTEM = frozenset(
    (
        "__macosx",
        "__pycache__",
        "@eadir",
        "@recycle",
        "@tmp",
        "#recycle",
        "#snapshot",
        "$recycle.bin",
        "recycler",
        "system volume information",
        "lost+found",
    )
)
"""Folders that operating systems, storage devices and Python create, in lower case."""


def hidden(name: str) -> bool:
    """Whether a file or folder holds no data, by its name: ``.ipynb_checkpoints``, ``._1.png``, ``__MACOSX``."""
    return name.startswith(".") or name.lower() in SYSTEM


def subfolders(folder: Path) -> list[str]:
    """List the names of subfolders that are not hidden, sorted as text: ``10`` before ``2``, ``B`` before ``a``.

    Raises:
        DataError: the folder cannot be read, or has a link to a missing one.
    """
    names = []
    for entry in _entries(folder, "expected a folder of classes"):
        if entry.is_dir():
            names.append(entry.name)
        elif entry.is_symlink() and not os.path.exists(entry.path):
            raise DataError(f"{printable(entry.path)}: a link to what does not exist; correct or remove it")
    return names


def files_below(folder: str | Path) -> Iterator[tuple[str, os.stat_result | None]]:
    """Yield path and status of the files and folders below a folder, sorted by the parts of their paths.

    Links are followed, but none to a folder above; the status of a link to nothing is None. Hidden files and folders
    are left out, and what is neither file nor folder.

    Raises:
        DataError: a folder cannot be read.
    """
    status = os.stat(folder)
    yield from _below(folder, frozenset([(status.st_dev, status.st_ino)]))


def _below(folder: str | Path, above: frozenset[tuple[int, int]]) -> Iterator[tuple[str, os.stat_result | None]]:
    for entry in _entries(folder, "cannot be read"):
        try:
            status = entry.stat()
        except OSError as error:
            if entry.is_symlink():  # to nothing, or to itself
                yield entry.path, None
            elif not isinstance(error, FileNotFoundError):  # deleted since it was listed
                raise DataError(f"{printable(entry.path)}: cannot be read: {error.strerror or error}") from error
            continue
        if S_ISREG(status.st_mode):
            yield entry.path, status
        elif S_ISDIR(status.st_mode) and (here := (status.st_dev, status.st_ino)) not in above:
            yield entry.path, status
            yield from _below(entry.path, above | {here})


def _entries(folder: str | Path, problem: str) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as found:
            return sorted((entry for entry in found if not hidden(entry.name)), key=lambda entry: entry.name)
    except OSError as error:
        raise DataError(f"{printable(str(folder))}: {problem}: {error.strerror or error}") from error
