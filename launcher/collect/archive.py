"""Extract the tar archive that a command on another host or in a container writes. The archive may be malicious."""

from __future__ import annotations

import errno
import os
import resource
import shutil
import subprocess
import tarfile
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO

from launcher.collect.limits import Limit
from launcher.errors import CollectError

MAX_HEADER = 1 << 16
"""Most bytes before the data of a member. ``tarfile`` reads long names and extended headers into memory."""
MAX_MESSAGE = 1 << 20
"""Most bytes of a command's error messages."""


def untar(
    command: Sequence[str], into: Path, wanted: Callable[[str], bool], limit: Limit, allowed: Sequence[int] = (0,)
) -> None:
    """Run ``command`` and extract the ``wanted`` files from the tar archive that it writes.

    Args:
        allowed: exit codes of the command that are no error.

    Raises:
        CollectError: the command failed, or the archive is invalid or beyond the limit.
    """
    with tempfile.TemporaryFile() as stderr:
        try:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                # Not a pipe: a master connection that ssh leaves in the background would keep it open.
                stderr=stderr,
                preexec_fn=_limit_messages,
            )
        except OSError as error:
            raise CollectError(f"{command[0]}: {error.strerror}") from None
        problem = ""
        with process:
            assert process.stdout is not None
            try:
                _extract(_Bounded(process.stdout, limit), into, wanted, limit)
            except (tarfile.TarError, ValueError, OverflowError) as error:
                problem = f"incomplete or invalid tar archive: {error}"
            except BaseException:
                process.kill()
                raise
        stderr.seek(0)
        message = "; ".join(stderr.read().decode(errors="replace").split("\n")[-4:]).strip("; ")[-500:]
    if problem or process.returncode not in allowed:
        # The error of the command explains more than what its archive lacks.
        raise CollectError(message or problem or f"{command[0]}: exit code {process.returncode}")


def _limit_messages() -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (MAX_MESSAGE, MAX_MESSAGE))


class _Bounded:
    """A stream for ``tarfile`` that ends with an error beyond the limit, or at a header that is too long."""

    def __init__(self, stream: IO[bytes], limit: Limit) -> None:
        self._stream = stream
        self._limit = limit
        self._position = 0
        self._until = MAX_HEADER

    def read(self, count: int) -> bytes:
        data = self._stream.read(count)
        self._limit.count_bytes(len(data))
        self._position += len(data)
        if self._position > self._until + tarfile.RECORDSIZE:  # tarfile reads whole records
            raise tarfile.ReadError(f"a header of more than {MAX_HEADER} bytes")
        return data

    def expect(self, member: tarfile.TarInfo) -> None:
        """Allow the data of a member, and the next header."""
        self._until = member.offset_data + member.size + MAX_HEADER


def _extract(stream: _Bounded, into: Path, wanted: Callable[[str], bool], limit: Limit) -> None:
    with tarfile.open(fileobj=stream, mode="r|") as archive:  # type: ignore[call-overload]
        while (member := archive.next()) is not None:
            limit.count_file()
            if member.issparse():  # their holes and segments are not bounded by their size
                raise CollectError(
                    f"{member.name} is sparse in the tar archive, which `p2pfl collect` does not accept"
                )
            stream.expect(member)
            if member.isreg() and wanted(member.name):
                limit.check_size(member.name, member.size)
                _write(archive, member, into / member.name)
            archive.members.clear()  # not needed again, and unbounded
            archive.pax_headers.clear()
    while stream.read(tarfile.RECORDSIZE):  # the padding: a closed pipe would kill the sender
        pass


def _write(archive: tarfile.TarFile, member: tarfile.TarInfo, target: Path) -> None:
    """Write a regular file with the process's own permissions. (Extraction filters need Python 3.11.4.)"""
    source = archive.extractfile(member)
    assert source is not None  # regular
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        file = target.open("wb")
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise CollectError(f"{member.name[:100]} cannot be created here: {error.strerror}") from None
    with source, file:
        shutil.copyfileobj(source, file)
    with suppress(OSError, OverflowError, ValueError):  # any number may be given
        os.utime(target, (member.mtime, member.mtime))
