"""Follow the peers of a launch to their end: show progress, restart crashed peers, pass on Ctrl-C."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from types import FrameType
from typing import Any, Literal

from rich.console import Console

from launcher.backends.group import Event, Group
from launcher.facts.processes import HOST_LOST, outcome
from launcher.views.progress import Display, Progress
from launcher.watching import Watching
from p2pfl import PeerId
from p2pfl.errors import AddressInUse, AlreadyRunning, WriteError
from p2pfl.run_folder.folder import PeerFolder, RunFolder, Status
from p2pfl.stop_signals import asks_to_kill, counted_interrupts

POLL_INTERVAL = 0.25
"""Seconds between two checks for interrupts, if the warm process reports nothing."""
MAX_FAILURES = 3
"""A peer that fails this many times without completing a round is not restarted."""
IN_USE_FOR = 60.0
"""Seconds for which a peer is restarted while its address is in use, independent of MAX_FAILURES."""
MAX_PAUSE = 16.0
"""Most seconds between two of these restarts."""
OUT_OF_MEMORY = (
    "; probably the kernel ran out of memory (see `dmesg`): lower slots, start fewer peers, or use a smaller batch "
    "or model"
)

Restart = Literal["on-failure", "always", "never"]
"""Which unfinished peers to restart.

``on-failure``: peers that crashed or failed. Exceptions: they were stopped, cannot write to the run folder, send more
than ``transport.max_message``, have another dataset than before, or fail MAX_FAILURES times without a further round.
No policy restarts a peer that the run file's chaos killed permanently, or whose host is lost; ``always`` starts hosts
again for as long as it takes.
"""


def follow(
    folder: RunFolder,
    peers: Sequence[PeerId],
    rounds: int,
    group: Group,
    console: Console,
    restart: Restart,
    watching: Watching = Watching(),
    failures: Callable[[], Iterable[str]] = tuple,
) -> PeerProcesses:
    """Start ``peers``, and return when they and the running peers of the group have exited.

    Args:
        failures: return further lines to print; called repeatedly.
    """
    processes = PeerProcesses(group)
    policy = RestartPolicy(folder, restart)
    shown = [files.peer for files in folder.peers()]
    recoveries = Recoveries(folder, processes)
    due: dict[PeerId, float] = {}
    """When to restart peers."""
    ended_in: dict[PeerId, int | None] = {}
    """The process id in the status of each peer that has exited."""
    with (
        counted_interrupts(*(() if group.is_here else (signal.SIGTERM,))) as interrupts,
        watching.progress(console, folder) as progress,
        sigterm_notice(folder, progress) if group.is_here else nullcontext(),
    ):
        display = Display(progress, folder, shown, rounds, processes.is_stale)
        if asked := group.requests():
            _stop(processes, group, kill=False, progress=progress)
        else:
            processes.expect(peers)
            group.fork(peers)
        while processes.running or due:
            exited = processes.update(group.events(POLL_INTERVAL))
            for line in group.notices():
                progress.print(line)
            if group.is_here:  # elsewhere only this launcher starts peers, and a status may arrive later
                ended_in |= {peer: _process_id(folder, peer) for peer in exited}
            if asked := [*asked, *group.requests()]:  # written before the signals: no peer is restarted
                policy.restart = "never"
                due.clear()
                if not processes.started and not processes.stopping:  # there was no process to signal
                    _stop(processes, group, kill=False, progress=progress)
            codes, errors = processes.exit_codes, processes.errors
            again = [peer for peer in exited if policy.restarts(peer, codes.get(peer), errors.get(peer, ""))]
            recoveries.forget(peer for peer in exited if policy.outcomes[peer] != "finished")
            if interrupts:
                _stop(processes, group, kill=asks_to_kill(interrupts), progress=progress)
            elif again and processes.started:  # otherwise the next attempt would not start any peer either
                progress.print("; ".join(f"peer {peer}: {policy.outcomes[peer]}; restarting" for peer in again))
                due |= {peer: time.monotonic() + policy.pause(peer, codes.get(peer)) for peer in again}
                exited = sorted(set(exited) - set(again))
            if interrupts:
                due.clear()
            elif now := [peer for peer, at in due.items() if at <= time.monotonic()]:
                processes.expect(now)
                recoveries.expect(now)
                group.fork(now)
                due = {peer: at for peer, at in due.items() if peer not in now}
            for peer in exited:
                if peer in policy.reports:
                    progress.print(f"peer {peer}: {policy.reports[peer]}")
                if peer in policy.hopeless:
                    group.declare_dead(peer)
            for line in failures():
                progress.print(line)
            for peer, t in recoveries.new():
                progress.print(f"peer {peer}: recovered; completed round {t}")
            display.update(now=not processes.running and not due)
    # Another launcher has started these since (`p2pfl resume`, `p2pfl join`): their results hold the outcome.
    processes.forget(peer for peer, pid in ended_in.items() if _process_id(folder, peer) != pid)
    return processes


def _process_id(folder: RunFolder, peer: PeerId) -> int | None:
    status = folder.peer(peer).status()
    return None if status is None else status.pid


def _stop(processes: PeerProcesses, group: Group, *, kill: bool, progress: Progress) -> None:
    stop_now, kill_now = not processes.stopping, kill and not processes.killing
    processes.stop(kill=kill)  # before printing, which may fail
    if not processes.started:
        group.cancel()
    if stop_now:
        progress.print("stopping: each peer ends its batch and writes a checkpoint; press Ctrl-C again to kill")
    elif kill_now:
        progress.print("killing")


class RestartPolicy:
    """Decide which peers to restart after they have exited."""

    def __init__(self, folder: RunFolder, restart: Restart) -> None:
        self.folder = folder
        self.restart = restart
        self.outcomes: dict[PeerId, str] = {}
        """How each peer ended last."""
        self.reports: dict[PeerId, str] = {}
        """What to print about a peer that is not restarted."""
        self.hopeless: set[PeerId] = set()
        """Peers that were restarted without success."""
        self._in_use_since: dict[PeerId, float] = {}
        """When another process listened at the address of a peer for the first time."""
        self._failures: dict[PeerId, list[int]] = {}
        """Completed rounds at each failure."""
        self._kills = {files.peer: len(_kills(files)) for files in folder.peers()}
        """How often chaos has killed each peer, in earlier launches too."""

    def pause(self, peer: PeerId, exit_code: int | None) -> float:
        """Return how many seconds to wait before the restart."""
        if exit_code != AddressInUse.exit_code:
            return 0.0
        return min(max(1.0, time.monotonic() - self._in_use_since[peer]), MAX_PAUSE)

    def restarts(self, peer: PeerId, exit_code: int | None, error: str = "") -> bool:
        """Return whether to restart ``peer``, given its exit code and the error that it reported."""
        files = self.folder.peer(peer)
        ended = self.outcomes[peer] = outcome(files, exit_code, error)
        self.reports.pop(peer, None)
        if error:
            self.reports[peer] = ended
        if self.restart == "never" or ended == "finished" or exit_code in (HOST_LOST, AlreadyRunning.exit_code):
            return False
        if self.restart == "on-failure" and (ended == "stopped" or exit_code == WriteError.exit_code):
            return False
        if self.restart == "on-failure" and exit_code == os.EX_CONFIG:
            self.hopeless.add(peer)
            self.reports[peer] = ended
            return False
        if exit_code == AddressInUse.exit_code:
            began = self._in_use_since.setdefault(peer, time.monotonic())
            if time.monotonic() - began < IN_USE_FOR:
                return True
        else:
            self._in_use_since.pop(peer, None)
        kills = _kills(files)
        if len(kills) > self._kills.get(peer, 0):  # an injected kill is not a failure of the peer
            self._kills[peer] = len(kills)
            return bool(kills[-1]["restart"])
        status = files.status()
        rounds = self._failures.setdefault(peer, [])
        rounds.append(status.rounds_done if status else 0)
        progressed = len(rounds) < MAX_FAILURES or max(rounds[1 - MAX_FAILURES :]) > rounds[-MAX_FAILURES]
        if self.restart == "always" or progressed:
            return True
        self.hopeless.add(peer)
        self.reports[peer] = f"{ended}; not restarted: failed {MAX_FAILURES} times without completing a further round"
        if exit_code == -signal.SIGKILL:
            self.reports[peer] += OUT_OF_MEMORY
        return False


def _kills(files: PeerFolder) -> list[dict[str, Any]]:
    return [fault for fault in files.injected() if fault["what"] == "kill"]


class Recoveries:
    """The restarted peers that have not yet completed a round since."""

    def __init__(self, folder: RunFolder, processes: PeerProcesses) -> None:
        self._folder = folder
        self._processes = processes
        self._done: dict[PeerId, int | None] = {}
        """Rounds that each had completed when it took part again; None before that."""

    def expect(self, peers: Iterable[PeerId]) -> None:
        """Note that ``peers`` were restarted."""
        self._done |= dict.fromkeys(peers)

    def forget(self, peers: Iterable[PeerId]) -> None:
        """Note that ``peers`` have failed again, or were stopped."""
        for peer in peers:
            self._done.pop(peer, None)

    def new(self) -> list[tuple[PeerId, int]]:
        """Return the peers that have completed a round since they were restarted, and that round, each peer once."""
        found = []
        for peer, before in sorted(self._done.items()):
            status = self._folder.peer(peer).status()
            if status is None or self._processes.is_stale(status) or status.phase == "starting":
                continue
            if before is None:
                self._done[peer] = status.rounds_done
            elif status.rounds_done > before:
                found.append((peer, status.rounds_done - 1))
        for peer, _ in found:
            del self._done[peer]
        return found


class PeerProcesses:
    """The peers that this launcher follows: which of them are running, and how the others exited."""

    def __init__(self, group: Group) -> None:
        self._group = group
        self._pids: dict[PeerId, int] = dict(group.running)
        self.started: set[PeerId] = set(self._pids)
        self.exit_codes: dict[PeerId, int] = {}
        self.errors: dict[PeerId, str] = {}
        """The error that each peer reported at its exit."""
        self.running = set(self._pids)
        """Requested peers that have not exited, as far as known."""
        self.stopping = False
        self.killing = False
        self.seconds = 0.0
        self._began = time.monotonic()
        self._signalled: set[tuple[PeerId, signal.Signals]] = set()

    def expect(self, peers: Iterable[PeerId]) -> None:
        """Count ``peers`` as running: they are about to be requested."""
        peers = set(peers)
        self.running |= peers
        self.forget(peers)
        for peer in peers:
            self._pids.pop(peer, None)

    def forget(self, peers: Iterable[PeerId]) -> None:
        """Forget how ``peers`` exited."""
        for peer in peers:
            self.exit_codes.pop(peer, None)
            self.errors.pop(peer, None)

    def is_stale(self, status: Status) -> bool:
        """Return whether a peer is about to start, and an earlier process of it has written ``status``."""
        return status.peer in self.running and self._pids.get(status.peer) != status.pid

    def update(self, events: Iterable[Event]) -> list[PeerId]:
        """Process events of the group. Return the peers that have exited."""
        before = set(self.running)
        for event in events:
            peer = event.peer
            if event.event == "started":
                self.started.add(peer)
                self.running.add(peer)
                self._pids[peer] = event.pid
                # A signal before that may not have reached it: its host was not connected.
                self._signalled -= {(peer, signal.SIGTERM), (peer, signal.SIGKILL)}
            elif event.event == "exited":
                self.exit_codes[peer] = event.code
                self.errors[peer] = event.error
                self.running.discard(peer)
            elif event.event == "vanished":
                self.running.discard(peer)
        self.seconds = time.monotonic() - self._began
        return sorted(before - self.running)

    def stop(self, *, kill: bool) -> None:
        """Signal every running peer once. Call it again for peers that start later."""
        self.stopping = True
        self.killing = kill
        number = signal.SIGKILL if kill else signal.SIGTERM
        new = [peer for peer in self.running & self._pids.keys() if (peer, number) not in self._signalled]
        self._signalled |= {(peer, number) for peer in new}
        self._group.signal(new, number)


@contextmanager
def sigterm_notice(folder: RunFolder, progress: Progress) -> Iterator[None]:
    """On SIGTERM, print that the peers keep running, before the signal ends this process."""

    def handle(signum: int, frame: FrameType | None) -> None:
        progress.__exit__(None, None, None)  # restores the terminal
        progress.print(f"terminated by SIGTERM; the peers keep running: stop them with `p2pfl stop {folder.root}`")
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTERM)

    before = signal.signal(signal.SIGTERM, handle)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
