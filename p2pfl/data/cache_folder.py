"""Where datasets are kept on this host, and the lock of processes that prepare one.

A user may have no home folder, or one that cannot be written, as in containers that run with an arbitrary user id.
Then a folder of that user's in the temporary folder takes its place, unless a variable names another.
"""

from __future__ import annotations

import errno
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path

from p2pfl.errors import DataError, UnsuitableFileSystem
from p2pfl.file_locks import lock

NO_PLACE = Path(os.devnull) / "p2pfl" / "data"
"""Cannot be created."""


def data_root(root: Path | None = None) -> Path:
    """Return the folder with the datasets' files: ``root``, or else $P2PFL_DATA, or else <user cache>/p2pfl/data.

    It need not exist. Where none can be created, the error of the first write names the variable to set.
    """
    folders = [root] if root is not None else _folders("P2PFL_DATA", "data") or [NO_PLACE]
    return next((folder for folder in folders if os.path.isdir(folder)), writable(folders))


def cache_folders() -> list[Path]:
    """Return where prepared datasets may be: $P2PFL_CACHE, or else <user cache>/p2pfl/decoded or its substitute.

    Raises DataError if there is no place for them.
    """
    folders = _folders("P2PFL_CACHE", "decoded")
    if not folders:
        raise DataError(
            "there is no place for the cache of datasets: no home folder, and no temporary folder that only this "
            "user can write; set $P2PFL_CACHE to a writable folder"
        )
    return folders


def writable(folders: list[Path]) -> Path:
    """Return the first folder that can be written or created; the first one if none can."""
    return next(filter(is_writable, folders), folders[0])


def _folders(variable: str, name: str) -> list[Path]:
    if value := os.environ.get(variable):
        return [Path(value)]
    found = []
    base = os.environ.get("XDG_CACHE_HOME")
    with suppress(RuntimeError):  # the user has no home folder
        found.append((Path(base) if base else Path.home() / ".cache") / "p2pfl" / name)
    if not any(map(is_writable, found)):
        with suppress(OSError):  # nothing can be written anywhere
            found.append(_substitute() / name)
    return found


def _substitute() -> Path:
    """Return a folder that only this user can write: others may have created one in the temporary folder."""
    folder = Path(tempfile.gettempdir()) / f"p2pfl-{os.getuid()}"
    with suppress(FileExistsError):
        folder.mkdir(0o700)
    found = folder.lstat()
    if found.st_uid != os.getuid() or found.st_mode & 0o022:
        raise PermissionError(errno.EPERM, "others may write into it", str(folder))
    return folder


def is_writable(folder: Path) -> bool:
    """Return whether a folder can be written, or created."""
    while not os.path.lexists(folder):
        folder = folder.parent
    return os.path.isdir(folder) and os.access(folder, os.W_OK | os.X_OK)


@contextmanager
def locked(path: Path) -> Iterator[bool]:
    """Hold an exclusive lock on ``path``; the kernel releases it when its holder exits.

    Where there are no locks, go on without and yield False: several processes may then do the same work.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("w")
    except OSError as error:
        raise unwritable(path, error) from error
    with file:
        try:
            alone = lock(file, path, "going on: processes that start together may each prepare it", wait=True)
        except UnsuitableFileSystem as error:
            alone = False
            _warn_once(str(error))
        yield alone


def unwritable(path: Path, error: OSError) -> DataError:
    return DataError(
        f"{path}: cannot write the cache of datasets: {error.strerror or error}; "
        "set $P2PFL_CACHE to a writable folder"
    )


@cache
def _warn_once(text: str) -> None:
    print(f"warning: {text}", file=sys.stderr)
