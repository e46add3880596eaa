"""All errors that the project raises on purpose.

    P2pflError
    ├── RunFileError            the run file is invalid: where, which key, what was found, what is allowed
    │   ├── ChangedDataset      the dataset has changed since the run began
    │   └── PluginError         the code of a plug-in is wrong or has failed: its file and line
    ├── Diverged                every result of a peer was discarded, because values had diverged
    ├── DataError               a dataset is missing, damaged, or too small for its partition
    ├── ModelError              a network does not fit the images or the method
    ├── RunFolderError          a run folder cannot be read or written, or lacks what the command needs
    │   ├── WriteError          a file in it cannot be written: disk full, no permission, folder deleted
    │   │   ├── JournalError    a message that a neighbor still needs was deleted from disk
    │   │   ├── SpoolError      received models cannot be written to the temporary folder
    │   │   └── UnsuitableFileSystem  a file system has no locks, or no FIFOs
    │   ├── CheckpointError     a checkpoint is unreadable or belongs to another run
    │   ├── AddressInUse        another process listens at the address of a peer
    │   └── AlreadyRunning      another process runs the peer
    ├── RunFailed               a run that was started from Python has failed
    ├── KeysError               the peers' keys are missing, damaged, or readable by others
    ├── OutOfMemory             a peer does not fit into the available memory
    ├── MissingExtra            an optional package is not installed
    ├── NetError                an algorithm misused its Net
    │   ├── BodyTooLarge        it sent more than transport.max_message
    │   ├── HeaderTooLarge      it sent too much beside its tensors
    │   ├── NotANeighbor        it addressed a peer that is not a neighbor, or whose edge is dropped
    │   └── Deadlock            in one process: every peer waits, and no message is in flight
    ├── HandshakeError          a neighbor uses another protocol version, run or run file
    └── WireError               a neighbor sent an invalid message: dropped, counted and logged, never fatal
        ├── Malformed           not a message of this protocol
        ├── WrongVersion        another protocol version
        ├── WrongRun            a message of another run
        └── Unexpected          well-formed, but with a kind, sender, field, dtype or shape that is not accepted

The message of every error is one line that includes the remedy. Nothing in the project raises a bare ``Exception``.
"""

from __future__ import annotations

import errno
import inspect
import os
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any


class P2pflError(Exception):
    """Base of all errors that this project raises on purpose."""

    exit_code = 1
    """Exit code of a peer that ends because of it."""

    def __reduce__(self) -> tuple[Any, ...]:
        # Not by the constructor: some errors' constructors take other arguments than the message.
        return _restore, (type(self), self.args, self.__dict__)


def _restore(kind: type[P2pflError], args: tuple[Any, ...], attributes: dict[str, Any]) -> P2pflError:
    error = kind.__new__(kind, *args)
    error.__dict__.update(attributes)
    return error


