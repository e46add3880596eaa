"""Our end of the warm process, which forks peers on request; its own end is peers/warm.py.

It speaks newline-delimited JSON on its stdin and stdout:

    → {"run": "<folder>", "peers": [0, 1, 2]}
    ← {"event": "ready"}
    ← {"event": "started", "peer": 0, "pid": 123}
    ← {"event": "exited", "peer": 0, "code": 0, "words": ""}    negative: killed by that signal;
                                                    words: why it failed, as it says itself

Peers hold none of these pipes. If this end goes away, or the warm process does, they go on.
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

from p2pfl.runfolder import PeerId, RunFolder

GOODBYE = 30.0
"""Seconds that an idle warm process may take to leave."""


@dataclass(frozen=True)
class Event:
    """Something that the warm process says; the fields that make no sense for an event are as given here."""

    event: Literal["ready", "started", "exited"]
    peer: PeerId = -1
    pid: int = 0
    code: int = 0
    words: str = ""


class WarmProcess:
    """A child in a session of its own, so that the terminal's Ctrl-C reaches the launcher only.

    Used as a context manager it is released at the end, and killed if an exception passes before it was asked
    for peers.
    """

    def __init__(self, environment: Mapping[str, str]) -> None:
        self.environment = dict(environment)
        self.gone = False
        self.asked = False
        self._pending = b""
        # In memory: what goes wrong may be that the disk is full. Closed in __exit__.
        self._errors = os.fdopen(os.memfd_create("p2pfl warm"), "w+b")
        self._process = subprocess.Popen(
            # -P: a folder called peers or p2pfl, where the user stands, must not be taken for ours.
            [sys.executable, "-P", "-m", "peers", "--warm"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            start_new_session=True,
            env={**os.environ, **environment},
            bufsize=0,
        )

    def ask(self, folder: RunFolder, peers: Iterable[PeerId]) -> None:
        """Have the peers forked; each answers with a ``started`` event, and in the end with ``exited``."""
        self.asked = True
        assert self._process.stdin is not None
        request = json.dumps({"run": str(folder.root), "peers": list(peers)}) + "\n"
        try:
            self._process.stdin.write(request.encode())
        except BrokenPipeError:
            self.gone = True

    def events(self, timeout: float) -> list[Event]:
        """What was said since the last call; waits up to ``timeout`` seconds. Sets ``gone`` when it is dead."""
        assert self._process.stdout is not None
        if self.gone:
            time.sleep(timeout)  # nothing will come, but the caller keeps its pace
            return []
        if not select.select([self._process.stdout], [], [], timeout)[0]:
            return []
        chunk = os.read(self._process.stdout.fileno(), 1 << 16)
        self.gone = not chunk
        *lines, self._pending = (self._pending + chunk).split(b"\n")
        return [Event(**json.loads(line)) for line in lines]

    @property
    def errors(self) -> str:
        """What it wrote to stderr."""
        return os.pread(self._errors.fileno(), 1 << 20, 0).decode(errors="replace")

    def kill(self) -> None:
        """End it, and whatever it has forked, at once."""
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
        self.gone = True
        self.release()

    def release(self) -> None:
        """Ask for nothing more. It leaves when the peers that it has forked have ended."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        try:
            self._process.wait(GOODBYE)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()

    def __enter__(self) -> WarmProcess:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None and not self.asked:
            self.kill()
        else:
            self.release()
        self._errors.close()
