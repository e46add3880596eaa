"""Endpoint: one peer's end of all its edges, for the whole run."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any

import torch

from p2pfl import PeerId
from p2pfl.errors import BodyTooLarge, HeaderTooLarge, Unexpected
from p2pfl.messaging import wire
from p2pfl.messaging.control import FOREVER
from p2pfl.messaging.conversation import Conversation
from p2pfl.messaging.deadline import WaitPolicy
from p2pfl.messaging.directions import Begin, Directions
from p2pfl.messaging.inbox import Inbox, MessageCounts, count_message
from p2pfl.messaging.journal import BodyStore, Journal, JournalEntry
from p2pfl.messaging.link import Link
from p2pfl.messaging.mailbox import Mailbox
from p2pfl.messaging.neighborhood import Neighborhood
from p2pfl.messaging.pipeline import Pipeline
from p2pfl.messaging.schema import MAX_HEADER, B, shown, tensors_of, with_tensors
from p2pfl.messaging.wire import Buffer, Encoded, Message, Plan
from p2pfl.tensors import Tensors


class Endpoint(Inbox):
    """Writes a peer's journal, counts its messages, and waits for messages of its neighbors.

    Args:
        neighborhood: this peer's place in the graph.
        run_id: 16 hex digits, equal on all peers of a run.
        conversation: what the method sends and receives.
        wait_policy: how long one wait may last.
        idle: entered around every wait, so that a runtime can release the compute slot. It is passed a function that
            lists the peers still waited for.
        store: of the journal's bodies; default: memory.
        pipeline: what becomes of messages between the method and the wire; default: nothing.
        mailbox: which messages a round takes; default: those of the same round, for which it waits.
    """

    link: Link

    def __init__(
        self,
        neighborhood: Neighborhood,
        run_id: str,
        conversation: Conversation,
        wait_policy: WaitPolicy | None = None,
        idle: Callable[[Callable[[], list[PeerId]]], AbstractAsyncContextManager[None]] = lambda _: nullcontext(),
        store: BodyStore | None = None,
        pipeline: Pipeline | None = None,
        mailbox: Mailbox | None = None,
    ) -> None:
        mailbox = mailbox or Mailbox(neighborhood.neighbors)
        super().__init__(conversation, mailbox, pipeline, wait_policy or WaitPolicy(), idle)
        self.neighborhood = neighborhood
        self.me = neighborhood.me
        self.neighbors = neighborhood.neighbors
        self.run_id = run_id
        self.prunes = conversation.prunes
        self.schema = conversation.schema(neighborhood.peers, pipeline)
        # Headers rarely differ between rounds and senders. Few are kept: a neighbor may send any.
        self._check = lru_cache(maxsize=8)(partial(wire.check, schema=self.schema))
        self.idle = idle
        self._kept, replaced = conversation.counting("all"), conversation.counting("current")
        supersedes = not self.mailbox.waits
        self.journal = Journal(self.neighbors, store, supersedes=supersedes, keeps=self._kept, replaces=replaced)
        self.t = 0
        self._directions = Directions(self.me, neighborhood.joined(0))
        self._receivers: set[PeerId] | None = None  # of this round, once the method has begun to send
        self._first_kept: dict[PeerId, int] = {}  # first round whose messages these neighbors still have
        self.durable = 0
        """Rounds before this one will not be computed again: the checkpoint before the last one contains them."""
        self.received_from: set[PeerId] = set()
        """The neighbors that have sent something, to this process or an earlier one of this peer."""
        self.max_message: float = math.inf
        """Maximum bytes of a body; set by a link that has a limit."""
        self.memo: dict[str, Tensors] | None = None
        """Results of ``Net.memoized``; set where several peers share a process."""
        self.dropped: dict[PeerId, int] = {}
        """Invalid messages by neighbor; counted on the thread that decodes."""
        self._reset_counters()

    # ---- rounds

    def open(self, t: int) -> None:
        """Announce round ``t`` to all neighbors by its Begin; called before any other message of the round."""
        before, joined, self.t = self.neighborhood.joined(self.t), self.neighborhood.joined(t), t
        self._receivers = None
        self._directions.begin(t, set(joined) - set(before))
        self.journal.begin(t)
        sources = tuple(sorted(self._directions.sources)) if self.prunes else ()
        to = self.neighbors if t == FOREVER else joined
        # A peer may wait for this Begin if the method prunes, this peer leaves, or a peer joins.
        awaited = self.prunes or t == FOREVER or t in self.neighborhood.joins.values()
        self.link.announce(self.journal.append(wire.encode(Begin(sources)), to, optional=not awaited))

    def begin(self, t: int) -> None:
        """Begin to compute round ``t``, which is open, with all counters at zero."""
        self._reset_counters()
        self.mailbox.begin(t)

    def _reset_counters(self) -> None:
        super()._reset_counters()
        self.sent: MessageCounts = {}
        self.sending = 0.0
        """Seconds of encoding and writing this round's messages, and of waiting for receivers far behind."""

    async def await_start(self, t: int) -> None:
        """If this peer joins late, in this round, wait without a deadline until its neighbors have begun it.

        Where rounds do not wait for one another, round 0 waits until the neighbors have started.
        """
        joins = self.neighborhood.joins
        if t == 0 and not self.waits_for_rounds:
            await self.waits.wait(Begin.kind(), self.neighborhood.joined(0), 0)
        if 0 < joins.get(self.me, 0) == t:
            earlier = [neighbor for neighbor in self.neighborhood.joined(t) if joins.get(neighbor, 0) < t]
            await self.waits.wait(Begin.kind(), earlier, t, deadline_factor=math.inf)

    @property
    def sources(self) -> set[PeerId]:
        """The neighbors that send to this peer in this round."""
        if self.neighborhood.rounds is None:
            return self._directions.sources
        return self._directions.sources & set(self.neighborhood.topology_at(self.t).sources[self.me])

    @property
    def all_sources(self) -> set[PeerId]:
        """The neighbors that send to this peer in some round."""
        return self._directions.sources

    def receive_only_from(self, senders: Iterable[PeerId]) -> None:
        """Drop all other sources after this round."""
        self._directions.receive_only_from(senders)

    def next_round(self, t: int) -> int:
        """Return the round to compute after those before ``t``.

        It is later than ``t`` if at least half of the connected neighbors no longer have their messages of round
        ``t``. So one neighbor of three or more cannot make this peer skip the run.
        """
        if not self.waits_for_rounds:
            return t
        joined = self.neighborhood.joined(self.t)
        present = [neighbor for neighbor in joined if not self.mailbox.is_disconnected(neighbor)]
        later = [first for neighbor in present if (first := self._first_kept.get(neighbor, 0)) > t]
        return min(later) if later and 2 * len(later) >= len(present) else t

    def finish(self, t: int) -> None:
        """End round ``t`` and open the next one."""
        if self.pipeline is not None:
            self.mailbox.begin(t + 1)  # discards what was not taken before the pipeline's state is checkpointed
        self.open(t + 1)

    def lost_before(self, sender: PeerId, t: int) -> None:
        """Note that no message of ``sender`` from before round ``t`` will arrive: it has dropped them."""
        self._first_kept[sender] = t  # also of a neighbor that joins only later: it may be far ahead by then
        self.mailbox.advance_sender(sender, t)

    # ---- sending

    async def receivers(self) -> set[PeerId]:
        """Return the neighbors that receive from this peer in this round; fixed when the method first sends.

        If the method prunes, their Begin says so. It is waited for like a message.
        """
        if self._receivers is None:
            if self.prunes and self.t > 0 and self.waits_for_rounds:
                joins = self.neighborhood.joins
                known = [j for j in self.expected_receivers if joins.get(j, 0) < self.t]
                await self.waits.wait(Begin.kind(), known, self.t)
            self._receivers = self.expected_receivers
        return self._receivers

    @property
    def knows_receivers(self) -> bool:
        """Whether ``expected_receivers`` is certain, and does not depend on the Begins that have arrived so far."""
        return self._receivers is not None or not self.prunes or self.t == 0

    @property
    def expected_receivers(self) -> set[PeerId]:
        """The neighbors that receive from this peer in this round, as far as known now."""
        if self._receivers is not None:
            return self._receivers
        place = self.neighborhood
        reached = place.joined(self.t) if place.rounds is None else place.topology_at(self.t).receivers[self.me]
        return {neighbor for neighbor in reached if self._directions.receives(neighbor, self.t)}

    async def see_first(self, kind: str, senders: Collection[PeerId], deadline_factor: float = 1.0) -> None:
        """Let the pipeline see bodies of ``senders``, which do not wait for this peer's, before it sends its own."""
        if self.pipeline is None or not await self.receivers():
            return
        if awaited := sorted(self.pipeline.awaits(kind, senders, self.t)):
            await self.waits.wait(kind, awaited, self.t, deadline_factor)
            found = (self.mailbox.peek((self.t, kind, sender)) for sender in awaited)
            restored = map(self.pipeline.incoming, filter(None, found))
            self.pipeline.see(kind, {message.sender: message.body for message in restored if message.finite})

    async def send(
        self, to: Iterable[PeerId], body: B, count: int | None = None, *, stored: bool = False, checked: bool = False
    ) -> B | None:
        """Write ``body`` into the journal once, for several neighbors; wait for neighbors that are far behind.

        Args:
            count: peers summed up in a partial sum, which no pipeline changes; 1 for what a pipeline has made before.
            checked: refuse a body that this peer would refuse to receive. The receivers accept the same bodies of
                this kind: they would drop it, and wait until the deadline.
            stored: return the body as it is in the journal. None if it is not there: there are no receivers, all
                have disconnected, a pipeline has changed it, or somebody has deleted the file.

        Raises:
            HeaderTooLarge, BodyTooLarge: the receivers would drop the message, or lose the connection each time that
                it is sent.
            Unexpected: a ``checked`` body is refused.
        """
        if not (receivers := tuple(to)):
            return None
        await self.waits.clock.settle()
        clock = asyncio.get_running_loop().time
        began = clock()
        copy = None
        if count is not None or self.pipeline is None:
            copy = self._write(receivers, body, count or 1, stored=stored, checked=checked)
        else:
            for some, changed in self.pipeline.outgoing(body, receivers, self.t):
                if changed is body:
                    copy = self._write(tuple(some), body, 1, stored=stored, checked=checked)
                else:
                    self._write(tuple(some), changed, 1, stored=False, checked=checked)
        must_arrive = self.mailbox.waits or body.kind() in self._kept
        if must_arrive and (behind := self.link.behind(receivers)):
            async with self.idle(lambda: self.link.behind(behind)):
                await self.link.caught_up(behind)
        self.sending += clock() - began
        return copy

    def _write(self, receivers: Sequence[PeerId], body: B, count: int, *, stored: bool, checked: bool) -> B | None:
        encoded = wire.encode(body, count)
        if len(encoded.header) > MAX_HEADER:
            raise HeaderTooLarge(encoded.kind, len(encoded.header), MAX_HEADER)
        if encoded.size > self.max_message:
            raise BodyTooLarge(encoded.size, self.max_message)
        if checked and encoded.kind in self.schema.layouts:
            self.check(encoded.header)
        entry = self.journal.append(encoded, receivers)
        copy = _stored(body, encoded, entry, self.journal) if stored else None
        for receiver in receivers:
            count_message(self.sent, receiver, encoded.kind, encoded.payload, len(encoded.header))
        self.link.announce(entry)
        return copy

    # ---- receiving

    def check(self, header: Buffer) -> Plan:
        """Check the header of an entry; on any thread. Raises WireError."""
        plan = self._check(bytes(header))
        if plan.count > self.neighborhood.peers:
            raise Unexpected(f"count must be at most {self.neighborhood.peers}, got {shown(plan.count)}")
        return plan

    def converted(self, message: Message) -> Message:
        """Return a decoded message with the result of ``on_receive`` as its body; it may be changed in place.

        With a pipeline, or if it may be taken again, that happens when the message is taken: until then it takes as
        much memory as on the wire.
        """
        if self.pipeline is not None or self.mailbox.keeps or isinstance(message.body, Begin):
            return message
        body = self.on_receive(message.body)
        return message if body is message.body else replace(message, body=body, stored=None)

    def accept(self, message: Message) -> None:
        """Accept a message. The link passes each message once, and the messages of a sender in order."""
        self.received_from.add(message.sender)
        if isinstance(message.body, Begin):
            sender = message.sender
            if self.prunes:
                self._directions.state(sender, message.t, message.body.sources)
                left_out = self._receivers is not None and sender not in self._receivers
                if message.t == self.t and left_out and self.me in message.body.sources:
                    # It may wait for a message of this round, but its Begin has arrived too late for one.
                    self.link.nothing(sender, self.t)
            self.mailbox.advance_sender(sender, message.t)
            self.mailbox.taken_bytes[sender] += message.cost
        else:
            self.mailbox.put(message)

    @property
    def taken_bytes(self) -> int:
        """Bytes of all messages taken or discarded so far."""
        return sum(self.mailbox.taken_bytes.values())

    # ---- state

    def state_dict(self) -> dict[str, Any]:
        """Return the edges; valid between rounds. ``Journal.state_dict`` is the other part of the state."""
        changes = {} if self.pipeline is None else {"pipeline": self.pipeline.state_dict()}
        arrived = {"mailbox": self.mailbox.state_dict(self.t)} if self.mailbox.keeps else {}
        return {**self._directions.state_dict(), "received_from": sorted(self.received_from), **changes, **arrived}

    def load_state_dict(self, state: Mapping[str, Any], journal: Mapping[str, Any], t: int) -> None:
        """Restore the state at the beginning of round ``t``; called before the link starts."""
        if self.pipeline is not None:
            self.pipeline.load_state_dict(state["pipeline"])
        self._directions.load_state_dict(state)
        self.received_from.update(state["received_from"])
        self.t = t
        if self.mailbox.keeps:
            self.mailbox.load_state_dict(state["mailbox"], self.check, t)
        self.journal.load_state_dict(journal)


def _stored(body: B, encoded: Encoded, entry: JournalEntry, journal: Journal) -> B | None:
    """Return a body that was written, with tensors in the journal, unless it cannot be mapped. Reads none of them."""
    try:
        raw, places = journal.map(entry), iter(encoded.tensors)
    except OSError:
        return None
    tensors = {}
    for path, tensor in tensors_of(body).items():
        if raw is None or not tensor.numel():
            tensors[path] = torch.empty_like(tensor)
            continue
        offset, part = next(places)
        tensors[path] = raw[offset : offset + len(part)].view(tensor.dtype).view(tensor.shape).to(tensor.device)
    return with_tensors(body, tensors)
