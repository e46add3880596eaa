"""What an algorithm can say and hear: Net, a view of one round, and what stands behind it.

    algorithm ── Net ── Endpoint ── Link ── … ── Link ── Endpoint ── Net ── algorithm
                (one round)  └─ Mailbox                   (one peer, the whole run)

A Link moves frames and knows nothing else: LocalLink within one process, ZmqLink over sockets. The Endpoint
numbers, encodes, counts and waits; it is the same for both, and so are the bytes.

Invariants:

1. ``gather`` returns senders in ascending order, whatever the order of arrival: float sums never depend on it.
2. The mailbox is a FIFO per (t, kind, sender): a fast neighbour's message for a later round waits its turn.
3. Every wait has an end (``Patience``): the message, the deadline, or the news that the neighbour is gone or has
   gone on without us. Whoever is missing then is left out by name (``missing``); so is one whose body holds NaN or
   infinity (``spoilt``), so that a peer whose training diverges does not take its neighbours along.
4. Who hears whom changes only between rounds, and only by messages that both sides wait for (``listen_to``),
   so that equal runs send equal messages.
5. What was sent is kept until its receiver has it in the checkpoint before its last one (``Sent``). A peer that
   crashed computes the rounds since its checkpoint again, which gives the same messages under the same numbers:
   receivers know them by these and drop what they have. What the peer itself had heard since is sent to it again.
6. A peer that its neighbours had given up finds that they no longer keep what it missed. It leaves out the rounds
   up to theirs (``skip_to``). Numbers begin anew with the round that it goes on with, above all earlier ones. If it
   falls back to a checkpoint of before that, they are lower than those that others have: rounds tell (``Place``).
7. After rounds were left out or messages lost, two peers may differ on who hears whom. They find out, since every
   message says whether its sender hears the receiver; and until then nobody waits in vain for long, since whoever
   expects one sort of message is told by the other sort, or by one of a later round, that none will come.
"""

from __future__ import annotations

import asyncio
import math
import threading
from collections import defaultdict, deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from statistics import median
from typing import Any, Literal, NamedTuple, Protocol, TypeVar, cast

import numpy as np
import torch
from torch import Tensor

from p2pfl import rng, wire
from p2pfl.errors import Deadlock, NetError, NotANeighbor, Unexpected
from p2pfl.runfolder import PeerId
from p2pfl.topology import Topology
from p2pfl.wire import ANYWAY, STOP, Body, Buffer, Encoded, Layout, Message, Vocabulary

B = TypeVar("B", bound=Body)

Key = tuple[int, str, PeerId]
"""Round, kind, sender."""

Counts = dict[PeerId, dict[str, list[int]]]
"""{neighbour: {kind: [messages, payload bytes, header bytes]}}"""


class Link(Protocol):
    """Moves frames between neighbours, each directed edge in order."""

    async def send(self, to: PeerId, seq: int) -> bool:
        """Take charge of the message that stands in ``Endpoint.sent[to]`` under this number. False when it was not
        (queue full until the deadline, or the neighbour gone): it is sent if the neighbour asks for it later."""

    def checkpointed(self, rounds_done: int) -> None:
        """Tell the neighbours that what they sent before that round need not be kept for us."""

    def full(self, to: PeerId) -> bool:
        """Whether ``send`` would have to wait."""

    async def close(self) -> None:
        """Return when every message taken charge of has arrived, or cannot."""


# ---- having said ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Kept:
    """One message on one directed edge: its number there, its round, its frames."""

    seq: int
    t: int
    frames: Sequence[Buffer]


class Place(NamedTuple):
    """How far a receiver has come in what a neighbour says.

    Numbers alone do not tell. A peer that falls back to an old checkpoint, and whose neighbours do not say everything
    again, goes other ways from there on, and may come to later rounds with lower numbers than before.
    """

    expected: int
    """Number of the message that comes next."""
    t: int
    """Round of the last one that has come; -1 if none has."""

    def has(self, seq: int, t: int) -> bool:
        """Whether the receiver has a message with this number and of this round, be it one that the sender does not
        remember, or needs it no more."""
        return seq < self.expected and t <= self.t


START = Place(0, -1)


class Sent:
    """The messages to one neighbour that it may still ask for, in ascending order of their numbers, without gaps.

    The event loop adds, the link's thread reads and drops.
    """

    def __init__(self, next_seq: int = 0) -> None:
        self._kept: deque[Kept] = deque()
        self._next = next_seq
        self._lock = threading.Lock()

    def add(self, message: Kept) -> None:
        with self._lock:
            if message.seq != self._next:  # the numbers went on elsewhere: what is older has lost its meaning
                self._kept.clear()
            self._kept.append(message)
            self._next = message.seq + 1

    def get(self, seq: int) -> Kept | None:
        """The message with this number; None if it is kept no more."""
        with self._lock:
            first = self._next - len(self._kept)
            return self._kept[seq - first] if first <= seq < self._next else None

    def forget_before(self, t: int) -> None:
        """Drop the messages of rounds before ``t``."""
        with self._lock:
            while self._kept and self._kept[0].t < t:
                self._kept.popleft()

    @property
    def first(self) -> tuple[int, int | None]:
        """Number and round of the oldest message that is kept; the number of the next one, and None, if none is."""
        with self._lock:
            return (self._kept[0].seq, self._kept[0].t) if self._kept else (self._next, None)

    @property
    def next(self) -> int:
        """Number of the next message."""
        return self._next

    def __len__(self) -> int:
        return len(self._kept)

    def all(self) -> list[Kept]:
        with self._lock:
            return list(self._kept)


