"""Inbox: the receiving half of an endpoint, what a method takes in each round."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import replace

from p2pfl import PeerId
from p2pfl.messaging.conversation import Conversation
from p2pfl.messaging.deadline import WaitPolicy
from p2pfl.messaging.mailbox import Mailbox
from p2pfl.messaging.pipeline import Pipeline
from p2pfl.messaging.waits import Waits
from p2pfl.messaging.wire import Message
from p2pfl.outcomes import MESSAGES, Outcomes

MessageCounts = dict[PeerId, dict[str, list[int]]]
"""{neighbor: {kind: [messages, payload bytes, header bytes]}}"""


class Inbox:
    """Waits for messages in a mailbox, takes them for the method, and counts them.

    The arguments are those of ``Endpoint``.
    """

    t: int
    """The round."""

    def __init__(
        self,
        conversation: Conversation,
        mailbox: Mailbox,
        pipeline: Pipeline | None,
        wait_policy: WaitPolicy,
        idle: Callable[[Callable[[], list[PeerId]]], AbstractAsyncContextManager[None]],
    ) -> None:
        self.on_receive = conversation.on_receive
        self.mailbox = mailbox
        self.pipeline = pipeline
        self.waits = Waits(mailbox, wait_policy, idle)
        if pipeline is not None:
            mailbox.on_discard = pipeline.left
        self.outcomes = Outcomes()  # the algorithm's, which counts messages too, in a session

    def _reset_counters(self) -> None:
        """Begin to count the messages of another round."""
        self.received: MessageCounts = {}
        self.missing: dict[str, list[PeerId]] = {}
        self.nonfinite: dict[str, list[PeerId]] = {}
        self.taken_ages: dict[str, dict[PeerId, int]] = {}
        """By kind and sender, the age of the body taken in this round, in rounds; negative if the sender is ahead."""
        self.waits.reset()

    @property
    def waits_for_rounds(self) -> bool:
        """Whether a round takes messages of the same round only: then all peers compute it at about the same time."""
        return not self.mailbox.keeps

    @property
    def staleness(self) -> float:
        """By how many rounds at most a message may be older or newer than the round that takes it."""
        return self.mailbox.staleness

    def count_as_missing(self, kind: str, senders: Iterable[PeerId]) -> None:
        """Record that bodies did not arrive, or cannot be used."""
        self.missing.setdefault(kind, []).extend(senders)

    async def take(
        self, kind: str, senders: Sequence[PeerId], t: int, deadline_factor: float = 1.0, *, addressed: bool = False
    ) -> dict[PeerId, Message]:
        """Return one message of ``kind`` per sender, in ascending order.

        Senders that miss the deadline, or whose body holds NaN, infinity or diverged values, are omitted and
        recorded in ``missing``.

        Args:
            kind: kind of the messages.
            senders: neighbors to receive from.
            t: round of the messages.
            deadline_factor: factor of the deadline, for senders that must wait for others first.
            addressed: the messages are sent to this peer whether or not it is one of their senders' receivers, one
                for each such call of the round. A message that misses its call is not taken by the next one.
        """
        senders = sorted(senders)
        await self.waits.wait(kind, senders, t, deadline_factor, addressed=addressed)
        arrived = self._taken(kind, senders, t)
        if addressed:
            for sender in set(senders) - arrived.keys():
                self.mailbox.miss((t, kind, sender))
        awaited = senders if self.mailbox.waits else arrived
        taken = {sender: messages[-1] for sender, messages in arrived.items() if messages}
        if absent := [sender for sender in awaited if sender not in taken]:
            self.count_as_missing(kind, absent)
        return taken

    async def collect(
        self, kind: str, senders: Collection[PeerId], t: int, awaited: Collection[PeerId], *, replies: bool = False
    ) -> dict[PeerId, list[Message]]:
        """Return the messages of ``kind``, which count once, that have arrived from each sender since the last call.

        Those that are ``awaited``, but do not arrive before the deadline, are recorded in ``missing``.

        Args:
            t: the round of the messages to wait for, or ``NEXT``.
            awaited: their senders.
            replies: the messages answer this peer's. Their senders may compute any round by now, and may have to wait
                before they answer.
        """
        awaited, deadlines = sorted(awaited), 2.0 if replies else 1.0
        await self.waits.wait(kind, sorted({*awaited, *self.mailbox.repeats(kind)}), t, deadlines)
        taken = self._taken(kind, sorted(senders), self.t, any_round=replies)
        if absent := [each for each in awaited if each not in taken and (t, kind, each) not in self.mailbox]:
            self.count_as_missing(kind, absent)
        return {sender: messages for sender, messages in taken.items() if messages}

    def _taken(
        self, kind: str, senders: Sequence[PeerId], t: int, *, any_round: bool = False
    ) -> dict[PeerId, list[Message]]:
        """Take what round ``t`` takes. Of senders that have sent something useless only, the list is empty."""
        taken: dict[PeerId, list[Message]] = {}
        for sender, messages in self.mailbox.take_all(kind, senders, t, any_round=any_round).items():
            self.taken_ages.setdefault(kind, {})[sender] = t - messages[-1].t
            taken[sender] = []
            for message in messages:
                count_message(self.received, sender, kind, message.plan.payload, message.plan.header)
                restored = self._restored(message)
                if self.outcomes.note(MESSAGES, restored.diverged):
                    taken[sender].append(restored)
                else:
                    self.nonfinite.setdefault(kind, []).append(sender)
        return taken

    def _restored(self, message: Message) -> Message:
        """Return what the method gets in place of a message that it takes."""
        if self.pipeline is None and not self.mailbox.keeps:
            return message  # on_receive has replaced its body
        restored = message
        if self.pipeline is not None:
            restored = self.pipeline.incoming(message)
            if not self.mailbox.retakes(message.kind):
                self.pipeline.left(message)
        return replace(restored, body=self.on_receive(restored.body)) if restored.finite else restored


def count_message(counts: MessageCounts, neighbor: PeerId, kind: str, payload: int, header: int) -> None:
    entry = counts.setdefault(neighbor, {}).setdefault(kind, [0, 0, 0])
    entry[0] += 1
    entry[1] += payload
    entry[2] += header
