"""``hosts.json`` in the launcher's run folder: which peers run on other hosts, and which launcher follows them.

{"launcher": 4711, "host": "login1", "running": {"3": "beta"}, "answered": 5}

The launcher is 0 if there is none; ``running`` is what the hosts reported last. Commands on other hosts that share
the run folder, e.g. on the login node while the launcher runs in a batch job, cannot see its process. They append a
line to the file ``.request``, which the launcher reads again and again, and wait until ``answered`` has reached the
end of that line.
A launcher on another host counts as alive until it leaves a request unanswered.
"""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

import psutil

from launcher.facts.registration import Request, Requests, launcher_title, process_with, request
from p2pfl import PeerId
from p2pfl.errors import RunFolderError
from p2pfl.process_title import set_title
from p2pfl.run_folder.files import read_json, write_json

NAME = "hosts.json"
ANSWER_TIMEOUT = 20.0
"""Seconds within which a living launcher answers a request; network file systems show changes late."""
START_TIMEOUT = 120.0
"""Seconds that a starting launcher has to answer; it answers once it has connected to all hosts."""
POLL_INTERVAL = 0.1
"""Seconds between two looks at the answer."""


@dataclass(frozen=True)
class HostState:
    """The peers of a run that run on hosts, by the name of the host, and the launcher: process id and host name.

    ``answered``: bytes of the requests that the launcher has read; -1 while it has not started the peers yet.
    """

    launcher: int = 0
    running: Mapping[PeerId, str] = field(default_factory=dict)
    host: str = field(default_factory=socket.gethostname)
    answered: int = 0

    @classmethod
    def read(cls, root: Path) -> HostState | None:
        """Return the state in the run folder ``root``; None for a run that never had other hosts."""
        with suppress(RunFolderError, ValueError, KeyError, TypeError, AttributeError):
            if (found := read_json(root / NAME)) is not None:
                running = {int(peer): str(host) for peer, host in found["running"].items()}
                return cls(int(found["launcher"]), running, str(found["host"]), int(found["answered"]))
        return None

    def write(self, root: Path) -> None:
        write_json(root / NAME, vars(self))

    @property
    def is_here(self) -> bool:
        """Whether the launcher ran on this host, so that its process can be found."""
        return self.host == socket.gethostname()

    def process(self, root: Path) -> psutil.Process | None:
        """Return the launcher if it lives on this host."""
        return process_with(self.launcher, [launcher_title(root)]) if self.is_here and self.launcher else None

    def followed(self, root: Path) -> bool:
        """Return whether a launcher follows the run; one on another host is believed to until ``ask`` fails."""
        return self.process(root) is not None if self.is_here else self.launcher != 0

    def answers(self, root: Path) -> bool:
        """Return whether a launcher follows the run, after asking one on another host. Raises WriteError."""
        return self.followed(root) and (self.is_here or ask(root, "answer"))


@contextmanager
def starting(root: Path) -> Iterator[Requests]:
    """Let `p2pfl stop` find this launcher while it connects to the hosts of the run in ``root``.

    Yields the requests of commands on other hosts, which may send one from now on.
    """
    requests = Requests(root)
    set_title(launcher_title(root))
    state = HostState.read(root) or HostState()
    replace(state, launcher=os.getpid(), host=socket.gethostname(), answered=-1).write(root)
    before = signal.signal(signal.SIGTERM, lambda number, frame: signal.raise_signal(signal.SIGINT))
    try:
        yield requests
    except BaseException:
        replace(state, launcher=0).write(root)
        raise
    finally:
        signal.signal(signal.SIGTERM, before)


def ask(root: Path, what: Request, timeout: float = ANSWER_TIMEOUT) -> bool:
    """Send a request to the launcher of a run. Return whether it has received it in time. Raises WriteError.

    A starting launcher has START_TIMEOUT; after False, it may still receive the request later.
    """
    end_of_line = request(root, what)
    began = time.monotonic()
    while True:
        state = HostState.read(root)
        if state is not None and state.answered >= end_of_line:
            return True
        if state is None or not state.followed(root):
            return False
        if time.monotonic() - began > (timeout if state.answered >= 0 else START_TIMEOUT):
            return False
        time.sleep(POLL_INTERVAL)
