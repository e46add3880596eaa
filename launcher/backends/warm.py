"""Client of the warm process, which has torch imported and forks peers on request. The server is peers/warm.py.

They exchange newline-delimited JSON over the server's stdin and stdout:

    → {"run": "<folder>", "peers": [0, 1, 2]}
    ← {"event": "ready"}
    ← {"event": "started", "peer": 0, "pid": 123}
    ← {"event": "exited", "peer": 0, "code": 0, "error": ""}

``code`` is negative if a signal killed the peer; ``error`` is what it reported. Peers inherit none of these
pipes: they keep running when the client or the server exits.
"""

from __future__ import annotations

import gc
import json
import os
import runpy
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import closing, suppress
from io import FileIO
from multiprocessing.context import ForkProcess  # noqa: TID251  # only a type
from typing import TypeVar

from launcher.backends.group import Event
from launcher.child import in_lasting_child
from launcher.descriptors import ProcessEnd, memory_file
from p2pfl import PeerId
from p2pfl.one_thread import ENVIRONMENT
from p2pfl.run_folder.folder import RunFolder

T = TypeVar("T")

EXIT_TIMEOUT = 30.0
"""Seconds that an idle warm process may take to exit, also after it has closed its output."""


class _Fork:
    """A fork of this process, as a Popen."""

    def __init__(self, process: ForkProcess, stdin: FileIO, stdout: FileIO) -> None:
        self.stdin, self.stdout = stdin, stdout
        self.pid = process.pid or 0
        self.kill = process.kill
        self._process = process

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        if timeout is not None and self._process.exitcode is None:
            # Not join(timeout): it waits for the end of a pipe that the peers hold open too.
            with closing(ProcessEnd(self.pid)) as end:
                end.wait(timeout)
            if self._process.exitcode is None:
                raise subprocess.TimeoutExpired("peers --warm", timeout)
        self._process.join()
        assert self._process.exitcode is not None
        return self._process.exitcode


class WarmProcess:
    """The warm process, in a session of its own, so that the terminal's Ctrl-C reaches the launcher only.

    As a context manager, it closes the process at the end, and kills it if an exception is raised before any peer
    was requested.
    """

    def __init__(self, environment: Mapping[str, str] | None = None, *, start: bool = True) -> None:
        self._environment = dict(environment or {})
        self.fork_requested = False
        # In memory, because the disk may be full. Closed in __exit__.
        self._errors = os.fdopen(memory_file("p2pfl warm"), "w+b")
        if start:
            self._start()

    @classmethod
    def after(cls, function: Callable[[], T]) -> tuple[WarmProcess, T]:
        """Call a function that imports torch in a new process, which then becomes the warm process.

        Returns:
            The warm process, and what the function returned.

        Raises:
            P2pflError, SystemExit: as ``in_child``.
        """
        warm = cls(start=False)
        requests, events = os.pipe(), os.pipe()

        def prepare() -> T:
            os.setsid()
            # What this process was forked with is never collected here: garbage of the launcher has descriptors whose
            # numbers may be those of others by now, and would close them.
            gc.freeze()
            os.environ.update(ENVIRONMENT)
            return function()

        def serve() -> None:
            sys.stdout.flush()  # what a plug-in has printed, before stdout becomes the pipe of events
            for descriptor, target in ((warm._errors.fileno(), 2), (requests[0], 0), (events[1], 1)):
                os.dup2(descriptor, target)
            # Peers outlive the launcher, and must not hold open what it has inherited or opened. The numbers stay in
            # use, because its objects still have them.
            warm._errors.close()
            null = os.open(os.devnull, os.O_RDWR)
            for name in os.listdir("/proc/self/fd"):
                if int(name) not in (0, 1, 2, null):
                    try:
                        os.dup2(null, int(name), inheritable=False)
                    except OSError:  # its number is above the limit on open files, which was lowered since
                        os.close(int(name))
            sys.argv = ["peers", "--warm"]
            runpy.run_module("peers", run_name="__main__", alter_sys=True)

        try:
            result, process = in_lasting_child(prepare, serve)
        except BaseException:
            warm._errors.close()
            for descriptor in (requests[1], events[0]):
                os.close(descriptor)
            raise
        finally:
            os.close(requests[0])
            os.close(events[1])
        warm._process = _Fork(process, FileIO(requests[1], "w"), FileIO(events[0]))
        warm.exited, warm._pending = False, b""
        return warm, result

    def _start(self) -> None:
        self.exited = False
        self._pending = b""
        self._process: subprocess.Popen[bytes] | _Fork = subprocess.Popen(
            # -P: ignore folders called peers or p2pfl in the working directory.
            [sys.executable, "-P", "-m", "peers", "--warm"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            start_new_session=True,
            env={**os.environ, **self._environment},
            bufsize=0,
        )

    def restart(self) -> None:
        """Start another process in place of one that has ``exited``."""
        self.close()
        self._start()

    def fork(self, folder: RunFolder, peers: Iterable[PeerId]) -> None:
        """Request the peers. Each is answered by a ``started`` event and, at its end, by ``exited``.

        If the process has died, ``events`` will tell, after those that it sent before.
        """
        self.fork_requested = True
        assert self._process.stdin is not None
        request = json.dumps({"run": str(folder.root), "peers": list(peers)}) + "\n"
        with suppress(BrokenPipeError):
            self._process.stdin.write(request.encode())

    def events(self, timeout: float) -> list[Event]:
        """Return the events since the last call; wait up to ``timeout`` seconds. Set ``exited`` at end of file."""
        assert self._process.stdout is not None
        if self.exited:
            time.sleep(timeout)  # nothing will arrive, but the caller polls at this pace
            return []
        if not select.select([self._process.stdout], [], [], timeout)[0]:
            return []
        chunk = os.read(self._process.stdout.fileno(), 1 << 16)
        self.exited = not chunk
        *lines, self._pending = (self._pending + chunk).split(b"\n")
        return [Event(**json.loads(line)) for line in lines]

    @property
    def outcome(self) -> str:
        """How an ``exited`` process ended."""
        try:
            code = self._process.wait(EXIT_TIMEOUT)
        except subprocess.TimeoutExpired:
            return "has closed its output"
        return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"

    @property
    def stderr(self) -> str:
        """What the process has written to stderr."""
        return os.pread(self._errors.fileno(), 1 << 20, 0).decode(errors="replace")

    def kill(self) -> None:
        """Kill the process and everything that it has forked in its session."""
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
        self.exited = True
        self.close()

    def close(self) -> None:
        """Close its stdin, and wait until it exits, which it does after the last peer that it has forked."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        try:
            self._process.wait(EXIT_TIMEOUT)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()

    def __enter__(self) -> WarmProcess:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None and not self.fork_requested:
            self.kill()
        else:
            self.close()
        self._errors.close()
