"""The hosts of a backend (launcher/backends/hosts.py) as a group that the launcher prepares and follows."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Self, TypeVar

from launcher import formatting
from launcher.backends import hosts as backends
from launcher.backends.group import Event, Plan
from launcher.backends.host_connection import this_version
from launcher.backends.host_files import files_of
from launcher.backends.host_group import HostGroup
from launcher.backends.hosts import Backend, BackendOptions, Host
from launcher.child import in_child
from launcher.errors import LaunchError
from launcher.facts.host_state import HostState, starting
from launcher.facts.registration import Requests
from p2pfl import PeerId
from p2pfl.errors import WriteError
from p2pfl.run_folder.folder import RunFolder

T = TypeVar("T")

REQUEST_INTERVAL = 0.5
"""Minimum seconds between two looks at the requests of other commands."""
SIGNALS = {"stop": (signal.SIGTERM,), "kill": (signal.SIGTERM, signal.SIGINT)}
"""What a request does to this process: the second request to stop kills."""


@dataclass(eq=False)
class SeveralHosts:
    """The hosts of a backend as a Group.

    Attributes:
        name: the name of the backend.
        placed: the hosts of a run that was launched before; None for a new run.
        keep_trying: start hosts again however often their processes have ended.
        host_dir: folder for run folders on other hosts; ``{host}`` is replaced by the host's name.
    """

    name: str
    backend: Backend
    placed: Sequence[Host] | None = None
    keep_trying: bool = False
    host_dir: str | None = None

    is_here = False
    _group: HostGroup = field(init=False)
    _found: list[Host] = field(init=False)
    _folder: RunFolder = field(init=False)
    _requests: Requests = field(init=False)
    _requests_due: float = 0.0
    _resources: ExitStack = field(default_factory=ExitStack)
    _written: HostState | None = None
    """None before the first write, and after a write that has failed."""
    _failure_noted: bool = False
    _failures: list[str] = field(default_factory=list)

    @classmethod
    def new(cls, name: str, options: BackendOptions, restart: str, host_dir: str | None) -> Self:
        """Make the group of a new run. Raises LaunchError."""
        if unknown := [field for field in re.findall(r"{.*?}", host_dir or "") if field != "{host}"]:
            raise LaunchError(f"--host-dir {host_dir}: unknown {unknown[0]}; {{host}} is replaced by the host's name")
        return cls(name, backends.make(name, options), keep_trying=restart == "always", host_dir=host_dir)

    @classmethod
    def of(cls, folder: RunFolder, restart: str) -> Self:
        """Make the group of a run that was launched before. Raises LaunchError."""
        state = HostState.read(folder.root)
        if state is not None and state.answers(folder.root):
            raise LaunchError(
                f"{folder.root}: followed by another launcher (process {state.launcher} on host {state.host}), which "
                f"restarts its peers; stop them with `p2pfl stop {folder.root}`"
            )
        saved = folder.info["hosts"]
        backend, placed = backends.restore(saved), backends.hosts_from(folder)
        return cls(saved["backend"], backend, placed, keep_trying=restart == "always")

    @property
    def running(self) -> dict[PeerId, int]:
        return self._group.running

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self._resources.close()

    # ---- the start -------------------------------------------------------------------------------------------

    def connect(self) -> None:
        hosts = self.backend.hosts() or self.placed or []
        group = HostGroup(self.backend, hosts, this_version(), keep_trying=self.keep_trying)
        self._group = self._resources.enter_context(group)
        self._found = group.connect()

    def prepare(self, function: Callable[[], T]) -> T:
        return in_child(function)

    @contextmanager
    def registered(self, folder: RunFolder, *, fresh: bool) -> Iterator[None]:
        self._folder = folder
        with starting(folder.root) as self._requests:
            yield

    def open(self, folder: RunFolder, plan: Plan, report: Callable[[str], object]) -> None:
        """Place the peers of a run that is new or has other hosts than before, and load the run on the hosts."""
        group, before = self._group, self.placed
        if before is not None and {host.name for host in self._found} == {host.name for host in before}:
            group.open(before, files_of(folder, plan, before, group.addresses))
            return
        placed = backends.place(plan.peers, self._found, group.cores)
        if before is None:
            placed = [replace(host, folder=self._folder_on(host, folder)) for host in placed]
            backends.save(folder, self.name, self.backend, placed)
            for host in placed:
                report(f"host {host.name}: peers {formatting.ids(host.peers, most=6)}")
        group.open(placed, files_of(folder, plan, placed, group.addresses))
        if before is not None:  # another allocation; a refused resume must not change where the run is
            if not (group.shared or plan.copied):
                raise LaunchError(
                    f"{folder.root}: its checkpoints are on the hosts of its last launch; resume it there, or keep "
                    "run folders on a file system that all hosts share"
                )
            backends.save(folder, self.name, self.backend, placed)

    def _folder_on(self, host: Host, folder: RunFolder) -> str | None:
        """Return the run folder on a host."""
        if self.host_dir is None:
            return host.folder
        return f"{self.host_dir.replace('{host}', host.name).rstrip('/')}/{folder.root.name}"

    @contextmanager
    def following(self, report: Callable[[str], object]) -> Iterator[None]:
        try:
            yield
        finally:
            self._write_state(0)
            for line in self._new_failures():
                report(line)

    # ---- the peers -------------------------------------------------------------------------------------------

    def fork(self, peers: Iterable[PeerId]) -> None:
        self._group.fork(peers)

    def cancel(self) -> None:
        self._group.cancel()

    def signal(self, peers: Iterable[PeerId], number: int) -> None:
        self._group.signal(peers, number)

    def declare_dead(self, peer: PeerId) -> None:
        self._group.declare_dead(peer)

    def events(self, timeout: float) -> list[Event]:
        found = self._group.events(timeout)
        if self._answer() or found or self._written is None:
            self._write_state(os.getpid())
        return found

    def notices(self) -> list[str]:
        return [*self._group.notices(), *self._new_failures()]

    def requests(self) -> list[str]:
        """Nothing: ``events`` turns requests into signals to this process."""
        return []

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

    def _write_state(self, launcher: int) -> None:
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

    def _new_failures(self) -> list[str]:
        lines, self._failures = self._failures, []
        return lines
