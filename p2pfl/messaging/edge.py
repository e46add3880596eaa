"""The delivery protocol of one edge, without clock, sockets, files or threads.

    Writer:  DOWN ──connected──▶ GREETING ──want──▶ STREAMING ──lost──▶ DOWN
    Reader:  SILENT ──hello──▶ ASKING ──start──▶ READING ──gap, hello──▶ ASKING

An *epoch* is one attempt of a reader to read from some entry on. The reader draws its number; messages with another
number are ignored. Within an epoch, on one connection, the writer sends entries in ascending order and never goes
back: an entry that the reader has is a duplicate, and a gap means that messages were lost with a connection, so that
the reader begins a new epoch.

| Writer      | event        | effect                                                                              |
|-------------|--------------|-------------------------------------------------------------------------------------|
| any         | connected    | GREETING: Hello is due                                                              |
| any         | lost         | DOWN                                                                                |
| not DOWN    | want, new    | STREAMING from ``next``: Start is due; at most ``EPOCHS_PER_SECOND``, others wait   |
| STREAMING   | want, same   | raise ``next``, ``window``                                                          |
| any         | want         | drop what is durable                                                                |
| not DOWN    | tick         | begin the epoch that had to wait                                                    |
| not DOWN    | next         | what is due; if STREAMING also Nothing, and entries while the window is open        |

| Reader      | event        | effect                                                                              |
|-------------|--------------|-------------------------------------------------------------------------------------|
| any         | hello        | ASKING with a new epoch: Want is due; a last Begin that was read is asked for again |
| ASKING      | start        | READING; if the writer begins after ``next``, what lies between is lost             |
| READING     | entry        | below ``next``: ignore; previous from ``next`` on: gap, new epoch; otherwise take   |
| READING     | ask_anew     | a chunk is missing: ASKING with a new epoch                                         |
| READING     | cannot_open  | the same, and without references from now on                                        |
| not SILENT  | tick         | Want is due if the window has moved, or ``durable`` some seconds after the last one |
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto

from p2pfl import PeerId
from p2pfl.messaging.control import BEFORE, CHUNK, FOREVER, Entry, Hello, Id, Nothing, Start, Want
from p2pfl.messaging.journal import Journal, JournalEntry
from p2pfl.messaging.wire import cost

BY_VALUE = 1 << 16
"""Bytes up to which a body is sent to a neighbor on the same host: mapping a file costs more."""
OPTIONAL_DELAY = 0.1
"""Seconds for which a Begin that no method awaits may wait for an entry that makes it superfluous."""
EPOCHS_PER_SECOND = 10.0
"""Rate at which a writer begins epochs, so that a reader cannot make it send without limit; also the burst."""
DURABLE_INTERVAL = 5.0
"""Seconds between two Wants that tell the writer only what it may drop: checkpoints may be more frequent."""
REPEAT, REPEAT_WAITING = 30.0, 2.0
"""Seconds after which Want is repeated: a ROUTER drops silently. While the neighbor is waited for, the time doubles
from the second one to the first, as long as nothing changes."""


def chunk_length(size: int, offset: int) -> int:
    """Return the bytes of the chunk at ``offset`` of a body of ``size`` bytes."""
    return min(CHUNK, size - offset)


@dataclass
class Outgoing:
    """A message for the reader; with an ``Entry``, a chunk of its body follows or a reference to all of it."""

    control: Hello | Start | Entry | Nothing
    entry: JournalEntry | None = None


class WriterState(Enum):
    DOWN = auto()
    GREETING = auto()
    STREAMING = auto()


class Writer:
    """The writing end of an edge: what to send to one neighbor next.

    Args:
        journal: this peer's.
        to: the neighbor.
        hello: the first message of every connection; its number is drawn each time.
        new_number: draws the number of a Hello.
    """

    def __init__(self, journal: Journal, to: PeerId, hello: Hello, new_number: Callable[[], int] = lambda: 0) -> None:
        self.state = WriterState.DOWN
        self.confirmed = Id(0, 0)
        """The neighbor has every entry before this one, by its last Want."""
        self.position = Id(0, 0)
        """The next entry to send."""
        self.reader_finished = False
        """The neighbor has finished: it needs nothing but the last Begin."""
        self._journal = journal
        self._to = to
        self._hello = hello
        self._new_number = new_number
        self._want: Want | None = None
        """The last statement in this epoch."""
        self._postponed: Want | None = None
        """A new epoch that the rate limit does not allow yet."""
        self._due: list[Hello | Start | Nothing] = []
        """To be sent in this order, before any entry."""
        self._nothing = 0
        """The round of the last Nothing, plus 1."""
        self._sent = 0
        """Window used in this epoch, in bytes."""
        self._offset = 0
        """Bytes of the current entry's body that were sent."""
        self._epochs_left = EPOCHS_PER_SECOND
        self._counted_at = float("-inf")

    # ---- events

    def connected(self) -> None:
        self.lost()
        self._hello = self._hello._replace(number=self._new_number())
        self.state, self._due = WriterState.GREETING, [self._hello]

    def lost(self) -> None:
        self.state, self._due = WriterState.DOWN, []
        self._want = self._postponed = None

    def want(self, want: Want, now: float) -> None:
        self._journal.drop(self._to, want.durable)
        self._journal.read_by(self._to, max(want.next, Id(want.used, 0)))
        self.confirmed = max(self.confirmed, want.next)
        if self.state is WriterState.DOWN:
            return
        if want.hello != self._hello.number:
            # It answers an earlier Hello, which does not show where this connection leads. The reader may have read
            # the Hello of a process that died last: repeat this one.
            if self._hello not in self._due and self._allows_epoch(now):
                self._due.insert(0, self._hello)
            return
        if self._want is not None and want.epoch == self._want.epoch:
            self._want = want
            if want.next > self.position:
                self.position, self._offset = want.next, 0
            return
        self._postponed, self.confirmed = want, want.next  # after a Hello, it reads the last Begin again
        self.tick(now)

    def tick(self, now: float) -> None:
        """Begin the epoch that was asked for last, if the rate limit allows it."""
        if self._postponed is None or not self._allows_epoch(now):
            return
        self._want, self._postponed = self._postponed, None
        self.state, self.position = WriterState.STREAMING, self._want.next
        self._sent = self._offset = 0
        begins = 0 if self.reader_finished else self._journal.floor(self._to)
        greeting = [self._hello] if self._hello in self._due else []
        self._due = [*greeting, Start(self._want.epoch, begins, self._nothing)]

    def _allows_epoch(self, now: float) -> bool:
        """Charge the rate limit for a new epoch."""
        refill = max(0.0, now - self._counted_at) * EPOCHS_PER_SECOND
        self._epochs_left, self._counted_at = min(EPOCHS_PER_SECOND, self._epochs_left + refill), now
        if self._epochs_left < 1.0:
            return False
        self._epochs_left -= 1.0
        return True

    def nothing(self, t: int) -> None:
        """Tell the reader that no message of a method will come in round ``t``."""
        if t >= self._nothing:
            self._nothing = t + 1
            if self._want is not None:
                self._due.append(Nothing(self._want.epoch, t))

    # ---- sending

    def next(self, *, hold_optional: bool = False) -> Outgoing | None:
        """Return the next message, or None if there is none or the window is closed. Call ``sent`` once it is sent.

        Args:
            hold_optional: the last entry, if it is optional, has not waited for ``OPTIONAL_DELAY`` yet.
        """
        if self._due:
            return Outgoing(self._due[0])
        if self.state is not WriterState.STREAMING or self._want is None:
            return None
        found = self._journal.after(self._to, self.position)
        if found is None:
            return None
        entry, previous = found
        if self.reader_finished:
            previous = BEFORE
        if entry.optional and hold_optional:
            return None
        if entry.id != self.position:
            self._offset = 0
        if self._offset == 0:
            idle = self._want.idle and self.position <= self._want.next
            if not idle and self._sent + cost(len(entry.header), entry.size) > self._want.window:
                return None
            if not self._journal.offer(self._to, entry):
                return self.next(hold_optional=hold_optional)
        offset, segment, at = self._offset, 0, 0
        if entry.place is not None and self._want.references and entry.size > BY_VALUE:
            offset, segment, at = 0, entry.place.segment, entry.place.at
        header = 0 if offset else len(entry.header)
        return Outgoing(Entry(self._want.epoch, entry.id, previous, entry.size, offset, segment, at, header), entry)

    def sent(self, message: Outgoing) -> None:
        """Note that a message was passed to the transport."""
        control, entry = message.control, message.entry
        if entry is None or not isinstance(control, Entry):
            del self._due[0]
            return
        if control.offset == 0:
            self._sent += cost(len(entry.header), entry.size)
        end = entry.size if control.segment else control.offset + chunk_length(entry.size, control.offset)
        self.position, self._offset = (entry.id, end) if end < entry.size else (entry.id.next, 0)


