"""The local backend: one process per peer on this host, forked from a warm process, and followed to the end."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from types import FrameType
from typing import TYPE_CHECKING, Literal, Protocol

import psutil
from rich.console import Console

from launcher import text
from launcher.errors import LaunchError
from launcher.here import elsewhere
from launcher.mps import multi_process_service
from launcher.prepare import Order
from launcher.processes import how_it_ended, living
from launcher.progress import Progress, progress_on, tell
from launcher.snapshot import Snapshot
from launcher.summary import Summary, summarize, watched
from launcher.warm import Event, WarmProcess
from p2pfl.errors import KeysError, RunFolderError, Unwritable
from p2pfl.runfolder import PeerId, RunFolder

if TYPE_CHECKING:
    from p2pfl.config import Run

LOOK_EVERY = 0.25
"""Seconds between two looks at the peers."""


Restart = Literal["on-failure", "always", "never"]
"""Whether peers that ended without having finished are started again. ``on-failure``: those that were killed or have
failed, not those that were stopped or cannot write into the run folder; and not one that fails ATTEMPTS times without
completing a round. None of them starts a peer again that the run file's chaos has killed for good."""
ATTEMPTS = 3
OUT_OF_MEMORY = (
    "; if nobody has killed it, the kernel has, for lack of memory (see `dmesg`): let fewer peers compute at once "
    "(slots), start fewer, or use a smaller batch or model"
)


def launch(order: Order, console: Console, restart: Restart = "on-failure") -> tuple[RunFolder, Summary]:
    """Make a run and run it, one process per peer."""
    # Before anything else: it imports torch while we do, and while we check the run file.
    with WarmProcess(threads(1)) as warm:
        run = order.load()
        _check_here(run, range(run.peers))
        _check_keys(run, range(run.peers))
        folder = order.prepare(run)
        return folder, _run(run, folder, range(run.peers), warm, console, restart)


def resume(
    folder: RunFolder, peers: Sequence[PeerId], console: Console, restart: Restart = "on-failure"
) -> tuple[RunFolder, Summary]:
    """Go on with a run: start those of ``peers`` (none named: of all) that do not live.

    Raises LaunchError if all of them have finished or live, or were simulated, RunFolderError if they live elsewhere.
    """
    from p2pfl import config

    folder.own()
    if folder.about.get("simulated"):
        raise LaunchError(
            f"{folder.root}: was simulated, and cannot go on: peers that live and die together keep nothing of what "
            f"they said, and those in an earlier round would not hear it. Begin anew: p2pfl launch {folder.run_file}"
        )

    with WarmProcess(threads(1)) as warm:
        run = config.load(folder.run_file)
        present = [place.peer for place in folder.peers()]  # of one that was started alone: it and no other
        absent = sorted(set(peers) - set(present))
        if absent:
            raise LaunchError(f"{folder.root} has no peer {text.ids(absent)}; it has {text.ids(present)}")
        places = [folder.peer(peer) for peer in sorted(peers) or present]
        if alive := [place.peer for place in places if living(folder, place.peer)]:
            console.print(f"peers that live already: {text.ids(alive)}")
        dead = [place for place in places if place.peer not in alive]
        if all(how_it_ended(place) == "finished" for place in dead):
            raise LaunchError(f"{folder.root}: nothing to resume: all peers have finished or live")
        # Not where others look for them: they have been started here before, maybe with an address of their router.
        _check_keys(run, [place.peer for place in dead])
        before = 0.0
        if not alive:  # else another launcher may follow them still, and the time would count twice
            with suppress(RunFolderError):
                before = watched(folder) or 0.0
        # Those that have finished too: others may need what they said last.
        return folder, _run(run, folder, [place.peer for place in dead], warm, console, restart, before)


def _check_here(run: Run, peers: Iterable[PeerId]) -> None:
    """Raises RunFileError if the others would not find these peers here."""
    transport = run.file.transport
    for peer, address in elsewhere(transport.book(run.peers), peers):
        problem = (
            f"peer {peer} is looked for at {address}, which is not this host, and peers would be started here: start "
            "each with `p2pfl peer` where it belongs, or say where these are: --set transport.hosts={} --set "
            "transport.address=null"
        )
        raise run.blame("transport.hosts" if transport.hosts else "transport.address", LaunchError(problem))


