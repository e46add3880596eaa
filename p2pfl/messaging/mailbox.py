"""Mailbox: messages that have arrived, and waits for messages that have not."""

from __future__ import annotations

import asyncio
import math
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, ClassVar

from p2pfl import PeerId
from p2pfl.messaging.deadline import Deadline, WaitPolicy
from p2pfl.messaging.directions import Begin
from p2pfl.messaging.wire import Buffer, Message, Plan

Key = tuple[int, str, PeerId]
"""Round, kind, sender."""


class _Wait:
    """A wait for one message under each of some keys, of different senders."""

    def __init__(self, keys: Iterable[Key], quorum: float, addressed: bool) -> None:
        self.missing = {key[2]: key for key in keys}
        self.addressed = addressed
        self.quorum = quorum
        self.deadline_passed = False
        self.ended = asyncio.Event()
        self._keys = len(self.missing)
        self._arrived = 0
        self._clock = asyncio.get_running_loop().time
        self._last_arrival = self._clock()

    @property
    def complete(self) -> bool:
        """Whether nothing is missing, or the deadline has passed and the quorum is reached."""
        enough = math.ceil(self.quorum * (self._arrived + len(self.missing)) - 1e-9)  # 0.1 * 30 is 3.000…4
        return not self.missing or (self.deadline_passed and self._arrived >= enough)

    def remove(self, sender: PeerId, *, arrived: bool) -> None:
        """Wait no longer for ``sender``: its message has arrived, or never will."""
        del self.missing[sender]
        if arrived:
            self._arrived += 1
            self._last_arrival = self._clock()
        if self.complete:
            self.ended.set()

    @property
    def wasted(self) -> float:
        """Seconds since the last arrival; 0 if every message arrived."""
        return self._clock() - self._last_arrival if self._arrived < self._keys else 0.0


