"""Endpoint, its mailbox and who receives from whom, with a scripted link. ``Net`` is tested in test_net.py."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Coroutine, Iterable
from functools import wraps
from typing import Any

import pytest

from p2pfl.errors import Unexpected
from p2pfl.messaging import wire
from p2pfl.messaging.control import FOREVER, Id
from p2pfl.messaging.conversation import Conversation
from p2pfl.messaging.deadline import Deadline, WaitPolicy
from p2pfl.messaging.directions import Begin
from p2pfl.messaging.endpoint import Endpoint
from p2pfl.messaging.journal import JournalEntry
from p2pfl.messaging.link import Link
from p2pfl.messaging.neighborhood import Neighborhood
from p2pfl.messaging.schema import Body
from p2pfl.messaging.topology import Topology
from p2pfl.simulation.virtual_loop import VirtualLoop
from tests.bodies import LAYOUTS, PAIR, RUN_ID, Word, complete, star, stored, vector


def virtual(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Run a test in virtual time."""

    @wraps(test)
    def run(*args: Any, **kwargs: Any) -> None:
        loop = VirtualLoop()
        try:
            loop.run_until_complete(test(*args, **kwargs))
        finally:
            loop.close()

    return run


class ScriptedLink(Link):
    """Records what an endpoint does; nobody reads it."""

    def __init__(self) -> None:
        self.entries: list[JournalEntry] = []
        self.nothings: list[tuple[int, int]] = []
        self.late: list[int] = []

    def announce(self, entry: JournalEntry) -> None:
        self.entries.append(entry)

    def behind(self, peers: Iterable[int]) -> list[int]:
        return [peer for peer in peers if peer in self.late]

    async def caught_up(self, peers: Iterable[int]) -> None:
        await asyncio.sleep(3.0)
        self.late = [peer for peer in self.late if peer not in peers]

    def nothing(self, to: int, t: int) -> None:
        self.nothings.append((to, t))


def make(topology: Topology | None = None, *, t: int | None = 0, me: int = 0, **options: Any) -> Endpoint:
    """An endpoint with five neighbors, or those of ``topology``, that has opened round ``t``."""
    conversation = Conversation(LAYOUTS, options.pop("prunes", False))
    neighborhood = Neighborhood(me, topology or star(6), joins=options.pop("joins", {}))
    endpoint = Endpoint(neighborhood, RUN_ID, conversation, **options)
    endpoint.link = ScriptedLink()
    if t is not None:
        endpoint.open(t)
    return endpoint


def link_of(endpoint: Endpoint) -> ScriptedLink:
    assert isinstance(endpoint.link, ScriptedLink)
    return endpoint.link


def receive(endpoint: Endpoint, sender: int, t: int = 0, body: Body | None = None, count: int = 1) -> None:
    """Let ``endpoint`` receive a body from ``sender``; default: a Word."""
    encoded = wire.encode(body or Word(f"{sender}"), count)
    endpoint.accept(endpoint.converted(endpoint.check(encoded.header).message(t, sender, stored(encoded))))


async def take(endpoint: Endpoint, t: int, deadline_factor: float = 1.0) -> dict[int, Body]:
    """Begin round ``t``, and take a Word of each source."""
    endpoint.begin(t)
    taken = await endpoint.take("Word", sorted(endpoint.sources), t, deadline_factor)
    return {sender: message.body for sender, message in taken.items()}


def begin(endpoint: Endpoint, sender: int, t: int, sources: tuple[int, ...] = (0,)) -> None:
    receive(endpoint, sender, t, Begin(sources))


async def after(seconds: float, function: Callable[..., None], *arguments: Any) -> None:
    await asyncio.sleep(seconds)
    function(*arguments)


def now() -> float:
    return asyncio.get_running_loop().time()


# ---- rounds


@pytest.mark.parametrize(
    ("options", "optional", "to"),
    [
        ({}, [True, True, True, False], [(1, 2)] * 4),
        ({"prunes": True}, [False] * 4, [(1, 2)] * 4),
        ({"joins": {2: 1}}, [True, False, True, False], [(1,), (1, 2), (1, 2), (1, 2)]),
    ],
)
def test_begin_opens_each_round_and_is_optional_unless_somebody_waits_for_it(
    options: Any, optional: list[bool], to: list[tuple[int, ...]]
) -> None:
    """R3. It is the first entry of the round, and is not counted."""
    endpoint = make(complete(3), **options)
    endpoint.finish(0)
    endpoint.open(7)  # skipped rounds
    endpoint.open(FOREVER)
    entries = link_of(endpoint).entries
    assert [entry.id for entry in entries] == [Id(0, 0), Id(1, 0), Id(7, 0), Id(FOREVER, 0)]
    assert [entry.optional for entry in entries] == optional
    assert [entry.to for entry in entries] == to
    assert endpoint.sent == {}