# ---- messages of our own -------------------------------------------------------------------------------------

SEQUENCES = 1 << 24
"""A peer that has left out rounds numbers its messages from (the round) · SEQUENCES on."""


@dataclass(frozen=True)
class Begun(Body):
    """A bare header to a neighbour that joins in this round: the sender has come to it."""


@dataclass(frozen=True)
class Listening(Body):
    """A bare header. On an edge whose sender is no longer heard, it says each round whether the sender still
    hears the receiver (flag STOP when not), so that both sides drop the edge in the same round."""


# ---- hearing -------------------------------------------------------------------------------------------------

STALL = 1.0
"""Seconds by which something comes too late that is due in this process, if the process stood still meanwhile: it was
stopped (SIGSTOP), or there was no processor for it."""


class Deadline:
    """When a wait ends: ``at`` by the event loop's clock, or never (None).

    Time in which this process stood still does not count. What the others said meanwhile has arrived, and has only
    not been read.
    """

    def __init__(self, at: float | None) -> None:
        self.at = at
        self._clock = asyncio.get_running_loop().time

    async def allows(self, awaitable: Awaitable[Any]) -> bool:
        """Wait for ``awaitable``, and raise what it raises. False, and it is cancelled, if it is not done in time."""
        awaited = asyncio.ensure_future(awaitable)
        try:
            while True:
                look = math.inf if self.at is None else min(self.at, self._clock() + STALL)
                await asyncio.wait([awaited], timeout=None if self.at is None else max(0.0, look - self._clock()))
                if awaited.done():
                    awaited.result()
                    return True
                late = self._clock() - look
                if late > STALL:
                    assert self.at is not None
                    self.at = max(self.at + late, self._clock() + STALL)  # there is always time to read
                elif look == self.at:
                    return False
        finally:
            awaited.cancel()


class _Wait:
    """Somebody waits for a message under each of some keys."""

    def __init__(self, keys: Iterable[Key], quorum: float, anyway: bool) -> None:
        self.lacking = set(keys)
        self.anyway = anyway
        self.awaited = len(self.lacking)
        self.here = 0
        self.quorum = quorum
        self.overdue = False
        """A quorum is enough now."""
        self._clock = asyncio.get_running_loop().time
        self._latest = self._clock()
        self._woken: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    @property
    def over(self) -> bool:
        enough = math.ceil(self.quorum * (self.here + len(self.lacking)) - 1e-9)  # 0.1 * 30 is 3.000…4
        return not self.lacking or (self.overdue and self.here >= enough)

    def settle(self, key: Key, *, here: bool, hopeless: bool = False) -> None:
        """There is news about ``key``."""
        if key in self.lacking and (here or hopeless):
            self.lacking.discard(key)
            if here:
                self.here += 1
                self._latest = self._clock()
            if self.over:
                self.wake()

    @property
    def in_vain(self) -> float:
        """Seconds since the last message came, if any is missing."""
        return self._clock() - self._latest if self.here < self.awaited else 0.0

    def wake(self, error: BaseException | None = None) -> None:
        if not self._woken.done():
            if error is None:
                self._woken.set_result(None)
            else:
                self._woken.set_exception(error)

    async def done(self, deadline: Deadline) -> bool:
        """False if it is not over before the deadline."""
        return await deadline.allows(asyncio.shield(self._woken))


OBJECTS = 2048
"""Bytes that a message takes up in memory besides its content, about."""


