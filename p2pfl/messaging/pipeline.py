"""What becomes of messages between a method and the wire: the place of codecs, adversaries and noise.

    method ── body ──▶ outgoing ───▶ wire.encode ──▶ journal ──▶ link
    method ◀── body ── incoming ◀── mailbox ◀── wire.check ◀──── link

Rules:

1. All peers have the same run file, so nothing is negotiated.
2. A body is not modified, since its tensors may be the model's parameters. A changed body is a new one.
3. Whatever is random comes from the peer's streams, and all that is remembered is in ``state_dict``, so that a round
   that is computed again after a crash writes equal bytes.
4. What is remembered of a received message changes when the message leaves the mailbox, never when it arrives: a
   checkpoint at the end of a round must not hold the effect of later messages, which come again after a crash. Those
   that no round has taken leave at the end of their round, before its checkpoint.
5. The partial sums of an allreduce pass unchanged.
6. A pipeline may ask to see what other peers send at the same point of the round before it says what this one sends.
   Such messages stay in the mailbox for the method. Peers that wait so do not wait for one another.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from p2pfl import PeerId
from p2pfl.messaging.schema import Body, Layout
from p2pfl.messaging.wire import Message


class Pipeline:
    """Changes what a peer's method sends and receives; this one changes nothing. The event loop's thread calls it."""

    def layouts(self, layout: Layout) -> Sequence[Layout]:
        """Return what is accepted on the wire for bodies with this layout: the layout too, because of rule 5."""
        return [layout]

    def awaits(self, kind: str, senders: Collection[PeerId], t: int) -> Collection[PeerId]:
        """Return which of some peers' bodies this pipeline sees before this peer sends one of their kind, by rule 6.

        Args:
            senders: the peers that send one to this peer at the same point of the round, whatever it sends.
        """
        return ()

    def see(self, kind: str, bodies: Mapping[PeerId, Body]) -> None:
        """Note what ``awaits`` has asked for, as far as it arrived, ascending; ``outgoing`` for that kind follows."""

    def outgoing(self, body: Body, to: Sequence[PeerId], t: int) -> Iterable[tuple[Sequence[PeerId], Body]]:
        """Yield what is sent in place of ``body``, and to whom; each is encoded and stored once."""
        yield to, body

    def incoming(self, message: Message) -> Message:
        """Return what the method gets in place of a message. Remembers nothing, and may be called again.

        If the message cannot be used, ``Message.diverged`` of the result says why.
        """
        return message

    def left(self, message: Message) -> None:
        """Note that a message was taken or discarded: once for each, in the order of each sender and kind.

        After a gap (skipped rounds, a deadline, a neighbor that was declared dead), messages are missing.
        """

    def state_dict(self) -> dict[str, Any]:
        """Return what is remembered between two rounds; tensors are not copied."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what ``state_dict`` has returned."""


class Chain(Pipeline):
    """Pipelines one after the other; the first is nearest to the method."""

    def __init__(self, parts: Sequence[Pipeline]) -> None:
        self.parts = parts

    def layouts(self, layout: Layout) -> Sequence[Layout]:
        found: Sequence[Layout] = [layout]
        for part in self.parts:
            found = [accepted for each in found for accepted in part.layouts(each)]
        return found

    def awaits(self, kind: str, senders: Collection[PeerId], t: int) -> Collection[PeerId]:
        return {sender for part in self.parts for sender in part.awaits(kind, senders, t)}

    def see(self, kind: str, bodies: Mapping[PeerId, Body]) -> None:
        for part in self.parts:
            part.see(kind, bodies)

    def outgoing(self, body: Body, to: Sequence[PeerId], t: int) -> Iterable[tuple[Sequence[PeerId], Body]]:
        bodies = [(to, body)]
        for part in self.parts:
            bodies = [sent for receivers, each in bodies for sent in part.outgoing(each, receivers, t)]
        return bodies

    def incoming(self, message: Message) -> Message:
        for part in reversed(self.parts):
            message = part.incoming(message)
        return message

    def left(self, message: Message) -> None:
        for part in self.parts:
            part.left(message)

    def state_dict(self) -> dict[str, Any]:
        return {str(number): part.state_dict() for number, part in enumerate(self.parts)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for number, part in enumerate(self.parts):
            part.load_state_dict(state[str(number)])