def _check_keys(run: Run, peers: Iterable[PeerId]) -> None:
    """Raises RunFileError if these peers would not find the keys that they need."""
    from p2pfl import keys

    transport = run.file.transport
    if transport.keys is not None:
        try:
            public = keys.check(transport.keys, run.peers, peers, transport.public_keys)
            # Which belong together says libzmq, which is none of ours.
            checking = [sys.executable, "-P", "-m", "peers.keys", "--check", str(transport.keys), *map(str, peers)]
            said = json.dumps([key.hex() for key in public])
            done = subprocess.run(checking, input=said, capture_output=True, text=True, check=False)
            if done.returncode:
                raise KeysError(done.stderr.strip().removeprefix("error: "))
        except KeysError as error:
            raise run.blame("transport.keys", error) from None


def _run(
    run: Run,
    folder: RunFolder,
    peers: Sequence[PeerId],
    warm: WarmProcess,
    console: Console,
    restart: Restart,
    before: float = 0.0,
) -> Summary:
    """``before``: seconds that earlier parts of the run took."""
    tell(folder, console)
    with ExitStack() as services:
        environment = threads(run.file.threads)
        if run.file.gpu.mps:
            mps = multi_process_service(folder.root / "mps", run.file.gpu.peers_per_gpu)
            environment.update(services.enter_context(mps))
        if environment == warm.environment:
            crew = follow(folder, peers, run, warm, console, restart)
        else:
            warm.kill()
            with WarmProcess(environment) as other:
                crew = follow(folder, peers, run, other, console, restart)
    return summarize(folder, crew.codes, before + crew.seconds, run.topology, crew.words)


def threads(count: int) -> dict[str, str]:
    """The environment in which libraries start so many threads, and in which idle ones sleep.

    By default they spin for a while in case there is more to do, which takes the cores from other peers: with
    two threads each, four peers on two cores took 28 to 44 s that way and 8 s this way.
    """
    counts = {f"{library}_NUM_THREADS": str(count) for library in ("OMP", "MKL", "OPENBLAS")}
    return {**counts, "OMP_WAIT_POLICY": "PASSIVE"}


def follow(
    folder: RunFolder, peers: Sequence[PeerId], run: Size, warm: WarmProcess, console: Console, restart: Restart
) -> Crew:
    """Have ``peers`` forked, and stay until the last one has ended. Raises LaunchError if none could start."""
    crew = Crew(peers)
    policy = Policy(folder, restart)
    here = [place.peer for place in folder.peers()]
    with interrupts() as pressed, progress_on(console) as progress, farewell(folder, progress):
        warm.ask(folder, peers)
        while crew.busy:
            ended = crew.hear(warm.events(LOOK_EVERY), warm.gone)
            again = [peer for peer in ended if policy.wants(peer, crew.codes.get(peer), crew.words.get(peer, ""))]
            if pressed:
                _stop(crew, warm, kill=len(pressed) > 1, progress=progress)
            elif again and not warm.gone:
                progress.say("; ".join(f"peer {peer}: {policy.why[peer]}; starting it again" for peer in again))
                crew.expect(again)
                warm.ask(folder, again)
                ended = sorted(set(ended) - set(again))
            for peer in ended:
                if peer in policy.last_words:
                    progress.say(f"peer {peer}: {policy.last_words[peer]}")
            progress.update(Snapshot.take(folder, here, run.rounds))
    if warm.errors:
        with suppress(OSError):
            (folder.root / "warm.log").write_text(warm.errors)
    if not crew.started and not crew.stopping:
        raise LaunchError(f"the process that forks the peers died:\n{warm.errors.strip() or '(it said nothing)'}")
    return crew


def _stop(crew: Crew, warm: WarmProcess, *, kill: bool, progress: Progress) -> None:
    first, last = not crew.stopping, kill and not crew.killing
    crew.stop(kill=kill)  # before a word is said, which may fail
    if not crew.started and not warm.gone:
        warm.kill()  # it is still importing; no peer has begun
    if first:
        progress.say("stopping: each peer ends its batch and writes a checkpoint; Ctrl-C again to kill")
    elif last:
        progress.say("killing")