@virtual
async def test_a_late_joiner_waits_without_a_deadline_for_its_first_round() -> None:
    endpoint = make(complete(4), me=3, t=4, joins={3: 4, 2: 4}, wait_policy=WaitPolicy(5.0))
    endpoint.begin(4)
    meeting = asyncio.create_task(endpoint.await_start(4))
    await asyncio.sleep(1000.0)
    begin(endpoint, 0, 4)
    await asyncio.sleep(0)
    assert not meeting.done()
    receive(endpoint, 1, 5)  # anything of that round or a later one; peer 2 begins only now
    await asyncio.wait_for(meeting, 1.0)
    await asyncio.wait_for(endpoint.await_start(5), 1.0)


def test_rounds_are_skipped_if_half_of_the_connected_neighbors_no_longer_have_them() -> None:
    endpoint = make()
    assert endpoint.next_round(3) == 3
    endpoint.lost_before(1, FOREVER)
    endpoint.lost_before(2, 8)
    assert endpoint.next_round(3) == 3  # peers 3, 4 and 5 have them
    endpoint.lost_before(3, 9)
    assert endpoint.next_round(3) == 8
    assert endpoint.next_round(8) == 8
    endpoint.mailbox.mark_disconnected(2)
    assert endpoint.next_round(3) == 9  # of peers 1, 3, 4 and 5, half no longer have them
    endpoint.mailbox.mark_disconnected(3)
    assert endpoint.next_round(3) == 3


def test_rounds_are_skipped_if_late_joiners_are_far_ahead_of_their_first_round() -> None:
    endpoint = make(joins={1: 4, 2: 4, 3: 4})
    for neighbor in (1, 2, 3):
        endpoint.lost_before(neighbor, 7)
    assert endpoint.next_round(0) == 0
    endpoint.open(4)
    assert endpoint.next_round(4) == 7


# ---- waits


@pytest.mark.parametrize(
    ("quorum", "disconnected", "senders", "late", "deadline_factor", "seconds", "wasted"),
    [
        (0.0, (), 2, None, 1.0, 10.0, 10.0),
        (0.0, (), 0, None, 4.0, 40.0, 40.0),
        (0.4, (), 2, None, 1.0, 10.0, 10.0),
        (0.6, (), 2, None, 1.0, 310.0, 310.0),  # give_up seconds more
        (0.6, (), 2, 3, 1.0, 200.0, 0.0),  # the third of five, after 200 s
        (0.6, (4, 5), 1, 2, 1.0, 200.0, 0.0),  # the second of the three that are connected
        (0.4, (), 1, 2, 4.0, 200.0, 0.0),
    ],
)
@virtual
async def test_a_wait_ends_at_the_deadline_with_a_quorum_and_after_give_up_without(
    quorum: float,
    disconnected: Any,
    senders: int,
    late: int | None,
    deadline_factor: float,
    seconds: float,
    wasted: float,
) -> None:
    endpoint = make(wait_policy=WaitPolicy(10.0, None, quorum, 300.0))
    for sender in disconnected:
        endpoint.mailbox.mark_disconnected(sender)
    for sender in range(1, senders + 1):
        receive(endpoint, sender)
    arrival = asyncio.create_task(after(200.0, receive, endpoint, late or 0)) if late else None
    taken = sorted(await take(endpoint, 0, deadline_factor))
    assert taken == list(range(1, (late or senders) + 1))
    assert endpoint.missing == {"Word": list(range(len(taken) + 1, 6))}
    assert [endpoint.waits.seconds, endpoint.waits.wasted] == pytest.approx([seconds, wasted])
    if arrival is not None:
        await arrival


@pytest.mark.parametrize(
    "ends",
    [
        lambda endpoint: receive(endpoint, 5, 3),
        lambda endpoint: begin(endpoint, 5, 1),
        lambda endpoint: endpoint.lost_before(5, 2),
        lambda endpoint: endpoint.mailbox.mark_disconnected(5),
        lambda endpoint: endpoint.mailbox.nothing(5, 0),
    ],
    ids=["a later message", "a later Begin", "messages lost", "disconnected", "nothing"],
)
@virtual
async def test_a_wait_ends_with_the_news_that_nothing_will_come(ends: Callable[[Endpoint], None]) -> None:
    endpoint = make(wait_policy=WaitPolicy(600.0))
    for sender in range(1, 5):
        receive(endpoint, sender)
    news = asyncio.create_task(after(7.0, ends, endpoint))
    assert sorted(await take(endpoint, 0)) == [1, 2, 3, 4]
    assert endpoint.missing == {"Word": [5]}
    assert endpoint.waits.seconds == pytest.approx(7.0)
    assert await endpoint.take("Word", [5], 0) == {}  # known from then on
    assert endpoint.waits.seconds == pytest.approx(7.0)
    await news
    if endpoint.mailbox.is_disconnected(5):
        endpoint.mailbox.mark_connected(5)  # waited for again
        await endpoint.take("Word", [5], 0)
        assert endpoint.waits.seconds == pytest.approx(607.0)


