"""Exclusive locks on open files, which the kernel releases when they are closed, also if their holder dies.

Some file systems lack locks: Lustre mounted without ``flock``, NFS without a lock daemon, some FUSE ones.
"""

from __future__ import annotations

import fcntl
import os
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, Any

from p2pfl.errors import UnsuitableFileSystem

RUN_FOLDER = "put the run folder on a file system with locks, e.g. a local disk: --run-dir FOLDER or --set out=FOLDER"


def lock(
    file: int | IO[Any], path: Path, remedy: str = RUN_FOLDER, *, wait: bool = False, of_process: bool = False
) -> bool:
    """Lock an open file. Return False if another process holds the lock.

    Args:
        path: of the file, to name it.
        remedy: what to do if the file system has no locks.
        wait: until no other process holds the lock.
        of_process: take a lock that this process's children do not share.

    Raises:
        UnsuitableFileSystem: the file cannot be locked.
    """
    try:
        (fcntl.lockf if of_process else fcntl.flock)(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        return False
    except OSError as error:
        raise UnsuitableFileSystem(path, "locked", error, remedy) from error
    return True


def require_locks(folder: Path, remedy: str = RUN_FOLDER) -> None:
    """Raise UnsuitableFileSystem if files cannot be locked in a folder, which need not exist yet.

    Each peer locks its log too, but a run of twenty should not end in twenty errors.
    """
    there = folder.absolute()
    while not os.path.lexists(there):
        there = there.parent
    with suppress(OSError), TemporaryFile(dir=there) as file:  # e.g. it is read-only, which is reported elsewhere
        lock(file, folder, remedy)
