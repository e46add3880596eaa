"""ZmqLink: frames over ZeroMQ sockets, on an I/O thread of its own.

    peer 3                                  peer 7
    DEALER  ── HELLO, messages, DURABLE, CLOSE ──▶  ROUTER
            ◀── WELCOME | REFUSED, CLOSED ─────────
    ROUTER  ◀───────────── the same ──────────────  DEALER

Each peer binds one ROUTER to hear and connects one DEALER per neighbour to speak. Where its neighbours listen says
the run file (p2pfl/addresses.py) or, of those whose port the system chooses, the run folder. Peers may start in any
order.

Rules:

1. The first message on a connection is HELLO (protocol version, run id, digest of the run file). Nothing else is
   sent until WELCOME comes back, with the sequence number of that HELLO. REFUSED is a named error on the sender's
   side, at once.
2. WELCOME says how far the receiver has come; sending goes on there, be it with messages that were sent before, on a
   connection that broke or to a process that died. HELLO says which message is the oldest that is kept: if the
   receiver expected an older one, it learns so that it will never come. It also says which comes next: if the
   receiver has nothing of that round, but higher numbers, the sender fell back to a checkpoint and went other ways
   since, and the receiver goes on there (``Place``). A receiver takes no message but the one that it expects. It has
   had those before; and of those after, libzmq may send some on a new connection before anybody knows that others got
   lost with the old one. Where numbers do not follow on, HELLO is said again first. DURABLE(t) says that everything
   of rounds before t is in the checkpoint of the receiver before its last one, and need not be kept.
3. A DEALER's socket identity is ``sender>receiver``; whoever restarts takes its identity back (ROUTER_HANDOVER).
   The sender in a header must be the one in the identity. The receiver must be us: an address from before a
   restart may by now be another peer's.
4. CLOSE is the last message on an edge; it comes when the receiver has said DURABLE for everything before it.
   CLOSED comes back when it has been read, but may get lost with its sender: nobody waits for it who knows that the
   neighbour has finished too. A peer that is stopped before its last round says no CLOSE: it may come back.
   Only who leaves for good takes its address away: nobody who closes waits for it any more.
5. A connection that libzmq finds dead (its heartbeats see to that) is *lost*. libzmq reconnects by itself; if it
   has not within ``give_up`` seconds, waits for that neighbour end. So they do for one that has said CLOSE, and for
   one that has not come up within ``deadline`` seconds.
6. Queues are bounded on both sides. What does not fit waits: the ROUTER is not read while the event loop is behind,
   and what waits past the deadline on the sender's side is given up and counted. A neighbour so far ahead that its
   messages for later rounds take up too much memory is asked to wait (HOLD), and what it sends meanwhile is dropped.
   When there is room again it is asked to go on (HOLD, false), says HELLO, and sends from there on again.
7. Messages that bring nothing (strangers', damaged ones, such as we have) are read at a bounded rate. While more of
   them come, the ROUTER is read more slowly: libzmq reads connections in turn, so that others come through, and TCP
   holds back who sends too much.

The I/O loop, which runs on a thread of its own, owns the sockets. A peer in the middle of an epoch, which blocks its
event loop, still hears, answers and sends. Whatever the link uses of the world is in peers/sockets.py.
"""

from __future__ import annotations

import asyncio
import logging
import os
import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from p2pfl import wire
from p2pfl.chaos import LinkFaults
from p2pfl.config import Transport
from p2pfl.errors import HandshakeError, NetError, WireError, WrongRun, WrongVersion
from p2pfl.keys import Keys
from p2pfl.net import STALL, START, Deadline, Endpoint, Kept, Place
from p2pfl.runfolder import PeerId
from p2pfl.wire import Body, Buffer, Layout, Message, Vocabulary
from peers.health import Health
from peers.refusals import Refusals
from peers.sockets import INPUT, ROOM, Dealer, Sockets, Turns, World

TICK = 0.1
"""Seconds between two looks for neighbours while some are not up."""
SLOW_TICK = 1.0
"""Seconds between two looks at connections that are up."""
STALE = 2.0
"""Seconds without an answer after which an address is read again: its peer may have restarted elsewhere."""
CLOSING = 10.0
"""Seconds that CLOSED may take."""
OVERDUE = 20.0
"""Seconds after which the log says which neighbours have not been reached yet, and where they are looked for."""
FOREVER = 1 << 40
"""Rounds; DURABLE(FOREVER) says that nothing need be kept for us any more."""
EXPLAINING = 1.0
"""Seconds for which a peer whose handshake has failed refuses the others' in turn, before it closes."""