@virtual
async def test_nothing_ends_no_wait_for_addressed_messages_or_for_other_rounds() -> None:
    """R5. After a crash, its receiver computes earlier rounds again, whose messages are on their way."""
    endpoint = make(PAIR, t=4, wait_policy=WaitPolicy(5.0))
    endpoint.mailbox.nothing(1, 5)
    for t, addressed in ((4, False), (5, True)):
        endpoint.begin(t)
        coming = asyncio.create_task(after(1.0, receive, endpoint, 1, t))
        assert list(await endpoint.take("Word", [1], t, addressed=addressed)) == [1]
        await coming
    assert await endpoint.take("Word", [1], 5) == {}
    assert now() == pytest.approx(2.0)


@virtual
async def test_messages_before_the_news_are_taken_and_those_of_past_rounds_are_discarded() -> None:
    endpoint = make(PAIR)
    receive(endpoint, 1, 0)
    receive(endpoint, 1, 1, Word("later"))
    endpoint.mailbox.mark_disconnected(1)
    size = endpoint.mailbox.taken_bytes[1]
    assert await take(endpoint, 1) == {1: Word("later")}
    assert endpoint.mailbox.expired == 1
    receive(endpoint, 1, 0)
    assert endpoint.mailbox.expired == 2
    assert endpoint.taken_bytes == endpoint.mailbox.taken_bytes[1] > size == 0  # the window is free again


@virtual
async def test_nonfinite_bodies_are_received_but_not_returned() -> None:
    endpoint = make(complete(3))
    receive(endpoint, 1, body=vector(1, math.nan, 2))
    receive(endpoint, 2, body=vector(1, 2, 3))
    assert list(await endpoint.take("Vector", [1, 2], 0)) == [2]
    assert (endpoint.missing, endpoint.nonfinite) == ({"Vector": [1]}, {"Vector": [1]})
    assert (endpoint.outcomes.tried, endpoint.outcomes.skipped) == ({"messages": 2}, {"messages": 1})
    assert endpoint.outcomes.why == {"messages": "x holds nan in Vector of peer 1"}
    assert endpoint.received[1]["Vector"][:2] == endpoint.received[2]["Vector"][:2] == [1, 12]


@virtual
async def test_the_slot_is_released_while_a_reader_is_behind_and_in_every_wait() -> None:
    """R7."""
    idle: list[Any] = []

    class Idle:
        def __init__(self, waits_for: Callable[[], list[int]]) -> None:
            self.waits_for = waits_for
            idle.append(waits_for())

        async def __aenter__(self) -> None: ...

        async def __aexit__(self, *error: object) -> None:
            idle.append((now(), self.waits_for()))

    endpoint = make(complete(3), idle=Idle, wait_policy=WaitPolicy(9.0))
    link_of(endpoint).late = [2]
    for _ in range(2):
        await endpoint.send([1, 2], Word("x"))
    assert idle == [[2], (3.0, [])]
    arrival = asyncio.create_task(after(1.0, receive, endpoint, 2))
    await take(endpoint, 0)
    assert idle[2:] == [[1, 2], (12.0, [1])]
    await arrival


def test_an_adaptive_deadline_follows_the_recent_rounds() -> None:
    policy = WaitPolicy(deadline=100.0, adaptive=4.0)
    assert policy.seconds == 100.0
    for _ in range(4):
        policy.took(2.0)
    assert policy.seconds == 8.0
    for _ in range(20):
        policy.took(50.0)
    assert policy.seconds == 100.0  # never longer than the deadline
    for _ in range(20):
        policy.took(0.01)
    assert policy.seconds == 1.0  # never shorter than SHORTEST
    assert WaitPolicy(deadline=7.0).seconds == 7.0
    assert WaitPolicy(adaptive=2.0).seconds == math.inf


@pytest.mark.parametrize(("seconds", "lost"), [(1.5, 1.0), (600.0, 10.0)])
@virtual
async def test_a_postponed_deadline_still_ends_the_wait(seconds: float, lost: float) -> None:
    """Time in which the process was suspended does not count, but for a part of the time between two checks."""
    loop: Any = asyncio.get_running_loop()
    deadline, event = Deadline(seconds), loop.create_future()
    waiting = asyncio.create_task(deadline.allows(event))
    await asyncio.sleep(0.5)
    loop._now += 40.0
    assert await waiting is False
    assert seconds + 40.0 - lost <= loop.time() <= seconds + 40.0
    assert event.cancelled()


# ---- whom a method that prunes sends to


