"""The connection to one neighbor: socket, address, both ends of the edge, loss and recovery. I/O thread only."""

from __future__ import annotations

import math
from collections import deque
from typing import TYPE_CHECKING

from p2pfl import PeerId
from p2pfl.errors import HandshakeError, WireError, WrongVersion
from p2pfl.messaging import control
from p2pfl.messaging.control import BEFORE, FOREVER, FROM_WRITER, Control, Entry, Id, Refused, Want
from p2pfl.messaging.edge import OPTIONAL_DELAY, Outgoing, Reader, Writer, WriterState
from p2pfl.messaging.journal import JournalEntry

if TYPE_CHECKING:
    from peers.io_loop import IoLoop
    from peers.zmq_sockets import ZmqDealer

CLOSE_TIMEOUT = 10.0
"""Maximum seconds to wait until a neighbor that has finished confirms the last Begin."""

SENT = (*FROM_WRITER, Want)
"""What peers send on their DEALER; a ROUTER answers with Refused only."""


class Connection:
    """The edge to one neighbor, over sockets.

    Args:
        io: the I/O loop.
        peer: the neighbor.
        dealer: an unconnected socket for it.
    """

    def __init__(self, io: IoLoop, peer: PeerId, dealer: ZmqDealer) -> None:
        self._io = io
        self.peer = peer
        self.dealer = dealer
        self.writer = Writer(io.endpoint.journal, peer, io.hello, io.world.new_epoch)
        self.reader = Reader(Id(io.endpoint.t, 0), io.budget, io.world.new_epoch)
        self.address = ""
        self.connected_at = 0.0
        """When ``connect`` was called."""
        self.lost_at: float | None = None
        """When the last TCP connection was lost, perhaps to a proxy; None while connected, and before the first."""
        self.disconnected = False
        """The neighbor was declared dead, has finished, or has refused this peer; the endpoint was notified."""
        self.wrong_peer_answered = False
        """Another process has answered at the neighbor's last address."""
        self.behind = False
        """The neighbor had more than ``transport.queue`` entries left to read when last looked at."""
        self._least_left = math.inf
        """While closing: the fewest entries so far that the neighbor lacks, plus those that it may ask for again."""
        self._progress_at = 0.0
        """While closing: when they last became fewer."""
        self._confirmed_address = ""
        """The address at which the neighbor was last reached."""
        self._unproven_address = ""
        """An address whose listener failed to prove the neighbor's key; logged once."""
        self._watched = False
        self._optional_until = 0.0
        """An optional entry at the end is held until then."""
        self._due: deque[tuple[Id, float]] = deque()
        """With injected delay or bandwidth: when new entries may be sent."""
        self._bandwidth_free_at = 0.0
        """When the last entry has been sent, at the injected bandwidth limit."""

    @property
    def up(self) -> bool:
        """Whether the neighbor is connected, and has said what it wants."""
        return self.writer.state is WriterState.STREAMING

    @property
    def was_reached(self) -> bool:
        """Whether the neighbor has ever answered this process."""
        return bool(self._confirmed_address)

    # ---- sending

    def announce(self, entry: JournalEntry) -> None:
        """Handle a new entry of the journal for this neighbor."""
        io, faults = self._io, self._io.faults
        if self.disconnected and not self.reader.finished:
            self._drop_old()
        if self.reader.finished:
            self._drop(FOREVER)
        self._optional_until = io.now() + OPTIONAL_DELAY if entry.optional else 0.0
        if faults.delay or faults.jitter or faults.bandwidth is not None:
            due = io.now()
            if faults.bandwidth is not None:
                due = self._bandwidth_free_at = max(due, self._bandwidth_free_at) + entry.size / faults.bandwidth
            due += faults.delay + (io.random.uniform(0.0, faults.jitter) if faults.jitter else 0.0)
            if self._due:  # keep the order
                due = max(due, self._due[-1][1])
            self._due.append((entry.id, due))

    def pump(self) -> None:
        """Pass what is due to libzmq while its queue has room."""
        io, now, due_at = self._io, self._io.now(), math.inf
        if not self.state_want(now):
            return
        while self.address:
            held = now < self._optional_until
            message = self.writer.next(hold_optional=held)
            if message is None:
                due_at = self._optional_until if held else math.inf
                break
            if message.entry is not None and (delay := self._delay(message.entry.id)) > 0.0:
                due_at = now + delay
                break
            first = isinstance(message.control, Entry) and message.control.offset == 0
            if message.entry is not None and first and io.faults.loss and io.random.random() < io.faults.loss:
                io.log.info("fault injected: message and connection lost peer=%d t=%d", self.peer, message.entry.id.t)
                self.break_connection()
                return
            if not self._send(message.control, message):
                return
            self.writer.sent(message)
        self._watch(False)
        self._note_progress()
        io.pump_at(self.peer, due_at)

    def state_want(self, now: float) -> bool:
        """Pass a Want to libzmq if one is due. Return False if its queue has no room."""
        io = self._io
        if not self._reachable:
            return True
        pending = io.pending(self.peer)
        want = self.reader.want(pending, now, waiting=self.peer in io.endpoint.mailbox.awaited)
        if want is None:
            return True
        if not self._send(want):
            return False
        self.reader.stated(want, now)
        io.reported[self.peer] = io.delivered[self.peer] - pending
        return True

    @property
    def _reachable(self) -> bool:
        return bool(self.address) and (self.lost_at is None or self.writer.state is not WriterState.DOWN)

    def _send(self, message: Control, outgoing: Outgoing | None = None) -> bool:
        frames = () if outgoing is None else outgoing.frames
        if self.dealer.send([control.pack(message, self._io.endpoint.run_id), *frames]):
            return True
        self._watch(True)
        return False

    def _delay(self, id: Id) -> float:
        """Return the seconds for which injected faults delay an entry."""
        while self._due and self._due[0][0] < id:
            self._due.popleft()
        return self._due[0][1] - self._io.now() if self._due and self._due[0][0] == id else 0.0

    def _note_progress(self) -> None:
        """Tell the event loop when the neighbor catches up, if it waits for that."""
        if self.behind and not self.is_behind():
            self.behind = False
            self._io.notify(self._io.link.neighbor_caught_up)

    def is_behind(self) -> bool:
        """Whether the neighbor is there, and has too many entries left to read. On any thread."""
        return self.entries_left() > self._io.transport.queue

    def entries_left(self) -> int:
        """Return how many entries the neighbor, if it is there, has left to read. On any thread."""
        return 0 if self.disconnected else self._io.endpoint.journal.waiting(self.peer, self.writer.position)

    def _watch(self, on: bool) -> None:
        """Have room to send wake the loop only if needed: polling idle sockets costs more than the messages."""
        if self._watched != on:
            self._watched = on
            self.dealer.watch(on)

    # ---- connecting

    def connect(self, address: str) -> None:
        self._replace_dealer(address)
        self.dealer.connect(address)
        self.connected_at = self._io.now()
        self._greet()

    def _greet(self) -> None:
        self.writer.connected()
        self.reader.restate()
        self.pump()

    def _replace_dealer(self, address: str) -> None:
        """Replace the socket, so that late answers to the old one cannot be misattributed."""
        self.dealer.close()
        self.dealer, self._watched = self._io.world.dealer(self.peer), False
        self.address = address
        self.writer.lost()

    def break_connection(self) -> None:
        """Close the connection. The next check reconnects, unless a fault cuts off the neighbor."""
        self._replace_dealer("")
        if self.lost_at is None:
            self.lost_at = self._io.now()
        self._io.seen_addresses = 0
        self._io.check_soon()

    @property
    def down_since(self) -> float:
        return self._io.started_at if self.lost_at is None else self.lost_at

    def check(self, now: float) -> None:
        """Do what is due, also without an event."""
        self.handle_events()
        self.writer.tick(now)
        self.pump()
        if self.up or self.disconnected:
            return
        give_up, deadline = self._io.transport.give_up, self._io.transport.deadline
        if self.was_reached and now - self.down_since > give_up:
            self.declare_dead(f"no connection for {give_up:g} s")
        elif not self.was_reached and now - self._io.started_at > deadline:
            self.declare_dead(f"not reached within {deadline:g} s of the start")

    def handle_events(self) -> None:
        """Handle the connection's monitor events, and what its other side answers."""
        io = self._io
        while self.address and (event := self.dealer.event()) is not None:
            if event == "lost":
                self.writer.lost()
                if self.lost_at is None:
                    self.lost_at = io.now()
                    if self.was_reached and not self.disconnected and io.closing_since is None:
                        io.log.info("connection lost peer=%d", self.peer)
            elif event == "connected" and self.lost_at is not None:
                self._greet()
            elif event == "rejected":
                self._refused("it does not accept this peer's key; compare the public keys on both sides")
            elif event == "unproven" and self._unproven_address != self.address:
                self._unproven_address = self.address
                io.log.warning(
                    "CURVE handshake failed peer=%d address=%s: wrong key, only one side uses keys, or the port "
                    "belongs to another process",
                    *(self.peer, self.address),
                )
        while self.address and (frames := self.dealer.receive()) is not None:
            try:
                answer, run = control.unpack(frames, None, (Refused,))
            except WrongVersion as error:
                answer, run = Refused(str(error)), io.endpoint.run_id
            except WireError as error:
                self.drop_message(error)
                continue
            assert isinstance(answer, Refused)
            # The address may predate a reboot; another run may have its port now.
            is_other_run = run != io.endpoint.run_id and not io.world.addresses.is_fixed(self.peer)
            self._refused(_printable(answer.reason), wrong_peer=is_other_run)

    def want(self, want: Want) -> None:
        """Handle the neighbor's statement of what it wants."""
        self.writer.want(want, self._io.now())
        if self.up:
            self.reached()
        self.pump()

    def reached(self) -> None:
        """Note that the neighbor has answered on this connection."""
        io = self._io
        self.lost_at = None
        self._confirmed_address, self.wrong_peer_answered = self.address, False
        if self.disconnected and not self.reader.finished:
            self.disconnected = False
            io.log.info("neighbor reconnected peer=%d", self.peer)
            io.notify(io.link.neighbor_reconnected, self.peer)

    def _refused(self, reason: str, *, wrong_peer: bool = False) -> None:
        io, address = self._io, self.address
        if wrong_peer or self._confirmed_address == address:
            # The neighbor has exited, and another process has its port. Wait for the neighbor to return.
            if not self.wrong_peer_answered:
                io.log.warning("another process has the address peer=%d address=%s: %s", self.peer, address, reason)
            self.wrong_peer_answered = True
            self._replace_dealer("")
            io.seen_addresses = 0
        else:
            error = f"peer {self.peer} at {address} refused peer {io.me}: {reason}"
            io.log.error("%s", error)
            self.disconnected = True
            io.was_refused = True
            io.notify(io.link.failed, HandshakeError(error))

    def drop_message(self, error: WireError) -> None:
        """Log and count an invalid message from the neighbor."""
        text = f"message dropped peer={self.peer}: {error}"
        self._io.limited_log.warning(f"dropped messages of peer {self.peer}", text)
        dropped = self._io.endpoint.dropped
        dropped[self.peer] = dropped.get(self.peer, 0) + 1

    # ---- disconnecting

    def declare_dead(self, reason: str) -> None:
        self._io.log.info("neighbor declared dead peer=%d: %s", self.peer, reason)
        self._disconnect(finished=False)
        self._drop_old()

    def _drop_old(self) -> None:
        """Keep only two rounds for a neighbor that is gone, in case it returns."""
        if (t := self._io.endpoint.t) < FOREVER:
            self._drop(t - 1, declared_dead=True)

    def _drop(self, before: int, *, declared_dead: bool = False) -> None:
        self._io.endpoint.journal.drop(self.peer, before, declared_dead=declared_dead)
        while self._due and self._due[0][0].t < before:
            self._due.popleft()

    def neighbor_finished(self) -> None:
        """Handle the neighbor's last Begin: nothing follows, and it needs nothing more from this peer."""
        self.writer.reader_finished = True
        self._drop(FOREVER)
        if not self.disconnected:
            if self._io.closing_since is None:
                self._io.log.info("neighbor finished peer=%d", self.peer)
            self._disconnect(finished=True)

    def neighbor_returned(self) -> None:
        """Handle a Hello after the last Begin: the neighbor may have failed, and go on. It has missed this round.

        If it has finished nevertheless, its last Begin follows again. It counts as disconnected until its next Want,
        or its next entry if it has a connection.
        """
        if (t := self._io.endpoint.t) < FOREVER:
            self.writer.reader_finished = False
            self._io.endpoint.journal.readmit(self.peer, t + 1)

    def _disconnect(self, *, finished: bool) -> None:
        self.disconnected = True
        self._note_progress()
        self._io.notify(self._io.link.neighbor_disconnected, self.peer, finished)

    # ---- closing

    def must_wait(self, *, finished: bool, closing_for: float) -> bool:
        """Return whether closing must wait, because the neighbor still needs something from this peer.

        Args:
            finished: this peer has finished all rounds; otherwise it failed, and what it keeps is of no use.
            closing_for: seconds since closing began.
        """
        io = self._io
        needs = finished and io.endpoint.journal.keeps_for(self.peer)
        if self.up:
            confirmed = self.writer.confirmed > Id(FOREVER, 0)
            if self.reader.finished and closing_for > CLOSE_TIMEOUT:
                return False
            return needs or not confirmed
        if self.reader.finished or self.disconnected:
            return False
        # The neighbor may have finished before this process started, or start only now: there may be rounds, even
        # all, in which this peer needs nothing of it.
        existed = self.was_reached or self.address or self.peer in io.endpoint.received_from
        if existed and io.world.addresses.is_withdrawn(self.peer):
            return False
        return self.was_reached or (needs and closing_for < io.transport.give_up)

    def waits_without_progress(self, now: float) -> float:
        """Return the seconds, while closing, for which the neighbor has confirmed nothing more, nor saved it."""
        journal = self._io.endpoint.journal
        left = journal.waiting(self.peer, BEFORE) + journal.waiting(self.peer, self.writer.confirmed)
        if left < self._least_left:
            self._least_left, self._progress_at = left, now
        return now - self._progress_at

    def forget_progress(self) -> None:
        """Note that this peer does not wait for the neighbor now: if it returns, its time begins anew."""
        self._least_left = math.inf


def _printable(text: str) -> str:
    """Sanitize another process's text for the log: one line of at most 300 characters."""
    return "".join(letter if letter.isprintable() else "?" for letter in text[:300])
