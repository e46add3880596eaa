"""This host as a group of one: its peers use the launcher's run folder, and the warm process forks them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import ClassVar, Self, TypeVar

import psutil

from launcher.backends.group import Event, Plan
from launcher.backends.mps import multi_process_service
from launcher.backends.warm import WarmProcess
from launcher.errors import LaunchError
from launcher.facts.processes import find_process
from launcher.facts.registration import Requests, register
from p2pfl import PeerId
from p2pfl.run_folder.folder import RunFolder

T = TypeVar("T")

ORPHAN_INTERVAL = 1.0
"""Seconds between two checks of the peers whose end no warm process reports."""


class ThisHost:
    """This host as a Group."""

    is_here = True
    running: ClassVar[dict[PeerId, int]] = {}
    """Empty: if peers run already, another launcher may follow them."""
    _folder: RunFolder
    _plan: Plan
    _warm: WarmProcess
    _requests: Requests

    def __init__(self) -> None:
        self._resources = ExitStack()
        self._processes: dict[PeerId, psutil.Process | None] = {}
        """The requested peers that have not exited, as far as known; None before the start."""
        self._orphans: set[PeerId] = set()
        self._orphans_checked = -ORPHAN_INTERVAL
        self._started = self._stopping = False
        self._notices: list[str] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self._resources.__exit__(*raised)  # type: ignore[arg-type]

    def connect(self) -> None:
        """Nothing: ``prepare`` starts the warm process."""

    def prepare(self, function: Callable[[], T]) -> T:
        """Call a function in a new process, which then becomes the warm process."""
        warm, result = WarmProcess.after(function)
        self._warm = self._resources.enter_context(warm)
        return result

    @contextmanager
    def registered(self, folder: RunFolder, *, fresh: bool) -> Iterator[None]:
        self._requests = register(folder, fresh=fresh)
        yield

    def open(self, folder: RunFolder, plan: Plan, report: Callable[[str], object]) -> None:
        self._folder, self._plan = folder, plan

    @contextmanager
    def following(self, report: Callable[[str], object]) -> Iterator[None]:
        with ExitStack() as resources:
            if self._plan.mps:
                mps = multi_process_service(self._folder.root / "mps", self._plan.peers_per_gpu, report)
                environment = resources.enter_context(mps)
                self._warm.kill()
                self._warm = resources.enter_context(WarmProcess(environment))
            yield
            output = self._warm.stderr
            if output:
                with suppress(OSError):
                    (self._folder.root / "warm.log").write_text(output, encoding="utf-8")
            if not self._started and not self._stopping:
                raise LaunchError(
                    f"the process that forks the peers {self._warm.outcome}:\n{output.strip() or '(no output)'}"
                )

    def fork(self, peers: Iterable[PeerId]) -> None:
        if self._warm.exited:
            self._notices.append("starting another warm process")
            self._warm.restart()
        peers = list(peers)
        self._processes |= dict.fromkeys(peers)
        self._orphans -= set(peers)
        for peer in peers:
            with suppress(OSError):
                self._folder.death_notice(peer).unlink()
        self._warm.fork(self._folder, peers)

    def cancel(self) -> None:
        """End a warm process that is still importing, and has forked no peer."""
        if not self._warm.exited:
            self._warm.kill()

    def signal(self, peers: Iterable[PeerId], number: int) -> None:
        self._stopping = True
        for peer in peers:
            if (process := self._processes.get(peer)) is not None:
                with suppress(psutil.NoSuchProcess):  # it compares start times too: a process id is used again
                    process.send_signal(number)

    def declare_dead(self, peer: PeerId) -> None:
        with suppress(OSError):  # otherwise they wait until their deadline
            self._folder.death_notice(peer).touch()

    def events(self, timeout: float) -> list[Event]:
        had_exited = self._warm.exited
        found = [self._noted(event) for event in self._warm.events(timeout)]
        if self._warm.exited:
            self._orphans |= self._processes.keys()
            if self._started and not had_exited and not self._stopping:
                self._notices.append(
                    f"the warm process, which forks peers, {self._warm.outcome}; the peers keep running"
                )
        return found + self._ends_of_orphans()

    def notices(self) -> list[str]:
        lines, self._notices = self._notices, []
        return lines

    def requests(self) -> list[str]:
        return self._requests.new()

    def _noted(self, event: Event) -> Event:
        """Keep the process that an event is about. Return the event, or another one if the peer runs nevertheless."""
        if event.event == "started":
            self._started = True
            with suppress(psutil.NoSuchProcess):
                self._processes[event.peer] = psutil.Process(event.pid)
        return self._adopted(event.peer) or event if event.event == "exited" else event

    def _adopted(self, peer: PeerId) -> Event | None:
        """Look for a process of ``peer`` of which no event told, e.g. of another launcher, and follow that."""
        process = find_process(self._folder, peer)
        if process is None:
            self._processes.pop(peer, None)
            self._orphans.discard(peer)
            return None
        self._processes[peer] = process
        self._orphans.add(peer)
        return Event("started", peer, pid=process.pid)

    def _ends_of_orphans(self) -> list[Event]:
        now = time.monotonic()
        if now < self._orphans_checked + ORPHAN_INTERVAL:
            return []
        self._orphans_checked = now
        ended = [peer for peer in sorted(self._orphans) if not _is_running(self._processes.get(peer))]
        return [self._adopted(peer) or Event("vanished", peer) for peer in ended]


def _is_running(process: psutil.Process | None) -> bool:
    with suppress(psutil.NoSuchProcess):
        return process is not None and process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False
