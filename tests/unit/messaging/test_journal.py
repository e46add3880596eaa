"""The journal: entries once for all readers, released when nobody needs them, and restored after a crash."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from p2pfl.messaging import wire
from p2pfl.messaging.control import BEFORE, FOREVER, Id
from p2pfl.messaging.journal import Journal, Place
from p2pfl.messaging.wire import Encoded
from tests.bodies import Block, Word
from tests.simulation.disk import Disk, SimulatedStore


def block(number: float, length: int = 4) -> Encoded:
    return wire.encode(Block(torch.full((length,), float(number))))


def journal_of(disk: Disk, neighbors: Sequence[int] = (1, 2)) -> Journal:
    """A journal whose bodies survive the process, two in a segment."""
    return Journal(neighbors, SimulatedStore(disk, lambda step: None))


def filled(disk: Disk) -> Journal:
    """Two rounds to peers 1 and 2: Begin to both, a block to both, a block to peer 2."""
    journal = journal_of(disk)
    for t in (0, 1):
        journal.begin(t)
        journal.append(wire.encode(Word("begin")), (1, 2))
        journal.append(block(t), (1, 2))
        journal.append(block(t + 10.0), (2,))
    return journal


def read(journal: Journal, to: int, id: Id = BEFORE) -> list[tuple[Id, Id, bytes]]:
    """All entries to a neighbor from ``id`` on: id, previous, body."""
    found = []
    while (next := journal.after(to, id)) is not None:
        entry, previous = next
        found.append((entry.id, previous, bytes(journal.read(entry, 0, entry.size))))
        id = entry.id.next
    return found


def ids(journal: Journal, to: int, id: Id = BEFORE) -> list[tuple[int, int]]:
    return [(found.t, found.number) for found, _, _ in read(journal, to, id)]


def contents(journal: Journal, to: int) -> list[tuple[Id, bytes]]:
    return [(id, body) for id, _, body in read(journal, to)]


# ---- reading


def test_an_entry_is_stored_once_and_read_by_its_addressees() -> None:
    disk = Disk()
    journal = filled(disk)
    assert ids(journal, 1) == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert ids(journal, 2) == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2)]
    assert sum(map(len, disk.segments.values())) == 4 * 16
    assert read(journal, 1)[1] == (Id(0, 1), Id(0, 0), block(0).tensors[0][1].numpy().tobytes())
    assert [previous for _, previous, _ in read(journal, 1)] == [BEFORE, Id(0, 0), Id(0, 1), Id(1, 0)]
    assert (journal.waiting(2, BEFORE), journal.waiting(2, Id(0, 2)), journal.waiting(2, Id(2, 0))) == (6, 4, 0)
    journal.begin(7)  # skipped rounds have no entries
    assert journal.append(block(0), ()).id == Id(7, 0)
    journal.append(block(0), (1,))
    assert ids(journal, 1, Id(1, 1)) == [(1, 1), (7, 1)]
    assert ids(journal, 1, Id(5, 9)) == [(7, 1)]


def test_an_optional_entry_is_passed_over_once_a_later_one_exists_and_is_no_predecessor() -> None:
    journal = journal_of(Disk())
    journal.begin(0)
    journal.append(wire.encode(Word("begin")), (1,), optional=True)
    assert ids(journal, 1) == [(0, 0)]
    journal.append(block(0), (1,))
    journal.begin(1)
    journal.append(wire.encode(Word("begin")), (1,), optional=True)
    journal.begin(2)
    journal.append(wire.encode(Word("begin")), (1,), optional=True)
    assert [(id, previous) for id, previous, _ in read(journal, 1)] == [(Id(0, 1), BEFORE), (Id(2, 0), Id(0, 1))]


def test_keeps_for_ignores_the_last_begin() -> None:
    journal = journal_of(Disk())
    journal.begin(4)
    journal.append(block(0), (1,))
    journal.begin(FOREVER)
    journal.append(wire.encode(Word("begin")), (1, 2))
    assert (journal.keeps_for(1), journal.keeps_for(2)) == (True, False)
    journal.drop(1, 5)
    assert not journal.keeps_for(1)
    assert ids(journal, 1) == [(FOREVER, 0)]


# ---- releasing


def test_a_body_is_released_when_the_last_addressee_drops_it() -> None:
    disk = Disk()
    journal = filled(disk)
    assert set(disk.segments) == {1, 2}
    journal.drop(2, 1)
    assert ids(journal, 2) == [(1, 0), (1, 1), (1, 2)]
    assert ids(journal, 1)[:2] == [(0, 0), (0, 1)]
    assert set(disk.segments) == {1, 2}  # peer 1 may ask for (0, 1)
    journal.drop(1, 1)
    assert set(disk.segments) == {2}
    assert (journal.floor(1), journal.floor(2)) == (1, 1)
    journal.drop(1, 0)
    assert journal.floor(1) == 1  # never goes back


def test_a_segment_is_not_released_while_a_body_is_written_into_it() -> None:
    """The I/O thread drops the other entries of the segment just when a body has filled it."""

    class Store(SimulatedStore):
        def write(self, encoded: Encoded) -> Place:
            place = super().write(encoded)
            if place.at:
                journal.drop(1, 1)
            return place

    journal = Journal([1], Store(Disk(), lambda step: None))
    journal.append(block(0), (1,))
    journal.begin(1)
    journal.append(block(1), (1,))
    assert [body for _, _, body in read(journal, 1)] == [block(1).tensors[0][1].numpy().tobytes()]


def test_bodies_of_the_last_checkpoint_stay_until_the_next_one_for_a_neighbor_that_was_declared_dead() -> None:
    """R8. If both go back to their checkpoints, it can have what this one names."""
    disk = Disk()
    journal = filled(disk)
    journal.state_dict(before=1)
    journal.saved(before=1)
    journal.drop(1, 2)
    journal.drop(2, 2, declared_dead=True)
    journal.begin(2)
    journal.append(block(0), (2,))
    assert set(disk.segments) == {1, 3}  # 1 holds the bodies of round 0
    journal.state_dict(before=2)
    journal.saved(before=2)
    assert set(disk.segments) == {3}


# ---- checkpoints


def test_a_restored_journal_has_the_entries_before_the_checkpoint_and_the_same_floors() -> None:
    disk = Disk()
    journal = filled(disk)
    journal.drop(1, 1)
    expected = {to: contents(journal, to) for to in (1, 2)}
    assert [row[:2] for row in journal.state_dict(before=1)["entries"]] == [[0, 0], [0, 1], [0, 2]]
    state = journal.state_dict(before=2)
    journal.begin(2)
    journal.append(block(5), (1, 2))  # of a round after the checkpoint
    restored = journal_of(disk)
    assert restored.damaged(state) == ""
    restored.load_state_dict(state)
    assert {to: contents(restored, to) for to in (1, 2)} == expected
    assert (restored.floor(1), restored.floor(2)) == (1, 0)
    for to in (1, 2):
        restored.drop(to, 2)
    assert set(disk.segments) <= {restored.store.current}  # released, and what was written later is deleted
    restored.begin(2)
    assert restored.append(block(6), (1,)).id == Id(2, 0)


@pytest.mark.parametrize("damage", [lambda body: body[:-1], lambda body: bytes([body[0] ^ 1]) + body[1:]])
def test_a_damaged_body_is_found_and_named(damage: Any) -> None:
    """R10."""
    disk = Disk()
    state = filled(disk).state_dict(before=2)
    disk.segments[2] = disk.segments[2][:16] + damage(disk.segments[2][16:])
    assert journal_of(disk).damaged(state) == "damaged: the body of entry 2 of round 1 in the journal"


def test_a_body_released_after_the_checkpoint_is_no_damage_and_is_not_offered() -> None:
    disk = Disk()
    journal = filled(disk)
    state = journal.state_dict(before=2)
    for to in (1, 2):
        journal.drop(to, 1)
    restored = journal_of(disk)
    assert restored.damaged(state) == ""
    restored.load_state_dict(state)
    assert ids(restored, 1) == [(1, 0), (1, 1)]
    assert restored.floor(1) == 1


def test_an_entry_that_nobody_needs_any_more_does_not_take_its_segment_with_it() -> None:
    disk = Disk()
    journal = journal_of(disk)
    journal.begin(0)
    for number, to in enumerate([(1,), (1,), (1,), (2,)]):
        journal.append(block(number), to)
    state = journal.state_dict(1)
    first, second = sorted(disk.segments)
    del disk.segments[first]  # so the third entry, of the same round, is not needed either
    restored = journal_of(disk)
    restored.load_state_dict(state)
    assert contents(restored, 1) == []
    assert contents(restored, 2) == [(Id(0, 3), block(3).tensors[0][1].numpy().tobytes())]
    restored.drop(2, 1)
    assert second not in disk.segments


def test_a_body_released_while_the_checkpoint_is_written_is_left_out() -> None:
    disk = Disk()
    journal = filled(disk)

    def drop(segments: Any) -> None:
        for to in (1, 2):
            journal.drop(to, 1)

    journal.store.sync = drop  # type: ignore[method-assign]
    assert {row[0] for row in journal.state_dict(before=2)["entries"] if row[4]} == {1}


# ---- entries that supersede earlier ones


def superseding(disk: Disk, rounds: int) -> Journal:
    journal = Journal([1, 2], SimulatedStore(disk, lambda step: None), supersedes=True)
    for neighbor in (1, 2):
        journal.read_by(neighbor, Id(0, 0))
    append_rounds(journal, range(rounds))
    return journal


def append_rounds(journal: Journal, rounds: Sequence[int]) -> None:
    """Append a word and a block to each."""
    for t in rounds:
        journal.begin(t)
        journal.append(wire.encode(Word(str(t))), (1, 2))
        journal.append(block(t), (1, 2))


def test_of_what_a_neighbor_cannot_have_read_the_newest_of_each_kind_stays() -> None:
    disk = Disk()
    journal = superseding(disk, 2)
    first = journal.after(1, Id(1, 0))
    assert first is not None
    assert journal.offer(1, first[0])  # sent: the neighbor may use it, and need it again after a crash
    append_rounds(journal, range(2, 5))
    assert ids(journal, 1) == [(1, 0), (4, 0), (4, 1)]
    assert ids(journal, 2) == [(4, 0), (4, 1)]
    assert [previous for _, previous, _ in read(journal, 1)] == [BEFORE, (1, 0), (4, 0)]  # no gap: nothing is missed
    journal.drop(1, 4)
    assert ids(journal, 1) == [(4, 0), (4, 1)]


def test_bodies_of_superseded_entries_are_released() -> None:
    disk = Disk()
    journal = superseding(disk, 50)
    assert len(journal.store.restore(range(1000))) <= 2  # two bodies in a segment, and the current one


def test_an_entry_may_replace_those_of_earlier_rounds_to_all_neighbors() -> None:
    """Not those of the same round: a pipeline may send each neighbor another body."""
    journal = Journal([1, 2, 3], supersedes=True, replaces=[Block.kind()])
    for neighbor in (1, 2, 3):
        journal.read_by(neighbor, Id(0, 0))
    for t, receivers in enumerate([[(1,), (2,)], [(2,), (3,)]]):
        journal.begin(t)
        for to in receivers:
            journal.append(block(t), to)
            journal.append(wire.encode(Word(str(t))), to)
    assert ids(journal, 1) == [(0, 1)]
    assert ids(journal, 2) == [(1, 0), (1, 1)]
    assert ids(journal, 3) == [(1, 2), (1, 3)]


def test_an_entry_that_was_dropped_is_not_superseded() -> None:
    """Not every kind is sent to a neighbor in each round, so its newest entry may be an old one."""
    journal = Journal([1], supersedes=True)
    journal.read_by(1, Id(0, 0))
    for t, encoded in enumerate([wire.encode(Word("0")), block(1), wire.encode(Word("2"))]):
        journal.drop(1, t - 1, declared_dead=True)
        journal.begin(t)
        journal.append(encoded, (1,))
    assert ids(journal, 1) == [(1, 0), (2, 0)]


def test_a_superseded_entry_is_not_sent_any_more() -> None:
    journal = superseding(Disk(), 1)
    found = journal.after(1, Id(0, 1))
    assert found is not None
    append_rounds(journal, [1])
    assert not journal.offer(1, found[0])
    assert journal.offer(2, journal.after(2, Id(1, 1))[0])  # type: ignore[index]


def test_a_peer_supersedes_nothing_before_a_neighbor_says_what_it_has() -> None:
    """An earlier process may have sent anything, even if there is no checkpoint of it."""
    started = Journal([1], supersedes=True)
    for t in range(3):
        started.begin(t)
        started.append(block(t), (1,))
    assert ids(started, 1) == [(0, 0), (1, 0), (2, 0)]
    disk = Disk()
    saved = superseding(disk, 2).state_dict(before=2)
    journal = Journal([1, 2], SimulatedStore(disk, lambda step: None), supersedes=True)
    journal.load_state_dict(saved)
    append_rounds(journal, range(2, 5))
    everything = [(t, number) for t in range(1, 5) for number in (0, 1)]
    assert ids(journal, 1) == everything
    journal.read_by(1, Id(3, 0))
    append_rounds(journal, [5])
    assert ids(journal, 1) == [(t, n) for t, n in everything if t < 4] + [(5, 0), (5, 1)]
    assert ids(journal, 2) == [*everything, (5, 0), (5, 1)]