def error_text(error: BaseException) -> str:
    """Return the message to show a user; errors from elsewhere are prefixed with their class."""
    return str(error) if isinstance(error, P2pflError) else f"{type(error).__name__}: {error}"


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message; without one, its class."""
    return str(error).partition("\n")[0] or type(error).__name__


@dataclass(frozen=True)
class Problem:
    """One problem in a run file.

    Attributes:
        where: ``file:line``, or the ``--set`` flag of the value.
        key: dotted path of the key, e.g. ``algorithm.lr``; empty for the file as a whole.
        message: what was found, what is allowed, what to do.
    """

    where: str
    key: str
    message: str

    def __str__(self) -> str:
        return ": ".join(part for part in (self.where, self.key, self.message) if part)


class RunFileError(P2pflError):
    """The run file is invalid; ``problems`` lists every problem found, one per line of the message."""

    def __init__(self, problems: Iterable[Problem]) -> None:
        self.problems = list(problems)
        super().__init__("\n".join(map(str, self.problems)))


class ChangedDataset(RunFileError):
    """The dataset has changed since the run began. Restarting the peer does not help."""

    exit_code = os.EX_CONFIG


class Diverged(P2pflError):
    """Every result of a peer was discarded, since its values had diverged. Restarting it does not help."""

    exit_code = os.EX_CONFIG


class PluginError(RunFileError):
    """The code of a plug-in is wrong or has failed; the message begins with its file and line."""

    def __init__(self, file: str, line: int, message: str) -> None:
        super().__init__([Problem(f"{file}:{line}", "", message)])

    @classmethod
    def of(cls, function: object, message: str) -> PluginError:
        """Return the error of a function or method; the message begins with where that is defined."""
        while isinstance(function, partial):
            function = function.func
        code = getattr(inspect.unwrap(getattr(function, "forward", function)), "__code__", None)  # type: ignore[arg-type]
        if code is None:
            return cls(f"{type(function).__module__}.{type(function).__qualname__}", 1, message)
        return cls(code.co_filename, code.co_firstlineno, message)

    def during(self, activity: str) -> PluginError:
        """Return the error with the activity before the message: ``my_method.py:12: round 3: KeyError: 7``."""
        (problem,) = self.problems
        file, _, line = problem.where.rpartition(":")
        return PluginError(file, int(line), f"{activity}: {problem.message}")


class DataError(P2pflError):
    """A dataset is missing, damaged, or too small for its partition."""


class ModelError(P2pflError):
    """A network does not fit the images or the method."""


class ModelWarning(UserWarning):
    """A run with this network works, but may not repeat itself."""


class RunFolderError(P2pflError):
    """A run folder cannot be read or written, or lacks what the command needs."""


WRITTEN_BY_RUNS = ("addresses", "hosts.json", "keys", "mps", "peers", "run.json", "slots", "tracking")
"""What launchers and peers write in a run folder; they end if they cannot. Reports and exports may be there too."""


class WriteError(RunFolderError):
    """A file cannot be written. The message names the cause and, if that ends a run, how to continue it."""

    exit_code = os.EX_CANTCREAT
    """Exit code of a peer that ends because of it: restarting the peer is useless until a user has intervened."""

    def __init__(self, path: Path, error: OSError) -> None:
        # Not with methods of Path: what cannot be written may be in a folder that cannot be read either.
        root = next((folder for folder in path.parents if os.path.exists(folder / "run.yaml")), None)
        written = root is not None and path.relative_to(root).parts[0] in WRITTEN_BY_RUNS
        resume = f", then `p2pfl resume {root}`" if written else ""
        parents = path.absolute().parents
        missing = [folder for folder in parents if not os.path.isdir(folder)]
        if missing and error.errno not in (errno.EACCES, errno.EPERM):
            advice = f"{missing[-1]} {'is not a folder' if os.path.lexists(missing[-1]) else 'does not exist'}"
        elif error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            advice = f"{shutil.disk_usage(parents[0]).free} bytes are free there; make room{resume}"
        elif error.errno in (errno.EMFILE, errno.ENFILE):
            advice = f"raise the limit of open files (`ulimit -n`){resume}"
        else:
            advice = f"make it writable{resume}"
        super().__init__(f"{path}: cannot be written: {error.strerror or error}; {advice}")


class SpoolError(WriteError):
    """Received models cannot be written to the temporary folder."""

    def __init__(self, folder: str, error: OSError) -> None:
        advice = "make room, or set TMPDIR to a folder with more room; then `p2pfl resume` the run"
        RunFolderError.__init__(self, f"cannot spool models in {folder}: {error.strerror}; {advice}")


class UnsuitableFileSystem(WriteError):
    """A file system lacks what a run needs, such as locks."""

    def __init__(self, path: Path, done: str, error: OSError, remedy: str) -> None:
        RunFolderError.__init__(self, f"{path}: cannot be {done}: {error.strerror or error}; {remedy}")


class AddressInUse(RunFolderError):
    """Another process listens at the address of a peer, perhaps only for a moment."""

    exit_code = os.EX_TEMPFAIL
    """The launcher tries again for a while."""


class AlreadyRunning(RunFolderError):
    """Another process runs this peer, perhaps on another host or in another container."""

    exit_code = os.EX_OSFILE
    """The launcher does not start the peer again."""


class JournalError(WriteError):
    """A message that a neighbor still needs is no longer in the journal on disk, and nothing can bring it back."""

    def __init__(self, neighbor: int, error: OSError) -> None:
        path = Path(error.filename) if error.filename else None
        if path is not None and not path.parent.is_dir():
            super().__init__(path, error)  # the whole folder was deleted
            return
        root = next((folder for folder in path.parents if (folder / "run.yaml").exists()), None) if path else None
        where = f"{path}: {error.strerror}" if path else str(error)
        again = f"p2pfl launch {root / 'run.yaml'}" if root else "p2pfl launch with its run.yaml"
        RunFolderError.__init__(
            self,
            f"{where}: peer {neighbor} still needs a message that was in it. Somebody deleted or changed a file of a "
            f"running run; start the run again: {again}",
        )


class OutOfMemory(P2pflError):
    """A peer does not fit into the available memory."""


class CheckpointError(RunFolderError):
    """A checkpoint is unreadable or belongs to another run."""


class RunFailed(P2pflError):
    """A run that was started from Python has failed: why."""


class KeysError(P2pflError):
    """The peers' keys are missing, damaged, or readable by others."""


class MissingExtra(P2pflError):
    """An optional package is not installed."""

    def __init__(self, package: str, extra: str, purpose: str) -> None:
        super().__init__(f"{purpose} needs {package}, which is not installed: pip install 'p2pfl-mesh[{extra}]'")


class NetError(P2pflError):
    """An algorithm misused its Net."""


class BodyTooLarge(NetError):
    """An algorithm sent a body of more bytes than the run file allows. Restarting the peer does not help."""

    exit_code = os.EX_CONFIG

    def __init__(self, size: int, largest: float) -> None:
        super().__init__(
            f"a body of {size} bytes cannot be sent: transport.max_message is {largest}; raise it in run.yaml of the "
            "run folder (or in the file of `p2pfl peer --file`), then restart the peers, e.g. by `p2pfl resume`"
        )


class HeaderTooLarge(NetError):
    """An algorithm sent a body with too much beside its tensors. Restarting the peer does not help."""

    exit_code = os.EX_CONFIG

    def __init__(self, kind: str, size: int, largest: int) -> None:
        super().__init__(
            f"{kind} cannot be sent: its header has {size} bytes, at most {largest} are allowed; send long lists and "
            "texts as tensors, and concatenate many small tensors"
        )


class NotANeighbor(NetError):
    """An algorithm addressed a peer that is not a neighbor, or whose edge is dropped."""


class Deadlock(NetError):
    """In one process: every peer waits, and no message is in flight."""


class HandshakeError(P2pflError):
    """A neighbor uses another protocol version, run or run file."""


class WireError(P2pflError):
    """A neighbor sent an invalid message. It is dropped, counted and logged, and never fatal."""


class Malformed(WireError):
    """Not a message of this protocol."""


class WrongVersion(WireError):
    """A message of another protocol version."""


class WrongRun(WireError):
    """A message of another run."""


class Unexpected(WireError):
    """Well-formed, but with a kind, sender, field, dtype or shape that is not accepted."""
