"""Follow the peers of a launch to their end: show progress, restart crashed peers, pass on Ctrl-C."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from types import FrameType
from typing import Any, Literal, Protocol

import psutil
from rich.console import Console

from launcher.backends.warm import Event
from launcher.errors import LaunchError
from launcher.facts.processes import HOST_LOST, find_process, outcome
from launcher.views.progress import Display, Progress
from launcher.watching import Watching
from p2pfl import PeerId
from p2pfl.errors import AddressInUse, AlreadyRunning, WriteError
from p2pfl.run_folder.folder import PeerFolder, RunFolder, Status
from p2pfl.stop_signals import asks_to_kill, counted_interrupts

POLL_INTERVAL = 0.25
"""Seconds between two checks for interrupts, if the warm process reports nothing."""
ORPHAN_INTERVAL = 1.0
"""Seconds between two checks of the peers that a dead warm process had forked."""
MAX_FAILURES = 3
"""A peer that fails this many times without completing a round is not restarted."""
IN_USE_FOR = 60.0
"""Seconds for which a peer is restarted whose address is in use, whatever MAX_FAILURES says."""
MAX_PAUSE = 16.0
"""Most seconds between two of these restarts."""
OUT_OF_MEMORY = (
    "; probably the kernel ran out of memory (see `dmesg`): lower slots, start fewer peers, or use a smaller batch "
    "or model"
)

Restart = Literal["on-failure", "always", "never"]
"""Which unfinished peers to restart.

