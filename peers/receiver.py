"""The receiving side: handles all messages that arrive at the ROUTER. I/O thread only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from p2pfl import PeerId, config_hash
from p2pfl.errors import Malformed, Unexpected, WireError, WrongRun, WrongVersion
from p2pfl.messaging import control
from p2pfl.messaging.control import FOREVER, Entry, Hello, Id, Nothing, Refused, Start, Want
from p2pfl.messaging.edge import chunk_length
from p2pfl.messaging.receivers import Begin
from p2pfl.messaging.wire import Buffer, Plan
from peers.connection import SENT, Connection

if TYPE_CHECKING:
    from peers.io_loop import IoLoop
    from peers.zmq_sockets import ZmqRouter

MESSAGES_PER_TURN = 256
"""Maximum messages read in one turn of the I/O loop, so that other sockets are served too."""
USELESS_RATE = 1000.0
"""Useless messages read per second over all connections; the burst: invalid ones, duplicates, control, of unknown
senders, of rounds that are over, and Begins of later rounds than the next. All others are limited by the window, or
by the rounds of this peer.

Well-behaved neighbors send more only in bursts, which are then read at this rate: to a peer that was away, up to
``transport.queue`` messages of each that are too late, and where rounds wait for Begins, all since its checkpoint.
"""
PAUSE = 0.05
"""Minimum seconds for which the ROUTER is not read after too many useless messages."""


@dataclass
class _Assembly:
    """An entry of which some chunks have arrived."""

    epoch: int
    id: Id
    plan: Plan
    body: Tensor
    """uint8 [size]"""
    filled: int = 0


class Receiver:
    """Reads the ROUTER, and hands complete messages to the event loop."""

    def __init__(self, io: IoLoop) -> None:
        self._io = io
        self.endpoint = io.endpoint
        self.senders = {f"{peer}>{io.me}".encode(): peer for peer in self.endpoint.neighbors}
        """By socket identity."""
        self.paused = False
        """There were too many useless messages; the ROUTER is not read."""
        self._assemblies: dict[PeerId, _Assembly] = {}
        self._useless_left = USELESS_RATE
        """Useless messages that may be read before a pause."""
        self._counted_at = io.now()
        self.router: ZmqRouter

    # ---- reading

    def read(self) -> None:
        for _ in range(MESSAGES_PER_TURN):
            if self.paused or (received := self.router.receive()) is None:
                return
            self.receive(*received)

    def receive(self, identity: bytes, frames: list[Buffer]) -> None:
        """Handle one message."""
        io, peer = self._io, self.senders.get(identity)
        if peer is None:
            if identity:
                text = f"message from unknown sender dropped identity={identity[:32]!r}"
                io.limited_log.warning("messages from unknown senders", text)
            self._count_useless(frames)
            return
        connection = io.connections[peer]
        try:
            message, _ = control.unpack(frames, self.endpoint.run_id, SENT)
            useful = isinstance(message, Entry) and self._handle_entry(connection, message, frames[1:])
        except WireError as error:
            connection.drop_message(error)
            self._count_useless(frames)
            if isinstance(error, WrongRun | WrongVersion):
                self._refuse(identity, str(error))
            return
        if not useful:
            self._count_useless(frames)
        if isinstance(message, Hello):
            self._handle_hello(connection, identity, message)
        elif isinstance(message, Start):
            self._handle_start(connection, message)
        elif isinstance(message, Nothing):
            if connection.reader.is_current(message.epoch):
                io.notify(self.endpoint.mailbox.nothing, peer, message.t)
        elif isinstance(message, Want):
            connection.want(message)
        if not isinstance(message, Want):
            connection.state_want(io.now())

    def _handle_hello(self, connection: Connection, identity: bytes, hello: Hello) -> None:
        io, peer = self._io, connection.peer
        if not connection.up:
            io.seen_addresses = 0  # it may listen at a new address
            io.check_soon()
        if hello.config_hash != io.hello.config_hash:
            reason = config_hash.mismatch(peer, hello.config_hash, io.me, io.hello.config_hash)
            io.limited_log.warning(f"refused Hellos of peer {peer}", f"Hello refused peer={peer}: {reason}")
            self._refuse(identity, reason)
            return
        self._assemblies.pop(peer, None)
        same_host = io.transport.same_host and io.world.journals.can_open(peer, hello.boot, hello.token)
        had_finished = connection.reader.finished
        connection.reader.hello(references=same_host, number=hello.number)
        if had_finished:
            connection.neighbor_returned()

    def _handle_start(self, connection: Connection, start: Start) -> None:
        io, peer = self._io, connection.peer
        current = connection.reader.next
        lost_before = connection.reader.start(start)
        if lost_before is not None:
            text = f"messages lost peer={peer} t={current.t}..{lost_before - 1}: the neighbor no longer keeps them"
            io.limited_log.warning(f"lost messages of peer {peer}", text)
            io.notify(self.endpoint.lost_before, peer, lost_before)
        if start.nothing and connection.reader.is_current(start.epoch):
            io.notify(self.endpoint.mailbox.nothing, peer, start.nothing - 1)

    # ---- entries

    def _handle_entry(self, connection: Connection, entry: Entry, frames: Sequence[Buffer]) -> bool:
        """Take a chunk or a reference. Return whether it may be of use. Raises WireError."""
        peer, reader = connection.peer, connection.reader
        if entry.offset:
            return self._continue(connection, entry, frames)
        verdict = reader.entry(entry)
        if verdict != "take":
            return False
        self._assemblies.pop(peer, None)
        header = frames[0] if frames else b""
        length = len(memoryview(header))
        if reader.exceeds_window(length, entry.size):
            raise Unexpected(f"entry {tuple(entry.id)} exceeds the window")
        limit = self._io.largest
        try:
            plan = self.endpoint.check(header)
            if plan.size != entry.size or plan.size > limit:
                raise Unexpected(f"the body has {entry.size} bytes; expected {plan.size}, and at most {limit}")
            if entry.segment and (not reader.references or plan.size == 0):
                raise Unexpected("a reference that was not asked for")
        except WireError:
            reader.passed(entry.id, length, min(entry.size, limit))  # the writer counts it too
            self._useless_left -= length / 1024  # it has been read in vain
            raise
        if entry.segment:
            try:
                body = self._io.world.journals.open_body(peer, entry.segment, entry.at, entry.size)
            except OSError as error:
                self._io.log.info("body cannot be opened peer=%d segment=%d: %s", peer, entry.segment, error.strerror)
                reader.cannot_open()
                return False
            self._complete(connection, entry.id, plan, body, in_place=True)
        elif plan.size == 0:
            self._complete(connection, entry.id, plan, None)
        else:
            body = torch.empty(plan.size, dtype=torch.uint8)
            self._assemblies[peer] = _Assembly(entry.epoch, entry.id, plan, body)
            return self._continue(connection, entry, frames[1:])
        return self._may_be_of_use(entry.id, plan)

    def _continue(self, connection: Connection, entry: Entry, frames: Sequence[Buffer]) -> bool:
        peer = connection.peer
        assembly = self._assemblies.get(peer)
        if assembly is None or (assembly.epoch, assembly.id) != (entry.epoch, entry.id):
            return False
        chunk = memoryview(frames[0] if frames else b"")
        end = entry.offset + len(chunk)
        expected = chunk_length(len(assembly.body), assembly.filled)
        if (entry.offset, len(chunk)) != (assembly.filled, expected):
            del self._assemblies[peer]
            connection.reader.gap()
            connection.state_want(self._io.now())
            raise Malformed(
                f"chunk of {len(chunk)} bytes at {entry.offset}; expected {expected} at {assembly.filled}"
            )
        assembly.body.numpy().data[entry.offset : end] = chunk
        assembly.filled = end
        if end == len(assembly.body):
            del self._assemblies[peer]
            self._complete(connection, entry.id, assembly.plan, assembly.body)
        return self._may_be_of_use(entry.id, assembly.plan)

    def _may_be_of_use(self, id: Id, plan: Plan) -> bool:
        t = self.endpoint.t
        if plan.layout.body is Begin:  # takes no window, so only the next two of each neighbor
            return id.number == 0 and t <= id.t <= t + 1
        return id.t >= t

    def _complete(
        self, connection: Connection, id: Id, plan: Plan, body: Tensor | None, *, in_place: bool = False
    ) -> None:
        io, peer = self._io, connection.peer
        connection.reader.passed(id, plan.header, plan.size)
        message = plan.message(id.t, peer, body)
        if body is not None and in_place:  # decoding has read all of it; from here on, the method may modify it
            io.world.journals.forget(body)
        message = self.endpoint.converted(message)
        if id.t == FOREVER:
            connection.neighbor_finished()
        else:
            if connection.disconnected and connection.up:
                connection.reached()  # its Want came before the Hello by which it returned
            io.delivered[peer] += message.cost
            io.notify(self.endpoint.accept, message)

    def _refuse(self, identity: bytes, reason: str) -> None:
        self.router.send(identity, [control.pack(Refused(reason), self.endpoint.run_id)])

    # ---- the rate of useless messages

    def _count_useless(self, frames: Sequence[Buffer]) -> None:
        """Charge the rate limit for a message; long headers and many frames cost more, since reading them does."""
        now = self._io.now()
        self._useless_left = min(USELESS_RATE, self._useless_left + (now - self._counted_at) * USELESS_RATE)
        self._counted_at = now
        self._useless_left -= 1 + sum(map(len, frames[:1])) / 1024 + len(frames) / 16
        if self._useless_left < 0 and not self.paused:
            self.paused = True
            self.router.watch(False)

    def pause_left(self) -> float:
        """Return the remaining seconds of the pause."""
        return PAUSE - self._useless_left / USELESS_RATE - (self._io.now() - self._counted_at)

    def end_pause(self) -> None:
        if self.paused and self.pause_left() <= 0:
            self.paused = False
            self.router.watch(True)
