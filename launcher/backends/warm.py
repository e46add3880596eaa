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

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from p2pfl import PeerId
from p2pfl.session.run_folder import RunFolder

EXIT_TIMEOUT = 30.0
"""Seconds that an idle warm process may take to exit."""


@dataclass(frozen=True)
class Event:
    """A message of the warm process. Fields that do not apply to an event have the defaults."""

    event: Literal["ready", "started", "exited"]
    peer: PeerId = -1
    pid: int = 0
    code: int = 0
    error: str = ""


class WarmProcess:
    """The warm process, in a session of its own, so that the terminal's Ctrl-C reaches the launcher only.

    As a context manager, it closes the process at the end, and kills it if an exception is raised before any peer
    was requested.
    """

    def __init__(self, environment: Mapping[str, str] | None = None) -> None:
        self._environment = dict(environment or {})
        self.fork_requested = False
        # In memory, because the disk may be full. Closed in __exit__.
        self._errors = os.fdopen(os.memfd_create("p2pfl warm"), "w+b")
        self._start()

    def _start(self) -> None:
        self.exited = False
        self._pending = b""
        self._process = subprocess.Popen(
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
        """Request the peers. Each is answered by a ``started`` event and, at its end, by ``exited``."""
        self.fork_requested = True
        assert self._process.stdin is not None
        request = json.dumps({"run": str(folder.root), "peers": list(peers)}) + "\n"
        try:
            self._process.stdin.write(request.encode())
        except BrokenPipeError:
            self.exited = True

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
        code = self._process.wait()
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
