"""Run folders on this host, copied from other hosts or containers, and which of their files to collect.

Only regular files that belong to a run folder are read: a copy may include links and anything else.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import BinaryIO

from launcher.errors import CollectError
from launcher.formatting import size

MAX_DEPTH = 2
"""How many levels below the given folder to search for run folders."""
MAX_RECORD = 1 << 26
"""Most bytes of a file that is later read into memory as a whole: 67 MB, twenty times as in the largest runs."""
RECORDS = (".json", ".yaml")
RUN_FILES = ("run.yaml", "run.json")
PEER_FILES = (
    *("peer.log", "peer.log.1", "metrics.jsonl", "order.jsonl", "chaos.jsonl", "output.log"),
    *("status.json", "result.json"),
)
"""In the order of copying: a copied status of a finished peer comes with its result."""
CHECKPOINTS = ("checkpoint-previous.pt", "checkpoint.pt")


def run_folders(text: str) -> list[Path]:
    """Return the run folders in the folder ``text``, or that folder itself. Raises CollectError."""
    root = Path(text).absolute()
    with _reading():
        if not root.is_dir():
            raise CollectError("no such folder")
    found = list(_search(root, MAX_DEPTH))
    if not found:
        raise CollectError(f"contains no run folder within {MAX_DEPTH} levels")
    return found


def reject_remote(text: str) -> None:
    """Raise CollectError with the command to copy the files if ``text`` is HOST:FOLDER."""
    host, colon, folder = text.partition(":")
    if colon and "/" not in host and not os.path.exists(text):
        command = f"rsync -a {host}:{folder.rstrip('/') or 'FOLDER'}/ COPY"
        raise CollectError(f"{text}: not on this host; copy it first: {command}; then collect from the folder COPY")


def _search(root: Path, depth: int) -> Iterator[Path]:
    """Yield ``root`` or the run folders in it, and unreadable folders, so that they are reported."""
    try:
        entries = sorted(root.iterdir())
        folders = [entry for entry in entries if entry.is_dir() and entry.name != "lost+found"]
    except OSError:
        yield root
        return
    if any(entry.name in RUN_FILES for entry in entries):
        yield root
    elif depth:
        for folder in folders:
            yield from _search(folder, depth - 1)


def copy_files(root: Path, into: Path, *, checkpoints: bool) -> None:
    """Copy the files of the run folder ``root`` into the folder ``into``. Raises CollectError."""
    with _reading():
        found = sorted(os.scandir(root / "peers"), key=lambda entry: entry.name) if (root / "peers").is_dir() else []
        peers = [entry.name for entry in found if _is_peer(entry.name) and entry.is_dir(follow_symlinks=False)]
    for name in RUN_FILES:
        _copy(root, into, name)
    for peer in peers:
        for name in (*(CHECKPOINTS if checkpoints else ()), *PEER_FILES):
            _copy(root, into, f"peers/{peer}/{name}")


def _is_peer(name: str) -> bool:
    """Return whether a folder has the name of a peer's folder."""
    return re.fullmatch(r"[0-9]{2}|[1-9][0-9]{2,8}", name) is not None


def _copy(root: Path, into: Path, name: str) -> None:
    """Copy a regular file; do nothing if it is missing or something else."""
    with _reading():
        file = _open_regular(root / name)
    if file is None:
        return
    with file:
        about = os.fstat(file.fileno())
        if PurePosixPath(name).suffix in RECORDS and about.st_size > MAX_RECORD:
            raise CollectError(
                f"{name} has {size(about.st_size)}, more than such a file can have ({size(MAX_RECORD)}); remove it"
            )
        target = into / name
        target.parent.mkdir(parents=True, exist_ok=True)
        with target.open("wb") as copy:
            shutil.copyfileobj(file, copy)
    os.utime(target, ns=(about.st_mtime_ns, about.st_mtime_ns))


def _open_regular(path: Path) -> BinaryIO | None:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        if isinstance(error, FileNotFoundError | NotADirectoryError) or error.errno in (errno.ELOOP, errno.ENXIO):
            return None  # missing, a link or a socket
        raise
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        return None
    return os.fdopen(descriptor, "rb")


@contextmanager
def _reading() -> Iterator[None]:
    """Turn an OSError of reading into CollectError. Errors of writing, e.g. a full disk, are handled elsewhere."""
    try:
        yield
    except OSError as error:
        raise CollectError(f"{error.filename}: {error.strerror}" if error.filename else str(error)) from None
