"""Everything that can go wrong, and whose fault it is.

    P2pflError
    ├── RunFileError            what the user wrote: the file, line, key, what was found, what is known
    ├── DataError               a dataset is missing, damaged, or too small for the partition asked of it
    ├── ModelError              a network cannot take these images, or is not of the kind that a method needs
    ├── RunFolderError          a run folder cannot be read, written, or is not what the command needs
    │   ├── Unwritable          a file in it cannot be written: the disk is full, or the folder not ours, or gone
    │   └── CheckpointError     a checkpoint is unreadable or belongs to another run
    ├── KeysError               the peers' keys are missing, damaged, or not kept from others
    ├── OutOfMemory             a peer does not fit into the memory that there is
    ├── MissingExtra            an optional package is not installed
    ├── NetError                what an algorithm asked of its Net (our mistake)
    │   ├── NotANeighbor        it addressed a peer that is no neighbour, or does not listen
    │   └── Deadlock            in one process: every peer waits and nothing is under way
    ├── HandshakeError          a neighbour runs another version, another run or another run file
    └── WireError               what a neighbour sent (their mistake): dropped, counted and logged, never fatal
        ├── Malformed           not a message of this protocol
        ├── WrongVersion        another protocol version
        ├── WrongRun            a message of another run
        └── Unexpected          well formed, but a kind, sender, dtype or shape that this peer does not take

Every class renders as one line that says what to do. Nothing in the project raises a bare ``Exception``.
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path


class P2pflError(Exception):
    """Base of all errors that this project raises on purpose."""


def in_words(error: BaseException) -> str:
    """What to tell people of an error: ours speak for themselves, others need their name."""
    return str(error) if isinstance(error, P2pflError) else f"{type(error).__name__}: {error}"


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong with a run file.

    Attributes:
        where: ``file:line`` or the ``--set`` flag that it came from.
        key: dotted path of the key, e.g. ``algorithm.lr``; empty for the file as a whole.
        message: what was found, what is known, what to do.
    """

    where: str
    key: str
    message: str

    def __str__(self) -> str:
        return ": ".join(part for part in (self.where, self.key, self.message) if part)


class RunFileError(P2pflError):
    """A run file cannot be used; ``problems`` holds every reason found, one line each."""

    def __init__(self, problems: Iterable[Problem]) -> None:
        self.problems = list(problems)
        super().__init__("\n".join(map(str, self.problems)))


class DataError(P2pflError):
    """A dataset is missing, damaged, or too small for the partition asked of it."""


class ModelError(P2pflError):
    """A network cannot take these images, or is not of the kind that a method needs."""


class RunFolderError(P2pflError):
    """A run folder cannot be read, written, or is not what the command needs."""


class Unwritable(RunFolderError):
    """A file of a run cannot be written. Says how much room there is, and how the run goes on afterwards."""

    exit_code = os.EX_CANTCREAT
    """Of a peer that ends because of it: to start it again is of no use before somebody has made room."""

    def __init__(self, path: Path, error: OSError) -> None:
        root = next((folder for folder in path.parents if (folder / "run.yaml").exists()), None)
        again = f", then `p2pfl resume {root}`" if root is not None else ""
        above = path.absolute().parents
        missing = [folder for folder in above if not folder.is_dir()]
        if missing:
            advice = f"{missing[-1]} is gone"
        elif error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            advice = f"{shutil.disk_usage(above[0]).free} bytes are free there; make room{again}"
        else:
            advice = f"make it writable{again}"
        super().__init__(f"{path}: cannot be written: {error.strerror or error}; {advice}")


class OutOfMemory(P2pflError):
    """A peer does not fit into the memory that there is."""


class CheckpointError(RunFolderError):
    """A checkpoint is unreadable or belongs to another run."""


class KeysError(P2pflError):
    """The peers' keys are missing, damaged, or not kept from others."""


class MissingExtra(P2pflError):
    """An optional package is not installed."""

    def __init__(self, package: str, extra: str, purpose: str) -> None:
        super().__init__(f"{purpose} needs {package}, which is not installed: pip install 'p2pfl-mesh[{extra}]'")


class NetError(P2pflError):
    """An algorithm asked its Net for something impossible."""


class NotANeighbor(NetError):
    """A body was addressed to a peer that is no neighbour, or that stopped listening."""


class Deadlock(NetError):
    """In one process: every peer waits for a message and none is under way."""


class HandshakeError(P2pflError):
    """A neighbour runs another protocol version, another run or another run file."""


class WireError(P2pflError):
    """A neighbour sent something this peer does not take. Dropped, counted, logged; never fatal."""


class Malformed(WireError):
    """Not a message of this protocol."""


class WrongVersion(WireError):
    """A message of another protocol version."""


class WrongRun(WireError):
    """A message of another run."""


class Unexpected(WireError):
    """Well formed, but with a kind, sender, dtype or shape that this peer does not take."""
