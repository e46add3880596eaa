"""Which bodies a round takes where rounds do not wait for one another."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from p2pfl.messaging import wire
from p2pfl.messaging.control import Id
from p2pfl.messaging.conversation import Conversation
from p2pfl.messaging.deadline import WaitPolicy
from p2pfl.messaging.endpoint import Endpoint
from p2pfl.messaging.journal import Journal, JournalEntry
from p2pfl.messaging.link import Link
from p2pfl.messaging.neighborhood import Neighborhood
from p2pfl.messaging.newest import NEXT, NewestMailbox, Take
from p2pfl.messaging.schema import Body, Layout, MessageSchema
from p2pfl.messaging.wire import Message
from tests.bodies import RUN_ID, star


@dataclass(frozen=True)
class Word(Body):
    values: Tensor


SCHEMA = MessageSchema([Layout.of(Word(torch.zeros(2)))])
KIND = Word.kind()


def message(t: int, sender: int = 1) -> Message:
    encoded = wire.encode(Word(torch.full((2,), float(t))))
    body = torch.frombuffer(bytearray().join(encoded.parts()), dtype=torch.uint8)
    return wire.check(encoded.header, SCHEMA).message(t, sender, body)


def filled(staleness: float, rounds: Sequence[int], t: int = 0) -> NewestMailbox:
    box = NewestMailbox([1, 2], staleness)
    box.begin(t)
    for each in rounds:
        box.put(message(each))
    return box


def taken(box: NewestMailbox, t: int, senders: Sequence[int] = (1,)) -> dict[int, int]:
    found: dict[int, int] = {}
    box.begin(t)
    for sender, (each,) in box.take_all(KIND, senders, t).items():
        assert isinstance(each.body, Word)
        assert torch.equal(each.body.values, torch.full((2,), float(each.t)))
        found[sender] = each.t
    return found


@pytest.mark.parametrize(
    ("staleness", "arrived", "t", "expected"),
    [
        (0, [0, 1, 2], 1, {1: 1}),
        (0, [0], 1, {}),
        (1, [0, 1, 2, 3], 1, {1: 2}),  # 3 is too new
        (1, [0], 1, {1: 0}),
        (1, [0], 2, {}),  # too old
        (math.inf, [0, 1, 2, 3], 1, {1: 3}),
        (math.inf, [0], 9, {1: 0}),
        (math.inf, [], 0, {}),
    ],
)
def test_a_round_takes_the_newest_body_within_the_bound(
    staleness: float, arrived: list[int], t: int, expected: dict[int, int]
) -> None:
    box = filled(staleness, arrived)
    box.begin(t)
    assert taken(box, t) == expected


def test_several_rounds_take_the_same_body_each_its_own_copy() -> None:
    box = filled(math.inf, [3])
    for t in (0, 1):
        ((found,),) = box.take_all(KIND, [1, 2], t).values()
        assert isinstance(found.body, Word)
        found.body.values.fill_(-1.0)  # a method may modify what it received
    assert taken(box, 2, [1, 2]) == {1: 3}


@pytest.mark.parametrize(("staleness", "kept"), [(math.inf, [4]), (1, [2, 3, 4]), (0, [1, 2, 3, 4])])
def test_what_no_round_can_take_any_more_is_discarded_at_once(staleness: float, kept: list[int]) -> None:
    box, discarded = filled(staleness, [], t=1), []
    box.on_discard = lambda each: discarded.append(each.t)
    for t in range(5):
        box.put(message(t))
        box.put(message(t))  # read again after a reconnection
    assert [each[1] for each in box.state_dict(1)["held"]] == kept
    assert sorted(discarded) == [t for t in range(5) if t not in kept]
    assert box.taken_bytes[1] == 10 * message(0).cost  # all count as taken, so that more may be sent
    assert box.unread == 0


def test_a_bounded_round_waits_for_a_body_that_is_new_enough_and_an_unbounded_one_never() -> None:
    async def wait(box: NewestMailbox, late: Sequence[int]) -> float:
        policy = WaitPolicy(deadline=math.inf)
        waiting = asyncio.ensure_future(box.wait([(3, KIND, 1)], policy))
        for t in late:
            await asyncio.sleep(0)
            assert not waiting.done()
            box.put(message(t))
        return await asyncio.wait_for(waiting, 10)

    assert asyncio.run(wait(filled(1, [0], t=3), [1, 2])) == 0.0
    assert asyncio.run(wait(filled(math.inf, [0], t=3), [])) == 0.0


@pytest.mark.parametrize("how", ["ahead", "disconnected"])
def test_a_wait_ends_when_no_body_within_the_bound_can_come(how: str) -> None:
    box = filled(1, [0], t=3)
    box.put(message(5)) if how == "ahead" else box.mark_disconnected(1)
    assert asyncio.run(box.wait([(3, KIND, 1)], WaitPolicy(deadline=math.inf))) == 0.0
    assert taken(box, 3) == {}


# ---- the order


def test_takes_are_recorded_and_repeated_whatever_has_arrived_meanwhile() -> None:
    recorded: list[Take] = []
    box = NewestMailbox([1, 2], math.inf, record=recorded.append)
    box.put(message(0))
    taken(box, 0, [1, 2])
    box.put(message(1))
    box.put(message(2))
    taken(box, 1, [1, 2])
    assert recorded == [Take(0, KIND, {1: [0], 2: []}), Take(1, KIND, {1: [2], 2: []})]

    again: list[Take] = []
    box = NewestMailbox([1, 2], math.inf, record=again.append)
    box.repeat(recorded)
    for t in range(4):
        box.put(message(t))
        box.put(message(t, 2))
    assert [taken(box, t, [1, 2]) for t in range(3)] == [{1: 0}, {1: 2}, {1: 3, 2: 3}]
    assert again == [Take(2, KIND, {1: [3], 2: [3]})]
    assert box.used == {1: 4, 2: 4}


def test_a_repeated_take_waits_for_its_body_and_bodies_count_as_taken_only_then() -> None:
    box = NewestMailbox([1], math.inf)
    box.repeat([Take(0, KIND, {1: [1]}), Take(1, KIND, {1: [1]})])
    assert (0, KIND, 1) not in box
    box.put(message(0))
    assert (0, KIND, 1) not in box
    box.put(message(1))
    assert (0, KIND, 1) in box
    assert box.taken_bytes[1] == message(0).cost
    assert (taken(box, 0), box.taken_bytes[1]) == ({1: 1}, message(0).cost)
    assert (taken(box, 1), box.taken_bytes[1]) == ({1: 1}, 2 * message(0).cost)
    assert box.unread == 0


def test_a_body_that_its_sender_no_longer_has_is_replaced_and_named() -> None:
    recorded: list[Take] = []
    lost: list[tuple[Take, int]] = []
    box = NewestMailbox(
        [1], math.inf, record=recorded.append, on_lost=lambda take, sender: lost.append((take, sender))
    )
    box.repeat([Take(0, KIND, {1: [1]})])
    box.put(message(2))
    assert asyncio.run(box.wait([(0, KIND, 1)], WaitPolicy(deadline=math.inf))) == 0.0  # 1 would have come before 2
    assert taken(box, 0) == {1: 2}
    assert recorded == [Take(0, KIND, {1: [2]})]
    assert lost == [(recorded[0], 1)]


# ---- checkpoints


def test_a_restarted_peer_has_what_it_could_take_and_asks_for_the_rest() -> None:
    box = filled(1, [0, 1, 2, 3], t=2)
    box.mark_disconnected(2, finished=True)
    state = box.state_dict(2)
    assert box.needed_after(2) == {1: 3, 2: 0}

    restarted = NewestMailbox([1, 2], 1)
    assert restarted.first_read(1, 2) == 0
    restarted.load_state_dict(state, lambda header: wire.check(header, SCHEMA), 2)
    restarted.begin(2)
    assert (restarted.first_read(1, 2), restarted.first_read(2, 2)) == (3, 0)
    assert restarted.needed_after(2) == {1: 3, 2: 0}
    assert [restarted.is_disconnected(sender) for sender in (1, 2)] == [
        False,
        True,
    ]  # nobody waits for the second one
    assert taken(restarted, 2) == {1: 3}
    assert taken(restarted, 2 + 1) == {1: 3}


def test_nothing_more_of_the_last_round_of_a_finished_neighbor_is_needed() -> None:
    box = filled(math.inf, [0, 1, 2, 3], t=9)
    box.mark_disconnected(1, finished=True)
    box.state_dict(9)
    assert box.needed_after(9) == {1: 4, 2: 0}
    box.mark_connected(1)  # it had failed, and is there again
    assert box.first_read(1, 9) == 3


def test_needs_of_states_that_will_not_be_restored_are_forgotten() -> None:
    box = filled(math.inf, [0])
    for done in (1, 2, 3):
        box.put(message(done))
        box.state_dict(done)
    assert box.needed_after(2) == {1: 2, 2: 0}
    assert box.needed_after(1) == {1: 0, 2: 0}
    assert box.needed_after(3) == {1: 3, 2: 0}


# ---- bodies of which each one counts


def counting(staleness: float, **callbacks: Any) -> NewestMailbox:
    return NewestMailbox([1, 2], staleness, [KIND], **callbacks)


def collected(box: NewestMailbox, t: int, senders: Sequence[int] = (1, 2)) -> dict[int, list[int]]:
    box.begin(t)
    return {sender: [each.t for each in found] for sender, found in box.take_all(KIND, senders, t).items()}


def test_each_body_that_counts_is_taken_once_and_none_supersedes_another() -> None:
    box = counting(math.inf)
    for t in (0, 1, 2):
        box.put(message(t))
    box.put(message(2))  # read again after a reconnection
    box.put(message(5, 2))
    assert (box.unread, box.taken_bytes[1]) == (4, message(0).cost)  # of the second one only
    assert collected(box, 1) == {1: [0, 1, 2], 2: [5]}
    assert (box.unread, box.taken_bytes[1]) == (0, 4 * message(0).cost)
    assert collected(box, 2) == {}
    box.put(message(2))
    box.put(message(3))
    assert collected(box, 3) == {1: [3]}


def test_a_bounded_round_leaves_bodies_that_are_too_new_for_it_and_takes_all_older_ones() -> None:
    box = counting(1)
    for t in range(5):
        box.put(message(t))
    assert [collected(box, t, [1]) for t in (1, 2, 4)] == [{1: [0, 1, 2]}, {1: [3]}, {1: [4]}]


def test_answers_count_however_far_ahead_their_sender_is() -> None:
    box = counting(1)
    box.put(message(9))
    box.begin(2)
    assert box.take_all(KIND, [1], 2) == {}
    ((found,),) = box.take_all(KIND, [1], 2, any_round=True).values()
    assert found.t == 9


@pytest.mark.parametrize(
    ("arrived", "t", "ends"),
    [
        ([2], 2, True),
        ([0], 2, False),
        ([3], 2, True),  # of round 2, nothing follows
        ([2], NEXT, True),
        ([], NEXT, False),
    ],
)
def test_a_wait_for_bodies_that_count_ends_when_that_of_a_round_or_the_next_one_is_there(
    arrived: list[int], t: int, ends: bool
) -> None:
    async def wait() -> bool:
        box = counting(math.inf)
        for each in arrived:
            box.put(message(each))
        box.begin(4)
        waiting = asyncio.ensure_future(box.wait([(t, KIND, 1)], WaitPolicy(deadline=math.inf)))
        await asyncio.sleep(0)
        ended = waiting.done()
        box.mark_disconnected(1)
        await waiting
        return ended

    assert asyncio.run(wait()) is ends


def test_bodies_that_count_are_taken_again_as_recorded_after_a_restart_and_no_other_ones() -> None:
    recorded: list[Take] = []
    box = counting(math.inf, record=recorded.append)
    box.put(message(0))
    box.put(message(1))
    state = box.state_dict(0)
    assert collected(box, 0) == {1: [0, 1]}
    box.put(message(4))  # the sender has replaced those between
    assert collected(box, 1) == {1: [4]}
    assert recorded == [Take(0, KIND, {1: [0, 1], 2: []}), Take(1, KIND, {1: [4], 2: []})]

    box = counting(math.inf, record=recorded.append)
    box.load_state_dict(state, lambda header: wire.check(header, SCHEMA), 0)
    box.repeat(recorded)
    box.begin(0)
    box.put(message(1))  # sent again, for more of its round may follow
    box.put(message(2, 2))
    assert collected(box, 0) == {1: [0, 1]}
    box.begin(1)
    assert (1, KIND, 1) not in box
    box.put(message(4))
    assert collected(box, 1) == {1: [4]}
    assert collected(box, 2) == {2: [2]}
    assert recorded[2:] == [Take(2, KIND, {1: [], 2: [2]})]
    restored = counting(math.inf)
    restored.load_state_dict(box.state_dict(3), lambda header: wire.check(header, SCHEMA), 3)
    restored.put(message(4))
    assert collected(restored, 3) == {}


# ---- what is still to be sent


class Silent(Link):
    """Nobody reads it."""

    def announce(self, entry: JournalEntry) -> None:
        return

    def nothing(self, to: int, t: int) -> None:
        return


@pytest.mark.parametrize(
    ("how", "left"),
    [
        ("newest", {1: [0], 2: [1]}),
        ("arrived", {1: [0], 2: [1]}),
        ("current", {1: [], 2: [1]}),
        ("all", {1: [0], 2: [0, 1]}),
    ],
)
def test_what_a_new_body_replaces(how: Any, left: dict[int, list[int]]) -> None:
    @dataclass(frozen=True)
    class Counted(Word):
        counts = how

    body = Counted(torch.zeros(2))
    conversation = Conversation([Layout.of(body)])
    endpoint = Endpoint(Neighborhood(0, star(3)), RUN_ID, conversation, mailbox=NewestMailbox([1, 2], math.inf))
    endpoint.link = Silent()
    for neighbor in (1, 2):
        endpoint.journal.read_by(neighbor, Id(0, 0))  # it has read nothing
    for t, receivers in enumerate([[1, 2], [2]]):
        endpoint.open(t)
        asyncio.run(endpoint.send(receivers, body))
    assert {neighbor: rounds_for(neighbor, endpoint.journal) for neighbor in (1, 2)} == left


def rounds_for(neighbor: int, journal: Journal) -> list[int]:
    """Return the rounds of the bodies that wait for a neighbor."""
    rounds, position = [], Id(0, 0)
    while following := journal.after(neighbor, position):
        entry, _ = following
        if not entry.optional:  # no Begin
            rounds.append(entry.id.t)
        position = entry.id.next
    return rounds


def test_repeated_takes_leave_out_what_its_sender_had_replaced_and_sends_again() -> None:
    box = counting(math.inf)
    box.repeat([Take(0, KIND, {1: [0, 5]}), Take(1, KIND, {1: []})])
    for t in range(7):
        box.put(message(t))
    assert box.unread == 3
    assert box.taken_bytes[1] == 4 * message(0).cost  # so that the sender goes on
    assert [collected(box, t, [1]) for t in range(3)] == [{1: [0, 5]}, {}, {1: [6]}]
    assert box.taken_bytes[1] == 7 * message(0).cost


def test_restored_bodies_that_count_do_not_widen_the_window() -> None:
    box = counting(math.inf)
    box.put(message(0))
    restored = counting(math.inf)
    restored.load_state_dict(box.state_dict(0), lambda header: wire.check(header, SCHEMA), 0)
    assert collected(restored, 0, [1]) == {1: [0]}
    assert restored.taken_bytes[1] == 0  # this process has not received it
