"""An edge as a table: what each end does at each event, and the rules of the delivery protocol that it keeps."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from typing import Any

import pytest
import torch

from p2pfl.messaging import wire
from p2pfl.messaging.control import BEFORE, CHUNK, FOREVER, Entry, Hello, Id, Nothing, Start, Want
from p2pfl.messaging.edge import (
    BY_VALUE,
    DURABLE_INTERVAL,
    REPEAT,
    REPEAT_WAITING,
    Reader,
    ReaderState,
    Writer,
    WriterState,
)
from p2pfl.messaging.journal import Journal
from p2pfl.messaging.wire import cost
from tests.bodies import Block, Word

BUDGET = 1 << 20
PEER = 1
BEGIN = wire.encode(Word("begin"))
Event = Callable[[Any], Any]

# ---- the writer


def journal_of(sizes: list[int], *, optional: bool = False) -> Journal:
    """Begin and a block of so many bytes in each round."""
    journal = Journal([PEER])
    for t, size in enumerate(sizes):
        journal.begin(t)
        journal.append(BEGIN, [PEER], optional=optional)
        journal.append(wire.encode(Block(torch.full((size,), t, dtype=torch.uint8))), [PEER])
    return journal


def writer_of(journal: Journal, *events: Event, new_number: Callable[[], int] = lambda: 0) -> Writer:
    writer = Writer(journal, PEER, Hello("digest", "boot", "token"), new_number)
    for event in events:
        event(writer)
    return writer


def connected(writer: Writer) -> None:
    writer.connected()


def lost(writer: Writer) -> None:
    writer.lost()


def want(epoch: int, next: tuple[int, int] = (0, 0), now: float = 0.0, **changes: Any) -> Event:
    wanted = Want(epoch, Id(*next), 0, 1 << 40, idle=False, references=False)._replace(**changes)
    return lambda writer: writer.want(wanted, now)


def nothing(t: int) -> Event:
    return lambda writer: writer.nothing(t)


def tick(now: float) -> Event:
    return lambda writer: writer.tick(now)


def finished(writer: Writer) -> None:
    """The reader has finished; so has this peer."""
    writer._journal.begin(FOREVER)
    writer._journal.append(BEGIN, [PEER])
    writer.reader_finished = True
    writer._journal.drop(PEER, FOREVER)


def messages(writer: Writer, most: int = 100) -> list[Any]:
    """Send what the writer has."""
    found: list[Any] = []
    while len(found) < most and (message := writer.next()) is not None:
        writer.sent(message)
        found.append(message)
    return found


def sends(writer: Writer, most: int = 100) -> list[Any]:
    """Send what the writer has; return ids of entries, and everything else in words."""
    names: dict[type, Callable[[Any], Any]] = {
        Hello: lambda message: "hello",
        Start: lambda message: f"start {message.epoch} {message.begins} {message.nothing}",
        Nothing: lambda message: f"nothing {message.t}",
        Entry: lambda message: tuple(message.id),
    }
    return [names[type(message.control)](message.control) for message in messages(writer, most)]


ALL = [(0, 0), (0, 1), (1, 0), (1, 1), (2, 0), (2, 1)]
FIRST = cost(len(BEGIN.header), 0)

WRITER: dict[str, list[Any]] = {
    "sends nothing before it is connected": [[]],
    "a connection begins with Hello, and nothing follows before Want": [connected, ["hello"], []],
    "a new epoch begins with Start and streams from next": [
        *(connected, want(7, (1, 1)), ["hello", "start 7 0 0", *ALL[3:]], []),
    ],
    "R1: Hello is sent even if a process that is gone has asked before": [
        *(connected, want(9), ["hello", "start 9 0 0", *ALL]),
    ],
    "lost ends the epoch, and a late Want is not answered": [
        *(connected, want(1), ["hello", "start 1 0 0", *ALL], lost, want(2), []),
        *(connected, ["hello"], want(3, (2, 0)), ["start 3 0 0", *ALL[4:]]),
    ],
    "R2: in an epoch, Want raises next and sets the window, and nothing goes back": [
        *(connected, want(1, window=FIRST), ["hello", "start 1 0 0", (0, 0)]),
        *(want(1, window=0), [], want(1, (2, 1)), [(2, 1)], want(1, (0, 0)), []),
    ],
    "what is durable is dropped, even while the connection is down": [
        *(want(1, (2, 1), durable=2), connected, want(2), ["hello", "start 2 2 0", *ALL[4:]]),
    ],
    "R1, R5: Start names the last Nothing of earlier connections": [
        *(nothing(1), connected, want(1), ["hello", "start 1 0 2", *ALL]),
    ],
    "R5: Nothing overtakes entries and is sent only once": [
        *(connected, want(1, window=0), ["hello", "start 1 0 0"], nothing(4), nothing(3), ["nothing 4"], []),
        *(nothing(6), ["nothing 6"], want(1), ALL),
    ],
    "R7: what is larger than the window is sent to an idle reader, one at a time": [
        *(connected, want(1, (0, 1), window=10), ["hello", "start 1 0 0"], want(1, (0, 1), window=10, idle=True)),
        *([(0, 1)], want(1, (1, 0), window=10, idle=True), [(1, 0)]),
    ],
    "R3: who has finished gets the last Begin without a gap": [
        *(finished, connected, want(1), ["hello", "start 1 0 0", (FOREVER, 0)]),
    ],
    "new epochs are limited in rate, and the last one asked for wins": [
        *(connected, *(want(epoch) for epoch in range(1, 40)), ["hello", "start 10 0 0", *ALL]),
        *(tick(0.05), want(39, (2, 1), 0.05), [], tick(0.2), ["start 39 0 0", (2, 1)]),
    ],
}  # fmt: skip


@pytest.mark.parametrize("name", WRITER)
def test_writer(name: str) -> None:
    """Events, and lists of what is sent after them."""
    writer = writer_of(journal_of([16] * 3))
    for step in WRITER[name]:
        if isinstance(step, list):
            assert sends(writer) == step
        else:
            step(writer)


def test_the_last_begin_is_no_gap_for_who_has_finished() -> None:
    """R3. What it has not read was dropped."""
    writer = writer_of(journal_of([16] * 3), finished, connected, want(1))
    assert messages(writer)[-1].control.previous == BEFORE


def test_hello_is_repeated_for_a_want_that_answers_another() -> None:
    """R1. It shows that its sender has read no Hello of this connection."""
    writer = writer_of(journal_of([16]), connected, new_number=count(1).__next__)
    assert sends(writer) == ["hello"]
    want(1, hello=7)(writer)
    want(1, hello=7)(writer)
    assert (sends(writer), writer.state) == (["hello"], WriterState.GREETING)
    want(1, hello=1)(writer)
    assert (sends(writer, 1), writer.state) == (["start 1 0 0"], WriterState.STREAMING)
    assert writer.confirmed == Id(0, 0)
    want(2, (0, 1), hello=7)(writer)
    assert writer.confirmed == Id(0, 1)


def test_a_reader_that_goes_back_confirms_anew() -> None:
    """R3. After a Hello it reads the last Begin again: a writer that left before would seem to have returned."""
    writer = writer_of(journal_of([16] * 3), connected, want(1, (FOREVER, 1)))
    assert writer.confirmed == Id(FOREVER, 1)
    for event, confirmed in ((connected, (FOREVER, 1)), (want(2, (2, 0)), (2, 0)), (want(2, (1, 0)), (2, 0))):
        event(writer)
        assert writer.confirmed == Id(*confirmed)


def test_large_bodies_travel_in_chunks_and_anew_in_the_next_epoch() -> None:
    writer = writer_of(journal_of([2 * CHUNK + 5]), connected, want(1, (0, 1)))
    messages(writer, 3)
    want(2, (0, 1))(writer)
    assert [chunk.control.offset for chunk in messages(writer)[1:]] == [0, CHUNK, 2 * CHUNK]


@pytest.mark.parametrize("references", [True, False])
def test_large_bodies_go_as_references_if_wanted_and_take_the_same_window(references: bool) -> None:
    """R7: full lengths count, mapped or not."""
    assert 16 < BY_VALUE < 1 << 17
    header = len(wire.encode(Block(torch.ones(1 << 17, dtype=torch.uint8))).header)
    window = 3 * FIRST + cost(header, 16) + cost(header, 1 << 17)
    writer = writer_of(journal_of([16, 1 << 17, 16]), connected, want(1, window=window, references=references))
    entries = messages(writer)[2:]
    assert [tuple(each.control.id) for each in entries] == ALL[:5]
    assert [bool(each.control.segment) for each in entries] == [False, False, False, references, False]
    assert [each.control.previous for each in entries] == [BEFORE, *(Id(*id) for id in ALL[:4])]


def test_a_held_optional_entry_gives_way_to_a_later_one() -> None:
    """R5."""
    writer = writer_of(journal := Journal([PEER]), connected, want(1))
    journal.append(BEGIN, [PEER], optional=True)
    assert sends(writer, 2) == ["hello", "start 1 0 0"]
    assert writer.next(hold_optional=True) is None
    journal.append(BEGIN, [PEER])
    message = writer.next(hold_optional=True)
    assert message is not None
    assert isinstance(message.control, Entry)
    assert (message.control.id, message.control.previous) == (Id(0, 1), BEFORE)


def test_a_body_dropped_in_the_middle_is_left_out() -> None:
    writer = writer_of(journal_of([2 * CHUNK] * 2), connected, want(1))
    messages(writer, 4)
    want(1, durable=1)(writer)
    assert sends(writer, 2) == [(1, 0), (1, 1)]


def test_a_writer_passes_over_what_was_superseded_and_keeps_what_its_reader_has_used() -> None:
    journal = Journal([PEER], supersedes=True)

    def compute(*rounds: int) -> None:
        for t in rounds:
            journal.begin(t)
            journal.append(wire.encode(Block(torch.full((1,), t, dtype=torch.uint8))), [PEER])

    compute(0, 1, 2)
    writer = writer_of(journal, connected, want(7))
    assert sends(writer) == ["hello", "start 7 0 0", (0, 0), (1, 0), (2, 0)]
    compute(3, 4)
    writer.lost()
    compute(5)
    for event in (connected, want(8, (2, 0), used=3)):  # the reader has restarted, and will take the body of 2 again
        event(writer)
    assert sends(writer) == ["hello", "start 8 0 0", (2, 0), (5, 0)]


# ---- the reader


def reader_of(next: tuple[int, int] = (0, 0), *, references: bool = False) -> Reader:
    """A reader in its first epoch, 1, whose Want was sent at time 0."""
    reader = Reader(Id(*next), BUDGET, count(1).__next__)
    reader.hello(references=references)
    asks(reader)
    reader.start(Start(1, 0, 0))
    return reader


def asks(
    reader: Reader, now: float = 0.0, pending: int = 0, *, waiting: bool = False, closing: bool = False
) -> Want | None:
    if (asked := reader.want(pending, now, waiting=waiting, closing=closing)) is not None:
        reader.stated(asked, now)
    return asked


def entry(id: tuple[int, int], previous: tuple[int, int] = BEFORE, epoch: int = 1) -> Entry:
    return Entry(epoch, Id(*id), Id(*previous), 16)


def test_hello_makes_the_reader_ask_and_only_the_start_of_that_epoch_opens_it() -> None:
    """R1: whatever carries another epoch is dropped."""
    reader = Reader(Id(2, 0), BUDGET, count(1).__next__)
    assert (reader.state, asks(reader)) == (ReaderState.SILENT, None)
    for epoch in (1, 2):
        reader.hello(references=True, number=epoch)
        assert asks(reader) == Want(epoch, Id(2, 0), 0, BUDGET, idle=True, references=True, hello=epoch)
        assert (reader.state, asks(reader)) == (ReaderState.ASKING, None)
    assert not reader.entry(entry((2, 0), epoch=2))  # before Start
    assert reader.start(Start(1, 9, 0)) is None
    assert not reader.is_current(2)
    assert reader.start(Start(2, 0, 0)) is None
    assert (reader.is_current(2), reader.is_current(1)) == (True, False)
    assert not reader.entry(entry((2, 0)))
    assert reader.start(Start(2, 9, 0)) is None  # a second one
    assert reader.next == Id(2, 0)


@pytest.mark.parametrize(("durable", "lost_before"), [(2, 5), (4, 5), (5, None), (9, None)])
def test_a_start_beyond_next_says_which_rounds_are_lost(durable: int, lost_before: int | None) -> None:
    """R8. What is durable is not missed, even if it was never read."""
    reader = reader_of((2, 3))
    reader.durable = durable
    for epoch, expected in ((2, lost_before), (3, None)):
        reader.hello(references=False)
        assert reader.start(Start(epoch, 5, 0)) == expected
        assert reader.next == Id(5, 0)


def test_the_last_begin_is_read_again_after_each_hello_and_nothing_before_it_is_missed() -> None:
    """R3, R8."""
    reader = reader_of((2, 3))
    for epoch, durable, begins, next in ((2, 0, 0, (2, 3)), (3, 0, 4, (2, 3)), (4, 9, 0, (9, 0))):
        reader.passed(Id(FOREVER, 0), 0, 0)
        assert (reader.finished, reader.next) == (True, Id(FOREVER, 1))
        reader.durable = durable
        reader.hello(references=False)
        assert (reader.finished, reader.next) == (False, Id(*next))
        assert reader.start(Start(epoch, begins, 0)) is None
    reader.passed(Id(9, 0), 0, 0)  # it goes on
    reader.hello(references=False)
    assert (reader.next, reader.start(Start(5, 12, 0))) == (Id(9, 1), 12)


@pytest.mark.parametrize(
    ("id", "previous", "verdict"),
    [
        ((2, 1), (2, 0), "take"),  # the next one
        ((2, 0), (1, 1), "ignore"),  # such as it has
        ((2, 2), (2, 1), "gap"),
        ((2, 2), (2, 0), "take"),  # what lies between is for others
        ((9, 0), (1, 5), "take"),  # skipped rounds, or an optional entry
        ((9, 0), BEFORE, "take"),
    ],
)
def test_an_entry_is_a_gap_only_if_its_predecessor_is_missing(
    id: tuple[int, int], previous: tuple[int, int], verdict: str
) -> None:
    """R4."""
    reader = reader_of((2, 1))
    assert reader.entry(entry(id, previous)) == (verdict == "take")
    assert reader.state is (ReaderState.ASKING if verdict == "gap" else ReaderState.READING)
    asked = asks(reader)
    assert (asked is not None and (asked.epoch, asked.next) == (2, Id(2, 1))) == (verdict == "gap")


def test_what_cannot_be_decoded_is_passed_and_what_cannot_be_opened_is_asked_for_by_value() -> None:
    """R6."""
    reader = reader_of(references=True)
    reader.passed(Id(0, 0), 30, 16)
    assert (reader.entry(entry((0, 0))), reader.entry(entry((0, 1), (0, 0)))) == (False, True)
    assert asks(reader) is None
    for change, epoch, references in ((reader.ask_anew, 2, True), (reader.cannot_open, 3, False)):
        change()
        asked = asks(reader)
        assert asked is not None
        assert (asked.epoch, asked.next, asked.references) == (epoch, Id(0, 1), references)


def test_want_is_repeated_now_and_then_and_more_often_while_the_neighbor_is_waited_for() -> None:
    """R12."""
    reader = reader_of()
    soon, late = REPEAT_WAITING + 0.1, REPEAT_WAITING + REPEAT + 0.2
    for now, waiting, due in ((1.9, True, False), (soon, False, False), (soon, True, True), (REPEAT, False, False)):
        assert (asks(reader, now, waiting=waiting) is not None) == due
    assert asks(reader, late)
    reader.restate()
    assert asks(reader, late)


def test_want_is_repeated_ever_more_slowly_until_something_changes() -> None:
    reader = reader_of()
    now, pauses = 0.0, []
    for _ in range(6):
        began = now
        while asks(reader, now, waiting=True) is None:
            now += 0.5
        pauses.append(now - began)
    assert pauses == [2.5, 4.5, 8.5, 16.5, 30.5, 30.5]


def test_want_is_due_when_the_window_has_moved_or_a_checkpoint_was_written_or_all_was_read() -> None:
    """R7, R9, R3."""
    reader = reader_of()
    reader.passed(Id(0, 0), 0, BUDGET // 2)
    size = cost(0, BUDGET // 2)
    assert asks(reader, pending=size) is None
    asked = asks(reader, pending=size // 2)
    assert asked == Want(1, Id(0, 1), 0, BUDGET + size - size // 2, idle=False, references=False)
    reader.durable = 3
    assert asks(reader, DURABLE_INTERVAL, pending=size // 2) is None
    assert asks(reader, DURABLE_INTERVAL + 0.1, pending=size // 2) == asked._replace(durable=3)
    reader.durable = 4
    assert asks(reader, DURABLE_INTERVAL + 0.1, pending=size // 2) is None
    assert asks(reader, DURABLE_INTERVAL + 0.1, pending=size // 2, closing=True) == asked._replace(durable=4)
    reader.passed(Id(FOREVER, 0), 0, 0)
    assert reader.finished
    asked = asks(reader, pending=size // 2)
    assert asked is not None
    assert asked.next == Id(FOREVER, 1)


def test_the_budget_holds_across_epochs_and_if_the_neighbor_ignores_the_window() -> None:
    """R7."""
    reader = reader_of()
    for number in range(3):  # OVERHEAD counts too
        assert not reader.exceeds_window(0, BUDGET // 4)
        reader.passed(Id(0, number), 0, BUDGET // 4)
    assert reader.exceeds_window(0, BUDGET // 4)
    reader.hello(references=False)
    asked = asks(reader, pending=BUDGET - 10)
    assert asked is not None
    assert (asked.window, asked.idle) == (10, False)
