"""ZmqLink: a peer's journal delivered over ZeroMQ sockets, on a dedicated I/O thread.

    peer 3                                       peer 7
    DEALER  ── Hello, Start, entries, Want ──▶   ROUTER
            ◀────────── Refused ───────────
    ROUTER  ◀────────── the same ────────────    DEALER

Each peer binds one ROUTER to receive and connects one DEALER per neighbor to send. Addresses come from the run file
(run_file/addresses.py) or, where the system chooses the port, from the run folder. Peers may start in any order.
``p2pfl.messaging.edge`` is the protocol of an edge; both of its ends, the writer's and the reader's, send on the
DEALER. Rules of the connections:

1. A writer opens each connection with Hello (digest of the run file, where the journal is); every message names
   protocol version and run. Refused raises a HandshakeError on the sender's side.
2. A DEALER's socket identity is ``sender>receiver``; a restarted peer takes over its identity (ROUTER_HANDOVER). The
   receiver must be this peer: a stale address may belong to another peer after a restart.
3. A connection is *lost* when it breaks or libzmq's heartbeats time out. libzmq reconnects automatically, and sends a
   socket's queue on a new connection before either side knows what was lost with the old one; epochs tell them apart.
   After ``give_up`` seconds without success, or if it was not reached within ``deadline`` seconds of the start, the
   neighbor is declared dead. That ends all waits for it, and so does its last Begin.
4. A peer that has finished stays until its neighbors have what it sent in a checkpoint and have confirmed its last
   Begin, or have finished and left. A peer stopped before its last round sends no Begin, since it may resume. Only a
   peer that will not return withdraws its address, so that closing neighbors do not wait for it.
5. Bodies go to neighbors on the same host as references into the journal's files, to others in chunks.
6. Useless messages (from unknown senders, invalid, duplicate, control) are read at a bounded rate; beyond it, the
   ROUTER is read more slowly. libzmq serves connections in turn, so that other neighbors are not starved, and TCP
   flow control slows down a sender of too many messages.

Threads: this class runs on the event loop's thread; the I/O loop (io_loop.py) owns the sockets on a separate one. A
peer whose event loop is blocked by training still receives, answers and sends.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable
from pathlib import Path

from p2pfl import PeerId
from p2pfl.errors import NetError
from p2pfl.messaging.control import FOREVER
from p2pfl.messaging.deadline import Deadline
from p2pfl.messaging.endpoint import Endpoint
from p2pfl.messaging.journal import JournalEntry
from p2pfl.messaging.wire import Message
from p2pfl.run_file.faults import LinkFaults
from p2pfl.run_file.schema import Transport
from p2pfl.session.key_files import Keys
from peers.health import Health
from peers.io_context import IoContext, Notification
from peers.io_loop import IoLoop, Leaving
from peers.journal_files import NeighborJournals
from peers.sockets import Sockets
from peers.world import World


class ZmqLink:
    """A Link over sockets. ``await start()`` before use; ``await close()`` at the end.

    Args:
        endpoint: accepts the messages that arrive.
        addresses: folder in which each peer publishes its address while it runs.
        transport: the run file's section.
        config_hash: hash of the run file.
        log: the peer's log.
        journals: where this peer's journal is, and the neighbors' on this host; None sends all bodies by value.
        keys: this peer's keys; None disables encryption.
        world: drives the link; default: ZeroMQ sockets on a thread.
        faults: faults to inject into messages.
        health: answers health checks.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        addresses: Path,
        transport: Transport,
        config_hash: str,
        log: logging.Logger,
        journals: NeighborJournals | None = None,
        keys: Keys | None = None,
        world: World | None = None,
        faults: LinkFaults | None = None,
        health: Health | None = None,
    ) -> None:
        self.endpoint = endpoint
        self.me = endpoint.me
        self.log = log
        self.transport = transport
        self.bound = self.address = ""
        # Written by the event loop's thread only; the I/O thread may read it.
        self._dead: set[PeerId] = set()  # disconnected without having finished
        self._caught_up = asyncio.Event()
        if world is None:
            book = transport.book(endpoint.topology.peers)
            world = Sockets(self.me, addresses, book, transport, endpoint.neighbors, log, journals, keys, health)
        self.world = world
        context = IoContext(endpoint, transport, config_hash, log, world, faults or LinkFaults(), events=self)
        self.io = IoLoop(context)
        endpoint.mailbox.on_block = self._ask_for_more

    async def start(self) -> None:
        """Bind, publish the address and start the I/O thread. Raises RunFolderError if the address cannot be bound.

        If there is a checkpoint, restore the endpoint from it before.
        """
        router = self.world.listen()
        self.bound, self.address = router.bound, router.address
        self.world.addresses.publish(self.address)
        self.io.start(router)
        self.checkpointed(self.endpoint.durable)

    def announce(self, entry: JournalEntry) -> None:
        limit = self.transport.max_message
        if entry.size > limit:
            raise NetError(
                f"a body of {entry.size} bytes cannot be sent: transport.max_message is {limit}; set it higher"
            )
        self.io.submit(lambda: self.io.announce(entry))

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
            if self.endpoint.failure is not None:
                raise self.endpoint.failure
            if not await deadline.allows(self._caught_up.wait()):
                self.log.warning(
                    "neighbors do not keep up peers=%s queue=%d", ",".join(map(str, waiting)), self.transport.queue
                )
                return

    def nothing(self, to: PeerId, t: int) -> None:
        self.io.submit(lambda: self.io.nothing(to, t))

    def checkpointed(self, durable: int) -> None:
        self.io.submit(lambda: self.io.set_durable(durable))

    def cut(self, neighbors: frozenset[PeerId]) -> None:
        """Cut off exactly these neighbors from now on (fault injection). Callable from any thread."""
        self.io.submit(lambda: self.io.cut(neighbors))

    def connected(self) -> int:
        """Return the number of connected neighbors. Callable from any thread."""
        return self.io.connected()

    def _ask_for_more(self) -> None:
        """When a wait begins: have the I/O loop tell the neighbors how much was taken, if they may wait for that."""
        io = self.io.context
        if stale := [peer for peer in self.endpoint.mailbox.awaited if io.untold(peer) >= io.budget // 4]:
            self.io.submit(lambda: self.io.pump(stale))

    async def close(self, leaving: Leaving = "finished") -> None:
        """Close the connections.

        Args:
            leaving: ``finished``: wait up to ``transport.deadline`` seconds until the neighbors have what this peer
                sent in a checkpoint. ``failed``: until they know that it leaves. ``stopped``: send nothing and
                do not wait, so that the neighbors wait for this peer to resume.
        """
        if leaving != "stopped":
            self.endpoint.open(FOREVER)
        self.io.submit(lambda: self.io.begin_closing(leaving))
        await self.world.ended()
        if leaving != "stopped":  # a published address means that this peer may resume
            self.world.addresses.withdraw(self.address)

    # ---- LinkEvents: called by the I/O loop, on the event loop's thread

    def dispatch(self, notifications: list[Notification]) -> None:
        for function, arguments in notifications:
            function(*arguments)

    def message_received(self, message: Message) -> None:
        self.endpoint.accept(message)

    def neighbor_caught_up(self, peer: PeerId) -> None:
        self._caught_up.set()

    def neighbor_disconnected(self, peer: PeerId, finished: bool) -> None:
        self._dead.discard(peer) if finished else self._dead.add(peer)
        if self._dead == set(self.endpoint.neighbors):
            self.log.warning("all neighbors are dead; continuing alone")
        self._caught_up.set()
        self.endpoint.mailbox.mark_disconnected(peer)

    def neighbor_reconnected(self, peer: PeerId) -> None:
        self._dead.discard(peer)
        self.endpoint.mailbox.mark_connected(peer)

    def failed(self, error: BaseException) -> None:
        self.endpoint.fail(error)
        self._caught_up.set()
