"""Atomic, durable and line-wise file access. What cannot be written raises WriteError, and leaves no partial data."""

from __future__ import annotations

import json
import os
import resource
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from itertools import count
from pathlib import Path
from typing import Any

from p2pfl.errors import RunFolderError, WriteError

Content = bytes | memoryview

_numbers = count()


def allow_many_files() -> None:
    """Raise this process's limit on open files: hundreds of peers need more than the usual soft limit of 1024."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


@contextmanager
def write_errors(path: Path | str) -> Iterator[None]:
    """Raise WriteError for ``path`` in place of OSError."""
    try:
        yield
    except OSError as error:
        raise WriteError(Path(path), error) from error


def obstacle(folder: Path) -> str | None:
    """Return what else is in the place of a folder or of one above it, if anything; then it cannot be created."""
    folder = folder.absolute()
    while not os.path.lexists(folder):
        folder = folder.parent
    if folder.is_dir():
        return None
    broken = folder.is_symlink() and not folder.exists()
    return f"{folder} is a broken symbolic link to {os.readlink(folder)}" if broken else f"{folder} is not a folder"


def write_atomically(path: Path, data: Content, *, durable: bool = False, mode: int = 0o666) -> None:
    """Replace a whole file: a reader sees either the old bytes or the new ones.

    Args:
        durable: wait until the data is on disk, so that it survives a power failure.
        mode: permissions of the file, less what the umask takes away.

    Raises:
        WriteError: the old file is left in place.
    """
    with write_errors(path), closing(NewFile(path, mode)) as file:
        file.write(data, 0)
        file.replace(durable=durable)


def write_all(file: int, data: Content, at: int) -> int:
    """Write all of ``data`` at an offset of an open file and return the end. Raises OSError."""
    rest = memoryview(data).cast("B")
    while rest:
        written = os.pwrite(file, rest, at)
        rest, at = rest[written:], at + written
    return at


class NewFile:
    """A file that can replace ``path``. Its methods raise OSError."""

    def __init__(self, path: Path, mode: int = 0o666) -> None:
        self.path = path
        # Not a ``Path``: each interns the names in it, and the table of interned strings would grow with every file.
        self.temporary = f"{path.parent}/.{path.name}.{os.getpid()}.{next(_numbers)}.tmp"
        self._file = os.open(self.temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, mode)

    def write(self, data: Content, at: int) -> None:
        write_all(self._file, data, at)

    def replace(self, keep: Path | None = None, *, durable: bool = True) -> None:
        """Replace ``path`` by this file.

        Args:
            durable: only when it is on disk.
            keep: where to move the old file. Between the two renames, and after a crash there, only ``keep`` exists.
        """
        if durable:
            os.fsync(self._file)
        if keep is not None:
            with suppress(FileNotFoundError):
                self.path.replace(keep)
        os.replace(self.temporary, self.path)
        if durable:
            _fsync(self.path.parent)

    def close(self) -> None:
        """Close the file, and delete it unless it has replaced ``path``."""
        os.close(self._file)
        with suppress(OSError):
            os.unlink(self.temporary)


def overwrite(path: Path, data: Content) -> None:
    """Overwrite a small text file in place, for one that changes often: much cheaper than to replace it.

    A reader may see a mixture (``read_json`` with ``stable`` does not), and a power failure may damage the file.
    Spaces cover the rest of a longer content. Raises WriteError.
    """
    with write_errors(path):
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            os.pwrite(descriptor, bytes(data).ljust(os.fstat(descriptor).st_size), 0)
        finally:
            os.close(descriptor)


def append_line(path: Path, line: str, *, durable: bool = False) -> None:
    """Append a whole line, or nothing. Raises WriteError."""
    with write_errors(path), path.open("ab", buffering=0) as file:
        before = os.fstat(file.fileno()).st_size
        rest = memoryview(f"{line}\n".encode())
        try:
            while rest:
                rest = rest[file.write(rest) :]
            if durable:
                os.fsync(file.fileno())
        except OSError:
            with suppress(OSError):
                file.truncate(before)
            raise


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Read one JSON object per line, up to the first line that is damaged or was cut off by a crash.

    Returns an empty list if there is no such file. Raises RunFolderError if it cannot be read.
    """
    found: list[dict[str, Any]] = []
    for line in (_read(path) or b"").splitlines(keepends=True):
        value = json_object(line) if line.endswith(b"\n") else None
        if value is None:
            break
        found.append(value)
    return found


def read_undamaged_lines(path: Path) -> tuple[list[dict[str, Any]], int]:
    """Read one JSON object per line; also count the lines that are damaged, not only cut off at the end."""
    lines = (_read(path) or b"").splitlines(keepends=True)
    found = [value for line in lines if line.endswith(b"\n") and (value := json_object(line)) is not None]
    return found, sum(line.endswith(b"\n") for line in lines) - len(found)


def sync(path: Path) -> None:
    """Wait until the content of ``path``, if it exists, is on disk (not necessarily its name). Raises WriteError."""
    with write_errors(path), suppress(FileNotFoundError):
        _fsync(path)


def _fsync(path: Path) -> None:
    """Flush a file, or the names in a folder, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_json(path: Path, value: Any, *, durable: bool = False) -> None:
    write_atomically(path, (json.dumps(value) + "\n").encode(), durable=durable)


def read_json(path: Path, *, stable: bool = False) -> dict[str, Any] | None:
    """Read a JSON object; None if there is no such file. Raises RunFolderError if it is damaged.

    Args:
        stable: the file may be overwritten in place: read until two readings agree.
    """
    content = _read(path)
    while stable and content != (content := _read(path)):
        pass
    if content is None:
        return None
    value = json_object(content)
    if value is None:
        raise RunFolderError(f"{path}: damaged: not a JSON object")
    return value


def is_file(path: Path) -> bool:
    """Return whether the file exists. Raises RunFolderError if its folder cannot be read."""
    try:
        return path.is_file()
    except OSError as error:
        raise RunFolderError(f"{path}: cannot be read: {error.strerror}") from error


def _read(path: Path) -> bytes | None:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise RunFolderError(f"{path}: cannot be read: {error.strerror}") from error


def json_object(text: bytes) -> dict[str, Any] | None:
    """Return the JSON object that is written there; None if there is none."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):  # of brackets nested without end
        return None
    return value if isinstance(value, dict) else None
