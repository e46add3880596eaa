"""The peers of a simulation in several forked processes, each of which runs a part of them.

Not threads: peers swap their random streams into torch's global generator. Pipes between processes carry only the
headers of messages: the receiver maps the body from the file in the sender's journal. So a pipe is hardly ever full,
and bodies are copied as often as in one process.

The parent process runs no peer. It starts the others, passes their rounds on, stops them after an error, and notices
a deadlock: every process waits, and all that was sent has arrived. The processes end with the parent, also if it is
killed.
"""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import sys
import threading
import traceback
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from multiprocessing import current_process, get_context  # noqa: TID251  # what it unpickles was pickled by a fork of this process
from multiprocessing.connection import Connection, wait  # noqa: TID251  # as above
from multiprocessing.context import ForkProcess  # noqa: TID251  # as above
from types import FrameType
from typing import Any

import torch

from p2pfl import PeerId
from p2pfl.errors import P2pflError, PluginError, RunFailed, error_text
from p2pfl.messaging.control import Id
from p2pfl.messaging.journal import JournalEntry, Place
from p2pfl.run_folder.folder import Result
from p2pfl.session.child_processes import children_of_plugins
from p2pfl.session.session import Session, Stopped
from p2pfl.simulation.replaying_hub import ReplayingHub
from p2pfl.stop_signals import asks_to_kill, handling, stop_signals

PARENT = -1
"""Number of the parent process; the others are numbered from 0."""

BusMessage = tuple[Any, ...]
"""A kind, and what belongs to it."""
PipeCounts = tuple[tuple[int, ...], tuple[int, ...]]
"""Messages that may end a wait: how many a process has sent to each other one, and received from it."""


class Bus:
    """Pipes between the parent process and the others: one for each ordered pair, so that messages stay in order."""

    def __init__(self, processes: int) -> None:
        everyone = range(PARENT, processes)
        context = get_context("fork")
        self._pipes = {(a, b): context.Pipe(duplex=False) for a in everyone for b in everyone if a != b}
        self._readers: dict[Connection, int] = {}
        self._writers: dict[int, Connection] = {}

    def become(self, process: int) -> None:
        """Keep the ends that belong to a process, in that process. The others are closed, so readers see an end."""
        for (source, to), (reader, writer) in self._pipes.items():
            if to == process:
                self._readers[reader] = source
            else:
                reader.close()
            if source == process:
                self._writers[to] = writer
            else:
                writer.close()
        self._pipes.clear()

    def send(self, to: int, *message: Any) -> None:
        with suppress(OSError):  # it has died, which the parent notices
            self._writers[to].send(message)

    def receive(self) -> Iterator[tuple[int, BusMessage]]:
        """Yield messages and their senders as they arrive; the kind "end" when a sender has ended."""
        while self._readers:
            for ready in wait(list(self._readers)):
                assert isinstance(ready, Connection)
                source = self._readers[ready]
                try:
                    yield source, ready.recv()
                except (EOFError, OSError):
                    del self._readers[ready]
                    yield source, ("end",)


