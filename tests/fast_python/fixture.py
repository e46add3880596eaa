"""The fixture ``fast_python``: an interpreter that has torch imported already."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil
import pytest

from p2pfl.one_thread import ENVIRONMENT

GRACE = 60.0
"""Seconds for commands to end by themselves after the last test: peers whose launcher was killed run to the end."""
REPOSITORY = Path(__file__).parents[2]
MODULES = (
    "torch._dynamo",
    "sklearn.datasets",
    "networkx",
    "pandas",
    "scipy.stats",
    "torchvision",
    "numpy.ma",
    "p2pfl.api",
    "peers.host",
    "peers.runtime",
    "peers.standalone",
    "peers.warm",
    "launcher.commands",
    "launcher.backends.hosts",
    "launcher.backends.launch",
    "launcher.backends.simulation",
    "launcher.commands.run",
    "launcher.commands.sweep",
    "launcher.prepare",
)
"""What most commands import."""


class FastPython:
    """A server process (see server.py), and a program that has it execute commands.

    Importing torch and the rest takes two to three CPU seconds; a fork that has all of it takes hundredths of one. It
    cannot show that an import is missing or an entry point is broken, so of each command at least one test starts
    ``sys.executable``.

    Args:
        folder: an empty folder with a short path, because it is to contain a socket.
        modules: what the server imports.
    """

    def __init__(self, folder: Path, modules: Sequence[str] = MODULES) -> None:
        self.folder = folder
        self.executable = str(folder / "python")
        """Use it like ``sys.executable``; in its processes, that is ``sys.executable``."""
        client = Path(__file__).with_name("client.py")
        Path(self.executable).write_text(f'#!/bin/sh\nexec {sys.executable} -IS {client} {folder}/socket "$@"\n')
        Path(self.executable).chmod(0o755)
        sources = os.pathsep.join(filter(None, [str(REPOSITORY), os.environ.get("PYTHONPATH")]))
        self.server = subprocess.Popen(
            [sys.executable, "-P", "-m", "tests.fast_python.server", folder, *modules],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
            # One thread: forks would wait forever for others of this process, as in peers/warm.py.
            env={**os.environ, **ENVIRONMENT, "PYTHONPATH": sources},
        )
        assert self.server.stdout is not None
        assert self.server.stdout.readline() == b"ready\n"

    def pid(self, process: subprocess.Popen[bytes] | subprocess.Popen[str]) -> int:
        """Return the process id of the command; ``process`` is its client, to which only the other signals go."""
        return int((self.folder / str(process.pid)).read_text())

    def close(self) -> None:
        """End the server, and whatever it still runs.

        Raises:
            AssertionError: a command, or a process that one has started, has outlived the tests.
        """
        assert self.server.stdin is not None
        assert self.server.stdout is not None
        this = psutil.Process(self.server.pid)
        end = time.monotonic() + GRACE
        while (left := this.children(recursive=True)) and time.monotonic() < end:
            psutil.wait_procs(left, timeout=0.1)
        titles = [f"{process.pid}: {_title(process)}" for process in left]
        self.server.stdin.close()
        self.server.stdout.close()
        self.server.wait()
        assert not left, f"processes survived the tests: {titles}"


def _title(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline()) or process.name()
    except psutil.NoSuchProcess:
        return "ended"


@pytest.fixture(scope="session")
def fast_python() -> Iterator[FastPython]:
    """One server for all tests of a worker."""
    with tempfile.TemporaryDirectory(prefix="p2pfl-tests-") as folder:  # paths of sockets are short
        started = FastPython(Path(folder))
        yield started
        started.close()


@pytest.fixture
def fast_children(fast_python: FastPython, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have what the test process starts with ``sys.executable`` executed by ``fast_python``."""
    monkeypatch.setattr(sys, "executable", fast_python.executable)
