"""The edge to one neighbor: both ends, the neighbor's address, loss and recovery, without sockets or a clock.

    connect, event, answered, want …  ──▶  Connection  ──▶  effects, and ``outgoing``: what is due for the socket

``edge`` has the protocol's states; this adds whether the neighbor is connected, has finished, or was declared dead.
I/O thread only, unless noted.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

from p2pfl import PeerId
from p2pfl.errors import HandshakeError, JournalError, WireError, WrongVersion
from p2pfl.messaging import control
from p2pfl.messaging.control import BEFORE, FOREVER, INLINE, Entry, Id, Refused, Want
from p2pfl.messaging.edge import OPTIONAL_DELAY, Outgoing, Reader, Writer, WriterState, chunk_length
from p2pfl.messaging.journal import Journal, JournalEntry
from p2pfl.messaging.wire import Buffer, Message
from peers.delays import Delays
from peers.effects import CaughtUp, Close, Deliver, Disconnected, Failed, Reconnected, Send, SocketEvent
from peers.link_context import LinkContext

CLOSE_TIMEOUT = 10.0
"""Maximum seconds to wait until a neighbor that has finished confirms the last Begin."""


class Connection:
    """The edge to one neighbor.

    Args:
        context: of the link.
        peer: the neighbor.
        now: when the link starts, in seconds.
    """

    def __init__(self, context: LinkContext, peer: PeerId, now: float) -> None:
        self.peer = peer
        self.writer = Writer(context.endpoint.journal, peer, context.hello, context.new_number)
        first = context.endpoint.mailbox.first_read(peer, context.endpoint.t)
        self.reader = Reader(Id(first, 0), context.budget, context.new_number)
        self.address = ""
        """Where the neighbor is looked for; empty: there is no socket for it."""
        self.connected_at = 0.0
        """When ``connect`` was called."""
        self.lost_at: float | None = None
        """When the last TCP connection was lost, perhaps to a proxy; None while connected, and before the first."""
        self.disconnected = context.endpoint.mailbox.is_disconnected(peer)
        """The neighbor was declared dead, has finished, or has refused this peer; the endpoint was notified."""
        self.wrong_peer_answered = False
        """Another process has answered at the neighbor's last address."""
        self.behind = False
        """The neighbor had more than ``transport.queue`` entries left to read when last looked at."""
        self.closing = False
        """This peer leaves, and no longer logs which neighbors leave."""
        self.refused = False
        """The neighbor has refused this peer."""
        self.due_at = math.inf
        """When something for the neighbor is due that waits for time only."""
        self._context = context
        self._started_at = now
        self._delivered = 0
        """Bytes of the neighbor's messages that were passed to the event loop."""
        self._reported = 0
        """Bytes of the neighbor's messages that the algorithm had taken when Want was last sent."""
        self._least_left = math.inf
        """While closing: the fewest entries so far that the neighbor lacks or may ask for again."""
        self._progress_at = 0.0
        """While closing: when they last became fewer."""
        self._confirmed_address = ""
        """The address at which the neighbor was last reached."""
        self._unproven_address = ""
        """An address whose listener failed to prove the neighbor's key; logged once."""
        self._optional_until = 0.0
        """An optional entry at the end is held until then."""
        self._delays = Delays(context.faults)

    @property
    def up(self) -> bool:
        """Whether the neighbor is connected and has stated what it wants. On any thread."""
        return self.writer.state is WriterState.STREAMING

    @property
    def was_reached(self) -> bool:
        """Whether the neighbor has ever answered this process."""
        return bool(self._confirmed_address)

    @property
    def down_since(self) -> float:
        return self._started_at if self.lost_at is None else self.lost_at

    # ---- sending

    def announce(self, entry: JournalEntry, now: float) -> None:
        """Handle a new entry of the journal for this neighbor."""
        if self.disconnected and not self.reader.finished:
            self._drop_old()
        if self.reader.finished:
            self._drop(FOREVER)
        self._optional_until = now + OPTIONAL_DELAY if entry.optional else 0.0
        if self._delays.active:
            self._delays.add(entry, now)

    def outgoing(self, now: float) -> Iterator[list[Buffer]]:
        """Yield the frames of each message that is due. Ask for another only once the socket has taken the last."""
        endpoint = self._context.endpoint
        run, taken = endpoint.run_id, endpoint.mailbox.taken_bytes[self.peer]
        if (want := self.due_want(now)) is not None:
            yield [control.pack(want, run)]
            self.reader.stated(want, now)
            self._reported = taken
        self.due_at = math.inf
        while self.address:
            held = now < self._optional_until
            message = self.writer.next(hold_optional=held)
            if message is None:
                self.due_at = self._optional_until if held else math.inf
                break
            entry = message.entry
            if entry is not None and self._delays.active:
                if (due_at := self._delays.due_at(entry.id)) > now:
                    self.due_at = due_at
                    break
                first = isinstance(message.control, Entry) and message.control.offset == 0
                if first and self._delays.loses():
                    self._context.log.info(
                        "fault injected: message and connection lost peer=%d t=%d", self.peer, entry.id.t
                    )
                    self.break_off(now)
                    return
            if (frames := _frames(message, run, endpoint.journal, self.peer)) is None:
                break
            yield frames
            self.writer.sent(message)
        self._note_progress()

    def due_want(self, now: float) -> Want | None:
        """Return what to ask the neighbor for, if that is due."""
        if not self.address or (self.lost_at is not None and self.writer.state is WriterState.DOWN):
            return None
        mailbox = self._context.endpoint.mailbox
        self.reader.used = mailbox.used.get(self.peer, 0)
        closing = self.closing or self.reader.finished
        return self.reader.want(self.pending(), now, waiting=self.peer in mailbox.awaited, closing=closing)

    def pending(self) -> int:
        """Return the bytes of the neighbor's messages that the algorithm has not taken yet."""
        return self._delivered - self._context.endpoint.mailbox.taken_bytes[self.peer]

    def unreported(self) -> int:
        """Return the bytes that the algorithm has taken since the neighbor was last told so. On any thread."""
        return self._context.endpoint.mailbox.taken_bytes[self.peer] - self._reported

    def _note_progress(self) -> None:
        """Report that a neighbor that is waited for has caught up."""
        if self.behind and not self.is_behind():
            self.behind = False
            self._context.news.append(CaughtUp())

    def is_behind(self) -> bool:
        """Return whether the neighbor is connected and has too many entries left to read. On any thread."""
        queue = self._context.transport.queue
        return self._context.endpoint.journal.count(self.peer) > queue and self.entries_left() > queue

    def entries_left(self) -> int:
        """Return how many entries the neighbor has left to read; 0 if it has disconnected. On any thread."""
        return 0 if self.disconnected else self._context.endpoint.journal.waiting(self.peer, self.writer.position)

    # ---- connecting

    def connect(self, address: str, now: float) -> None:
        """Note that a new socket, the only one, connects to this address."""
        self.address, self.connected_at = address, now
        self._greet()

    def _greet(self) -> None:
        self.writer.connected()
        self.reader.restate()
        self._context.effects.append(Send(self.peer))

    def break_off(self, now: float) -> None:
        """Close the connection. The next look reconnects, unless a fault cuts off the neighbor."""
        self._close()
        if self.lost_at is None:
            self.lost_at = now

    def _close(self) -> None:
        """Close the socket, so that late answers to it cannot be misattributed."""
        self.address = ""
        self.writer.lost()
        self._context.effects.append(Close(self.peer))

    def check(self, now: float) -> None:
        """Do what is due, also without an event."""
        self.writer.tick(now)
        self._context.effects.append(Send(self.peer))
        if self.up or self.disconnected:
            return
        give_up, deadline = self._context.transport.give_up, self._context.transport.deadline
        if self.was_reached and now - self.down_since > give_up:
            self.declare_dead(f"no connection for {give_up:g} s")
        elif not self.was_reached and now - self._started_at > deadline:
            self.declare_dead(f"not reached within {deadline:g} s of the start")

    def event(self, event: SocketEvent, now: float) -> None:
        """Handle an event of the socket."""
        log = self._context.log
        if event == "lost":
            self.writer.lost()
            if self.lost_at is None:
                self.lost_at = now
                if self.was_reached and not self.disconnected and not self.closing:
                    log.info("connection lost peer=%d", self.peer)
        elif event == "connected" and self.lost_at is not None:
            self._greet()
        elif event == "rejected":
            self._refused("it does not accept this peer's key; compare the public keys on both sides")
        elif event == "unproven" and self._unproven_address != self.address:
            self._unproven_address = self.address
            text = "wrong key, only one side uses keys, or the port belongs to another process"
            log.warning("CURVE handshake failed peer=%d address=%s: %s", self.peer, self.address, text)

    def answered(self, frames: Sequence[Buffer], *, fixed: bool) -> None:
        """Handle an answer to this socket.

        Args:
            fixed: the run file has the neighbor's address.
        """
        run_id = self._context.endpoint.run_id
        try:
            answer, run, _ = control.unpack(frames, None, (Refused,))
        except WrongVersion as error:
            answer, run = Refused(str(error)), run_id
        except WireError as error:
            self.drop_message(error)
            return
        assert isinstance(answer, Refused)
        # Another process's text: one line in the log, of at most 300 characters.
        line = "".join(letter if letter.isprintable() else "?" for letter in answer.reason[:300])
        # The address may predate a reboot; another run may have its port now.
        self._refused(line, wrong_peer=run != run_id and not fixed)

    def _refused(self, reason: str, *, wrong_peer: bool = False) -> None:
        context, address = self._context, self.address
        if wrong_peer or self._confirmed_address == address:
            # The neighbor has exited, and another process has its port. Wait for the neighbor to return.
            if not self.wrong_peer_answered:
                context.log.warning(
                    "another process has the address peer=%d address=%s: %s", self.peer, address, reason
                )
            self.wrong_peer_answered = True
            self._close()
        else:
            error = f"peer {self.peer} at {address} refused peer {context.endpoint.me}: {reason}"
            context.log.error("%s", error)
            self.disconnected = self.refused = True
            context.news.append(Failed(HandshakeError(error)))

    # ---- what the neighbor has sent

    def want(self, want: Want, now: float) -> None:
        """Handle the neighbor's statement of what it wants."""
        self.writer.want(want, now)
        if self.up:
            self._reached()
        self._context.effects.append(Send(self.peer))

    def _reached(self) -> None:
        """Note that the neighbor has answered on this connection."""
        self.lost_at = None
        self._confirmed_address, self.wrong_peer_answered = self.address, False
        if self.disconnected and not self.reader.finished:
            self.disconnected = False
            self._context.log.info("neighbor reconnected peer=%d", self.peer)
            self._context.news.append(Reconnected(self.peer))

    def deliver(self, message: Message) -> None:
        """Pass a message of the neighbor on to the event loop."""
        if self.disconnected and self.up:
            self._reached()  # its Want has arrived before its new Hello
        self._delivered += message.cost
        self._context.news.append(Deliver(message))

    def drop_message(self, error: WireError) -> None:
        """Log and count an invalid message from the neighbor."""
        text = f"message dropped peer={self.peer}: {error}"
        self._context.limited_log.warning(f"dropped messages of peer {self.peer}", text)
        dropped = self._context.endpoint.dropped
        dropped[self.peer] = dropped.get(self.peer, 0) + 1

    # ---- disconnecting

    def declare_dead(self, reason: str) -> None:
        self._context.log.info("neighbor declared dead peer=%d: %s", self.peer, reason)
        self._disconnect(finished=False)
        self._drop_old()

    def _drop_old(self) -> None:
        """Keep only two rounds for a neighbor that was declared dead, in case it returns."""
        if (t := self._context.endpoint.t) < FOREVER:
            self._drop(t - 1, declared_dead=True)

    def _drop(self, before: int, *, declared_dead: bool = False) -> None:
        self._context.endpoint.journal.drop(self.peer, before, declared_dead=declared_dead)
        self._delays.drop(before)

    def neighbor_finished(self) -> None:
        """Handle the neighbor's last Begin: nothing follows, and it needs nothing more from this peer."""
        self.writer.reader_finished = True
        self._drop(FOREVER)
        if not self.disconnected:
            if not self.closing:
                self._context.log.info("neighbor finished peer=%d", self.peer)
            self._disconnect(finished=True)

    def neighbor_returned(self) -> None:
        """Handle a Hello after the last Begin: the neighbor may have failed and resumed. It has missed this round.

        If it has finished, its last Begin follows again. It counts as disconnected until its next Want, or its next
        entry if it has a connection.
        """
        if (t := self._context.endpoint.t) < FOREVER:
            self.writer.reader_finished = False
            self._context.endpoint.journal.readmit(self.peer, t + 1)

    def _disconnect(self, *, finished: bool) -> None:
        self.disconnected = True
        self._note_progress()
        self._context.news.append(Disconnected(self.peer, finished))

    # ---- closing

    def must_wait(self, finished: bool, closing_for: float, is_withdrawn: Callable[[PeerId], bool]) -> bool:
        """Return whether closing must wait, because the neighbor still needs something from this peer.

        Args:
            finished: this peer has finished all rounds; otherwise it failed, and what it keeps is useless.
            closing_for: seconds since closing began.
            is_withdrawn: whether a peer has withdrawn its published address.
        """
        endpoint = self._context.endpoint
        needs = finished and endpoint.journal.keeps_for(self.peer)
        if self.up:
            confirmed = self.writer.confirmed > Id(FOREVER, 0)
            if self.reader.finished and closing_for > CLOSE_TIMEOUT:
                return False
            return needs or not confirmed
        if self.reader.finished or self.disconnected:
            return False
        # The neighbor may have finished before this process started, or start only now, since there may be rounds in
        # which this peer needs nothing of it.
        existed = self.was_reached or self.address or self.peer in endpoint.received_from
        if existed and is_withdrawn(self.peer):
            return False
        return self.was_reached or (needs and closing_for < self._context.transport.give_up)

    def waits_without_progress(self, now: float) -> float:
        """Return for how many seconds of closing the neighbor has neither confirmed nor saved anything more."""
        journal = self._context.endpoint.journal
        left = journal.waiting(self.peer, BEFORE) + journal.waiting(self.peer, self.writer.confirmed)
        if left < self._least_left:
            self._least_left, self._progress_at = left, now
        return now - self._progress_at

    def forget_progress(self) -> None:
        """Note that this peer does not wait for the neighbor now: if it returns, its time starts again."""
        self._least_left = math.inf


def _frames(message: Outgoing, run: str, journal: Journal, to: PeerId) -> list[Buffer] | None:
    """Return the frames of a message; None if its entry was dropped at this moment.

    Raises JournalError if the journal has lost the body.
    """
    entry, described = message.entry, message.control
    if entry is None or not isinstance(described, Entry):
        return [control.pack(described, run)]
    header = b"" if described.offset else entry.header
    if described.segment or not entry.size:
        return [control.pack(described, run, header)]
    length = chunk_length(entry.size, described.offset)
    try:
        chunk = journal.read(entry, described.offset, length)
    except OSError as error:
        found = journal.after(to, entry.id)
        if found is not None and found[0] is entry:  # a user has deleted the file
            raise JournalError(to, error) from error
        return None  # the neighbor does not need it any more
    if length > INLINE:
        return [control.pack(described, run, header), chunk]
    return [control.pack(described, run, header, chunk)]