@pytest.mark.parametrize(
    ("options", "seconds"), [({}, 0.0), ({"prunes": True}, 9.0), ({"prunes": True, "joins": {2: 1}}, 0.0)]
)
@virtual
async def test_begin_is_awaited_in_methods_that_prune_but_not_from_a_late_joiner(
    options: Any, seconds: float
) -> None:
    """R5."""
    endpoint = make(complete(3), wait_policy=WaitPolicy(9.0), **options)
    begin(endpoint, 1, 1)
    endpoint.finish(0)
    endpoint.begin(1)
    assert endpoint.sources == {1, 2}
    assert await endpoint.receivers() == {1, 2}
    assert now() == pytest.approx(seconds)


@virtual
async def test_who_has_stopped_receiving_is_neither_awaited_nor_sent_to() -> None:
    """R5."""
    endpoint = make(wait_policy=WaitPolicy(9.0), prunes=True)
    for sender, sources in ((1, (0,)), (2, ()), (3, (0, 2))):
        begin(endpoint, sender, 1, sources)
    begin(endpoint, 1, 2, ())  # it is ahead
    endpoint.mailbox.mark_disconnected(4)
    endpoint.finish(0)
    endpoint.begin(1)
    await endpoint.send(await endpoint.receivers(), Word("x"))
    assert now() == pytest.approx(9.0)  # for peer 5
    assert link_of(endpoint).entries[-1].to == (1, 3, 4, 5)
    assert endpoint.expected_receivers == {1, 3, 4, 5}
    begin(endpoint, 3, 3)  # it has skipped round 2
    begin(endpoint, 5, 2)
    endpoint.finish(1)
    endpoint.begin(2)
    assert await endpoint.receivers() == {3, 4, 5}
    assert now() == pytest.approx(9.0)  # peers 1 and 2 do not receive, peer 4 is not there


@virtual
async def test_receivers_are_known_once_the_method_sends_if_it_prunes() -> None:
    """What is recorded must not depend on which Begins have arrived."""
    endpoint, other = make(complete(3), prunes=True), make(complete(3), t=5)
    known = [endpoint.knows_receivers, other.knows_receivers]  # in round 0 all receive
    endpoint.finish(0)
    for sender, receivers in ((1, {2}), (2, set())):
        begin(endpoint, sender, 1, ())
        assert endpoint.expected_receivers == receivers
        known.append(endpoint.knows_receivers)
    await endpoint.receivers()
    known.append(endpoint.knows_receivers)
    endpoint.finish(1)
    assert [*known, endpoint.knows_receivers] == [True, True, False, False, True, False]


@virtual
async def test_the_statement_of_the_latest_round_stands_if_none_comes() -> None:
    """R5."""
    endpoint = make(complete(3), wait_policy=WaitPolicy(9.0), prunes=True)
    begin(endpoint, 1, 1)
    begin(endpoint, 2, 2, ())
    for t in (1, 2, 3):
        endpoint.finish(t - 1)
        endpoint.begin(t)
        assert await endpoint.receivers() == {1}, t
    restored = make(complete(3), t=None, wait_policy=WaitPolicy(9.0), prunes=True)
    restored.load_state_dict(endpoint.state_dict(), endpoint.journal.state_dict(4), 4)
    assert restored.received_from == {1, 2}
    restored.open(4)
    assert await restored.receivers() == {1}


@virtual
async def test_a_late_begin_that_asks_for_messages_is_answered_with_nothing() -> None:
    """R5. Peers that wait for each other because they disagree are told at once."""
    endpoint = make(complete(4), wait_policy=WaitPolicy(9.0), prunes=True)
    for sender in (1, 2, 3):
        begin(endpoint, sender, 1, ())
    endpoint.finish(0)
    endpoint.begin(1)
    assert await endpoint.receivers() == set()
    endpoint.finish(1)
    endpoint.begin(2)
    assert await endpoint.receivers() == set()
    begin(endpoint, 1, 2)
    begin(endpoint, 2, 2, ())  # expects nothing
    begin(endpoint, 3, 3)  # in time for its round
    assert link_of(endpoint).nothings == [(1, 2)]


# ---- counts


def test_a_count_above_the_number_of_peers_is_rejected() -> None:
    endpoint = make(complete(3))
    receive(endpoint, 1, body=vector(1, 2, 3), count=3)
    with pytest.raises(Unexpected, match="count must be at most 3, got 4"):
        receive(endpoint, 1, body=vector(1, 2, 3), count=4)


def test_a_begin_names_at_most_as_many_peers_as_there_are() -> None:
    endpoint = make()
    endpoint.check(wire.encode(Begin(tuple(range(6)))).header)
    with pytest.raises(Unexpected, match="must hold at most 6 ints, got 7"):
        endpoint.check(wire.encode(Begin((0, 1, 2, 3, 4, 5, 5))).header)
