"""What arrives from all neighbors: checks it, joins chunks, and appends effects. No sockets and no clock."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from p2pfl import PeerId, config_hash
from p2pfl.errors import Malformed, Unexpected, WireError, WrongRun, WrongVersion
from p2pfl.messaging import control
from p2pfl.messaging.control import FOREVER, FROM_WRITER, Entry, Hello, Id, Nothing, Start, Want
from p2pfl.messaging.directions import Begin
from p2pfl.messaging.edge import chunk_length
from p2pfl.messaging.wire import Buffer, Plan
from p2pfl.session.body_files import NeighborJournals
from peers.connection import Connection
from peers.effects import Look, Lost, NothingComes, Refuse, Send
from peers.link_context import LinkContext

SENT = (*FROM_WRITER, Want)
"""What peers send on their DEALER; a ROUTER answers with Refused only."""
USELESS_RATE = 1000.0
"""Useless messages read per second over all connections; also the burst.

Useless are invalid messages, duplicates, control, messages of unknown senders or of past rounds, and Begins of rounds
after the next. The window or this peer's rounds limit all other messages.

Well-behaved neighbors exceed the rate only in bursts, which are then read at this rate. To a peer that was away, each
sends up to ``transport.queue`` late messages; where rounds wait for Begins, all messages since its checkpoint.
"""
PAUSE = 0.05
"""Minimum seconds for which the ROUTER is not read after too many useless messages."""


@dataclass
class _Assembly:
    """An entry with some chunks still missing."""

    epoch: int
    id: Id
    plan: Plan
    body: Tensor
    """uint8 [size]"""
    filled: int = 0


class Receiver:
    """Hands the frames that a ROUTER has received to the connections, and complete messages on to the event loop.

    Args:
        context: of the link.
        connections: to all neighbors.
        journals: of the neighbors on this host.
        now: when the link starts, in seconds.
    """

    def __init__(
        self, context: LinkContext, connections: Mapping[PeerId, Connection], journals: NeighborJournals, now: float
    ) -> None:
        self.paused = False
        """There were too many useless messages: do not read any until ``end_pause``."""
        self._context = context
        self._journals = journals
        me = context.endpoint.me
        self._connections = {f"{peer}>{me}".encode(): connection for peer, connection in connections.items()}
        """By socket identity."""
        self._assemblies: dict[PeerId, _Assembly] = {}
        self._useless_left = USELESS_RATE
        """Useless messages that may be read before a pause."""
        self._counted_at = now

    def receive(self, identity: bytes, frames: list[Buffer], now: float) -> None:
        """Handle one message.

        Args:
            identity: of the connection, verified; empty if the message was refused.
        """
        context, connection = self._context, self._connections.get(identity)
        if connection is None:
            if identity:
                text = f"message from unknown sender dropped identity={identity[:32]!r}"
                context.limited_log.warning("messages from unknown senders", text)
            self._count_useless(frames, now)
            return
        useful, inline = False, 0
        try:
            message, _, rest = control.unpack(frames, context.endpoint.run_id, SENT)
            if isinstance(message, Entry):
                header, chunk = rest[: message.header], rest[message.header :]
                inline = len(chunk)
                if len(frames) > 1:
                    if inline:
                        raise Malformed(f"entry {tuple(message.id)} has two chunks")
                    chunk = memoryview(frames[1])
                useful = self._handle_entry(connection, message, header, chunk)
            elif isinstance(message, Want):
                connection.want(message, now)
            elif isinstance(message, Hello):
                self._handle_hello(connection, identity, message)
            elif isinstance(message, Start):
                self._handle_start(connection, message)
            elif isinstance(message, Nothing) and connection.reader.is_current(message.epoch):
                context.news.append(NothingComes(connection.peer, message.t))
        except WireError as error:
            connection.drop_message(error)
            if isinstance(error, WrongRun | WrongVersion):
                context.effects.append(Refuse(identity, str(error)))
        if not useful:
            self._count_useless(frames, now, inline)
        if connection.due_want(now) is not None:
            context.effects.append(Send(connection.peer))

    def _handle_hello(self, connection: Connection, identity: bytes, hello: Hello) -> None:
        context, peer = self._context, connection.peer
        if not connection.up:
            context.effects.append(Look())
        if hello.config_hash != (ours := context.hello.config_hash):
            reason = config_hash.mismatch(peer, hello.config_hash, context.endpoint.me, ours)
            context.limited_log.warning(f"refused Hellos of peer {peer}", f"Hello refused peer={peer}: {reason}")
            context.effects.append(Refuse(identity, reason))
            return
        self._assemblies.pop(peer, None)
        same_host = context.transport.same_host and self._journals.can_open(peer, hello.boot, hello.token)
        had_finished = connection.reader.finished
        connection.reader.hello(references=same_host, number=hello.number)
        if had_finished:
            connection.neighbor_returned()

    def _handle_start(self, connection: Connection, start: Start) -> None:
        context, peer = self._context, connection.peer
        current = connection.reader.next
        lost_before = connection.reader.start(start)
        if lost_before is not None and not connection.closing:
            text = f"messages lost peer={peer} t={current.t}..{lost_before - 1}: the neighbor no longer keeps them"
            context.limited_log.warning(f"lost messages of peer {peer}", text)
            context.news.append(Lost(peer, lost_before))
        if start.nothing and connection.reader.is_current(start.epoch):
            context.news.append(NothingComes(peer, start.nothing - 1))

    # ---- entries

    def _handle_entry(self, connection: Connection, entry: Entry, header: memoryview, chunk: memoryview) -> bool:
        """Take a chunk or a reference. Return whether it may be of use. Raises WireError."""
        peer, reader = connection.peer, connection.reader
        if entry.offset:
            return self._continue(connection, entry, chunk)
        if not reader.entry(entry):
            return False
        self._assemblies.pop(peer, None)
        length = len(header)
        if reader.exceeds_window(length, entry.size):
            raise Unexpected(f"entry {tuple(entry.id)} exceeds the window")
        limit = self._context.largest
        try:
            plan = self._context.endpoint.check(header)
            if plan.size != entry.size or plan.size > limit:
                raise Unexpected(f"the body has {entry.size} bytes; expected {plan.size}, and at most {limit}")
            if entry.segment and (not reader.references or plan.size == 0):
                raise Unexpected("a reference that was not asked for")
        except WireError:
            reader.passed(entry.id, length, min(entry.size, limit))  # the writer counts it too
            self._useless_left -= length / 1024  # reading it was wasted
            raise
        if entry.segment:
            try:
                body = self._journals.open_body(peer, entry.segment, entry.at, entry.size)
            except OSError as error:
                self._context.log.info(
                    "body cannot be opened peer=%d segment=%d: %s", peer, entry.segment, error.strerror
                )
                reader.cannot_open()
                return False
            self._complete(connection, entry.id, plan, body, in_place=True)
        elif plan.size == 0:
            self._complete(connection, entry.id, plan, None)
        else:
            self._assemblies[peer] = _Assembly(entry.epoch, entry.id, plan, torch.empty(plan.size, dtype=torch.uint8))
            return self._continue(connection, entry, chunk)
        return self._may_be_of_use(peer, entry.id, plan)

    def _continue(self, connection: Connection, entry: Entry, chunk: memoryview) -> bool:
        peer = connection.peer
        assembly = self._assemblies.get(peer)
        if assembly is None or (assembly.epoch, assembly.id) != (entry.epoch, entry.id):
            return False
        plan, begins, ends = assembly.plan, entry.offset, entry.offset + len(chunk)
        expected = chunk_length(plan.size, assembly.filled)
        if begins != assembly.filled or len(chunk) != expected:
            del self._assemblies[peer]
            connection.reader.ask_anew()
            raise Malformed(f"chunk of {len(chunk)} bytes at {begins}; expected {expected} at {assembly.filled}")
        assembly.body.numpy().data[begins:ends] = chunk
        assembly.filled = ends
        if ends == plan.size:
            del self._assemblies[peer]
            self._complete(connection, entry.id, plan, assembly.body)
        return self._may_be_of_use(peer, entry.id, plan)

    def _may_be_of_use(self, peer: PeerId, id: Id, plan: Plan) -> bool:
        endpoint = self._context.endpoint
        t = endpoint.t
        if plan.layout.body is Begin:  # takes no window, so only the next two of each neighbor
            return id.number == 0 and t <= id.t <= t + 1
        return id.t >= (endpoint.mailbox.sender_round(peer) if endpoint.mailbox.keeps else t)

    def _complete(
        self, connection: Connection, id: Id, plan: Plan, body: Tensor | None, *, in_place: bool = False
    ) -> None:
        connection.reader.passed(id, plan.header, plan.size)
        message = plan.message(id.t, connection.peer, body)
        if body is not None and in_place:  # decoding has read it, and nothing has modified it yet
            self._journals.forget(body)
        message = self._context.endpoint.converted(message)
        if id.t == FOREVER:
            connection.neighbor_finished()
        else:
            connection.deliver(message)

    # ---- the rate of useless messages

    def _count_useless(self, frames: Sequence[Buffer], now: float, inline: int = 0) -> None:
        """Charge the rate limit for a message; long headers and many frames cost more, since reading them does.

        Args:
            inline: bytes of the chunk in the first frame.
        """
        self._useless_left = min(USELESS_RATE, self._useless_left + (now - self._counted_at) * USELESS_RATE)
        self._counted_at = now
        self._useless_left -= 1 + (sum(map(len, frames[:1])) - inline) / 1024 + len(frames) / 16
        self.paused = self.paused or self._useless_left < 0

    def pause_left(self, now: float) -> float:
        """Return the remaining seconds of the pause."""
        return PAUSE - self._useless_left / USELESS_RATE - (now - self._counted_at)

    def end_pause(self, now: float) -> bool:
        """End the pause if it is over, and return whether it was."""
        over = self.paused and self.pause_left(now) <= 0
        self.paused = self.paused and not over
        return over