class Size(Protocol):
    """What ``follow`` needs to know of a run."""

    @property
    def peers(self) -> int: ...

    @property
    def rounds(self) -> int: ...


class Policy:
    """Which peers are started again after they have ended."""

    def __init__(self, folder: RunFolder, restart: Restart) -> None:
        self.folder = folder
        self.restart = restart
        self.why: dict[PeerId, str] = {}
        """How each peer has ended last."""
        self.last_words: dict[PeerId, str] = {}
        """What there is to tell of them, should they not be started again."""
        self._failures: dict[PeerId, list[int]] = {}
        """Completed rounds at each failure."""
        self._kills: dict[PeerId, int] = {}
        """How often chaos has killed each."""

    def wants(self, peer: PeerId, code: int | None, words: str = "") -> bool:
        """Whether to start ``peer`` again, which has ended with ``code``; ``words`` is what it has said of that."""
        place = self.folder.peer(peer)
        ended = self.why[peer] = how_it_ended(place, code, words)
        self.last_words.pop(peer, None)
        if words:
            self.last_words[peer] = ended
        if self.restart == "never" or ended == "finished":
            return False
        if self.restart == "on-failure" and (ended == "stopped" or code == Unwritable.exit_code):
            return False
        kills = [blow for blow in place.injected() if blow["what"] == "kill"]
        if len(kills) > self._kills.get(peer, 0):  # no failure of its own
            self._kills[peer] = len(kills)
            return bool(kills[-1]["restart"])
        status = place.status()
        rounds = self._failures.setdefault(peer, [])
        rounds.append(status.rounds_done if status else 0)
        if self.restart == "always" or len(rounds) < ATTEMPTS or max(rounds[1 - ATTEMPTS :]) > rounds[-ATTEMPTS]:
            return True
        self.last_words[peer] = f"{ended}; given up after {ATTEMPTS} times without a completed round in between"
        if code == -signal.SIGKILL:
            self.last_words[peer] += OUT_OF_MEMORY
        return False


class Crew:
    """The peers that one launcher has started: who runs, who has ended and with which exit code."""

    def __init__(self, peers: Iterable[PeerId]) -> None:
        self.started: set[PeerId] = set()
        self.codes: dict[PeerId, int] = {}
        self.words: dict[PeerId, str] = {}
        """What each has said itself of why it failed."""
        self.busy = set(peers)
        """Peers that have not ended, as far as we know."""
        self.stopping = False
        self.killing = False
        self.seconds = 0.0
        self._began = time.monotonic()
        # Known by number and time of birth, so that another process with a number used again is not taken for it.
        self._processes: dict[PeerId, psutil.Process] = {}
        self._signalled: set[tuple[PeerId, signal.Signals]] = set()

    def expect(self, peers: Iterable[PeerId]) -> None:
        """These peers are being started again."""
        self.busy.update(peers)

    def hear(self, events: list[Event], warm_is_gone: bool) -> list[PeerId]:
        """Take in what the warm process has said. Returns the peers that have ended."""
        before = set(self.busy)
        for event in events:
            if event.event == "started":
                self.started.add(event.peer)
                with suppress(psutil.NoSuchProcess):
                    self._processes[event.peer] = psutil.Process(event.pid)
            elif event.event == "exited":
                self.codes[event.peer] = event.code
                self.words[event.peer] = event.words
                self.busy.discard(event.peer)
        if warm_is_gone:
            # Nobody reports exits any more, but the peers go on: see for ourselves who still lives.
            self.busy = {peer for peer in self.busy if self._lives(peer)}
        self.seconds = time.monotonic() - self._began
        return sorted(before - self.busy)

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
def farewell(folder: RunFolder, progress: Progress) -> Iterator[None]:
    """SIGTERM ends this command and no peer, which is said inside."""

    def leave(signum: int, frame: FrameType | None) -> None:
        progress.__exit__(None, None, None)  # gives the terminal back
        progress.say(f"ended by SIGTERM; the peers go on: `p2pfl stop {folder.root}` stops them")
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTERM)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


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
