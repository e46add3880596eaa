"""Descriptors of files in memory and of the ends of processes.

Python built with old headers lacks the functions for them, and a sandbox may refuse the calls.
"""

from __future__ import annotations

import os
import select
import tempfile
import threading
from contextlib import suppress

from launcher.errors import LaunchError


def memory_file(name: str) -> int:
    """Return the descriptor of a new file in memory, because the disk may be full. The caller closes it.

    Raises LaunchError if there is neither memory nor disk for it.
    """
    with suppress(AttributeError, OSError):
        return os.memfd_create(name)
    for folder in ("/dev/shm", None):
        try:
            with tempfile.TemporaryFile(dir=folder) as file:
                return os.dup(file.fileno())
        except OSError as error:
            problem = error
    raise LaunchError(f"no temporary file can be created: {problem.strerror}; set TMPDIR to a folder with room")


class ProcessEnd:
    """A descriptor that can be read once a child of this process has ended, for ``select``."""

    def __init__(self, pid: int) -> None:
        try:
            self._descriptor = os.pidfd_open(pid)
        except (AttributeError, OSError):
            self._descriptor, writer = os.pipe()
            threading.Thread(target=_report, args=(pid, writer), name="process end", daemon=True).start()

    def fileno(self) -> int:
        return self._descriptor

    def wait(self, timeout: float) -> None:
        """Wait up to ``timeout`` seconds."""
        select.select([self], [], [], timeout)

    def close(self) -> None:
        os.close(self._descriptor)


def _report(pid: int, writer: int) -> None:
    with suppress(ChildProcessError):  # another thread has waited for it
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)  # leaves the exit code to others
    with suppress(OSError):  # the waiting side has closed it
        os.write(writer, b"\0")  # not only closed: a fork would keep a copy open
    os.close(writer)