class ForkedHub(ReplayingHub):
    """Connects endpoints in several processes. Until ``become``, all of them are in this one.

    Args:
        peers: number of peers.
        processes: number of processes; each gets a block of consecutive peers.
    """

    def __init__(self, peers: int, processes: int) -> None:
        super().__init__()
        self.processes = processes
        self.owner = {peer: peer * processes // peers for peer in range(peers)}
        """The process of each peer."""
        self.bus = Bus(processes)
        self._me = PARENT
        self._local: list[PeerId] = []
        self._sent = [0] * processes
        """Messages to each other process that may end a wait there."""
        self._received = [0] * processes
        """The same from each other process."""
        self.done = False
        """Whether all peers of this process have finished."""
        self.failed = False
        """Whether a peer has failed: then waiting peers are not a deadlock."""

    def become(self, process: int) -> None:
        """Keep the peers of a process, in that process."""
        self._me = process
        self._local = self.owned(process)
        self.bus.become(process)

    @property
    def local(self) -> list[PeerId]:
        return self._local

    def owned(self, process: int) -> list[PeerId]:
        return [peer for peer, owner in self.owner.items() if owner == process]

    def deliver(self, sender: PeerId, entry: JournalEntry, to: Iterable[PeerId]) -> None:
        if self._me == PARENT:
            super().deliver(sender, entry, to)
            return
        of_process: dict[int, list[PeerId]] = {}
        for peer in to:
            of_process.setdefault(self.owner[peer], []).append(peer)
        for process, peers in of_process.items():
            if process == self._me:
                super().deliver(sender, entry, peers)
            else:
                place = None if entry.place is None else tuple(vars(entry.place).values())
                self._send(process, "entry", sender, tuple(entry.id), entry.header, entry.size, place, peers)

    def nothing(self, sender: PeerId, to: PeerId, t: int) -> None:
        if self._me in (PARENT, self.owner[to]):
            super().nothing(sender, to, t)
        else:
            self._send(self.owner[to], "nothing", sender, to, t)

    def drop(self, reader: PeerId, needed: Mapping[PeerId, int]) -> None:
        self._drop(reader, needed)
        for process in {self.owner[neighbor] for neighbor in needed} - {self._me}:
            self.bus.send(process, "drop", reader, needed)  # uncounted: it ends no wait, and may be sent during one

    def _drop(self, reader: PeerId, needed: Mapping[PeerId, int]) -> None:
        for neighbor, t in needed.items():
            if self.owner[neighbor] == self._me:  # this process has old copies of the others' journals
                self.endpoints[neighbor].journal.drop(reader, t)

    def _send(self, process: int, *message: Any) -> None:
        self._sent[process] += 1
        self.bus.send(process, *message)

    def handle(self, source: int, message: BusMessage) -> None:
        """Handle a message of another process."""
        kind, *values = message
        if kind == "drop":
            self._drop(*values)
            return
        self._received[source] += 1
        if kind == "entry":
            sender, id, header, size, place, to = values
            where = None if place is None else Place(*place)
            super().deliver(sender, JournalEntry(Id(*id), header, size, where, tuple(to)), to)
        elif kind == "nothing":
            super().nothing(*values)
        self.check()

    def check(self) -> None:
        if self._me != PARENT and not self.failed:
            super().check()

    def stuck(self) -> None:
        """Tell the parent that no peer of this process can continue before a message of another process arrives."""
        if self.failed:
            return
        if self.done or not self.finished.issuperset(self.local):
            self.bus.send(PARENT, "idle", tuple(self._sent), tuple(self._received))


# ---- the parent ----------------------------------------------------------------------------------------------


def run_forked(sessions: Sequence[Session], hub: ForkedHub, threads: int) -> list[Result]:
    """Fork the processes and run all peers in them to the end.

    Args:
        sessions: of all peers, connected by ``hub``, before their first round.
        threads: of each process.

    Returns:
        Results by peer id.

    Raises:
        KeyboardInterrupt: SIGINT or an equal signal arrived; the peers have stopped with checkpoints.
        RunFailed: a process was killed, or an unexpected error ended it.
        P2pflError: what the first peer to fail raised.
    """
    gc.collect()
    gc.freeze()  # keeps memory shared: the collector does not touch it in the forks
    sys.stdout.flush()
    sys.stderr.flush()
    fork = get_context("fork").Process
    # Forks inherit it: none loses a signal before it can stop.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, stop_signals())
    processes = [
        fork(target=_run_process, args=(number, sessions, hub, threads), daemon=True)
        for number in range(hub.processes)
    ]
    try:
        for process in processes:
            process.start()
        gc.unfreeze()
        hub.become(PARENT)
        return _Parent(sessions, hub, processes).follow(mask)
    finally:
        for process in processes:
            if process.pid is not None:
                process.kill()
                process.join()
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


class _Parent:
    """Follows the processes until all have ended."""

    def __init__(self, sessions: Sequence[Session], hub: ForkedHub, processes: Sequence[ForkProcess]) -> None:
        self._sessions = sessions
        self._hub = hub
        self._processes = processes
        self._results: dict[PeerId, Result] = {}
        self._over: set[int] = set()
        """Processes whose peers have ended."""
        self._idle: dict[int, PipeCounts] = {}
        self._errors: list[BaseException] = []
        self._stopping = False
        self._signals: list[int] = []
        """Those that interrupted the run."""

    def follow(self, mask: Iterable[int]) -> list[Result]:
        """Return the results. Signals arrive under this mask again, once they interrupt the run."""
        with handling(self._interrupt):
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            for source, message in self._hub.bus.receive():
                self._handle(source, *message)
        if self._errors:
            raise self._errors[0]
        if self._signals:
            raise KeyboardInterrupt
        return [self._results[session.me] for session in self._sessions]

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        """Stop the peers; at the second signal, kill them."""
        self._signals.append(number)
        self._stopping = True
        for process in self._processes:
            process.kill() if asks_to_kill(self._signals) else process.terminate()

    def _handle(self, source: int, kind: str, *values: Any) -> None:
        if kind == "round":
            self._sessions[values[0]].on_round(*values)
        elif kind == "result":
            self._results[values[0].peer] = values[0]
        elif kind == "idle":
            self._idle[source] = values[0], values[1]
            if len(self._over) < len(self._processes) and not self._stopping and nothing_in_transit(self._idle):
                self._send_all("deadlock")
        elif kind == "over":
            self._end(source, *values)
        elif kind == "end" and source not in self._over:
            self._processes[source].join()
            code = self._processes[source].exitcode or 0
            reason = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
            peers = self._hub.owned(source)
            self._end(source, RunFailed(f"the process of the peers {peers[0]} to {peers[-1]} {reason}"))

    def _end(self, source: int, error: BaseException | None) -> None:
        """Note that the peers of a process have ended. After an error, stop the others."""
        self._over.add(source)
        if error is not None and not self._signals:
            self._errors.append(error)
            self._stopping = True
            for process in self._processes:
                process.terminate()
        if len(self._over) == len(self._processes):  # until then, each answers the others
            self._send_all("exit")

    def _send_all(self, kind: str) -> None:
        for process in range(len(self._processes)):
            self._hub.bus.send(process, kind)


def nothing_in_transit(idle: Mapping[int, PipeCounts]) -> bool:
    """Return whether every process waits, and has received what the others had sent when they began to wait.

    Then none can have continued since: the first to do so would have received another message.
    """
    processes = range(max(len(sent) for sent, _ in idle.values()))
    return len(idle) == len(processes) and all(idle[a][0][b] == idle[b][1][a] for a in processes for b in processes)


# ---- the other processes -------------------------------------------------------------------------------------


def _run_process(me: int, sessions: Sequence[Session], hub: ForkedHub, threads: int) -> None:
    """Run the peers of process ``me``."""
    for number in (signal.SIGINT, signal.SIGHUP):  # they reach the whole group: the parent stops the others
        signal.signal(number, signal.SIG_IGN)
    current_process().daemon = False  # plug-ins may start processes, as in one process
    hub.become(me)
    torch.set_num_threads(threads)
    with children_of_plugins():
        asyncio.run(_serve([sessions[peer] for peer in hub.owned(me)], hub))


async def _serve(mine: Sequence[Session], hub: ForkedHub) -> None:
    """Run the peers of this process, and answer the other processes until the parent ends it."""
    loop = asyncio.get_running_loop()
    exit = asyncio.Event()

    def interrupt() -> None:
        for session in mine:
            session.stop()
            session.interrupt()

    def stop(number: int, frame: FrameType | None) -> None:
        # Runs between two bytecodes, even while training blocks the event loop.
        for session in mine:
            session.stop()

    def handle(source: int, message: BusMessage) -> None:
        if message[0] == "exit":
            exit.set()
        elif message[0] == "deadlock":
            hub.deadlocked()
        elif message[0] != "end":
            try:
                hub.handle(source, message)
            except Exception as error:  # the event loop would only log it, and receivers would wait forever
                hub.fail(error)

    def receive() -> None:
        for source, message in hub.bus.receive():
            if source == PARENT and message[0] == "end":
                os._exit(1)  # the parent was killed: the peers end too, as if they were killed
            with suppress(RuntimeError):  # the event loop has ended
                loop.call_soon_threadsafe(handle, source, message)

    loop.add_signal_handler(signal.SIGTERM, interrupt)  # wakes the loop, even if it was just about to sleep
    signal.signal(signal.SIGTERM, stop)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGTERM, signal.SIGINT, signal.SIGHUP))
    threading.Thread(target=receive, name="p2pfl pipes", daemon=True).start()
    error = await _run_peers(mine, hub)
    if error is not None and not isinstance(error, P2pflError):
        traceback.print_exception(error)
        error = RunFailed(error_text(error))  # others may not be picklable
    hub.bus.send(PARENT, "over", error)
    await exit.wait()


def failure_of(session: Session, error: Exception) -> Exception:
    """Log the traceback of an error in a plug-in. Return the error, with the peer's id."""
    if not isinstance(error, PluginError):
        return error
    session.log.error("%s", error, exc_info=error.__cause__)
    return error.during(f"peer {session.me}")


async def _run_peers(mine: Sequence[Session], hub: ForkedHub) -> BaseException | None:
    """Run the peers of this process. Return the first error."""
    errors: list[BaseException] = []
    stopped: list[PeerId] = []

    async def run_peer(session: Session) -> None:
        session.on_round = lambda peer, t: hub.bus.send(PARENT, "round", peer, t)
        try:
            hub.bus.send(PARENT, "result", await session.run())
        except Stopped:
            stopped.append(session.me)
        except Exception as error:
            errors.append(failure_of(session, error))
            hub.failed = True
            raise
        finally:
            hub.finish(session.me)

    try:
        async with asyncio.TaskGroup() as group:
            for session in mine:
                group.create_task(run_peer(session))
    except BaseExceptionGroup:
        return errors[0]
    hub.done = not stopped
    hub.check()
    return None
