"""Bugs planted on purpose, one at a time: each violates one sentence of docs/reliability.md or docs/wire.md.

A planted bug replaces one method of the project's code in this process, and nothing on disk.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

from p2pfl.messaging.control import BEFORE, Entry, Id
from p2pfl.messaging.directions import Begin, Directions
from p2pfl.messaging.edge import Reader, Writer
from p2pfl.messaging.endpoint import Endpoint
from p2pfl.messaging.journal import Journal, JournalEntry
from p2pfl.messaging.mailbox import Mailbox
from p2pfl.messaging.newest import NewestMailbox
from p2pfl.messaging.wire import Buffer, Message
from p2pfl.session.saving import Saver
from peers.connection import Connection
from peers.zmq_link import ZmqLink

Method = Callable[..., Any]


@dataclass(frozen=True)
class PlantedBug:
    """One sentence about the bug, and a function from the correct method to the buggy one."""

    summary: str
    owner: type
    method: str
    change: Callable[[Method], Method]
    without_waits: bool = False
    """It concerns rounds that do not wait for one another."""

    @contextmanager
    def planted(self) -> Iterator[None]:
        with patch.object(self.owner, self.method, self.change(getattr(self.owner, self.method))):
            yield


def _take_duplicates(entry: Method) -> Method:
    def planted(self: Reader, message: Entry) -> bool:
        gap = self.is_current(message.epoch) and message.id >= self.next and message.previous >= self.next
        return entry(self, message) or not gap

    return planted


def _see_no_gap(entry: Method) -> Method:
    # Not what it returns alone: a reader that has found a gap has asked anew, and its window is closed.
    return lambda self, message: entry(self, message._replace(previous=BEFORE))


def _send_durable_too_early(checkpointed: Method) -> Method:
    # Two rounds: one is covered by the checkpoint before the last.
    return lambda self, needed: checkpointed(self, {peer: t + 2 for peer, t in needed.items()})


def _want_too_late(hello: Method) -> Method:
    def planted(self: Reader, **about: Any) -> None:
        if self.next.number:
            self.next = self.next.next
        hello(self, **about)

    return planted


def _want_the_next_round(create: Method) -> Method:
    def planted(self: Reader, next: Id, budget: int, new_epoch: Callable[[], int]) -> None:
        create(self, Id(next.t + (next.t > 0), 0), budget, new_epoch)

    return planted


def _repeat_from_the_start(want: Method) -> Method:
    def planted(self: Writer, message: Any, now: float) -> None:
        want(self, message, now)
        if self.position == message.next and message.next.number > 1:
            self.position = Id(message.next.t, message.next.number + 1)

    return planted


def _leave_early(must_wait: Method) -> Method:
    return lambda self, finished, *others: must_wait(self, False, *others)


def _save_no_journal(state_dict: Method) -> Method:
    return lambda self, before: {**state_dict(self, before), "entries": []}


def _drop_too_much(drop: Method) -> Method:
    return lambda self, to, before, **options: drop(self, to, before + (before > 0), **options)


def _number_anew(begin: Method) -> Method:
    def planted(self: Journal, t: int) -> None:
        begin(self, t)
        if t and not self._live:  # after a restart
            self._next = Id(t, 1)

    return planted


def _send_durable_before_saving(save: Method) -> Method:
    async def planted(self: Saver, state: Any, **options: Any) -> None:
        self._endpoint.link.checkpointed(state["rounds_done"])
        await save(self, state, **options)

    return planted


def _ignore_reconnection(regained: Method) -> Method:
    return lambda self, sender: None


def _skip_no_rounds(next_round: Method) -> Method:
    return lambda self, t: t


def _miss_some_statements(state: Method) -> Method:
    def planted(self: Directions, neighbor: int, t: int, sources: Any) -> None:
        if t % 3:
            state(self, neighbor, t, sources)

    return planted


def _do_not_wait_for_begin(receivers: Method) -> Method:
    async def planted(self: Endpoint) -> set[int]:
        if self._receivers is None:
            self._receivers = self.expected_receivers
        return self._receivers

    return planted


def _close_no_round(accept: Method) -> Method:
    def planted(self: Endpoint, message: Message) -> None:
        if not isinstance(message.body, Begin):
            accept(self, message)

    return planted


def _leak_window(pending: Method) -> Method:
    return lambda self: self._delivered


def _send_the_last_body_again(read: Method) -> Method:
    def planted(self: Journal, entry: JournalEntry, offset: int, length: int) -> Buffer:
        _, at, part = self._last_read
        return part if length and (at, len(part)) == (offset, length) else read(self, entry, offset, length)

    return planted


def _record_later(take_all: Method) -> Method:
    """Record a take when the next one is made."""

    def planted(self: NewestMailbox, *request: Any, **options: Any) -> Any:
        record, late = self._record, getattr(self, "late", lambda: None)
        self._record = lambda take: setattr(self, "late", lambda: record(take))
        try:
            taken = take_all(self, *request, **options)
        finally:
            self._record = record
        late()
        return taken

    return planted


def _need_what_is_newest(needed_after: Method) -> Method:
    """Tell neighbors to keep only what arrives from now on, not from the checkpoint before the last one on."""
    return lambda self, done: {
        sender: max(t, self.first_read(sender, done)) for sender, t in needed_after(self, done).items()
    }


def _supersede_what_was_sent(supersede: Method) -> Method:
    def planted(self: Journal, kind: str, entry: JournalEntry) -> None:
        for addressed in self._addressed.values():
            addressed.offered = BEFORE
        supersede(self, kind, entry)

    return planted


def _forget_order(repeat: Method) -> Method:
    """Repeat the order of an earlier process only up to its last take but one."""
    return lambda self, takes: repeat(self, list(takes)[:-1])


def _forget_what_has_arrived(load: Method) -> Method:
    return lambda self, state, *others: load(self, {**state, "arrived": []}, *others)


def _keep_no_kind(append: Method) -> Method:
    def planted(self: Journal, *entry: Any, **options: Any) -> JournalEntry:
        self._keeps = ()
        appended: JournalEntry = append(self, *entry, **options)
        return appended

    return planted


PLANTED_BUGS: Mapping[str, PlantedBug] = {
    "duplicates": PlantedBug(
        "a reader takes what it has, and what old epochs repeat", Reader, "entry", _take_duplicates
    ),
    "gaps": PlantedBug("a reader takes entries after a gap", Reader, "entry", _see_no_gap),
    "durable-early": PlantedBug(
        "Want.durable covers rounds that are not saved", ZmqLink, "checkpointed", _send_durable_too_early
    ),
    "durable-before": PlantedBug(
        "Want.durable is raised before the checkpoint is saved", Saver, "_write", _send_durable_before_saving
    ),
    "want-late": PlantedBug("a reader asks anew for one entry too few", Reader, "hello", _want_too_late),
    "restart-late": PlantedBug(
        "a restarted peer wants the round after its checkpoint", Reader, "__init__", _want_the_next_round
    ),
    "replay-late": PlantedBug("an epoch starts one entry too late", Writer, "want", _repeat_from_the_start),
    "leave-early": PlantedBug("a peer leaves before its neighbors have saved", Connection, "must_wait", _leave_early),
    "journal-not-saved": PlantedBug("checkpoints lack the journal", Journal, "state_dict", _save_no_journal),
    "drop-early": PlantedBug("one round too many is dropped", Journal, "drop", _drop_too_much),
    "renumbered": PlantedBug("a repeated round gets other numbers", Journal, "begin", _number_anew),
    "stale-body": PlantedBug("a body of the same size is sent again", Journal, "read", _send_the_last_body_again),
    "window-leak": PlantedBug("the window never opens again", Connection, "pending", _leak_window),
    "statements-missed": PlantedBug(
        "some statements of sources are ignored", Directions, "state", _miss_some_statements
    ),
    "begin-not-awaited": PlantedBug(
        "a method that prunes does not wait for Begin", Endpoint, "receivers", _do_not_wait_for_begin
    ),
    "begin-ignored": PlantedBug("Begin closes no round", Endpoint, "accept", _close_no_round),
    "never-readmitted": PlantedBug(
        "a reconnected peer stays declared dead", Mailbox, "mark_connected", _ignore_reconnection
    ),
    "record-late": PlantedBug(
        "a body is used before that is recorded", NewestMailbox, "take_all", _record_later, without_waits=True
    ),
    "needs-early": PlantedBug(
        "an entry is dropped that a restart needs",
        NewestMailbox,
        "needed_after",
        _need_what_is_newest,
        without_waits=True,
    ),
    "supersedes-sent": PlantedBug(
        "an entry is superseded that was sent", Journal, "_supersede", _supersede_what_was_sent, without_waits=True
    ),
    "order-forgotten": PlantedBug(
        "a restarted peer does not repeat its last take", NewestMailbox, "repeat", _forget_order, without_waits=True
    ),
    "counted-twice": PlantedBug(
        "a body that counts once is used again after a restart",
        NewestMailbox,
        "load_state_dict",
        _forget_what_has_arrived,
        without_waits=True,
    ),
    "counted-dropped": PlantedBug(
        "an entry is superseded although each of its kind counts",
        Journal,
        "append",
        _keep_no_kind,
        without_waits=True,
    ),
    "never-catches-up": PlantedBug("a returning peer skips no rounds", Endpoint, "next_round", _skip_no_rounds),
}