USELESS = 1000.0
"""Messages that bring nothing which are read within a second, over all connections; as many more at once."""
BREATHER = 0.05
"""Seconds for which the ROUTER is not read, at least, once there were too many."""
AT_ONCE = 64
"""Answers of one neighbour that are read in one turn of the I/O loop."""
HELD = 16
"""Largest messages of a neighbour that may wait to be taken, or ``transport.queue`` of them if that is more: those of
a round must have room, in whatever order the method takes them."""

Leaving = Literal["finished", "failed", "stopped"]


@dataclass(frozen=True)
class Hello(Body):
    """``durable``: as in Durable. ``first``: number of the oldest message that is kept; ``oldest``: its round, or the
    sender's present one if nothing is kept. ``coming``, ``of``: number and round of the message that comes next, as
    far as the sender knows what the receiver has; or else of the oldest."""

    digest: str
    durable: int
    first: int
    oldest: int
    coming: int
    of: int


@dataclass(frozen=True)
class Welcome(Body):
    """``expected``, ``last``: a Place in what the one who is welcomed says."""

    expected: int
    last: int


@dataclass(frozen=True)
class Durable(Body):
    rounds_done: int


@dataclass(frozen=True)
class Hold(Body):
    """``on``: send nothing more for now; otherwise: say HELLO, and go on."""

    on: bool


@dataclass(frozen=True)
class Refused(Body):
    reason: str


@dataclass(frozen=True)
class Close(Body):
    pass


@dataclass(frozen=True)
class Closed(Body):
    pass


ANSWERS = Vocabulary([Layout.of(Welcome(0, 0)), Layout.of(Refused("")), Layout.of(Closed())])


@dataclass
class _Edge:
    """The way to one neighbour; touched by the I/O thread only."""

    to: PeerId
    dealer: Dealer
    address: str = ""
    up: bool = False
    """WELCOME has come on this connection."""
    lost_at: float | None = None
    given_up: bool = False
    """Lost for longer than ``give_up`` seconds; the endpoint was told."""
    polled: int = 0
    """What the DEALER is watched for: answers while one is due, room while it is full."""
    connected_at: float = 0.0
    attempt: int = 0
    """Number of this connection: the HELLO on it and its WELCOME bear it."""
    held: bool = False
    """The neighbour has asked us to wait."""
    must_greet: bool = False
    """HELLO is due on this connection."""
    known_at: str = ""
    """The address from which WELCOME has come last."""
    turned_away: bool = False
    """Somebody else was met there since."""
    suspected: str = ""
    """An address whose listener has not proved to have the neighbour's key; the log says so once."""
    close_sent: float | None = None
    """When CLOSE was sent on this connection."""
    closed: bool = False
    """CLOSED has come."""
    finished: bool = False
    """The neighbour has said that it needs nothing of us any more, not even CLOSE."""
    outbox: deque[tuple[float, int]] = field(default_factory=deque)
    """(not before, number of the message)"""
    queued: int = 0
    """Number of the next message to come from the event loop."""
    handed: int = 0
    """Number after the highest that libzmq was handed: the event loop was told that there is room again."""
    durable: int = 0
    """Rounds of our own that the neighbour was told are in a checkpoint."""
    free_at: float = 0.0
    """When the last message will have left, over a connection of limited bandwidth."""
    place: Place = START
    """How far the neighbour had come when the connection came up."""
    follows: int = 0
    """Number of the message that it expects next, now: it takes no other."""