class Mailbox:
    """Messages that have arrived and were not yet taken. All methods run in the event loop's thread."""

    def __init__(self) -> None:
        self._queues: defaultdict[Key, deque[Message]] = defaultdict(deque)
        self._waits: list[_Wait] = []
        self._gone: set[PeerId] = set()
        self._oldest = 0
        self._silent_before: dict[PeerId, int] = {}
        self._spoken: dict[tuple[PeerId, bool], int] = {}
        """The last round in which a peer has said to us (False) something, or (True) that it says nothing."""
        self.held: defaultdict[PeerId, int] = defaultdict(int)
        """Bytes that each sender's messages take up here, about. The link's thread may read it."""
        self.late = 0
        """Messages that came after their round was over."""
        self.blocked: Callable[[], None] = lambda: None
        """Called whenever somebody has to wait."""

    def put(self, message: Message) -> bool:
        """False if the message comes too late for its round."""
        self.skipped(message.sender, message.t)  # rounds follow one another on an edge
        if message.t < self._oldest:
            self.late += 1
            return False
        key = (message.t, message.kind, message.sender)
        self._queues[key].append(message)
        self.held[message.sender] += _weight(message)
        for wait in self._waits:
            wait.settle(key, here=True)
        if message.kind != Begun.kind() and not message.flags & ANYWAY:
            self._spoken[message.sender, message.kind == Listening.kind()] = message.t
            self._end_hopeless_waits()
        return True

    def __contains__(self, key: Key) -> bool:
        return key in self._queues

    def take_now(self, key: Key) -> Message | None:
        """The oldest message under ``key``, if one is here."""
        queue = self._queues.get(key)
        if not queue:
            return None
        message = queue.popleft()
        self.held[message.sender] -= _weight(message)
        if not queue:
            del self._queues[key]
        return message

    async def wait(
        self,
        keys: Iterable[Key],
        until: float | None = None,
        quorum: float = 0.0,
        longer: float = 0.0,
        anyway: bool = False,
    ) -> float:
        """Return when under each of ``keys`` a message is here, or will never be.

        At the latest when the loop's clock passes ``until``; or, if by then less than the share ``quorum`` of those
        that may still come is here, when it is, or ``longer`` seconds later. Returns the seconds of the wait that
        brought nothing: those after the last message, if any is missing.
        """
        wait = _Wait(keys, quorum, anyway)
        for key in tuple(wait.lacking):
            wait.settle(key, here=key in self._queues, hopeless=self._hopeless(key, anyway))
        if wait.over:
            return 0.0
        self._waits.append(wait)
        self.blocked()
        try:
            deadline = Deadline(until)
            if not await wait.done(deadline) and deadline.at is not None:
                wait.overdue = True
                if not wait.over:
                    deadline.at += longer
                    await wait.done(deadline)
        finally:
            self._waits.remove(wait)
        return wait.in_vain

    def _hopeless(self, key: Key, anyway: bool) -> bool:
        """Whether no message will come under a key under which none is.

        Besides the plain reasons: somebody who says that it says nothing in this round, or says something though we
        expect to be told that it says nothing, does not know what we expect.
        """
        t, kind, sender = key
        if sender in self._gone or t < self._silent_before.get(sender, 0):
            return True
        return not anyway and self._spoken.get((sender, kind != Listening.kind()), -1) >= t

    @property
    def waits_for(self) -> list[Key]:
        """What is being waited for, right now."""
        return [key for wait in self._waits for key in wait.lacking]

    def fail(self, error: BaseException) -> None:
        """End all waits with an error."""
        for wait in self._waits:
            wait.wake(error)

    def lost(self, sender: PeerId) -> None:
        """Nothing more will come from ``sender``: end the waits for it."""
        self._gone.add(sender)
        self._end_hopeless_waits()

    def regained(self, sender: PeerId) -> None:
        self._gone.discard(sender)

    def skipped(self, sender: PeerId, t: int) -> None:
        """Nothing of rounds before ``t`` will come from ``sender`` any more: end the waits for it."""
        if t > self._silent_before.get(sender, 0):
            self._silent_before[sender] = t
            self._end_hopeless_waits()

    def is_gone(self, sender: PeerId) -> bool:
        return sender in self._gone

    def _end_hopeless_waits(self) -> None:
        for wait in self._waits:
            for key in tuple(wait.lacking):
                wait.settle(key, here=False, hopeless=self._hopeless(key, wait.anyway))

    def begin(self, t: int) -> list[Message]:
        """Hand out what came for earlier rounds and was never taken."""
        self._oldest = t
        old = [self._queues.pop(key) for key in [key for key in self._queues if key[0] < t]]
        untaken = [message for queue in old for message in queue]
        for message in untaken:
            self.held[message.sender] -= _weight(message)
        self.late += len(untaken)
        return untaken


def _weight(message: Message) -> int:
    return message.header + message.payload + OBJECTS


# ---- one peer, the whole run ---------------------------------------------------------------------------------

RECENT = 10
"""Rounds whose time an adaptive deadline follows; it begins to when a third of them are over."""
SHORTEST = 1.0
"""Seconds of the shortest adaptive deadline: a host may be busy with something else for a moment."""


@dataclass
class Patience:
    """How long a wait may last.

    Args:
        deadline: seconds; None for ever (one process, where nothing can get lost).
        adaptive: a wait also ends after so many times the median time of the recent rounds.
        quorum: the deadline ends a wait only if this share of the neighbours waited for has spoken (those that are
            gone do not count); otherwise it goes on for up to ``give_up`` seconds more.
        give_up: seconds.
    """

    deadline: float | None = None
    adaptive: float | None = None
    quorum: float = 0.0
    give_up: float = 0.0

    def __post_init__(self) -> None:
        self._recent: deque[float] = deque(maxlen=RECENT)

    def took(self, seconds: float) -> None:
        """A round is over, which would have taken so long had everybody who was missing not been waited for."""
        self._recent.append(seconds)

    @property
    def seconds(self) -> float | None:
        """The deadline of a wait that begins now."""
        if self.deadline is None or self.adaptive is None or 3 * len(self._recent) < RECENT:
            return self.deadline
        return min(self.deadline, max(SHORTEST, self.adaptive * median(self._recent)))