class ReaderState(Enum):
    SILENT = auto()
    ASKING = auto()
    READING = auto()


class Reader:
    """The reading end of an edge: which entries of one neighbor to take, and what to ask for.

    Args:
        next: the first entry that this peer does not have: the beginning of the round of its checkpoint.
        budget: bytes of entries that may be on their way, or not yet taken by the algorithm.
        new_epoch: returns a number that was never used before, in this process or an earlier one.
    """

    def __init__(self, next: Id, budget: int, new_epoch: Callable[[], int]) -> None:
        self.state = ReaderState.SILENT
        self.next = next
        self.durable = 0
        """Entries of rounds before this one are never needed again."""
        self.used = 0
        """Entries of rounds before this one were used, if rounds take those of others too."""
        self.references = False
        """The neighbor's journal can be opened."""
        self._hello = 0
        """Number of the writer's last Hello."""
        self.finished = False
        """The neighbor's last Begin was read on this connection: nothing follows."""
        self._left_at: Id | None = None
        """``next`` before that Begin, until something else is read."""
        self._budget = budget
        self._new_epoch = new_epoch
        self._epoch = -1
        self._received = 0
        """Window used in this epoch, in bytes."""
        self._granted = 0
        """Window stated in this epoch, in bytes."""
        self._stated: Want | None = None
        self._stated_at = float("-inf")
        self._repeat = REPEAT_WAITING

    # ---- events

    def hello(self, *, references: bool, number: int = 0) -> None:
        self.references, self._hello = references, number
        if self._left_at is not None:  # it may have failed and resumed; otherwise its last Begin is read again
            self.next, self.finished = max(self._left_at, Id(self.durable, 0)), False
        self.ask_anew()

    def start(self, start: Start) -> int | None:
        """Return the round before which messages are lost for good, if this peer may need any of them."""
        if self.state is not ReaderState.ASKING or start.epoch != self._epoch:
            return None
        self.state = ReaderState.READING
        if start.begins <= self.next.t:
            return None
        self.next = Id(start.begins, 0)
        # After the last Begin, nothing was awaited. What is durable may never have been read: a method without
        # messages does not wait for a neighbor that connects late.
        return None if self._left_at is not None or start.begins <= self.durable else start.begins

    def is_current(self, epoch: int) -> bool:
        return self.state is ReaderState.READING and epoch == self._epoch

    def entry(self, entry: Entry) -> bool:
        """Return whether to take an entry, given its first chunk or reference."""
        if not self.is_current(entry.epoch) or entry.id < self.next:
            return False
        if entry.previous >= self.next:
            self.ask_anew()
            return False
        return True

    def exceeds_window(self, header: int, size: int) -> bool:
        """Return whether the writer may not send the next entry yet."""
        stated = self._stated
        idle = stated is not None and stated.idle and self.next <= stated.next
        return not idle and self._received + cost(header, size) > self._granted

    def passed(self, id: Id, header: int, size: int) -> None:
        """Move past an entry that was taken or cannot be decoded."""
        self.finished = id.t == FOREVER
        if not self.finished:
            self._left_at = None
        elif self._left_at is None:
            self._left_at = self.next
        self.next = id.next
        self._received += cost(header, size)

    def cannot_open(self) -> None:
        """Ask for bodies instead of references on this connection."""
        self.references = False
        self.ask_anew()

    def restate(self) -> None:
        """Have Want repeated at once: the last one may have been lost with a connection."""
        self._stated = None

    def ask_anew(self) -> None:
        """Begin a new epoch: something is missing."""
        self.state, self._epoch, self._stated = ReaderState.ASKING, self._new_epoch(), None
        self._received = self._granted = 0

    # ---- asking

    def want(self, pending: int, now: float, *, waiting: bool, closing: bool = False) -> Want | None:
        """Return what to ask for, if that is due.

        Args:
            pending: bytes of this neighbor's entries that the algorithm has not taken.
            now: seconds.
            waiting: the algorithm waits for this neighbor.
            closing: this peer leaves, and the neighbor may wait to learn what is durable.
        """
        if self.state is ReaderState.SILENT:
            return None
        window = max(0, self._received + self._budget - pending)
        stated = self._stated
        if (
            stated is None
            or window - stated.window >= self._budget // 4
            or (self.durable > stated.durable and (closing or now - self._stated_at > DURABLE_INTERVAL))
            or (self.finished and self.next > stated.next)
            or now - self._stated_at > (self._repeat if waiting else REPEAT)
        ):
            idle = pending == 0
            return Want(self._epoch, self.next, self.durable, window, idle, self.references, self._hello, self.used)
        return None

    def stated(self, want: Want, now: float) -> None:
        """Note that ``want`` was sent."""
        self._repeat = min(2 * self._repeat, REPEAT) if want == self._stated else REPEAT_WAITING
        self._stated, self._stated_at = want, now
        self._granted = max(self._granted, want.window)
