"""ZmqLink: a peer's journal delivered over ZeroMQ sockets, on a dedicated I/O thread.

    peer 3                                       peer 7
    DEALER  ── Hello, Start, entries, Want ──▶   ROUTER
            ◀────────── Refused ───────────
    ROUTER  ◀────────── the same ────────────    DEALER

``docs/wire.md`` describes the protocol; ``p2pfl.messaging.edge`` implements it, connection.py over sockets.
Each peer binds one ROUTER to receive and connects one DEALER per neighbor to send, both ends of an edge on the same
one. libzmq reconnects by itself, and sends a socket's queue on a new connection before either side knows what was
lost with the old one; epochs tell them apart.

Threads: this class runs on the event loop's thread; the I/O loop (io_loop.py) owns the sockets on a separate one. A
peer whose event loop is blocked by training still receives, answers and sends.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Mapping
from functools import partial

from p2pfl import PeerId
from p2pfl.messaging.control import FOREVER, Hello
from p2pfl.messaging.deadline import Deadline
from p2pfl.messaging.edge import OPTIONAL_DELAY
from p2pfl.messaging.endpoint import Endpoint
from p2pfl.messaging.journal import JournalEntry
from p2pfl.messaging.link import Link
from p2pfl.run_file.faults import LinkFaults
from p2pfl.run_file.schema import Transport
from peers.effects import CaughtUp, Deliver, Disconnected, Failed, Lost, News, NothingComes, Reconnected
from peers.io_loop import IoLoop, Leaving
from peers.limited_log import LimitedLog
from peers.link_context import LinkContext
from peers.sockets import Sockets


class ZmqLink(Link):
    """A Link over sockets. ``await start()`` before use; ``await close()`` at the end.

    Args:
        endpoint: accepts the messages that arrive.
        world: the sockets, and what else a link uses of its environment.
        transport: the run file's section.
        config_hash: hash of the run file.
        log: the peer's log.
        faults: faults to inject into messages.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        world: Sockets,
        transport: Transport,
        config_hash: str,
        log: logging.Logger,
        faults: LinkFaults | None = None,
    ) -> None:
        self.endpoint = endpoint
        self.world = world
        self.transport = transport
        self.log = log
        self.bound = self.address = ""
        self._dead: set[PeerId] = set()
        """Neighbors that have disconnected without having finished."""
        self._caught_up = asyncio.Event()
        self._optional_due: asyncio.TimerHandle | None = None
        """Wakes the I/O loop for the last entry, which is optional."""
        hello = Hello(config_hash, *(world.journals.own if transport.same_host else ("", "")))
        limited_log = LimitedLog(log, world.now)
        self.context = LinkContext(
            endpoint, transport, faults or LinkFaults(), hello, world.new_number, log, limited_log
        )
        self.io = IoLoop(self.context, world, self._hear)
        endpoint.max_message = transport.max_message
        endpoint.mailbox.on_block = self._ask_for_more

    async def start(self) -> None:
        """Bind, publish the address and start the I/O thread. Raises RunFolderError if the address cannot be bound.

        If there is a checkpoint, restore the endpoint from it before.
        """
        router = self.world.listen(self.context.limited_log)
        self.bound, self.address = router.bound, self.world.addresses.publish(router.bound)
        self.io.start(router)
        self.checkpointed(self.endpoint.mailbox.needed_after(self.endpoint.durable))

    def announce(self, entry: JournalEntry) -> None:
        if self._optional_due is not None:
            self._optional_due.cancel()
        at = self.io.now()
        self.io.submit(lambda: self.io.announce(entry, at), soon=not entry.optional)
        if entry.optional:  # mostly, another entry follows soon, and makes it superfluous
            wake = partial(self.io.submit, lambda: None)
            self._optional_due = asyncio.get_running_loop().call_later(OPTIONAL_DELAY, wake)

    def behind(self, peers: Iterable[PeerId]) -> list[PeerId]:
        return [peer for peer in peers if self.io.connections[peer].is_behind()]

    async def caught_up(self, peers: Iterable[PeerId]) -> None:
        waiting = list(peers)
        deadline = Deadline(asyncio.get_running_loop().time() + self.transport.deadline)
        while True:
            self._caught_up.clear()
            for peer in waiting:  # before looking, so that no news is missed; a new epoch may set a neighbor back
                self.io.connections[peer].behind = True
            if not (waiting := self.behind(waiting)):
                return
            if self.endpoint.mailbox.failure is not None:
                raise self.endpoint.mailbox.failure
            if not await deadline.allows(self._caught_up.wait()):
                names, queue, deadline_s = ",".join(map(str, waiting)), self.transport.queue, self.transport.deadline
                self.log.warning(
                    "neighbors do not keep up peers=%s queue=%d deadline=%g: sending on", names, queue, deadline_s
                )
                return

    def nothing(self, to: PeerId, t: int) -> None:
        self.io.submit(lambda: self.io.nothing(to, t))

    def checkpointed(self, needed: Mapping[PeerId, int]) -> None:
        self.io.submit(lambda: self.io.set_needed(needed), soon=False)

    def undelivered(self) -> int:
        return sum(connection.entries_left() for connection in self.io.connections.values())

    def cut(self, neighbors: frozenset[PeerId]) -> None:
        """Cut off exactly these neighbors from now on (fault injection). Callable from any thread."""
        self.io.submit(lambda: self.io.cut(neighbors))

    def connected(self) -> int:
        """Return the number of connected neighbors. Callable from any thread."""
        return sum(connection.up for connection in self.io.connections.values())

    def _ask_for_more(self) -> None:
        """When a wait begins: have the I/O loop tell the neighbors how much was taken, if they may wait for that."""
        awaited, enough = self.endpoint.mailbox.awaited, self.context.budget // 4
        if stale := [peer for peer in awaited if self.io.connections[peer].unreported() >= enough]:
            self.io.submit(lambda: self.io.pump(stale))

    async def close(self, leaving: Leaving = "finished") -> None:
        """Close the connections.

        Args:
            leaving: ``finished``: wait until the neighbors have what this peer sent in a checkpoint, up to
                ``transport.deadline`` seconds without progress. ``failed``: until they know that it leaves.
                ``stopped``: send nothing and do not wait, so that the neighbors wait for this peer to resume.
        """
        if leaving != "stopped":
            self.endpoint.open(FOREVER)
        self.io.submit(lambda: self.io.begin_closing(leaving))
        await self.world.ended()
        if leaving != "stopped":  # a published address means that this peer may resume
            self.world.addresses.withdraw(self.address)

    # ---- news of the I/O loop, on the event loop's thread, in order

    def _hear(self, news: Iterable[News]) -> None:
        endpoint = self.endpoint
        for each in news:
            match each:
                case Deliver(message):
                    endpoint.accept(message)
                case NothingComes(peer, t):
                    endpoint.mailbox.nothing(peer, t)
                case Lost(peer, t):
                    endpoint.lost_before(peer, t)
                case CaughtUp():
                    self._caught_up.set()
                case Disconnected(peer, finished):
                    self._disconnected(peer, finished)
                case Reconnected(peer):
                    self._dead.discard(peer)
                    endpoint.mailbox.mark_connected(peer)
                case Failed(error):
                    endpoint.mailbox.fail(error)
                    self._caught_up.set()

    def _disconnected(self, peer: PeerId, finished: bool) -> None:
        self._dead.discard(peer) if finished else self._dead.add(peer)
        if self._dead == set(self.endpoint.neighbors):
            self.log.warning("all neighbors are dead; continuing alone")
        self._caught_up.set()
        self.endpoint.mailbox.mark_disconnected(peer, finished=finished)
