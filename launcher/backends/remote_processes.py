"""Peers on other hosts, as ``follow`` sees them."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterable

import psutil

from launcher.backends.follow import PeerProcesses
from launcher.backends.host_group import HostGroup
from launcher.backends.warm import Event
from launcher.facts.host_state import HostState
from launcher.facts.registration import Requests
from p2pfl import PeerId
from p2pfl.errors import WriteError
from p2pfl.run_folder.folder import RunFolder, Status

REQUEST_INTERVAL = 0.5
"""Minimum seconds between two looks at the requests of other commands."""
SIGNALS = {"stop": (signal.SIGTERM,), "kill": (signal.SIGTERM, signal.SIGINT)}
"""What a request does to this process: the second request to stop kills."""


class Remote:
    """A HostGroup in the place of the warm process."""

    exited = False
    """Hosts end one by one, and the group starts them again."""
    outcome = stderr = ""
    stops_on_sigterm = True

    def __init__(self, group: HostGroup, folder: RunFolder, requests: Requests) -> None:
        self._group = group
        self._folder = folder
        self._written: HostState | None = None
        """None before the first write, and after one that has failed."""
        self._failure_noted = False
        self._failures: list[str] = []
        self._requests = requests
        self._requests_due = 0.0
        self.fork = group.fork
        self.declare_dead = group.declare_dead
        self.kill = group.cancel

    def processes(self, peers: Iterable[PeerId]) -> RemoteProcesses:
        """Return the peers to follow: ``peers``, and those that run already."""
        return RemoteProcesses({*peers, *self._group.running}, self._group)

    def events(self, timeout: float) -> list[Event]:
        found = self._group.events(timeout)
        if self._answer() or found or self._written is None:
            self.write_state(os.getpid())
        return found

    def _answer(self) -> bool:
        """Do what commands on other hosts ask for. Return whether there was a request."""
        if time.monotonic() < self._requests_due:
            return False
        self._requests_due = time.monotonic() + REQUEST_INTERVAL
        requests = self._requests.new()
        for request in requests:
            for number in SIGNALS.get(request, ()):
                os.kill(os.getpid(), number)
        return bool(requests)

    def restart(self) -> None:
        """Nothing: the group starts each host again by itself."""

    def write_state(self, launcher: int) -> None:
        """Write down which peers run and who follows them, for other commands. ``launcher``: 0 at the end.

        A failure is noted once, and the next call tries again: peers do not need the file.
        """
        group = self._group
        running = {peer: group.host_of(peer) for peer in sorted(group.running)}
        state = HostState(launcher, running, answered=self._requests.answered)
        if state == self._written:
            return
        try:
            state.write(self._folder.root)
        except WriteError as error:
            self._written = None
            if not self._failure_noted:
                self._failures.append(f"other commands cannot find the peers until this is written: {error}")
            self._failure_noted = True
        else:
            self._written, self._failure_noted = state, False

    def failures(self) -> list[str]:
        """Return what to print about a state that could not be written, each line once."""
        lines, self._failures = self._failures, []
        return lines


class RemoteProcesses(PeerProcesses):
    """Which peers on other hosts are running, and how the others exited."""

    def __init__(self, peers: Iterable[PeerId], group: HostGroup) -> None:
        super().__init__(peers)
        self._group = group
        self._pids: dict[PeerId, int] = dict(group.running)
        self.started |= self._pids.keys()

    def expect(self, peers: Iterable[PeerId]) -> None:
        peers = list(peers)
        super().expect(peers)
        for peer in peers:
            self._pids.pop(peer, None)

    def is_stale(self, status: Status) -> bool:
        return status.peer in self.running and self._pids.get(status.peer) != status.pid

    def adopt(self, peer: PeerId, process: psutil.Process | None) -> bool:
        return False

    def update(self, events: list[Event], warm_exited: bool) -> list[PeerId]:
        for event in events:
            if event.event == "started":
                self._pids[event.peer] = event.pid
                self.running.add(event.peer)
                # A signal before that may not have reached it: its host was not connected.
                self._signalled -= {(event.peer, signal.SIGTERM), (event.peer, signal.SIGKILL)}
        return super().update(events, warm_exited)

    def stop(self, *, kill: bool) -> None:
        self.stopping = True
        self.killing = kill
        number = signal.SIGKILL if kill else signal.SIGTERM
        new = [peer for peer in self.running & self._pids.keys() if (peer, number) not in self._signalled]
        self._signalled |= {(peer, number) for peer in new}
        self._group.signal(new, number)