``on-failure``: peers that crashed or failed, but not those that were stopped, cannot write to the run folder, send
more than ``transport.max_message``, or have another dataset than before, nor those that fail MAX_FAILURES times
without completing a round. No policy restarts a peer that the run file's chaos killed permanently, or whose
host is lost; ``always`` starts hosts again for as long as it takes.
"""


class Forker(Protocol):
    """What forks the peers: the warm process, or the host processes of several hosts (remote_processes.py)."""

    stops_on_sigterm: bool
    """Whether SIGTERM stops the peers, as Ctrl-C does, in place of ending the launcher only."""

    @property
    def exited(self) -> bool: ...

    @property
    def outcome(self) -> str: ...

    @property
    def stderr(self) -> str: ...

    def fork(self, folder: RunFolder, peers: Iterable[PeerId], /) -> None: ...

    def declare_dead(self, folder: RunFolder, peer: PeerId, /) -> None:
        """Have the neighbors of a peer that is not restarted continue without it."""

    def events(self, timeout: float) -> list[Event]: ...

    def restart(self) -> None: ...

    def kill(self) -> None: ...


def follow(
    folder: RunFolder,
    peers: Sequence[PeerId],
    rounds: int,
    warm: Forker,
    console: Console,
    restart: Restart,
    watching: Watching = Watching(),
    notices: Callable[[], Iterable[str]] = tuple,
    processes: PeerProcesses | None = None,
    requests: Callable[[], Iterable[str]] = tuple,
) -> PeerProcesses:
    """Fork ``peers``, and return when the last one has exited. Raises LaunchError if none could start.

    Args:
        notices: return lines of others to print, again and again.
        requests: return what `p2pfl stop` has asked for since the last call. It also signals the peers that it finds.
        processes: the peers to follow, if they are not on this host: ``peers``, and those that run already.
    """
    local = processes is None
    processes = processes or PeerProcesses(peers)
    policy = RestartPolicy(folder, restart)
    shown = [files.peer for files in folder.peers()]
    recoveries = Recoveries(folder, processes)
    due: dict[PeerId, float] = {}
    """When to restart peers."""
    ended_in: dict[PeerId, int | None] = {}
    """The process id in the status of each peer that has exited."""
    with (
        counted_interrupts(*[signal.SIGTERM] * warm.stops_on_sigterm) as interrupts,
        watching.progress(console, folder) as progress,
        nullcontext() if warm.stops_on_sigterm else sigterm_notice(folder, progress),
    ):
        display = Display(progress, folder, shown, rounds, processes.is_stale)
        if not (asked := list(requests())):
            warm.fork(folder, peers)
        while processes.running or due:
            warm_exited = warm.exited
            events = warm.events(POLL_INTERVAL)
            if warm.exited and not warm_exited and processes.started and not interrupts:
                progress.print(f"the warm process, which forks peers, {warm.outcome}; the peers keep running")
            exited = [
                peer
                for peer in processes.update(events, warm.exited)
                if not (local and processes.adopt(peer, find_process(folder, peer)))
            ]
            ended_in |= {peer: _process_id(folder, peer) for peer in exited if local}
            if asked := [*asked, *requests()]:  # written before the signals, so that this launcher restarts nobody
                policy.restart = "never"
                due.clear()
                if not processes.started and not processes.stopping:  # there was nobody to signal
                    _stop(processes, warm, kill=False, progress=progress)
            codes, errors = processes.exit_codes, processes.errors
            again = [peer for peer in exited if policy.restarts(peer, codes.get(peer), errors.get(peer, ""))]
            recoveries.forget(peer for peer in exited if policy.outcomes[peer] != "finished")
            if interrupts:
                _stop(processes, warm, kill=asks_to_kill(interrupts), progress=progress)
            elif again and processes.started:  # otherwise another warm process would not start any peer either
                progress.print("; ".join(f"peer {peer}: {policy.outcomes[peer]}; restarting" for peer in again))
                due |= {peer: time.monotonic() + policy.pause(peer, codes.get(peer)) for peer in again}
                exited = sorted(set(exited) - set(again))
            if interrupts:
                due.clear()
            elif now := [peer for peer, at in due.items() if at <= time.monotonic()]:
                if warm.exited:
                    progress.print("starting another warm process")
                    warm.restart()
                processes.expect(now)
                recoveries.expect(now)
                warm.fork(folder, now)
                due = {peer: at for peer, at in due.items() if peer not in now}
            for peer in exited:
                if peer in policy.reports:
                    progress.print(f"peer {peer}: {policy.reports[peer]}")
                if peer in policy.hopeless:
                    warm.declare_dead(folder, peer)
            for line in notices():
                progress.print(line)
            for peer, t in recoveries.new():
                progress.print(f"peer {peer}: recovered; completed round {t}")
            display.update(now=not processes.running and not due)
    # Another launcher has started these since (`p2pfl resume`, `p2pfl join`): their results tell how they ended.
    processes.forget(peer for peer, pid in ended_in.items() if _process_id(folder, peer) != pid)
    if warm.stderr:
        with suppress(OSError):
            (folder.root / "warm.log").write_text(warm.stderr, encoding="utf-8")
    if not processes.started and not processes.stopping:
        output = warm.stderr.strip() or "(no output)"
        raise LaunchError(f"the process that forks the peers {warm.outcome}:\n{output}")
    return processes


def _process_id(folder: RunFolder, peer: PeerId) -> int | None:
    status = folder.peer(peer).status()
    return None if status is None else status.pid


def _stop(processes: PeerProcesses, warm: Forker, *, kill: bool, progress: Progress) -> None:
    stop_now, kill_now = not processes.stopping, kill and not processes.killing
    processes.stop(kill=kill)  # before printing, which may fail
    if not processes.started and not warm.exited:
        warm.kill()  # it is still importing, and has forked no peer
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
        if len(kills) > self._kills.get(peer, 0):  # an injected kill is no failure of the peer
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
    """The peers that this launcher has forked: which of them are running, and how the others exited."""

    def __init__(self, peers: Iterable[PeerId]) -> None:
        self.started: set[PeerId] = set()
        self.exit_codes: dict[PeerId, int] = {}
        self.errors: dict[PeerId, str] = {}
        """The error that each peer reported at its exit."""
        self.running = set(peers)
        """Requested peers that have not exited, as far as known."""
        self.stopping = False
        self.killing = False
        self.seconds = 0.0
        self._began = time.monotonic()
        # psutil compares process ids and start times, so that a reused id is not mistaken for the peer.
        self._processes: dict[PeerId, psutil.Process] = {}
        self._signalled: set[tuple[PeerId, signal.Signals]] = set()
        self._orphans: set[PeerId] = set()
        """Peers whose end no warm process will report."""
        self._orphans_checked = -ORPHAN_INTERVAL

    def expect(self, peers: Iterable[PeerId]) -> None:
        """Count ``peers`` as running again: they have been requested anew."""
        peers = set(peers)
        self.running |= peers
        self._orphans -= peers
        self.forget(peers)
        for peer in peers:
            self._processes.pop(peer, None)

    def forget(self, peers: Iterable[PeerId]) -> None:
        """Forget how ``peers`` exited."""
        for peer in peers:
            self.exit_codes.pop(peer, None)
            self.errors.pop(peer, None)

    def is_stale(self, status: Status) -> bool:
        """Return whether a peer is about to start, and an earlier process of it has written ``status``."""
        process = self._processes.get(status.peer)
        return status.peer in self.running and (process is None or process.pid != status.pid)

    def adopt(self, peer: PeerId, process: psutil.Process | None) -> bool:
        """Count ``peer`` as running if it has a process of which no event told. Return whether it has."""
        if process is not None:
            self.expect([peer])
            self._orphans.add(peer)
            self._processes[peer] = process
        return process is not None

    def update(self, events: list[Event], warm_exited: bool) -> list[PeerId]:
        """Process the events of the warm process. Return the peers that have exited."""
        before = set(self.running)
        for event in events:
            if event.event == "started":
                self.started.add(event.peer)
                with suppress(psutil.NoSuchProcess):
                    self._processes[event.peer] = psutil.Process(event.pid)
            elif event.event == "exited":
                self.exit_codes[event.peer] = event.code
                self.errors[event.peer] = event.error
                self.running.discard(event.peer)
            elif event.event == "vanished":
                self.running.discard(event.peer)
        if warm_exited:
            self._orphans |= self.running
        now = time.monotonic()
        if now >= self._orphans_checked + ORPHAN_INTERVAL:
            self._orphans_checked = now
            self.running -= {peer for peer in self._orphans if not self._is_running(peer)}
        self.seconds = now - self._began
        return sorted(before - self.running)

    def stop(self, *, kill: bool) -> None:
        """Signal every running peer once. Call it again for peers that start later."""
        self.stopping = True
        self.killing = kill
        number = signal.SIGKILL if kill else signal.SIGTERM
        for peer in self.running & self._processes.keys():
            if (peer, number) not in self._signalled:
                self._signalled.add((peer, number))
                with suppress(psutil.NoSuchProcess):
                    self._processes[peer].send_signal(number)

    def _is_running(self, peer: PeerId) -> bool:
        process = self._processes.get(peer)
        with suppress(psutil.NoSuchProcess):
            return process is not None and process.is_running() and process.status() != psutil.STATUS_ZOMBIE
        return False


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