class Mailbox:
    """Messages that have arrived and were not yet taken: a FIFO per (round, kind, sender).

    All methods run in the event loop's thread.
    """

    waits = True
    """Whether a round waits for what it takes; otherwise, nothing is missing."""
    staleness = 0.0
    """By how many rounds at most a message may be older or newer than the round that takes it."""
    keeps: ClassVar[bool] = False
    """Whether messages stay after they were taken, since later rounds may take them too (messaging/newest.py)."""

    def __init__(self, senders: Iterable[PeerId]) -> None:
        self._queues: defaultdict[Key, deque[Message]] = defaultdict(deque)
        self._missed: Counter[Key] = Counter()  # messages of this round to discard, should they arrive
        self._waits: list[_Wait] = []
        self._disconnected: set[PeerId] = set()
        self._finished: set[PeerId] = set()  # those that have sent their last message
        self._round = 0
        self._sender_round: dict[PeerId, int] = {}  # the earliest round whose messages may still arrive
        self._nothing: dict[PeerId, int] = {}  # the latest round in which the sender has nothing for this peer
        self.taken_bytes = dict.fromkeys(senders, 0)
        """Bytes of each sender's messages that were taken or discarded: its window grows. Any thread may read it."""
        self.used: dict[PeerId, int] = {}
        """Where rounds take messages of other rounds: the round after the last one of which they took a sender's. Any
        thread may read it."""
        self.awaited: frozenset[PeerId] = frozenset()
        """Senders of the messages waited for when the last wait began or ended. Any thread may read it."""
        self.failure: BaseException | None = None
        """Ends every wait."""
        self.expired = 0
        """Messages that were discarded because they arrived too late, or were not taken in their round."""
        self.on_block: Callable[[], None] = lambda: None
        """Called whenever a wait begins."""
        self.on_discard: Callable[[Message], None] = lambda message: None
        """Called with each message that is discarded."""

    def put(self, message: Message) -> None:
        """Add a message, or discard it if its round is over or its wait was missed."""
        key = message.t, message.kind, message.sender
        if message.t >= self._round and not self._missed[key]:
            self._queues[key].append(message)
        else:
            self._missed -= Counter([key])
            self._discard(message)
        self.advance_sender(message.sender, message.t)  # rounds are in order on an edge

    def __contains__(self, key: Key) -> bool:
        """Return whether a message has arrived. Any entry of its round or a later one implies Begin."""
        return key in self._queues or (key[1] == Begin.kind() and self.sender_round(key[2]) >= key[0])

    def peek(self, key: Key) -> Message | None:
        """Return the oldest message under ``key``, or None, and leave it there."""
        queue = self._queues.get(key)
        return queue[0] if queue else None

    def take(self, key: Key) -> Message | None:
        """Remove and return the oldest message under ``key``, or None."""
        queue = self._queues.get(key)
        if not queue:
            return None
        message = queue.popleft()
        self.taken_bytes[message.sender] += message.cost
        if not queue:
            del self._queues[key]
        return message

    def take_all(
        self, kind: str, senders: Sequence[PeerId], t: int, *, any_round: bool = False
    ) -> dict[PeerId, list[Message]]:
        """Take what round ``t`` takes of each sender from which something has arrived: here, one message.

        Args:
            any_round: where rounds do not wait for one another, take messages of whatever later round, too.
        """
        taken = {sender: self.take((t, kind, sender)) for sender in senders}
        return {sender: [message] for sender, message in taken.items() if message is not None}

    def retakes(self, kind: str) -> bool:
        """Return whether later rounds may take a message again that a round has taken."""
        return False

    def repeats(self, kind: str) -> Collection[PeerId]:
        """Return the senders whose messages this round takes because an earlier process of this peer took them."""
        return ()

    def miss(self, key: Key) -> None:
        """Discard the next message under ``key`` when it arrives: the wait that it was sent for has ended."""
        self._missed[key] += 1

    def _discard(self, message: Message) -> None:
        self.expired += 1
        self.taken_bytes[message.sender] += message.cost
        self.on_discard(message)

    async def wait(
        self, keys: Iterable[Key], policy: WaitPolicy, deadline_factor: float = 1.0, *, addressed: bool = False
    ) -> float:
        """Wait until a message under each of ``keys`` has arrived or no longer can, or until the policy ends it.

        Args:
            keys: what to wait for, each of another sender.
            policy: how long to wait.
            deadline_factor: factor of the deadline.
            addressed: the messages are sent to this peer whether or not it is one of their senders' receivers.

        Returns:
            Seconds of the wait after the last arrival, 0 if nothing is missing.
        """
        wait = _Wait(keys, policy.quorum, addressed)
        for sender in list(wait.missing):
            self._settle(wait, sender)
        if wait.complete and self.failure is None:
            return 0.0
        deadline = Deadline(policy.after(asyncio.get_running_loop().time(), policy.seconds * deadline_factor))
        self._waits.append(wait)
        self._note_awaited()
        self.on_block()
        try:
            if self.failure is None and not await deadline.allows(wait.ended.wait()):
                wait.deadline_passed = True
                if not wait.complete:
                    deadline.at = policy.after(deadline.at, policy.give_up)
                    await deadline.allows(wait.ended.wait())
        finally:
            self._waits.remove(wait)
            self._note_awaited()
            if self._waits:  # other tasks still wait; unless this one soon waits again, only their waits count
                asyncio.get_running_loop().call_soon(self.on_block)
        if self.failure is not None:
            raise self.failure
        return wait.wasted

    def _impossible(self, key: Key, addressed: bool) -> bool:
        """Return whether no message will arrive under an empty key: its sender is disconnected, or in a later round,
        or has stated that it sends nothing in this one (``Nothing``)."""
        t, kind, sender = key
        if sender in self._disconnected or t < self.sender_round(sender):
            return True
        return not addressed and kind != Begin.kind() and t == self._nothing.get(sender)  # earlier ones end by Begin

    def _settle(self, wait: _Wait, sender: PeerId) -> None:
        """End a wait for ``sender`` if its message has arrived or never will."""
        key = wait.missing.get(sender)
        if key is not None and ((arrived := key in self) or self._impossible(key, wait.addressed)):
            wait.remove(sender, arrived=arrived)

    def _recheck(self, sender: PeerId) -> None:
        for wait in self._waits:
            self._settle(wait, sender)

    def _note_awaited(self) -> None:
        self.awaited = frozenset().union(*(wait.missing for wait in self._waits))

    @property
    def waits_for(self) -> list[Key]:
        """Keys of the messages being waited for."""
        return [key for wait in self._waits for key in wait.missing.values()]

    @property
    def blocked(self) -> bool:
        """Whether something is waited for, and none of the waits has ended."""
        return bool(self._waits) and not any(wait.ended.is_set() for wait in self._waits)

    @property
    def unread(self) -> int:
        """Messages that have arrived and were not yet taken."""
        return sum(map(len, self._queues.values()))

    def fail(self, error: BaseException) -> None:
        """End all waits with an error, now and later."""
        self.failure = error
        for wait in self._waits:
            wait.ended.set()

    def mark_disconnected(self, sender: PeerId, *, finished: bool = False) -> None:
        """End the waits for ``sender``, now and later.

        Args:
            finished: it has sent its last message.
        """
        self._disconnected.add(sender)
        self._finished.discard(sender)
        if finished:
            self._finished.add(sender)
        self._recheck(sender)

    def mark_connected(self, sender: PeerId) -> None:
        self._disconnected.discard(sender)
        self._finished.discard(sender)

    def is_disconnected(self, sender: PeerId) -> bool:
        return sender in self._disconnected

    def sender_round(self, sender: PeerId) -> int:
        """Return the earliest round whose messages of ``sender`` may still arrive; -1 before its first message."""
        return self._sender_round.get(sender, -1)

    def advance_sender(self, sender: PeerId, t: int) -> None:
        """End the waits for messages that ``sender`` sent before round ``t``: none will arrive from now on."""
        self._sender_round[sender] = max(t, self.sender_round(sender))
        self._recheck(sender)

    def nothing(self, sender: PeerId, t: int) -> None:
        """End the waits for what ``sender`` sends to its receivers in round ``t``: this peer is not one of them."""
        self._nothing[sender] = max(t, self._nothing.get(sender, -1))
        self._recheck(sender)

    def begin(self, t: int) -> None:
        """Begin round ``t``: discard the messages of earlier rounds that were never taken."""
        self._round = t
        self._missed.clear()
        for key in sorted(key for key in self._queues if key[0] < t):
            for message in self._queues.pop(key):
                self._discard(message)

    # ---- checkpoints

    def first_read(self, sender: PeerId, t: int) -> int:
        """Return the round from which a process that begins with round ``t`` reads what ``sender`` sends."""
        return t

    def needed_after(self, done: int) -> Mapping[PeerId, int]:
        """Return for each sender the first round whose messages a peer needs that resumes after ``done`` rounds.

        It will not resume after fewer rounds any more.
        """
        return dict.fromkeys(self.taken_bytes, done)

    def state_dict(self, done: int) -> dict[str, Any]:
        """Return what has arrived and rounds from ``done`` on may take, although it will not be sent again."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any], check: Callable[[Buffer], Plan], done: int) -> None:
        """Restore what ``state_dict`` has returned.

        Args:
            check: decodes a header.
        """
