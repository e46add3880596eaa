"""The local backend: one process per peer on this host, forked from a warm process, and followed to the end."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from types import FrameType

import psutil
from rich.console import Console

from launcher.errors import LaunchError
from launcher.mps import multi_process_service
from launcher.prepare import Order
from launcher.progress import Progress, progress_on
from launcher.snapshot import Snapshot
from launcher.summary import Summary, summarize
from launcher.warm import Event, WarmProcess
from p2pfl.runfolder import PeerId, RunFolder

LOOK_EVERY = 0.25
"""Seconds between two looks at the peers."""


def launch(order: Order, console: Console) -> tuple[RunFolder, Summary]:
    """Make a run and run it, one process per peer."""
    # Before anything else: it imports torch while we do, and while we check the run file.
    with WarmProcess(threads(1)) as warm:
        run = order.load()
        folder = order.prepare(run)
        with ExitStack() as services:
            environment = threads(run.file.threads)
            if run.file.gpu.mps:
                mps = multi_process_service(folder.root / "mps", run.file.gpu.peers_per_gpu)
                environment.update(services.enter_context(mps))
            if environment == warm.environment:
                crew = follow(folder, run.peers, run.rounds, warm, console)
            else:
                warm.kill()
                with WarmProcess(environment) as other:
                    crew = follow(folder, run.peers, run.rounds, other, console)
    return folder, summarize(folder, crew.codes, crew.seconds)


def threads(count: int) -> dict[str, str]:
    """The environment in which libraries start so many threads, and in which idle ones sleep.

    By default they spin for a while in case there is more to do, which takes the cores from other peers: with
    two threads each, four peers on two cores took 28 to 44 s that way and 8 s this way.
    """
    counts = {f"{library}_NUM_THREADS": str(count) for library in ("OMP", "MKL", "OPENBLAS")}
    return {**counts, "OMP_WAIT_POLICY": "PASSIVE"}


def follow(folder: RunFolder, peers: int, rounds: int, warm: WarmProcess, console: Console) -> Crew:
    """Have all peers forked, and stay until the last one has ended. Raises LaunchError if none could start."""
    crew = Crew(peers)
    warm.ask(folder, range(peers))
    with interrupts() as pressed, progress_on(console) as progress:
        while crew.busy:
            crew.hear(warm.events(LOOK_EVERY), warm.gone)
            if pressed:
                _stop(crew, warm, kill=len(pressed) > 1, progress=progress)
            progress.update(Snapshot.take(folder, peers, rounds))
    if warm.errors:
        (folder.root / "warm.log").write_text(warm.errors)
    if not crew.started and not crew.stopping:
        raise LaunchError(f"the process that forks the peers died:\n{warm.errors.strip() or '(it said nothing)'}")
    return crew


def _stop(crew: Crew, warm: WarmProcess, *, kill: bool, progress: Progress) -> None:
    if not crew.stopping:
        progress.say("stopping: each peer ends its batch and writes a checkpoint; Ctrl-C again to kill")
    elif kill and not crew.killing:
        progress.say("killing")
    crew.stop(kill=kill)
    if not crew.started and not warm.gone:
        warm.kill()  # it is still importing; no peer has begun


class Crew:
    """The peers that one launcher has started: who runs, who has ended and with which exit code."""

    def __init__(self, peers: int) -> None:
        self.started: set[PeerId] = set()
        self.codes: dict[PeerId, int] = {}
        self.busy = set(range(peers))
        """Peers that have not ended, as far as we know."""
        self.stopping = False
        self.killing = False
        self.seconds = 0.0
        self._began = time.monotonic()
        # Known by number and time of birth, so that another process with a number used again is not taken for it.
        self._processes: dict[PeerId, psutil.Process] = {}
        self._signalled: set[tuple[PeerId, signal.Signals]] = set()

    def hear(self, events: list[Event], warm_is_gone: bool) -> None:
        for event in events:
            if event.event == "started":
                self.started.add(event.peer)
                with suppress(psutil.NoSuchProcess):
                    self._processes[event.peer] = psutil.Process(event.pid)
            elif event.event == "exited":
                self.codes[event.peer] = event.code
                self.busy.discard(event.peer)
        if warm_is_gone:
            # Nobody reports exits any more, but the peers go on: see for ourselves who still lives.
            self.busy = {peer for peer in self.busy if self._lives(peer)}
        self.seconds = time.monotonic() - self._began

    def stop(self, *, kill: bool) -> None:
        """Signal every peer that runs, each once; peers that start later are caught by calling this again."""
        self.stopping = True
        self.killing = kill
        number = signal.SIGKILL if kill else signal.SIGTERM
        for peer in self.busy & self._processes.keys():
            if (peer, number) not in self._signalled:
                self._signalled.add((peer, number))
                with suppress(psutil.NoSuchProcess):
                    self._processes[peer].send_signal(number)

    def _lives(self, peer: PeerId) -> bool:
        process = self._processes.get(peer)
        with suppress(psutil.NoSuchProcess):
            return process is not None and process.is_running() and process.status() != psutil.STATUS_ZOMBIE
        return False


@contextmanager
def interrupts() -> Iterator[list[int]]:
    """Collects Ctrl-C inside, instead of raising KeyboardInterrupt."""
    pressed: list[int] = []

    def press(signum: int, frame: FrameType | None) -> None:
        pressed.append(signum)

    before = signal.signal(signal.SIGINT, press)
    try:
        yield pressed
    finally:
        signal.signal(signal.SIGINT, before)
