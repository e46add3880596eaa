"""An edge as a table: what each end does at each event, and rules R1 to R12 of the delivery protocol."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import count
from typing import Any

import pytest
import torch

from p2pfl.errors import WriteError
from p2pfl.messaging import wire
from p2pfl.messaging.control import BEFORE, CHUNK, FOREVER, Entry, Hello, Id, Nothing, Start, Want
from p2pfl.messaging.edge import (
    BY_VALUE,
    EPOCHS_PER_SECOND,
    REPEAT,
    REPEAT_WAITING,
    Outgoing,
    Reader,
    ReaderState,
    Writer,
    WriterState,
)
from p2pfl.messaging.journal import Journal, MemoryStore
from p2pfl.messaging.wire import cost
from tests.bodies import Block, Word
from tests.simulation.disk import Disk, SimulatedStore

HELLO = Hello("digest", "boot", "token")
BUDGET = 1 << 20
ME, PEER = 0, 1


def want(epoch: int, next: tuple[int, int] = (0, 0), **changes: Any) -> Want:
    return replace(Want(epoch, Id(*next), 0, BUDGET, idle=False, references=False), **changes)


def journal_with(rounds: int = 3, size: int = 16, *, optional: bool = False) -> Journal:
    """Begin and a block of ``size`` bytes in each round."""
    journal = Journal([PEER], MemoryStore())
    for t in range(rounds):
        journal.begin(t)
        journal.append(wire.encode(Word("begin")), [PEER], optional=optional)
        journal.append(wire.encode(Block(torch.full((size,), t % 100, dtype=torch.uint8))), [PEER])
    return journal


def sent_by(writer: Writer, most: int = 100) -> Iterator[Outgoing]:
    """Send what the writer has."""
    while most and (message := writer.next()) is not None:
        writer.sent(message)
        yield message
        most -= 1


def drain(writer: Writer, most: int = 100) -> list[Any]:
    return [message.control for message in sent_by(writer, most)]


def ids(messages: list[Any]) -> list[tuple[int, int]]:
    return [(control.id.t, control.id.number) for control in messages if isinstance(control, Entry)]


def streaming(journal: Journal, asked: Want | None = None) -> Writer:
    """A writer that has sent Hello and been asked, but has sent nothing since."""
    writer = Writer(journal, PEER, HELLO)
    writer.connected()
    assert drain(writer) == [HELLO]
    writer.want(asked or want(1), 0.0)
    return writer


def reading(next: tuple[int, int] = (0, 0), *, references: bool = False) -> Reader:
    """A reader in its first epoch, 1, whose Want was sent at time 0."""
    reader = Reader(Id(*next), BUDGET, count(1).__next__)
    reader.hello(references=references)
    ask(reader, 0.0)
    reader.start(Start(1, 0, 0))
    return reader


def ask(reader: Reader, now: float, pending: int = 0, *, waiting: bool = False) -> Want | None:
    asked = reader.want(pending, now, waiting=waiting)
    if asked is not None:
        reader.stated(asked, now)
    return asked


def entry(id: tuple[int, int], previous: tuple[int, int] | Id = BEFORE, epoch: int = 1) -> Entry:
    return Entry(epoch, Id(*id), Id(*previous), 16)


# ---- the writer's rows


def test_connected_makes_hello_due_and_nothing_else_until_asked() -> None:
    writer = Writer(journal_with(), PEER, HELLO)
    assert (writer.state, writer.next()) == (WriterState.DOWN, None)
    writer.connected()
    assert (writer.state, drain(writer)) == (WriterState.GREETING, [HELLO])


def test_lost_ends_the_epoch_and_a_want_that_arrives_later_is_not_answered() -> None:
    writer = streaming(journal_with())
    writer.lost()
    writer.want(want(2), 0.0)
    assert (writer.state, writer.next()) == (WriterState.DOWN, None)
    writer.connected()
    assert drain(writer) == [HELLO]


def test_a_new_epoch_begins_with_start_and_streams_from_next() -> None:
    writer = streaming(journal_with(3), want(7, (1, 0)))
    messages = drain(writer)
    assert writer.state is WriterState.STREAMING
    assert messages[0] == Start(7, 0, 0)
    assert [(each.id, each.previous) for each in messages[1:]] == [
        (Id(1, 0), Id(0, 1)),
        (Id(1, 1), Id(1, 0)),
        (Id(2, 0), Id(1, 1)),
        (Id(2, 1), Id(2, 0)),
    ]
    assert writer.next() is None


def test_want_of_the_same_epoch_raises_next_and_the_window_but_never_goes_back() -> None:
    """R2."""
    one = cost(len(wire.encode(Word("begin")).header), 0)
    writer = streaming(journal_with(4), want(1, window=one))
    assert ids(drain(writer)) == [(0, 0)]
    writer.want(want(1, (0, 0), window=0), 0.0)
    assert drain(writer) == []
    writer.want(want(1, (2, 1)), 0.0)
    assert ids(drain(writer)) == [(2, 1), (3, 0), (3, 1)]
    writer.want(want(1, (0, 0)), 0.0)
    assert drain(writer) == []


def test_any_want_drops_what_is_durable_and_confirms_what_was_read() -> None:
    journal = journal_with(3)
    writer = Writer(journal, PEER, HELLO)  # even while the connection is down
    writer.want(want(1, (2, 1), durable=2), 0.0)
    assert (journal.floor(PEER), writer.confirmed) == (2, Id(2, 1))
    writer.want(want(2, (0, 0)), 0.0)
    assert (journal.floor(PEER), writer.confirmed) == (2, Id(2, 1))


def test_hello_precedes_everything_though_the_neighbor_asks_before_it_could_be_sent() -> None:
    """R1. The Want may be one of a process that is gone: without Hello its successor would never ask."""
    writer = Writer(journal_with(1), PEER, HELLO)
    writer.connected()
    writer.want(want(9), 0.0)
    assert drain(writer, 2) == [HELLO, Start(9, 0, 0)]


def test_start_says_what_was_dropped_and_the_last_nothing() -> None:
    """R1."""
    journal = journal_with(3)
    journal.drop(PEER, 2)
    writer = Writer(journal, PEER, HELLO)
    writer.nothing(1)
    writer.connected()
    writer.want(want(1), 0.0)
    messages = drain(writer)[1:]
    assert messages[0] == Start(1, 2, 2)
    assert not any(isinstance(each, Nothing) for each in messages)
    assert ids(messages) == [(2, 0), (2, 1)]


def test_nothing_is_said_at_once_and_only_once() -> None:
    """R5. It overtakes entries, since the reader may wait for it; later connections learn it from Start."""
    writer = streaming(journal_with(2))
    writer.nothing(4)
    writer.nothing(3)
    assert drain(writer, 2) == [Start(1, 0, 0), Nothing(1, 4)]
    writer.nothing(6)
    assert drain(writer, 1) == [Nothing(1, 6)]
    assert not any(isinstance(each, Nothing) for each in drain(writer))


def test_new_epochs_are_limited_in_rate_and_the_last_one_asked_for_wins() -> None:
    writer = streaming(journal_with(1))
    for epoch in range(2, 40):
        writer.want(want(epoch), 0.0)
    assert drain(writer, 1) == [Start(int(EPOCHS_PER_SECOND), 0, 0)]
    writer.tick(0.05)
    writer.want(want(39, (0, 1)), 0.05)
    assert not any(isinstance(each, Start) for each in drain(writer))
    writer.tick(0.2)
    messages = drain(writer)
    assert messages[0] == Start(39, 0, 0)
    assert ids(messages) == [(0, 1)]


# ---- chunks, references, the window


def test_large_bodies_travel_in_chunks_of_at_most_1_mib() -> None:
    size = 2 * CHUNK + 5
    journal = Journal([PEER], MemoryStore())
    body = torch.arange(size, dtype=torch.int64).to(torch.uint8)
    journal.append(wire.encode(Block(body)), [PEER])
    writer = streaming(journal, want(1, window=1 << 30))
    messages = []
    while (message := writer.next()) is not None:
        assert writer.sent(message) == (0 if message.entry is None else min(CHUNK, size - message.control.offset))  # type: ignore[union-attr]
        messages.append(message)
    chunks = messages[1:]
    assert [chunk.control.offset for chunk in chunks] == [0, CHUNK, 2 * CHUNK]  # type: ignore[union-attr]
    assert [len(chunk.frames) for chunk in chunks] == [2, 1, 1]
    assert b"".join(bytes(chunk.frames[-1]) for chunk in chunks) == body.numpy().tobytes()


def test_what_was_sent_in_part_is_sent_anew_in_the_next_epoch() -> None:
    journal = Journal([PEER], MemoryStore())
    journal.append(wire.encode(Block(torch.ones(3 * CHUNK, dtype=torch.uint8))), [PEER])
    writer = streaming(journal, want(1, window=1 << 30))
    drain(writer, 3)
    writer.want(want(2, window=1 << 30), 0.0)
    assert [each.offset for each in drain(writer)[1:]] == [0, CHUNK, 2 * CHUNK]


@pytest.mark.parametrize(
    ("size", "references", "mapped"), [(1 << 17, True, True), (1 << 17, False, False), (16, True, False)]
)
def test_references_are_sent_for_large_bodies_to_who_can_open_them(size: int, references: bool, mapped: bool) -> None:
    assert 16 < BY_VALUE < 1 << 17
    writer = streaming(journal_with(1, size), want(1, references=references))
    message = next(m for m in sent_by(writer) if isinstance(m.control, Entry) and m.control.size)
    assert isinstance(message.control, Entry)
    assert bool(message.control.segment) == mapped
    assert len(message.frames) == (1 if mapped else 2)


def test_the_window_counts_full_lengths_mapped_or_not() -> None:
    """R7."""
    for references in (False, True):
        journal = journal_with(10, 1 << 17)
        begin, block = (cost(len(e.header), e.size) for e, _ in map(journal.after, [PEER] * 2, [Id(0, 0), Id(0, 1)]))  # type: ignore[misc]
        writer = streaming(journal, want(1, window=2 * (begin + block) + begin, references=references))
        assert ids(drain(writer))[-1] == (2, 0)


def test_an_entry_larger_than_the_window_is_sent_when_the_reader_is_idle() -> None:
    """R7."""
    writer = streaming(journal_with(2), want(1, (0, 1), window=10))
    assert ids(drain(writer)) == []
    writer.want(want(1, (0, 1), window=10, idle=True), 0.0)
    assert ids(drain(writer)) == [(0, 1)]  # one, until the reader is idle again
    writer.want(want(1, (1, 0), window=10, idle=True), 0.0)
    assert ids(drain(writer)) == [(1, 0)]


def test_a_held_optional_entry_gives_way_to_a_later_one() -> None:
    """R5."""
    journal = Journal([PEER], MemoryStore())
    journal.append(wire.encode(Word("begin")), [PEER], optional=True)
    writer = streaming(journal)
    drain(writer, 1)
    assert writer.next(hold_optional=True) is None
    journal.append(wire.encode(Word("first")), [PEER])
    message = writer.next(hold_optional=True)
    assert message is not None
    assert isinstance(message.control, Entry)
    assert (message.control.id, message.control.previous) == (Id(0, 1), BEFORE)
    assert ids(drain(streaming(journal_with(3, optional=True)))) == [(0, 1), (1, 1), (2, 1)]


def test_a_reader_that_has_finished_is_sent_the_last_begin_without_a_gap() -> None:
    """R3."""
    journal = journal_with(3)
    journal.begin(FOREVER)
    journal.append(wire.encode(Word("begin")), [PEER])
    writer = Writer(journal, PEER, HELLO)
    writer.reader_finished = True
    journal.drop(PEER, FOREVER)
    writer.connected()
    writer.want(want(1), 0.0)
    _, start, last = drain(writer)
    assert start == Start(1, 0, 0)
    assert (last.id, last.previous) == (Id(FOREVER, 0), BEFORE)


def test_a_body_dropped_in_the_middle_is_left_out_but_a_deleted_file_is_an_error() -> None:
    """R10."""
    disk = Disk()
    journal = Journal([PEER], SimulatedStore(disk, lambda step: None))
    for t in (0, 1):
        journal.begin(t)
        journal.append(wire.encode(Block(torch.ones(2 * CHUNK, dtype=torch.uint8))), [PEER])
    writer = streaming(journal, want(1, window=1 << 30))
    drain(writer, 2)
    writer.want(want(1, window=1 << 30, durable=1), 0.0)
    (chunk,) = drain(writer, 1)
    assert (chunk.id, chunk.offset) == (Id(1, 0), 0)
    disk.segments.clear()
    with pytest.raises(WriteError, match="No such file"):
        writer.next()


# ---- the reader's rows


def test_hello_makes_the_reader_ask_with_a_new_epoch() -> None:
    """R1."""
    reader = Reader(Id(2, 0), BUDGET, count(1).__next__)
    assert (reader.state, ask(reader, 0.0)) == (ReaderState.SILENT, None)
    for epoch in (1, 2):
        reader.hello(references=True)
        assert reader.state is ReaderState.ASKING
        assert ask(reader, 0.0) == Want(epoch, Id(2, 0), 0, BUDGET, idle=True, references=True)
        assert ask(reader, 0.0) is None


def test_only_the_start_of_the_epoch_asked_for_opens_it() -> None:
    """R1: whatever carries another epoch is dropped."""
    reader = Reader(Id(0, 0), BUDGET, count(1).__next__)
    reader.hello(references=False)
    assert reader.entry(entry((0, 0))) == "ignore"  # before Start
    assert reader.start(Start(5, 9, 0)) is None
    assert reader.start(Start(1, 0, 0)) is None
    assert reader.state is ReaderState.READING
    assert (reader.is_current(1), reader.is_current(5)) == (True, False)
    assert reader.entry(entry((0, 0), epoch=5)) == "ignore"
    assert reader.start(Start(1, 9, 0)) is None  # a second one
    assert reader.next == Id(0, 0)


def test_a_start_beyond_next_says_which_rounds_are_lost() -> None:
    """R8."""
    reader = Reader(Id(2, 3), BUDGET, count(1).__next__)
    reader.hello(references=False)
    assert reader.start(Start(1, 5, 0)) == 5
    assert reader.next == Id(5, 0)
    reader.hello(references=False)
    assert reader.start(Start(2, 5, 0)) is None


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
    reader = reading((2, 1))
    assert reader.entry(entry(id, previous)) == verdict
    assert reader.state is (ReaderState.ASKING if verdict == "gap" else ReaderState.READING)
    asked = ask(reader, 0.0)
    assert (asked is not None and (asked.epoch, asked.next) == (2, Id(2, 1))) == (verdict == "gap")


def test_an_entry_that_cannot_be_decoded_is_passed_and_not_asked_for_again() -> None:
    """R6."""
    reader = reading()
    assert reader.entry(entry((0, 0))) == "take"
    reader.passed(Id(0, 0), 30, 16)
    assert reader.entry(entry((0, 1), (0, 0))) == "take"
    assert ask(reader, 0.0) is None
    assert reader.entry(entry((0, 0))) == "ignore"


def test_a_reference_that_cannot_be_opened_and_a_missing_chunk_begin_a_new_epoch() -> None:
    """R6."""
    reader = reading(references=True)
    reader.gap()
    asked = ask(reader, 0.0)
    assert asked is not None
    assert (asked.epoch, asked.next, asked.references) == (2, Id(0, 0), True)
    reader.cannot_open()
    asked = ask(reader, 0.0)
    assert asked is not None
    assert (asked.epoch, asked.next, asked.references) == (3, Id(0, 0), False)


def test_want_is_repeated_now_and_then_and_more_often_while_the_neighbor_is_waited_for() -> None:
    """R12."""
    reader = reading()
    assert ask(reader, REPEAT_WAITING - 0.1, waiting=True) is None
    assert ask(reader, REPEAT_WAITING + 0.1) is None
    assert ask(reader, REPEAT_WAITING + 0.1, waiting=True) is not None
    assert ask(reader, REPEAT) is None
    assert ask(reader, REPEAT_WAITING + REPEAT + 0.2) is not None
    reader.restate()
    assert ask(reader, REPEAT_WAITING + REPEAT + 0.2) is not None


def test_want_is_repeated_ever_more_slowly_until_something_changes() -> None:
    reader, now, pauses = reading(), 0.0, []
    for _ in range(6):
        began = now
        while ask(reader, now, waiting=True) is None:
            now += 0.5
        pauses.append(now - began)
    assert pauses == [2.5, 4.5, 8.5, 16.5, 30.5, 30.5]
    reader.passed(Id(0, 0), 10, 10)
    assert ask(reader, now + 31, waiting=True) is not None
    assert ask(reader, now + 33.5, waiting=True) is not None


def test_want_is_due_when_the_window_has_moved_or_a_checkpoint_was_written_or_all_was_read() -> None:
    """R7, R9, R3."""
    reader = reading()
    reader.passed(Id(0, 0), 0, BUDGET // 2)
    size = cost(0, BUDGET // 2)
    assert ask(reader, 0.0, pending=size) is None
    asked = ask(reader, 0.0, pending=size // 2)
    assert asked is not None
    assert (asked.window, asked.idle, asked.next) == (BUDGET + size - size // 2, False, Id(0, 1))
    reader.durable = 3
    asked = ask(reader, 0.0, pending=size // 2)
    assert asked is not None
    assert asked.durable == 3
    assert ask(reader, 0.0, pending=size // 2) is None
    reader.passed(Id(FOREVER, 0), 0, 0)
    assert reader.finished
    asked = ask(reader, 0.0, pending=size // 2)
    assert asked is not None
    assert asked.next == Id(FOREVER, 1)


def test_a_new_window_begins_with_what_the_algorithm_has_not_taken() -> None:
    """R7: new epochs cannot be used to send more than the budget."""
    reader = reading()
    reader.passed(Id(0, 0), 0, BUDGET)
    reader.hello(references=False)
    asked = ask(reader, 0.0, pending=BUDGET - 10)
    assert asked is not None
    assert (asked.window, asked.idle) == (10, False)


def test_what_is_far_beyond_the_window_is_not_taken() -> None:
    """R7: the budget holds even if the neighbor does not heed the window."""
    reader = reading()
    taken = 0
    for number in range(100):
        if not reader.exceeds_window(0, BUDGET // 4):
            reader.passed(Id(0, number), 0, BUDGET // 4)
            taken += 1
    assert taken == 3  # OVERHEAD counts too