class ZmqLink:
    """A Link over sockets. ``await start()`` before use; ``await close()`` at the end.

    Args:
        endpoint: decodes and takes what arrives.
        addresses: folder in which each peer writes where it listens, as long as it does.
        transport: the run file's section.
        digest: of the run file.
        log: the peer's log.
        keys: this peer's; None: nothing is encrypted.
        world: what drives the link; by default real sockets on a thread.
        faults: what happens to messages on purpose.
        health: answers whoever asks how the peer does.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        addresses: Path,
        transport: Transport,
        digest: str,
        log: logging.Logger,
        keys: Keys | None = None,
        world: World | None = None,
        faults: LinkFaults | None = None,
        health: Health | None = None,
    ) -> None:
        self.endpoint = endpoint
        self.me = endpoint.me
        self.transport = transport
        self.digest = digest
        self.log = log
        self.bound = self.address = ""
        self._addresses = addresses
        controls = (Hello("", 0, 0, 0, 0, 0), Durable(0), Hold(True), Close())
        self._vocabulary = Vocabulary([*endpoint.layouts, *map(Layout.of, controls)])
        largest = self._vocabulary.largest(transport.max_message)
        book = transport.book(endpoint.topology.peers)
        self.world = world or Sockets(
            self.me, addresses, book, transport, endpoint.neighbors, largest, log, keys, health
        )
        self.most_held = max(HELD, transport.queue) * largest
        """Bytes of one neighbour that may wait to be taken."""
        self._stood_still = 0.0
        self.refusals = Refusals(log, self.now)
        # Shared between the threads; appends and pops of a deque are atomic.
        self._commands: deque[Callable[[], None]] = deque()
        # Owned by the event loop's thread; the I/O thread may read.
        self._accepted: dict[PeerId, int] = dict.fromkeys(endpoint.neighbors, 0)
        self._room: dict[PeerId, int] = dict.fromkeys(endpoint.neighbors, transport.queue)
        self._gone: set[PeerId] = set()
        self._lost: set[PeerId] = set()  # those of them that did not take their leave
        self._room_changed = asyncio.Event()
        self._crowded = False
        """The event loop has as many messages of one neighbour to accept as may wait; the I/O thread writes it."""
        # Owned by the I/O thread once it runs.
        self._edges: dict[PeerId, _Edge] = {}
        self._delivered: dict[PeerId, int] = dict.fromkeys(endpoint.neighbors, 0)
        self._places: dict[PeerId, Place] = dict.fromkeys(endpoint.neighbors, START)
        """How far we have come in what each neighbour says."""
        self._holding: dict[PeerId, int | None] = {}
        """Neighbours that were asked to wait, and on which connection of ours to go on."""
        self._useless = USELESS
        """Useless messages that may still be read now."""
        self._counted = self.now()
        self._resting = False
        """There were too many of them; the ROUTER is not read."""
        self._durable = 0
        self._seen_addresses = 0
        self._next_look = 0.0
        self._named_overdue = False
        self._closing: float | None = None
        self._leaving: Leaving = "finished"
        self._refused = False
        self._neighbors = {f"{one}>{self.me}".encode(): one for one in endpoint.neighbors}
        self._told: list[tuple[Callable[..., None], tuple[Any, ...]]] = []
        self._faults = faults or LinkFaults()
        self._chance = random.Random(f"{self.me} {os.getpid()}")  # timing only: must differ between runs
        self._cut_off: frozenset[PeerId] = frozenset()

    # ---- the event loop's side

    async def start(self) -> None:
        """Bind, publish the address, start the I/O thread. Raises RunFolderError if it cannot bind.

        The endpoint must be in the state in which it goes on.
        """
        self._places = dict(self.endpoint.heard)
        self._durable = self.endpoint.durable
        self._router = self.world.listen()
        self.bound, self.address = self._router.bound, self._router.address
        self.world.publish(self.address)
        self._started = self.now()
        self.world.start(self._io())

    async def send(self, to: PeerId, seq: int) -> bool:
        kept = self.endpoint.sent[to].get(seq)
        assert kept is not None
        largest = max(memoryview(frame).nbytes for frame in kept.frames)
        if largest > self.transport.max_message:
            raise NetError(f"{largest} bytes in one tensor; transport.max_message is {self.transport.max_message}")
        deadline = Deadline(asyncio.get_running_loop().time() + self.transport.deadline)
        while self.full(to):
            if self.endpoint.failure is not None:
                raise self.endpoint.failure
            self._room_changed.clear()
            if not await deadline.allows(self._room_changed.wait()):
                self.log.warning("gave up a message to peer %d: %d are waiting", to, self.transport.queue)
                return False
        if to in self._gone:
            self.endpoint.sent[to].forget_before(self.endpoint.t - 1)  # in case that it comes back
            return False
        self._room[to] -= 1
        self._command(lambda: self._enqueue(to, seq, kept.t))
        return True

    def checkpointed(self, rounds_done: int) -> None:
        self._command(lambda: self._spread(rounds_done))

    def cut(self, neighbors: frozenset[PeerId]) -> None:
        """Do not reach these neighbours, and all others (again), from now on: a fault on purpose. Any thread."""
        self._command(lambda: self._cut(neighbors))

    def full(self, to: PeerId) -> bool:
        return to not in self._gone and self._room[to] <= 0

    async def close(self, leaving: Leaving = "finished") -> None:
        """End the connections.

        Args:
            leaving: ``finished``: wait until the neighbours have all our messages in a checkpoint, which may take
                them ``transport.deadline`` seconds, say CLOSE, wait for CLOSED. ``failed``: the same, without waiting
                for checkpoints. ``stopped``: go without a word, so that the neighbours wait for us for a while.
        """
        self._command(lambda: self._begin_closing(leaving))
        await self.world.ended()
        if leaving != "stopped":  # whoever finds our address knows that we may come back
            self.world.withdraw(self.address)

    def _command(self, command: Callable[[], None]) -> None:
        self._commands.append(command)
        if len(self._commands) > 1:
            return  # the I/O loop has been woken and takes them until none is left
        self.world.wake()

    def _handed_over(self, to: PeerId) -> None:
        self._room[to] += 1
        self._room_changed.set()

    def _neighbor_gone(self, to: PeerId, closed: bool) -> None:
        self._gone.add(to)
        self._lost.discard(to) if closed else self._lost.add(to)
        if self._lost == set(self.endpoint.neighbors):
            self.log.warning("no neighbour is left: going on alone")
        self._room_changed.set()
        self.endpoint.mailbox.lost(to)

    def _neighbor_back(self, to: PeerId) -> None:
        self._gone.discard(to)
        self._lost.discard(to)
        self.endpoint.mailbox.regained(to)
        until = self.endpoint.sent[to].next
        self._command(lambda: self._make_up(to, until))

    def _failed(self, error: BaseException) -> None:
        self.endpoint.fail(error)
        self._room_changed.set()

    def _arrived(self, message: Message) -> None:
        self._accepted[message.sender] += 1
        self.endpoint.accept(message)

    def now(self) -> float:
        """Seconds on a clock that stands still while this process does: what neighbours did meanwhile has not been
        seen yet, and nobody is given up for it."""
        return self.world.now() - self._stood_still

    # ---- the I/O thread's side

    def connected(self) -> int:
        """To how many neighbours the way is free."""
        return sum(edge.up for edge in self._edges.values())

    def _tell(self, function: Callable[..., None], *arguments: Any) -> None:
        """Have the event loop call something, in order, at the end of this turn of the I/O loop."""
        self._told.append((function, arguments))

    def _hand_in(self) -> None:
        """Wake the event loop once for all that happened in this turn."""
        if not self._told:
            return
        told, self._told = self._told, []

        def call() -> None:
            for function, arguments in told:
                function(*arguments)
            if self._crowded:
                self._command(self._read_on)

        self.world.call_soon(call)

    def _io(self) -> Turns:
        """The I/O loop, one turn at a time."""
        try:
            for neighbor in self.endpoint.neighbors:
                edge = self._edges[neighbor] = _Edge(neighbor, self.world.dealer(neighbor))
                edge.queued = edge.handed = self.endpoint.sent[neighbor].next
            turned = self.world.now()
            while not self._done():
                patience = self._patience()
                ready = yield patience
                turned, before = self.world.now(), turned
                if turned - before > patience + STALL:
                    self._stood_still += turned - before
                while self._commands:
                    self._commands.popleft()()
                if self._resting and self._rest() <= 0:
                    self._resting = False
                    self._watch_router()
                if self._router in ready:
                    self._hear()
                for edge in self._edges.values():
                    if edge.dealer in ready:
                        self._answered(edge)
                    if edge.outbox:
                        self._flush(edge)
                if self.now() >= self._next_look:
                    self._look_around()
                self._hand_in()
        except Exception as error:
            self.log.exception("the I/O thread failed")
            self._tell(self._failed, error)
        finally:
            self.refusals.sum_up(last=True)
            self._hand_in()
            for edge in self._edges.values():
                edge.dealer.close()
            self._router.close()

    def _renew(self, edge: _Edge, address: str) -> None:
        """New sockets for a neighbour that listens elsewhere now; nothing that comes late can be mistaken."""
        edge.dealer.close()
        edge.dealer, edge.polled = self.world.dealer(edge.to), 0
        edge.address, edge.must_greet = address, False
        edge.attempt += 1

    def _patience(self) -> float:
        """Seconds until something is due even if no socket stirs."""
        due = self._next_look
        for edge in self._edges.values():
            if edge.outbox and edge.up and not edge.held and not edge.polled & ROOM:
                due = min(due, edge.outbox[0][0])
        if self._resting:
            due = min(due, self.now() + self._rest())
        return max(0.001, due - self.now())

    # -- finding neighbours

    def _look_around(self) -> None:
        """See to connections that were lost, to neighbours that came up, and to those lost for too long."""
        now = self.now()
        self.refusals.sum_up()
        for edge in self._edges.values():
            self._watch(edge)
            if edge.must_greet:
                self._greet(edge)
            self._spread_to(edge)
            if edge.up or edge.given_up:
                continue
            if edge.lost_at is not None and now - edge.lost_at > self.transport.give_up:
                self._give_up(edge, f"lost for {self.transport.give_up:g} s")
            if edge.lost_at is None and now - self._started > self.transport.deadline:
                self._give_up(edge, f"it has not come up within {self.transport.deadline:g} s")
        down = [edge for edge in self._edges.values() if not edge.up]
        if down:
            self._look_for_addresses(down, now)
        if now - self._started > OVERDUE and not self._named_overdue:
            self._named_overdue = True
            self._name_overdue([edge for edge in down if edge.lost_at is None and not edge.given_up])
        self._let_go_on()
        busy = down or self._holding or self._closing is not None
        self._next_look = now + (TICK if busy else SLOW_TICK)

    def _name_overdue(self, edges: list[_Edge], most: int = 8) -> None:
        """Once: others may just not have been started yet. But a firewall, or an address that is none, looks the
        same."""
        if edges:
            words = [f"peer {edge.to} at {edge.address or 'no known address'}" for edge in edges[:most]]
            others = f" and {len(edges) - most} others" if len(edges) > most else ""
            unwritten = any(not edge.address and not self.world.settled(edge.to) for edge in edges)
            where = f"; each writes its address into {self._addresses}, unless transport.hosts tells it" * unwritten
            self.log.info("not reached yet: %s%s%s", ", ".join(words), others, where)

    def _look_for_addresses(self, down: list[_Edge], now: float) -> None:
        """Connect to neighbours whose address has appeared or changed."""
        published = self.world.published()
        if published and published == self._seen_addresses:
            return
        self._seen_addresses = published
        for edge in down:
            address = self.world.address_of(edge.to)
            if address is None or edge.to in self._cut_off:
                continue
            unanswered = edge.turned_away or (edge.address and edge.lost_at is None)
            if unanswered and now - edge.connected_at < STALE:
                self._seen_addresses = 0  # it has not had the time to answer: look again later
                continue
            if address != edge.address:
                self._renew(edge, address)
                edge.dealer.connect(address)
                edge.connected_at = now
                self._greet(edge)

    def _greet(self, edge: _Edge, coming: Kept | None = None) -> None:
        t = self.endpoint.t  # before we look for the message: it may be said now, and be the last of its round
        first, kept_of = self.endpoint.sent[edge.to].first
        oldest = t if kept_of is None else kept_of
        of = (first, oldest) if coming is None else (coming.seq, coming.t)
        hello = Hello(self.digest, self._durable, first, oldest, *of)
        edge.must_greet = not self._control(edge, hello)
        if edge.must_greet:
            self._next_look = min(self._next_look, self.now() + TICK)
        edge.durable = hello.durable

    def _poll(self, edge: _Edge, events: int) -> None:
        """Watch the DEALER for ``events`` only: a poller that watches a hundred idle sockets costs more than
        the messages do."""
        if edge.polled != events:
            edge.polled = events
            edge.dealer.watch(events)

    def _control(self, edge: _Edge, body: Body, *, answered: bool = True) -> bool:
        """False if there is no room at the moment."""
        frames = wire.encode(body).to(self.endpoint.run_id, 0, self.me, edge.attempt)
        if not edge.dealer.send(frames):
            return False
        if answered:
            self._poll(edge, edge.polled | INPUT)
        return True

    def _watch(self, edge: _Edge) -> None:
        while (event := edge.dealer.event()) is not None:
            if event == "lost":
                edge.up = False
                edge.attempt += 1  # also if WELCOME has not come: it may have, and not have been read yet
                if edge.lost_at is None:
                    edge.lost_at = self.now()
                    if not edge.given_up and self._closing is None:
                        self.log.info("peer %d: connection lost", edge.to)
            elif event == "connected" and edge.lost_at is not None:
                self._greet(edge)
            elif event == "unwelcome":
                self._turned_away(edge, "it does not know our key: its public keys are older or newer than ours")
            elif event == "foreign" and edge.suspected != edge.address:
                edge.suspected = edge.address
                self.log.warning(
                    "peer %d: who listens at %s does not prove to have its key, or one of us has keys and the other "
                    "has none; another may have got its port",
                    *(edge.to, edge.address),
                )

    def _give_up(self, edge: _Edge, why: str) -> None:
        self.log.info("peer %d is gone: %s", edge.to, why)
        self._let_go(edge)

    def _has_left(self, edge: _Edge) -> None:
        """Everything that it ever sent stands before its CLOSE, and it hears nothing any more."""
        if self._closing is None:
            self.log.info("peer %d has left", edge.to)
        self._let_go(edge, closed=True)

    def _let_go(self, edge: _Edge, *, closed: bool = False) -> None:
        edge.given_up = True
        edge.outbox.clear()
        self._handed_up_to(edge, edge.queued)
        self._poll(edge, edge.polled & ~ROOM)
        self._tell(self._neighbor_gone, edge.to, closed)

    def _answered(self, edge: _Edge) -> None:
        """A control message on our own connection to a neighbour."""
        for _ in range(AT_ONCE):
            frames = edge.dealer.receive()
            if frames is None:
                return
            try:
                answer = wire.decode(frames, None, ANSWERS)
                body, seq, run = answer.body, answer.seq, answer.run
            except WrongVersion as error:
                body, seq, run = Refused(str(error)), edge.attempt, self.endpoint.run_id
            except WireError as error:
                self._drop(edge.to, error)
                continue
            if isinstance(body, Welcome):
                if seq != edge.attempt:
                    continue  # to a connection that is no more
                edge.up, edge.lost_at = True, None
                edge.known_at, edge.turned_away = edge.address, False
                if edge.given_up:
                    edge.given_up = False
                    self.log.info("peer %d is back", edge.to)
                    self._tell(self._neighbor_back, edge.to)
                edge.close_sent, edge.closed, edge.held = None, False, False
                self._poll(edge, edge.polled & ~INPUT)
                self._go_on(edge, Place(body.expected, body.last))
            elif isinstance(body, Refused):
                # The address may be from before a reboot, and its port another run's by now.
                mistaken = run != self.endpoint.run_id and not self.world.settled(edge.to)
                self._turned_away(edge, _legible(body.reason), mistaken=mistaken)
            else:
                edge.closed = True

    def _turned_away(self, edge: _Edge, why: str, *, mistaken: bool = False) -> None:
        if mistaken or edge.known_at == edge.address:
            # The neighbour that was there is gone, and somebody else has got its port, until it comes back.
            if not edge.turned_away:
                self.log.warning("peer %d is no longer at %s: %s", edge.to, edge.address, why)
            edge.turned_away = True
            self._renew(edge, "")
            self._seen_addresses = 0
        else:
            refusal = f"peer {edge.to} at {edge.address} refuses peer {self.me}: {why}"
            self.log.error("%s", refusal)
            edge.given_up = True
            self._refused = True
            self._tell(self._failed, HandshakeError(refusal))

    # -- hearing

    def _hear(self) -> None:
        """Everything that waits in the ROUTER, up to a bound so that the other sockets get their turn."""
        for _ in range(256):
            if self._crowded or self._resting:
                return
            received = self._router.receive()
            if received is None:
                return
            self._heard(*received)

    def _heard(self, identity: bytes, frames: list[Buffer]) -> None:
        via = self._neighbors.get(identity)
        if via is None:
            if identity:
                self.refusals.say("messages of strangers", f"dropped a message of a stranger: {identity[:32]!r}")
            self._brought_nothing(frames)
            return
        try:
            message = self.endpoint.decode(frames, via, self._vocabulary)
        except WireError as error:
            self._drop(via, error)
            self._brought_nothing(frames)
            if isinstance(error, WrongRun | WrongVersion):
                self._reply(identity, Refused(str(error)), 0)
            return
        if isinstance(message.body, Hello):
            self._brought_nothing(frames)  # no method's message
            self._greeted(via, identity, message.body, message.seq)
        elif isinstance(message.body, Durable):
            self._brought_nothing(frames)
            self.endpoint.sent[via].forget_before(message.body.rounds_done)
            self._edges[via].finished |= message.body.rounds_done == FOREVER
        elif isinstance(message.body, Hold):
            self._brought_nothing(frames)
            self._asked_to_hold(self._edges[via], message.body.on)
        elif isinstance(message.body, Close):
            self._brought_nothing(frames)
            self._reply(identity, Closed(), message.seq)
            if not self._edges[via].given_up:
                self._has_left(self._edges[via])
        elif message.seq != self._places[via].expected or via in self._holding:
            # We have it, or it comes again: something before it was lost with a connection, or we asked it to hold.
            self._brought_nothing(frames)
        elif self.endpoint.mailbox.held[via] >= self.most_held:
            self._hold(via)
        else:
            self._places[via] = Place(message.seq + 1, max(message.t, self._places[via].t))
            self._delivered[via] += 1
            self._tell(self._arrived, message)
            if self._behind(via):
                self._crowded = True
                self._watch_router()

    def _watch_router(self) -> None:
        self._router.watch(not (self._crowded or self._resting))

    def _brought_nothing(self, frames: Sequence[Buffer]) -> None:
        """A message was of no use, and cost the more time the longer its header."""
        now = self.now()
        self._useless = min(USELESS, self._useless + (now - self._counted) * USELESS)
        self._counted = now
        self._useless -= 1 + sum(map(len, frames[:1])) / 1024 + len(frames) / 16
        if self._useless < 0 and not self._resting:
            self._resting = True
            self._watch_router()

    def _rest(self) -> float:
        """Seconds for which the ROUTER is not read yet."""
        return BREATHER - self._useless / USELESS - (self.now() - self._counted)

    # -- neighbours that are too far ahead

    def _hold(self, via: PeerId) -> None:
        self.log.info("peer %d is far ahead: asked to wait", via)
        edge = self._edges[via]
        self._holding[via] = None
        self._next_look = min(self._next_look, self.now() + TICK)
        if edge.up:
            self._control(edge, Hold(True), answered=False)  # if there is no room, what it sends is dropped

    def _let_go_on(self) -> None:
        """Ask neighbours whose messages have room again to go on: once on each connection, until they do."""
        for via, attempt in self._holding.items():
            edge = self._edges[via]
            room = self.endpoint.mailbox.held[via] <= self.most_held // 2
            if room and edge.up and attempt != edge.attempt and self._control(edge, Hold(False), answered=False):
                self._holding[via] = edge.attempt

    def _asked_to_hold(self, edge: _Edge, on: bool) -> None:
        edge.held = on
        if not on and edge.up:
            edge.up = False
            edge.lost_at = self.now()
            edge.attempt += 1
            self._greet(edge)

    def _behind(self, neighbor: PeerId) -> bool:
        return self._delivered[neighbor] - self._accepted[neighbor] >= self.transport.queue

    def _read_on(self) -> None:
        """The event loop has accepted some messages: read the ROUTER again, if these were enough."""
        if self._crowded and not any(map(self._behind, self._edges)):
            self._crowded = False
            self._watch_router()

    def _greeted(self, via: PeerId, identity: bytes, hello: Hello, seq: int) -> None:
        if hello.digest != self.digest:
            reason = f"run file differs: digest {hello.digest[:12]}…, here {self.digest[:12]}…"
            self.refusals.say(f"HELLOs of peer {via} that were refused", f"refused peer {via}: {reason}")
            self._reply(identity, Refused(reason), seq)
            return
        self._holding.pop(via, None)
        self.endpoint.sent[via].forget_before(hello.durable)
        self._edges[via].finished |= hello.durable == FOREVER
        place = self._place_after(hello, via)
        self._reply(identity, Welcome(place.expected, place.t), seq)
        edge = self._edges[via]
        if not edge.up:
            self._seen_addresses = 0  # it may listen at a new address: look again, soon
            self._next_look = min(self._next_look, self.now() + TICK)

    def _place_after(self, hello: Hello, via: PeerId) -> Place:
        """Where we go on in what a neighbour says, now that it has said what it still has."""
        place = self._places[via]
        if hello.first > place.expected:
            lacking = f"messages {place.expected} to {hello.first - 1}, of rounds before {hello.oldest}"
            self.refusals.say(f"gaps in what peer {via} has", f"peer {via} no longer has {lacking}")
            self._places[via] = Place(hello.first, place.t)
            self._tell(self.endpoint.missed, via, hello.oldest)
        elif hello.coming < place.expected and not place.has(hello.coming, hello.of):
            news = f"peer {via} fell back to a checkpoint: says other things than before from round {hello.of} on"
            self.refusals.say(f"falls of peer {via} to a checkpoint", news)
            self._places[via] = Place(hello.coming, place.t)
            if hello.oldest > place.t + 1:
                self._tell(self.endpoint.missed, via, hello.oldest)
        return self._places[via]

    def _reply(self, identity: bytes, body: Body, seq: int) -> None:
        frames = wire.encode(body).to(self.endpoint.run_id, 0, self.me, seq)
        self._router.send(identity, frames)

    def _drop(self, via: PeerId, error: WireError) -> None:
        self.refusals.say(f"messages of peer {via} that were dropped", f"dropped a message of peer {via}: {error}")
        self.endpoint.refuse(via)  # not by the event loop: it may not turn for minutes, and have millions to count

    # -- speaking

    def _enqueue(self, to: PeerId, seq: int, t: int) -> None:
        edge = self._edges[to]
        if seq != edge.queued:  # rounds were skipped, and numbers with them
            self._handed_up_to(edge, edge.queued)
            edge.handed = seq
        edge.queued = seq + 1
        if edge.given_up or edge.place.has(seq, t):  # it has got it from us already, before we came back
            self._handed_up_to(edge, seq + 1)
            return
        self._put_out(edge, seq)

    def _put_out(self, edge: _Edge, seq: int) -> None:
        after = now = self.now()
        faults = self._faults
        if faults.bandwidth is not None and (kept := self.endpoint.sent[edge.to].get(seq)) is not None:
            size = sum(memoryview(frame).nbytes for frame in kept.frames)
            after = edge.free_at = max(now, edge.free_at) + size / faults.bandwidth
        after += faults.delay + (self._chance.uniform(0.0, faults.jitter) if faults.jitter else 0.0)
        if edge.outbox:  # the order on an edge stays
            after = max(after, edge.outbox[-1][0])
        edge.outbox.append((after, seq))

    def _go_on(self, edge: _Edge, place: Place) -> None:
        """A new connection: send what the neighbour has not got yet."""
        edge.place, edge.follows = place, place.expected
        lacking = self._lacking(edge, edge.queued)
        if again := sum(seq < edge.handed for seq in lacking):
            self.log.info("peer %d: sending %d message%s again", edge.to, again, "s" * (again != 1))
        self._handed_up_to(edge, lacking[0] if lacking else edge.queued)
        edge.outbox.clear()
        for seq in lacking:
            self._put_out(edge, seq)

    def _lacking(self, edge: _Edge, until: int) -> list[int]:
        """Numbers of the messages before number ``until`` that are kept and that the neighbour has not got."""
        kept = self.endpoint.sent[edge.to].all()
        return [one.seq for one in kept if one.seq < until and not edge.place.has(one.seq, one.t)]

    def _make_up(self, to: PeerId, until: int) -> None:
        """Send what was kept for a neighbour while it was gone, up to number ``until``."""
        edge = self._edges[to]
        for seq in self._lacking(edge, until):
            if seq >= edge.queued:
                self._put_out(edge, seq)
        edge.queued = edge.handed = max(edge.queued, until)

    def _flush(self, edge: _Edge) -> None:
        while edge.up and not edge.held and edge.outbox and edge.outbox[0][0] <= self.now():
            seq = edge.outbox[0][1]
            if self._faults.loss and self._chance.random() < self._faults.loss:
                self.log.info("chaos: message %d to peer %d is lost, and the connection", seq, edge.to)
                self._break(edge)
                return
            kept = self.endpoint.sent[edge.to].get(seq)
            # If it is kept no more, the neighbour has said that it needs it no more.
            if kept is not None:
                if seq != edge.follows:
                    self._explain(edge, kept)
                    return
                if not edge.dealer.send(kept.frames):
                    self._poll(edge, edge.polled | ROOM)
                    return
                edge.follows = seq + 1
            edge.outbox.popleft()
            self._handed_up_to(edge, seq + 1)
        self._poll(edge, edge.polled & ~ROOM)

    def _explain(self, edge: _Edge, coming: Kept) -> None:
        """Numbers do not follow on: have HELLO say so, and go on when WELCOME has come."""
        edge.up = False
        edge.lost_at = self.now()
        edge.attempt += 1
        self._greet(edge, coming)

    def _handed_up_to(self, edge: _Edge, seq: int) -> None:
        """Messages before ``seq`` take no room in the queue any more."""
        for _ in range(edge.handed, seq):
            self._tell(self._handed_over, edge.to)
        edge.handed = max(edge.handed, seq)

    # -- faults on purpose

    def _break(self, edge: _Edge) -> None:
        """Close the connection to a neighbour. It is made again at the next look, unless the neighbour is cut off."""
        self._renew(edge, "")
        edge.up = False
        if edge.lost_at is None:
            edge.lost_at = self.now()
        self._seen_addresses = 0
        self._next_look = min(self._next_look, self.now() + TICK)

    def _cut(self, neighbors: frozenset[PeerId]) -> None:
        for edge in self._edges.values():
            if edge.to in neighbors - self._cut_off:
                self._break(edge)
        self._cut_off = neighbors
        self._seen_addresses = 0
        self._next_look = 0.0

    # -- durability

    def _spread(self, rounds_done: int) -> None:
        self._durable = max(self._durable, rounds_done)
        for edge in self._edges.values():
            self._spread_to(edge)

    def _spread_to(self, edge: _Edge) -> None:
        """Say DURABLE to a neighbour that was not told yet; if there is no room now, then at the next look."""
        if edge.up and edge.durable < self._durable and self._control(edge, Durable(self._durable), answered=False):
            edge.durable = self._durable

    # -- ending

    def _begin_closing(self, leaving: Leaving) -> None:
        self._closing = self.now()
        self._leaving = leaving
        self._next_look = 0.0
        if leaving == "finished":
            self._spread(FOREVER)

    def _done(self) -> bool:
        if self._closing is None:
            return False
        if self._leaving == "stopped":
            return True
        now = self.now()
        if self._refused and now - self._closing < EXPLAINING:
            return False  # the others should hear it too, and not wait for us
        waiting = [edge for edge in self._edges.values() if self._must_wait_for(edge, now)]
        if waiting and now - self._closing > self.transport.deadline:
            for edge in waiting:
                self.log.warning("peer %d has not got our last messages into a checkpoint", edge.to)
            return True
        return not waiting

    def _must_wait_for(self, edge: _Edge, now: float) -> bool:
        """Whether the neighbour still needs something of us, while we are closing."""
        if edge.closed or edge.given_up:
            return False
        needs = bool(edge.outbox) or (self._leaving == "finished" and len(self.endpoint.sent[edge.to]) > 0)
        if not edge.up:
            if edge.finished or (edge.close_sent is not None and now - edge.close_sent > CLOSING):
                return False
            came_up = edge.lost_at is not None
            # It may have left for good while we were not there.
            was_there = came_up or edge.address or self._places[edge.to] != START
            if was_there and self.world.absent(edge.to):
                return False
            return came_up or (needs and self._closing is not None and now - self._closing < self.transport.give_up)
        if edge.close_sent is None:
            if not needs and self._control(edge, Close()):
                edge.close_sent = now
            return True
        if now - edge.close_sent > CLOSING:
            self.log.warning("peer %d did not confirm our last messages", edge.to)
            edge.closed = True
        return not edge.closed


def _legible(text: str) -> str:
    """What another has written, for the log: on one line, and not a megabyte of it."""
    return "".join(letter if letter.isprintable() else "?" for letter in text[:300])