@asynccontextmanager
async def _no_idling(waits_for: Callable[[], list[PeerId]]) -> AsyncIterator[None]:
    yield


class Endpoint:
    """One peer's place in the mesh: numbers, encodes and counts what goes out, waits for what comes in.

    Args:
        me: this peer.
        topology: the whole graph; every peer knows it from the run file.
        run_id: 16 hex digits, equal on all peers of a run.
        seed: the run's seed, for ``Net.shared``.
        layouts: what neighbours may say.
        patience: how long one wait may last.
        joins: {peer: the round from which on it takes part}, of those that do not from the first.
        idle: entered around every wait; a runtime gives up its compute slot meanwhile. It is handed a function
            that lists the peers still waited for.
        stow: makes of a body that has arrived what is kept until it is taken; on whatever thread decodes.
    """

    link: Link

    def __init__(
        self,
        me: PeerId,
        topology: Topology,
        run_id: str,
        seed: int,
        layouts: Iterable[Layout],
        patience: Patience | None = None,
        idle: Callable[[Callable[[], list[PeerId]]], AbstractAsyncContextManager[None]] = _no_idling,
        stow: Callable[[Body], Body] = lambda body: body,
        joins: Mapping[PeerId, int] | None = None,
    ) -> None:
        self.me = me
        self.topology = topology
        self.run_id = run_id
        self.seed = seed
        self.neighbors = topology.neighbors[me]
        self.layouts = (*layouts, Layout.of(Listening()), Layout.of(Begun()))
        self.vocabulary = Vocabulary(self.layouts)
        self.patience = patience or Patience()
        self.joins = dict(joins or {})
        self._topologies: dict[frozenset[PeerId], Topology] = {}
        self.idle = idle
        self.stow = stow
        self.mailbox = Mailbox()
        self.failure: BaseException | None = None

        self.sources = {neighbor for neighbor in self.neighbors if neighbor not in self.joins}
        self.listeners = set(self.sources)
        self._met = set(self.sources)  # neighbours that take part
        self._ahead: dict[PeerId, int] = {}  # the first round of which these neighbours keep what they said
        self._arrivals = 0  # messages that have been accepted
        self._flagged: dict[PeerId, int] = {}  # arrival of the message that told us last whether its sender hears us
        self._again: set[PeerId] = set()  # told us in this round that they hear us, which we did not know
        self._greeting = range(0)  # rounds in which all are told whether we hear them
        self._answers: set[asyncio.Task[None]] = set()
        self._dropping: set[PeerId] = set()  # asked for by listen_to, not yet told
        self._told: set[PeerId] = set()  # told in this round
        self._left: set[PeerId] = set()  # told us in this round
        self._sequence = dict.fromkeys(self.neighbors, 0)
        self.sent = {neighbor: Sent() for neighbor in self.neighbors}
        self.heard: dict[PeerId, Place] = dict.fromkeys(self.neighbors, START)
        """How far in what each neighbour says the rounds before the present one may have used it."""
        self._arrived: dict[PeerId, deque[tuple[int, int]]] = {neighbor: deque() for neighbor in self.neighbors}
        """(number, round) of the last message of this round and of each later one."""
        self.t = 0
        self.durable = 0
        """Rounds before this one will not be computed again: the checkpoint before the last one holds them."""

        self.out: Counts = {}
        self.inn: Counts = {}
        self.missing: dict[str, list[PeerId]] = {}
        self.spoilt: dict[str, list[PeerId]] = {}
        self.undelivered = 0
        self.refused: dict[PeerId, int] = {}
        self.waited = 0.0
        self.waited_in_vain = 0.0
        """Seconds of this round spent after the last of those had come who came at all."""

    # -- rounds

    def begin(self, t: int) -> Net:
        """The view of round ``t``. Counters start at zero."""
        self.out, self.inn, self.missing, self.spoilt, self.waited, self.waited_in_vain = {}, {}, {}, {}, 0.0, 0.0
        self._mark(t)
        for message in self.mailbox.begin(t):
            self._note(message)
        return Net(self, t)

    async def meet(self, t: int) -> None:
        """Right after ``begin``: take in the neighbours that join in this round, and tell them that it has come.

        The peer that joins waits, for as long as it takes, until its neighbours have come to it.
        """
        mine = self.joins.get(self.me, 0)
        joining = {neighbor for neighbor in self.neighbors if self.joins.get(neighbor, 0) <= t} - self._met
        self.sources |= joining
        self.listeners |= joining
        self._met |= joining
        if 0 < mine == t:
            earlier = [neighbor for neighbor in self._met if self.joins.get(neighbor, 0) < t]
            await self.take(Begun.kind(), earlier, t, patience=math.inf)
        await self.send([one for one in sorted(joining) if self.joins[one] == t > mine], Begun(), t)
        if t in self._greeting:
            await self.send(sorted(self._met - self.listeners), Listening(), t)

    def topology_at(self, t: int) -> Topology:
        """The graph of those that take part in round ``t``."""
        absent = frozenset(peer for peer, joins in self.joins.items() if joins > t)
        if absent not in self._topologies:
            self._topologies[absent] = self.topology.without(absent) if absent else self.topology
        return self._topologies[absent]

    def next_round(self, t: int) -> int:
        """The round to go on with after those before ``t``: a later one if neighbours do not keep any more what they
        said in ``t``, because they had given us up."""
        theirs = [later for one, later in self._ahead.items() if later > t and not self.mailbox.is_gone(one)]
        return min(theirs, default=t)

    def skip_to(self, t: int) -> None:
        """Leave out the rounds before ``t`` (invariant 6)."""
        self._greeting = range(t, t + RECENT)  # neighbours may be ahead
        for neighbor, seq in self._sequence.items():
            # They may have heard more of us than we remember: no number may be used twice.
            self._sequence[neighbor] = max(seq, t * SEQUENCES)
        self._mark(t)

    async def finish(self, t: int) -> None:
        """Settle who hears whom from the next round on (invariant 4)."""
        only_heard = sorted(self.sources - self.listeners)
        if only_heard:
            await self.send(only_heard, Listening(), t)
        only_hearing = sorted(self.listeners - self.sources)
        if only_hearing:
            await self.take(Listening.kind(), only_hearing, t)
        self.sources -= self._told
        self.listeners -= self._left
        self.listeners |= self._again & self._met
        self._told, self._left, self._again = set(), set(), set()
        self._mark(t + 1)

    def _mark(self, t: int) -> None:
        """Round ``t`` is next: what came for earlier ones is not needed again, not even after a crash."""
        self.t = t
        for sender, arrived in self._arrived.items():
            while arrived and arrived[0][1] < t:
                seq, last = arrived.popleft()
                self.heard[sender] = Place(seq + 1, max(last, self.heard[sender].t))

    def drop(self, senders: Iterable[PeerId]) -> None:
        self._dropping.update(set(senders) & self.sources - self._told)

    def missed(self, sender: PeerId, t: int) -> None:
        """What ``sender`` said before round ``t`` will not come: it keeps it no more, or has left out rounds."""
        if sender in self._met:
            self._ahead[sender] = t
        self.mailbox.skipped(sender, t)

    # -- saying

    async def send(self, to: Iterable[PeerId], body: Body, t: int, count: int = 1, *, anyway: bool = False) -> None:
        """The same body to several neighbours, encoded once; ``anyway``: whether they hear us or not."""
        encoded = wire.encode(body)
        for receiver in to:
            await self.send_encoded(receiver, encoded, t, count, anyway=anyway)

    async def send_encoded(
        self, to: PeerId, encoded: Encoded, t: int, count: int = 1, *, anyway: bool = False
    ) -> None:
        if to in self._dropping:
            self._dropping.discard(to)
            self._told.add(to)
        # Repeated for as long as it holds: the receiver may have missed it, or gone back to an old checkpoint.
        flags = (STOP if to in self._told or to not in self.sources else 0) | (ANYWAY if anyway else 0)
        seq = self._sequence[to]
        frames = encoded.to(self.run_id, t, self.me, seq, flags, count)
        self._sequence[to] += 1
        self.sent[to].add(Kept(seq, t, frames))
        _count(self.out, to, encoded.kind, encoded.payload, len(frames[0]))
        if self.link.full(to):
            async with self.idle(lambda: [to]):
                sent = await self.link.send(to, seq)
        else:
            sent = await self.link.send(to, seq)
        if not sent:
            self.undelivered += 1

    # -- hearing

    def decode(self, frames: Sequence[Buffer], via: PeerId, vocabulary: Vocabulary | None = None) -> Message:
        """Check and decode what came over the link from ``via``. Any thread. Raises WireError.

        ``vocabulary`` replaces the peer's own, for a link that has messages of its own besides.
        """
        message = wire.decode(frames, self.run_id, vocabulary or self.vocabulary)
        if message.sender != via:
            raise Unexpected(f"a message of peer {message.sender} over the link from peer {via}")
        if message.kind in self.vocabulary:  # and none of the link's own
            message = replace(message, body=self.stow(message.body))
        return message

    def accept(self, message: Message) -> None:
        """Take a message that has come: each once, those of a sender in the order in which it said them."""
        self._arrivals += 1
        message = replace(message, arrival=self._arrivals)
        arrived = self._arrived[message.sender]
        if arrived and arrived[-1][1] >= message.t:
            arrived[-1] = (message.seq, arrived[-1][1])
        else:
            arrived.append((message.seq, message.t))
        if self._is_mistaken(message):
            # At once: in our next round might be too late, if we wait for somebody who waits for it.
            answer = asyncio.get_running_loop().create_task(
                self.send([message.sender], Listening(), max(self.t, message.t))
            )
            self._answers.add(answer)
            answer.add_done_callback(self._answers.discard)
        if not self.mailbox.put(message):
            self._note(message)

    def _is_mistaken(self, message: Message) -> bool:
        """Whether its sender waits for us to say something, though we shall not (invariant 7)."""
        sender = message.sender
        if sender in self.listeners or sender not in self._met or message.flags & ANYWAY:
            return False
        thinks_that_we_hear_it = message.kind != Listening.kind() and sender not in self.sources
        return thinks_that_we_hear_it or not message.flags & STOP

    def _note(self, message: Message) -> None:
        """Whether its sender hears us (invariant 7)."""
        sender = message.sender
        if message.arrival < self._flagged.get(sender, 0):
            return  # a later one was noted before; neither round nor number tell, if the sender fell back meanwhile
        self._flagged[sender] = message.arrival
        stops = bool(message.flags & STOP)
        (self._left.add if stops else self._left.discard)(sender)
        (self._again.discard if stops or sender in self.listeners else self._again.add)(sender)

    def refuse(self, via: PeerId) -> None:
        """Count a message that was no good. On the thread that decodes, and no other."""
        self.refused[via] = self.refused.get(via, 0) + 1

    def fail(self, error: BaseException) -> None:
        """The mesh cannot be used: end this and all later waits with ``error``."""
        self.failure = error
        self.mailbox.fail(error)

    async def take(
        self, kind: str, senders: Sequence[PeerId], t: int, patience: float = 1.0, *, anyway: bool = False
    ) -> dict[PeerId, Message]:
        """One message of ``kind`` from each sender, ascending; who misses the deadline, or sends NaN or infinity, is
        left out by name.

        ``patience`` multiplies the deadline, for senders that wait for others in turn. ``anyway``: they send whether
        they take us for a listener or not.
        """
        senders = sorted(senders)
        keys = {sender: (t, kind, sender) for sender in senders}
        if any(key not in self.mailbox for key in keys.values()):

            def absent_now() -> list[PeerId]:
                return [one for one, key in keys.items() if key not in self.mailbox]

            async with self.idle(absent_now):
                if self.failure is not None:
                    raise self.failure
                clock = asyncio.get_running_loop().time
                began = clock()
                seconds = self.patience.seconds
                until = None if seconds is None or patience == math.inf else began + seconds * patience
                self.waited_in_vain += await self.mailbox.wait(
                    keys.values(), until, self.patience.quorum, self.patience.give_up, anyway
                )
                self.waited += clock() - began
        taken = {sender: self.mailbox.take_now(key) for sender, key in keys.items()}
        arrived = {sender: message for sender, message in taken.items() if message is not None}
        for sender, message in list(arrived.items()):
            _count(self.inn, sender, kind, message.payload, message.header)
            self._note(message)
            if not wire.is_finite(message.body):
                self.spoilt.setdefault(kind, []).append(sender)
                del arrived[sender]
        absent = [sender for sender in senders if sender not in arrived]
        if absent:
            self.missing.setdefault(kind, []).extend(absent)
        return arrived

    # -- state

    def state_dict(self) -> dict[str, Any]:
        """Who hears whom, the numbers of the next messages, and what is kept of the last; valid between rounds.

        Tensors share their memory with the frames, which nobody changes.
        """
        return {
            "sources": sorted(self.sources),
            "listeners": sorted(self.listeners),
            "met": sorted(self._met),
            "dropping": sorted(self._dropping),
            "sequence": dict(self._sequence),
            "heard": {sender: tuple(place) for sender, place in self.heard.items()},
            "sent": _pack({to: sent.all() for to, sent in self.sent.items()}),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """To be called before the link starts."""
        self.sources = set(state["sources"])
        self.listeners = set(state["listeners"])
        self._met = set(state["met"])
        self._dropping = set(state["dropping"])
        self._sequence = dict(state["sequence"])
        self.heard = {sender: Place(*place) for sender, place in state["heard"].items()}
        self.sent = {to: Sent(self._sequence[to]) for to in self.neighbors}
        for to, kept in _unpack(state["sent"]).items():
            if kept:
                self.sent[to] = Sent(kept[0].seq)
            for message in kept:
                self.sent[to].add(message)


def _pack(sent: Mapping[PeerId, Sequence[Kept]]) -> dict[str, Any]:
    """Messages as few tensors and plain numbers; frames that several messages have in common are there once."""
    headers, known = bytearray(), dict[int, int]()
    frames: list[Tensor] = []
    messages: dict[PeerId, list[list[Any]]] = {}
    for to, kept in sent.items():
        messages[to] = []
        for message in kept:
            header, *tensors = message.frames
            for frame in tensors:
                if id(frame) not in known:
                    known[id(frame)] = len(frames)
                    frames.append(_as_tensor(frame))
            numbers = [known[id(frame)] for frame in tensors]
            messages[to].append([message.seq, message.t, len(header), numbers])
            headers += header
    return {"messages": messages, "headers": _as_tensor(headers), "frames": frames}


def _unpack(packed: Mapping[str, Any]) -> dict[PeerId, list[Kept]]:
    headers = memoryview(packed["headers"].numpy())
    frames = [memoryview(frame.numpy()) for frame in packed["frames"]]
    sent: dict[PeerId, list[Kept]] = {}
    start = 0
    for to, messages in packed["messages"].items():
        sent[to] = []
        for seq, t, length, numbers in messages:
            header = headers[start : start + length].tobytes()
            start += length
            sent[to].append(Kept(seq, t, [header, *(frames[number] for number in numbers)]))
    return sent


def _as_tensor(buffer: Buffer) -> Tensor:
    return torch.frombuffer(buffer, dtype=torch.uint8) if len(buffer) else torch.empty(0, dtype=torch.uint8)


def _count(counts: Counts, neighbor: PeerId, kind: str, payload: int, header: int) -> None:
    entry = counts.setdefault(neighbor, {}).setdefault(kind, [0, 0, 0])
    entry[0] += 1
    entry[1] += payload
    entry[2] += header


# ---- one round -----------------------------------------------------------------------------------------------


class Net:
    """What an algorithm can say and hear in round ``t``. Verbs are named as in MPI."""

    def __init__(self, endpoint: Endpoint, t: int) -> None:
        self._endpoint = endpoint
        self.t = t

    @property
    def me(self) -> PeerId:
        return self._endpoint.me

    @property
    def peers(self) -> int:
        """How many peers the mesh has."""
        return self._endpoint.topology.peers

    @property
    def neighbors(self) -> tuple[PeerId, ...]:
        """Neighbours in the graph that take part, ascending, heard or not."""
        return self._endpoint.topology_at(self.t).neighbors[self.me]

    def neighbors_of(self, peer: PeerId, t: int) -> tuple[PeerId, ...]:
        """Another peer's neighbours in round ``t``, ascending: the run file tells everybody the whole graph, and who
        joins when."""
        return self._endpoint.topology_at(t).neighbors[peer]

    @property
    def sources(self) -> tuple[PeerId, ...]:
        """Peers that I hear in this round, ascending."""
        return tuple(sorted(self._endpoint.sources))

    @property
    def listeners(self) -> tuple[PeerId, ...]:
        """Peers that hear me in this round, ascending."""
        return tuple(sorted(self._endpoint.listeners))

    @property
    def degrees(self) -> dict[PeerId, int]:
        """How many neighbours I and each of my neighbours have, ascending."""
        topology = self._endpoint.topology_at(self.t)
        return {peer: topology.degree(peer) for peer in sorted((self.me, *self.neighbors))}

    @cached_property
    def shared(self) -> np.random.Generator:
        """Draws the same on every peer, afresh each round: random roles need no message and no coordinator."""
        return rng.shared(self._endpoint.seed, "net.shared", self.t)

    def participants(self, share: float) -> tuple[PeerId, ...]:
        """Who takes part in this round: ``share`` of those who have joined, rounded down, at least one; drawn alike
        on every peer; ascending.

        Partial participation without a server: those who take part train and speak, and everybody hears them. On
        a complete graph that is a server which asks so many clients.
        """
        joined = [peer for peer in range(self.peers) if self._endpoint.joins.get(peer, 0) <= self.t]
        if share >= 1.0:
            return tuple(joined)
        draw = rng.shared(self._endpoint.seed, "net.participants", self.t)
        count = math.floor(share * len(joined) + 1e-9)  # 0.29 * 100 is 28.999…
        chosen = draw.permutation(joined)[: max(1, count)]
        return tuple(sorted(int(peer) for peer in chosen))

    async def send(self, to: PeerId, body: Body) -> None:
        """Say something to one peer that hears me. Raises NotANeighbor for any other."""
        self._must_hear(to)
        await self._endpoint.send([to], body, self.t)

    async def broadcast(self, body: Body) -> None:
        """Say the same to every peer that hears me."""
        await self._endpoint.send(self.listeners, body, self.t)

    async def scatter(self, bodies: Mapping[PeerId, Body]) -> None:
        """Say something else to each peer; ascending. Raises NotANeighbor for peers that do not hear me."""
        for to in sorted(bodies):
            self._must_hear(to)
        for to in sorted(bodies):
            await self._endpoint.send([to], bodies[to], self.t)

    async def gather(
        self, kind: type[B], of: Iterable[PeerId] | None = None, patience: float = 1.0
    ) -> dict[PeerId, B]:
        """One body of ``kind`` from each peer that I hear (or of those in ``of``), in ascending order.

        Peers that miss the deadline, or whose body holds NaN or infinity, are left out; the runtime logs and counts
        them. ``patience`` multiplies the deadline, for peers that have something long to compute first, or wait for
        others in turn.
        """
        senders = self.sources if of is None else tuple(of)
        for sender in senders:
            if sender not in self._endpoint.sources:
                raise NotANeighbor(f"peer {self.me} does not hear peer {sender} in round {self.t}")
        messages = await self._endpoint.take(kind.kind(), senders, self.t, patience)
        return {sender: cast(B, message.body) for sender, message in messages.items()}

    async def exchange(
        self, body: B, among: Iterable[PeerId] | None = None, patience: float = 1.0
    ) -> dict[PeerId, B]:
        """Broadcast ``body`` and gather the same kind from all that I hear; ``patience`` as of ``gather``.

        With ``among`` only those peers speak (I too only if I am one of them), and everybody hears them.
        """
        if among is None:
            await self.broadcast(body)
            return await self.gather(type(body), patience=patience)
        speakers = set(among)
        if self.me in speakers:
            await self.broadcast(body)
        return await self.gather(type(body), of=[j for j in self.sources if j in speakers], patience=patience)

    def listen_to(self, senders: Iterable[PeerId]) -> None:
        """Stop hearing everyone else, for good, from the next round on.

        The others learn it from a flag in a message that goes to them anyway, and stop sending.
        """
        self._endpoint.drop(self._endpoint.sources - set(senders))

    async def allreduce(self, body: B, op: Literal["mean", "sum"] = "mean") -> B:
        """Mean or sum over all peers of the connected component, tensor by tensor; the same bits on every peer.

        Partial sums rise along a breadth-first spanning tree of the graph to its lowest id (children in
        ascending order) and the total comes back down: 2 messages per tree edge. Every peer must call it in
        the same round. Whoever is missing takes its subtree out of the result, on this side.
        """
        endpoint = self._endpoint
        tree = endpoint.topology_at(self.t).spanning_tree
        parent, children = tree.parent[self.me], tree.children[self.me]
        if len(wire.tensors_of(body)) != len(_fields(body)):
            raise NetError(f"allreduce: {body.kind()} must hold tensors only")
        # Those below wait in turn for those below them: one deadline for each level, so that a missing leaf
        # costs its own contribution and not that of all who waited for it.
        patience = float(tree.height[self.me])
        total = {path: tensor.detach().clone() for path, tensor in wire.tensors_of(body).items()}
        count = 1
        for message in (await endpoint.take(body.kind(), children, self.t, patience, anyway=True)).values():
            for path, tensor in wire.tensors_of(message.body).items():
                total[path] += tensor.to(total[path].device)
            count += message.count
        result = wire.with_tensors(body, total)
        if parent is not None:
            await endpoint.send([parent], result, self.t, count, anyway=True)
            longest = tree.height[tree.root[self.me]] + 1.0
            answer = await endpoint.take(body.kind(), [parent], self.t, longest, anyway=True)
            if parent in answer:
                result, count = cast(B, answer[parent].body), answer[parent].count
        await endpoint.send(children, result, self.t, count, anyway=True)
        if op == "sum":
            return result
        return wire.with_tensors(result, {path: x / count for path, x in wire.tensors_of(result).items()})

    def _must_hear(self, to: PeerId) -> None:
        if to not in self._endpoint.listeners:
            why = "stopped listening" if to in self._endpoint.neighbors else "is no neighbour"
            raise NotANeighbor(f"peer {self.me} cannot send to peer {to} in round {self.t}: it {why}")


def _fields(body: Body) -> list[object]:
    values = vars(body).values()
    return [item for value in values for item in (value.values() if isinstance(value, Mapping) else [value])]


# ---- all peers in one process --------------------------------------------------------------------------------


class LocalHub:
    """Connects endpoints of one process, and notices when all of them wait for one another."""

    def __init__(self) -> None:
        self.endpoints: dict[PeerId, Endpoint] = {}
        self.finished: set[PeerId] = set()

    def join(self, endpoint: Endpoint) -> None:
        self.endpoints[endpoint.me] = endpoint
        endpoint.link = LocalLink(endpoint.me, self)
        endpoint.mailbox.blocked = self.check

    def finish(self, peer: PeerId) -> None:
        self.finished.add(peer)
        self.check()

    def check(self) -> None:
        """Raise Deadlock in every waiting peer if no peer can go on. Delivery is immediate, so that nothing can
        be under way."""
        waits = {
            peer: endpoint.mailbox.waits_for for peer, endpoint in self.endpoints.items() if peer not in self.finished
        }
        if not waits or not all(waits.values()):
            return
        lines = [
            f"peer {peer} waits for {kind} of peer {sender} in round {t}"
            for peer, keys in waits.items()
            for t, kind, sender in keys
        ]
        for peer in waits:
            self.endpoints[peer].fail(Deadlock("; ".join(lines[:5]) + ("; …" if len(lines) > 5 else "")))


class LocalLink:
    """Hands frames to another endpoint of this process, which decodes them as if they had travelled."""

    def __init__(self, me: PeerId, hub: LocalHub) -> None:
        self.me = me
        self.hub = hub

    async def send(self, to: PeerId, seq: int) -> bool:
        sender, receiver = self.hub.endpoints[self.me], self.hub.endpoints[to]
        kept = sender.sent[to].get(seq)
        assert kept is not None
        receiver.accept(receiver.decode(kept.frames, via=self.me))
        sender.sent[to].forget_before(kept.t + 1)  # delivered; nobody crashes alone in one process
        return True

    def checkpointed(self, rounds_done: int) -> None:
        return

    def full(self, to: PeerId) -> bool:
        return False

    async def close(self) -> None:
        return
