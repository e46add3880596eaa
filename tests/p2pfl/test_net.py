"""What Net, Endpoint and Mailbox promise, over both sorts of link; and what LocalHub does besides."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from p2pfl import wire
from p2pfl.errors import Deadlock, NetError, NotANeighbor, Unexpected
from p2pfl.net import SEQUENCES, Counts, Deadline, Endpoint, LocalHub, Net, Patience
from p2pfl.topology import Topology
from p2pfl.wire import Body, Layout
from tests.bodies import PAIR, RUN_ID, Word


@dataclass(frozen=True)
class Vector(Body):
    x: Tensor


@dataclass(frozen=True)
class Model(Body):
    values: dict[str, Tensor]
    count: Tensor


LAYOUTS = [
    Layout.of(Vector(torch.zeros(3))),
    Layout.of(Word("")),
    Layout.of(Model({"w": torch.zeros(2, 2), "b": torch.zeros(0)}, torch.tensor(0))),
]


def complete(peers: int) -> Topology:
    return Topology.from_edges(peers, [(i, j) for i in range(peers) for j in range(i)])


def line(peers: int) -> Topology:
    return Topology.from_edges(peers, [(i, i + 1) for i in range(peers - 1)])


def star(peers: int, hub: int = 0) -> Topology:
    return Topology.from_edges(peers, [(hub, i) for i in range(peers) if i != hub])


def vector(*values: float) -> Vector:
    return Vector(torch.tensor(values, dtype=torch.float32))


def words(heard: dict[int, Word]) -> dict[int, str]:
    return {sender: body.text for sender, body in heard.items()}


async def together(endpoints: list[Endpoint], program: Callable[[Endpoint], Awaitable[Any]]) -> list[Any]:
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(_coroutine(program(endpoint))) for endpoint in endpoints]
    return [task.result() for task in tasks]


async def _coroutine(awaitable: Awaitable[Any]) -> Any:
    return await awaitable


async def rounds(endpoint: Endpoint, count: int, talk: Callable[[Net], Awaitable[Any]], start: int = 0) -> list[Any]:
    """So many rounds; returns what was said to come out of each."""
    outcomes = []
    for t in range(start, start + count):
        net = endpoint.begin(t)
        outcomes.append(await talk(net))
        await endpoint.finish(t)
    return outcomes


async def hesitate(seed: object) -> None:
    """Let the others go first, or not."""
    for _ in range(random.Random(f"{seed}").randrange(6)):
        await asyncio.sleep(0)


# ---- the verbs


async def test_exchange_gives_one_body_of_each_source_in_ascending_order(mesh: Any) -> None:
    endpoints = await mesh.open(complete(5), LAYOUTS)

    async def talk(net: Net) -> list[tuple[int, list[float]]]:
        await hesitate((net.me, net.t))
        heard = await net.exchange(vector(net.me, net.t, 7))
        return [(sender, body.x.tolist()) for sender, body in heard.items()]

    for me, outcome in enumerate(await together(endpoints, lambda endpoint: rounds(endpoint, 6, talk))):
        assert outcome == [[(j, [j, t, 7]) for j in range(5) if j != me] for t in range(6)]


async def test_one_sided_sends_arrive_in_ascending_order_whatever_the_order_of_arrival(mesh: Any) -> None:
    endpoints = await mesh.open(star(6), LAYOUTS)
    net, *others = (endpoint.begin(0) for endpoint in endpoints)
    for other in random.sample(others, len(others)):
        await other.send(0, Word(f"from {other.me}"))
    assert list(words(await net.gather(Word)).items()) == [(j, f"from {j}") for j in range(1, 6)]


async def test_messages_of_one_sender_and_kind_come_in_the_order_in_which_they_were_sent(mesh: Any) -> None:
    here, there = await mesh.open(PAIR, LAYOUTS)
    net, other = here.begin(0), there.begin(0)
    for number in range(40):
        await other.send(0, Word(str(number)))
        await other.send(0, vector(number, 0, 0))
    vectors = [float((await net.gather(Vector))[1].x[0]) for _ in range(40)]
    texts = [words(await net.gather(Word))[1] for _ in range(40)]
    assert vectors == list(range(40))
    assert texts == list(map(str, range(40)))


async def test_a_message_for_a_later_round_waits_its_turn(mesh: Any) -> None:
    slow, fast = await mesh.open(PAIR, LAYOUTS)
    for t in range(4):
        await fast.begin(t).send(0, Word(f"round {t}"))
    heard = []
    for t in range(4):
        heard.append(words(await slow.begin(t).gather(Word)))
        await slow.finish(t)
    assert heard == [{1: f"round {t}"} for t in range(4)]
    assert slow.mailbox.late == 0


async def test_messages_of_a_round_that_is_over_are_forgotten(mesh: Any, eventually: Any) -> None:
    slow, fast = await mesh.open(PAIR, LAYOUTS)
    net = fast.begin(0)
    for text in ("untaken", "untaken too"):
        await net.send(0, Word(text))
    await fast.begin(1).send(0, Word("now"))
    assert words(await slow.begin(1).gather(Word)) == {1: "now"}
    assert slow.mailbox.late == 2
    await net.send(0, Word("late"))
    await eventually(lambda: slow.mailbox.late == 3)


async def test_only_those_among_speak_and_everybody_hears_them(mesh: Any) -> None:
    endpoints = await mesh.open(complete(4), LAYOUTS)

    async def talk(endpoint: Endpoint) -> dict[int, str]:
        return words(await endpoint.begin(0).exchange(Word(f"from {endpoint.me}"), among=[3, 1]))

    heard = await together(endpoints, talk)
    assert [list(one) for one in heard] == [[1, 3], [3], [1, 3], [1]]
    assert [len(endpoint.out) for endpoint in endpoints] == [0, 3, 0, 3]


def test_participants_are_drawn_alike_everywhere_and_anew_each_round() -> None:
    endpoints = [Endpoint(me, complete(10), "run", 5, LAYOUTS) for me in (0, 7)]
    drawn = [[endpoint.begin(t).participants(0.3) for t in range(40)] for endpoint in endpoints]
    assert drawn[0] == drawn[1]
    assert all(len(chosen) == 3 and list(chosen) == sorted(set(chosen)) for chosen in drawn[0])
    assert {peer for chosen in drawn[0] for peer in chosen} == set(range(10))
    net = endpoints[0].begin(0)
    assert net.participants(1.0) == tuple(range(10))
    assert len(net.participants(0.01)) == 1
    assert [len(net.participants(share)) for share in (0.25, 0.39, 0.55)] == [2, 3, 5]
    fifteen = Endpoint(0, complete(15), "run", 5, LAYOUTS).begin(0)
    assert len(fifteen.participants(0.5)) == 7  # ⌊0.5 · 15⌋, as FedStyle has it
    assert Endpoint(0, complete(10), "run", 6, LAYOUTS).begin(0).participants(0.3) != drawn[0][0]


async def test_patience_multiplies_the_deadline_of_a_gather(mesh: Any) -> None:
    endpoints = await mesh.open(PAIR, LAYOUTS, deadline=0.05)
    net = endpoints[0].begin(0)
    loop = asyncio.get_running_loop()
    for patience in (1.0, 4.0):
        for answers in (net.gather(Word, patience=patience), net.exchange(Word("?"), patience=patience)):
            began = loop.time()
            assert await answers == {}
            assert loop.time() - began >= 0.05 * patience


def hurried(quorum: float, deadline: float = 0.05, give_up: float = 20.0) -> Endpoint:
    """An endpoint in the middle of a star, with nobody else there."""
    return Endpoint(0, star(6), RUN_ID, 5, LAYOUTS, Patience(deadline, None, quorum, give_up))


def says(endpoint: Endpoint, sender: int, t: int = 0) -> None:
    frames = wire.encode(Word(f"{sender}")).to(RUN_ID, t, sender, 0)
    endpoint.accept(endpoint.decode(frames, sender))


@pytest.mark.parametrize(("gone", "enough"), [((), 3), ((4, 5), 2)])
async def test_below_the_quorum_the_deadline_does_not_end_a_wait(gone: tuple[int, ...], enough: int) -> None:
    """Of five neighbours three are 60 %, and of those that are not gone two of three."""
    endpoint, clock = hurried(quorum=0.6, give_up=1000), asyncio.get_running_loop().time
    for sender in gone:
        endpoint.mailbox.lost(sender)
    waiting = asyncio.create_task(endpoint.begin(0).gather(Word))
    for sender in range(1, enough):
        says(endpoint, sender)
    await asyncio.sleep(0.2)
    assert not waiting.done()
    before = clock()
    says(endpoint, enough)
    assert sorted(await waiting) == list(range(1, enough + 1))
    assert endpoint.missing == {"Word": list(range(enough + 1, 6))}
    assert 0.0 <= endpoint.waited_in_vain <= clock() - before
    assert endpoint.waited >= 0.2


async def test_with_the_quorum_there_the_deadline_ends_a_wait_and_without_it_some_time_later() -> None:
    clock = asyncio.get_running_loop().time
    for quorum, spoken, give_up, least in ((0.4, 2, 1000, 0.05), (0.6, 2, 0.3, 0.35), (1.0, 0, 0.3, 0.35)):
        endpoint = hurried(quorum, give_up=give_up)
        for sender in range(1, spoken + 1):
            says(endpoint, sender)
        began = clock()
        assert len(await endpoint.begin(0).gather(Word)) == spoken
        assert clock() - began >= least


def test_an_adaptive_deadline_follows_the_recent_rounds() -> None:
    patience = Patience(deadline=100.0, adaptive=4.0)
    assert patience.seconds == 100.0
    for _ in range(4):
        patience.took(2.0)
    assert patience.seconds == 8.0
    for _ in range(20):
        patience.took(50.0)
    assert patience.seconds == 100.0  # never longer
    for _ in range(20):
        patience.took(0.01)
    assert patience.seconds == 1.0  # never shorter
    assert Patience(deadline=7.0).seconds == 7.0
    assert Patience(adaptive=2.0).seconds is None


async def test_a_message_of_a_later_round_ends_the_waits_for_earlier_ones() -> None:
    endpoint = hurried(quorum=0.0, deadline=600)
    for sender in range(1, 5):
        says(endpoint, sender)
    waiting = asyncio.create_task(endpoint.begin(0).gather(Word))
    await asyncio.sleep(0)
    says(endpoint, 5, t=3)
    assert sorted(await waiting) == [1, 2, 3, 4]
    assert endpoint.missing == {"Word": [5]}
    assert sorted(await endpoint.begin(3).gather(Word, of=[5])) == [5]


OPEN, HEARS, HEARD, SHUT = (True, True), (True, False), (False, True), (False, False)
"""What one side of an edge believes: (it hears the other, the other hears it)."""


@pytest.mark.parametrize("here", [OPEN, HEARS, HEARD, SHUT])
@pytest.mark.parametrize("there", [OPEN, HEARS, HEARD, SHUT])
async def test_two_that_differ_on_who_hears_whom_come_to_agree_and_do_not_wait_in_vain(
    here: tuple[bool, bool], there: tuple[bool, bool], mesh: Any
) -> None:
    """The second has come back with an old checkpoint. Only what cannot come about is left out: that each has been
    told by the other to stop, and knows of its own doing so no more."""
    if here == there == HEARS:
        pytest.skip("cannot come about")
    endpoints = await mesh.open(PAIR, LAYOUTS, deadline=600.0)
    for endpoint, (hears, is_heard) in zip(endpoints, (here, there), strict=True):
        endpoint.sources = {1 - endpoint.me} if hears else set()
        endpoint.listeners = {1 - endpoint.me} if is_heard else set()
    endpoints[1].skip_to(3)

    async def live(endpoint: Endpoint, rounds: Iterable[int]) -> None:
        for t in rounds:
            while t > min(one.t, other.t) + 2 and t > 3:  # others, to which both are bound, would hold it up
                await asyncio.sleep(0.001)
            net = endpoint.begin(t)
            await endpoint.meet(t)
            await net.exchange(Word("…"))
            await endpoint.finish(t)

    one, other = endpoints
    meanwhile = asyncio.create_task(live(one, itertools.count()))
    async with asyncio.timeout(200):
        await live(other, range(3, 30))
    meanwhile.cancel()
    await asyncio.gather(meanwhile, return_exceptions=True)
    assert (bool(one.sources), bool(other.sources)) == (here[0], there[0])  # nobody hears whom it did not want to
    assert (bool(one.listeners), bool(other.listeners)) == (there[0], here[0])


async def test_gather_of_some(mesh: Any) -> None:
    endpoints = await mesh.open(complete(4), LAYOUTS)
    net, *others = (endpoint.begin(0) for endpoint in endpoints)
    await others[0].send(0, Word("one"))
    await others[2].send(0, Word("three"))
    assert words(await net.gather(Word, of=[3, 1])) == {1: "one", 3: "three"}
    assert await net.gather(Word, of=[]) == {}
    assert endpoints[0].missing == {}


async def test_scatter_says_something_else_to_each(mesh: Any) -> None:
    endpoints = await mesh.open(star(4), LAYOUTS)
    net, *others = (endpoint.begin(0) for endpoint in endpoints)
    await net.scatter({3: Word("to 3"), 1: Word("to 1")})
    assert words(await others[0].gather(Word)) == {0: "to 1"}
    assert words(await others[2].gather(Word)) == {0: "to 3"}
    assert sorted(endpoints[0].out) == [1, 3]


async def test_broadcast_reaches_neighbors_only(mesh: Any) -> None:
    endpoints = await mesh.open(line(3), LAYOUTS)
    nets = [endpoint.begin(0) for endpoint in endpoints]
    await nets[0].broadcast(Word("hello"))
    assert words(await nets[1].gather(Word, of=[0])) == {0: "hello"}
    assert list(endpoints[0].out) == [1]


@pytest.mark.parametrize("verb", ["send", "scatter", "gather"])
async def test_whoever_is_no_neighbor_cannot_be_addressed(mesh: Any, verb: str) -> None:
    endpoints = await mesh.open(line(3), LAYOUTS)
    net = endpoints[0].begin(4)
    calls = {
        "send": lambda: net.send(2, Word("")),
        "scatter": lambda: net.scatter({1: Word(""), 2: Word("")}),
        "gather": lambda: net.gather(Word, of=[1, 2]),
    }
    with pytest.raises(NotANeighbor, match=r"peer 0 .* peer 2 in round 4"):
        await calls[verb]()
    assert endpoints[0].out == {}  # not even to those who are


async def test_views_of_the_mesh(mesh: Any) -> None:
    endpoints = await mesh.open(line(3), LAYOUTS)
    net = endpoints[1].begin(9)
    assert (net.me, net.t, net.peers) == (1, 9, 3)
    assert net.neighbors == net.sources == net.listeners == (0, 2)
    assert net.degrees == {0: 1, 1: 2, 2: 1}
    assert endpoints[0].begin(9).neighbors_of(2, 9) == (1,)


async def test_shared_draws_the_same_on_every_peer_and_afresh_each_round(mesh: Any) -> None:
    endpoints = await mesh.open(complete(3), LAYOUTS)
    drawn = np.array([[endpoint.begin(t).shared.random() for t in range(4)] for endpoint in endpoints])
    assert (drawn == drawn[0]).all()
    assert len(set(drawn[0])) == 4


# ---- allreduce


@pytest.mark.parametrize("topology", [line(4), line(1), star(5), star(5, hub=3), complete(5)], ids=str)
@pytest.mark.parametrize("op", ["mean", "sum"])
async def test_allreduce_gives_the_same_bits_everywhere(mesh: Any, topology: Topology, op: Any) -> None:
    endpoints = await mesh.open(topology, LAYOUTS)
    draw = torch.Generator().manual_seed(1)
    bodies = [
        Model({"w": torch.randn(2, 2, generator=draw), "b": torch.zeros(0)}, torch.tensor(me + 1))
        for me in range(topology.peers)
    ]

    async def talk(net: Net) -> Model:
        await hesitate((net.me, net.t))
        return await net.allreduce(bodies[net.me], op)

    outcomes = await together(endpoints, lambda endpoint: rounds(endpoint, 3, talk))
    first = outcomes[0][0]
    stacked = torch.stack([body.values["w"] for body in bodies])
    torch.testing.assert_close(first.values["w"], stacked.sum(0) if op == "sum" else stacked.mean(0))
    assert first.count == sum(range(1, topology.peers + 1)) / (topology.peers if op == "mean" else 1)
    for outcome in outcomes:
        for model in outcome:
            assert torch.equal(model.values["w"], first.values["w"])
            assert torch.equal(model.count, first.count)
    # Two messages per edge of the tree: one up, one down.
    sent = [sum(kinds["Model"][0] for kinds in endpoint.out.values()) for endpoint in endpoints]
    assert sum(sent) == 2 * (topology.peers - 1)


async def test_allreduce_leaves_the_senders_tensors_alone(mesh: Any) -> None:
    endpoints = await mesh.open(PAIR, LAYOUTS)
    mine = [vector(1, 2, 3), vector(5, 6, 7)]
    await together(endpoints, lambda endpoint: endpoint.begin(0).allreduce(mine[endpoint.me]))
    assert [body.x.tolist() for body in mine] == [[1, 2, 3], [5, 6, 7]]


async def test_allreduce_without_a_peer_that_stays_silent(mesh: Any) -> None:
    endpoints = await mesh.open(line(4), LAYOUTS, deadline=2.0)
    silent = endpoints.pop(3)
    outcomes = await together(endpoints, lambda endpoint: endpoint.begin(0).allreduce(vector(endpoint.me, 0, 0)))
    assert [outcome.x.tolist() for outcome in outcomes] == [[1, 0, 0]] * 3
    assert endpoints[2].missing == {"Vector": [3]}
    assert silent.out == {}


async def test_allreduce_of_a_body_that_is_not_all_tensors(mesh: Any) -> None:
    endpoints = await mesh.open(PAIR, LAYOUTS)
    with pytest.raises(NetError, match="Word must hold tensors only"):
        await endpoints[0].begin(0).allreduce(Word("text"))


# ---- those who are missing


async def test_whoever_misses_the_deadline_is_left_out_by_name(mesh: Any, eventually: Any) -> None:
    endpoints = await mesh.open(complete(4), LAYOUTS, deadline=0.25)
    net, one, _, three = (endpoint.begin(0) for endpoint in endpoints)
    await one.send(0, Word("in time"))
    await three.send(0, Word("in time"))
    await eventually(lambda: all((0, "Word", sender) in endpoints[0].mailbox for sender in (1, 3)))
    assert words(await net.gather(Word)) == {1: "in time", 3: "in time"}
    assert await net.gather(Vector) == {}
    assert endpoints[0].missing == {"Word": [2], "Vector": [1, 2, 3]}
    assert endpoints[0].waited >= 0.2


async def test_time_in_which_the_process_stood_still_does_not_count(mesh: Any, monkeypatch: Any) -> None:
    here, there = await mesh.open(PAIR, LAYOUTS, deadline=20)
    clock, stood_still = asyncio.get_running_loop().time, 0.0
    monkeypatch.setattr(asyncio.get_running_loop(), "time", lambda: clock() + stood_still)
    waiting = asyncio.create_task(here.begin(0).gather(Word))
    for _ in range(3):
        await asyncio.sleep(0.05)
        stood_still += 40
        await asyncio.sleep(0.05)
        assert not waiting.done()
    await there.begin(0).broadcast(Word("this was under way all the time"))
    assert words(await waiting) == {1: "this was under way all the time"}


async def test_a_deadline_that_has_moved_on_still_comes(monkeypatch: Any) -> None:
    clock, stood_still = asyncio.get_running_loop().time, 0.0
    monkeypatch.setattr(asyncio.get_running_loop(), "time", lambda: clock() + stood_still)
    deadline = Deadline(clock() + 3.0)
    happens = asyncio.get_running_loop().create_future()
    waiting = asyncio.create_task(deadline.allows(happens))
    await asyncio.sleep(0)
    stood_still = 40
    began = clock()
    assert await waiting is False
    assert clock() - began > 0.5
    assert happens.cancelled()


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
async def test_a_body_with_nan_or_infinity_counts_as_missing(mesh: Any, bad: float) -> None:
    endpoints = await mesh.open(complete(3), LAYOUTS)

    async def talk(net: Net) -> list[int]:
        await net.broadcast(vector(1, bad if net.me == 1 and net.t == 0 else 2, 3))
        return list(await net.gather(Vector))

    outcomes = await together(endpoints, lambda endpoint: rounds(endpoint, 1, talk))
    assert outcomes == [[[2]], [[0, 2]], [[0]]]
    for endpoint in (endpoints[0], endpoints[2]):
        assert endpoint.missing == endpoint.spoilt == {"Vector": [1]}
        assert endpoint.inn[1]["Vector"][:2] == [1, 12]  # it did come
    outcomes = await together(endpoints, lambda endpoint: rounds(endpoint, 1, talk, start=1))
    assert outcomes == [[[1, 2]], [[0, 2]], [[0, 1]]]
    assert all(endpoint.missing == endpoint.spoilt == {} for endpoint in endpoints)


async def test_a_sum_over_all_peers_goes_without_a_summand_that_is_not_finite(mesh: Any) -> None:
    endpoints = await mesh.open(line(3), LAYOUTS)
    last = 2

    async def talk(net: Net) -> list[float]:
        own = vector(*[float("nan") if net.me == last else 1.0] * 3)
        return (await net.allreduce(own, op="sum")).x.tolist()

    outcomes = await together(endpoints, lambda endpoint: rounds(endpoint, 1, talk))
    assert outcomes == [[[2.0] * 3]] * 3


async def test_those_waited_for_are_those_that_have_not_come(mesh: Any, eventually: Any) -> None:
    endpoints = await mesh.open(complete(4), LAYOUTS)
    seen: list[Callable[[], list[int]]] = []

    @contextlib.asynccontextmanager
    async def idle(waits_for: Callable[[], list[int]]) -> AsyncIterator[None]:
        seen.append(waits_for)
        yield

    endpoints[0].idle = idle
    net, *others = (endpoint.begin(0) for endpoint in endpoints)
    waiting = asyncio.create_task(net.gather(Word))
    await eventually(lambda: seen and seen[0]() == [1, 2, 3])
    await others[1].send(0, Word("second"))
    await eventually(lambda: seen[0]() == [1, 3])
    await others[0].send(0, Word("first"))
    await eventually(lambda: seen[0]() == [3])
    await others[2].send(0, Word("third"))
    assert list(await waiting) == [1, 2, 3]


async def test_one_deadline_holds_for_all_senders_together(mesh: Any, monkeypatch: Any) -> None:
    endpoints = await mesh.open(complete(6), LAYOUTS, deadline=0.3)
    missed: list[Deadline] = []

    class Noted(Deadline):
        async def allows(self, awaitable: Awaitable[Any]) -> bool:
            in_time = await super().allows(awaitable)
            missed.extend([self] * (not in_time))
            return in_time

    monkeypatch.setattr("p2pfl.net.Deadline", Noted)
    assert await endpoints[0].begin(0).gather(Word) == {}
    assert len(missed) == 1


async def test_a_peer_that_was_late_is_heard_again_in_the_next_round(mesh: Any) -> None:
    endpoints = await mesh.open(PAIR, LAYOUTS, deadline=0.1)
    here, there = endpoints
    assert await here.begin(0).gather(Word) == {}
    await here.finish(0)
    net = here.begin(1)
    await there.begin(0).send(0, Word("late"))
    await there.begin(1).send(0, Word("in time"))
    here.patience.deadline = 100
    assert words(await net.gather(Word)) == {1: "in time"}
    assert here.missing == {}
    assert here.mailbox.late == 1


async def test_a_failure_ends_waits_now_and_later(mesh: Any) -> None:
    endpoints = await mesh.open(PAIR, LAYOUTS)
    net = endpoints[0].begin(0)
    waiting = asyncio.create_task(net.gather(Word))
    await asyncio.sleep(0)
    endpoints[0].fail(RuntimeError("the mesh is broken"))
    with pytest.raises(RuntimeError, match="broken"):
        await waiting
    with pytest.raises(RuntimeError, match="broken"):
        await net.gather(Word)


# ---- who hears whom


def edges(endpoint: Endpoint) -> tuple[list[int], list[int]]:
    return sorted(endpoint.sources), sorted(endpoint.listeners)


async def test_listen_to_takes_effect_after_the_round_on_both_sides(mesh: Any) -> None:
    endpoints = await mesh.open(complete(3), LAYOUTS)

    async def talk(net: Net) -> dict[str, Any]:
        if net.me == 0 and net.t == 1:
            net.listen_to([1])
        before = net.sources, net.listeners
        heard = await net.exchange(Word(f"{net.me} in {net.t}"))
        assert (net.sources, net.listeners) == before  # not before the round's end
        return words(heard)

    outcomes = await together(endpoints, lambda endpoint: rounds(endpoint, 4, talk))
    assert [list(heard) for heard in outcomes[0]] == [[1, 2], [1, 2], [1], [1]]
    assert [list(heard) for heard in outcomes[1]] == [[0, 2]] * 4
    assert [list(heard) for heard in outcomes[2]] == [[0, 1]] * 4  # still hears 0
    assert [edges(endpoint) for endpoint in endpoints] == [([1], [1, 2]), ([0, 2], [0, 2]), ([0, 1], [1])]
    # The half-open edge says a bare header each round, and nothing else.
    assert endpoints[2].out[0].keys() == {"Listening"}
    assert endpoints[2].out[0] == endpoints[0].inn[2]
    assert endpoints[2].out[0]["Listening"][:2] == [1, 0]


async def test_an_edge_that_both_sides_drop_is_silent(mesh: Any) -> None:
    endpoints = await mesh.open(complete(3), LAYOUTS)

    async def talk(net: Net) -> None:
        if net.me == 0 and net.t == 0:
            net.listen_to([1])
        if net.me == 2 and net.t == 2:  # tells it in the Listening header
            net.listen_to([1])
        await net.exchange(Word("…"))

    await together(endpoints, lambda endpoint: rounds(endpoint, 3, talk))
    assert [edges(endpoint) for endpoint in endpoints] == [([1], [1]), ([0, 2], [0, 2]), ([1], [1])]
    await together(endpoints, lambda endpoint: rounds(endpoint, 4, talk, start=3))
    assert 2 not in endpoints[0].out
    assert 0 not in endpoints[2].out
    assert all(endpoint.missing == {} for endpoint in endpoints)


async def test_both_sides_may_drop_an_edge_in_the_same_round(mesh: Any) -> None:
    endpoints = await mesh.open(PAIR, LAYOUTS)

    async def talk(net: Net) -> dict[int, Word]:
        net.listen_to([])
        return await net.exchange(Word("the last"))

    outcomes = await together(endpoints, lambda endpoint: rounds(endpoint, 3, talk))
    assert [[len(heard) for heard in outcome] for outcome in outcomes] == [[1, 0, 0]] * 2


async def test_listen_to_after_the_last_message_of_a_round_holds_one_round_later(mesh: Any) -> None:
    endpoints = await mesh.open(PAIR, LAYOUTS)

    async def talk(net: Net) -> dict[int, Word]:
        heard = await net.exchange(Word("…"))
        if net.me == 0:
            net.listen_to([])
        return heard

    outcomes = await together(endpoints, lambda endpoint: rounds(endpoint, 4, talk))
    assert [[len(heard) for heard in outcome] for outcome in outcomes] == [[1, 1, 0, 0], [1, 1, 1, 1]]


async def test_whoever_stopped_listening_cannot_be_addressed(mesh: Any) -> None:
    endpoints = await mesh.open(PAIR, LAYOUTS)

    async def talk(net: Net) -> None:
        if net.me == 0:
            net.listen_to([])
        await net.exchange(Word("…"))

    await together(endpoints, lambda endpoint: rounds(endpoint, 1, talk))
    with pytest.raises(NotANeighbor, match="peer 1 cannot send to peer 0 in round 1: it stopped listening"):
        await endpoints[1].begin(1).send(0, Word("hello?"))
    with pytest.raises(NotANeighbor, match="peer 0 does not hear peer 1 in round 1"):
        await endpoints[0].begin(1).gather(Word, of=[1])


async def test_a_stop_that_misses_the_deadline_is_still_understood(mesh: Any, eventually: Any) -> None:
    """Otherwise the one waits for Listening, to the deadline and in every round, of the other, which sends on."""
    endpoints = await mesh.open(PAIR, LAYOUTS, deadline=0.1)
    here, there = endpoints
    assert await there.begin(0).gather(Word) == {}
    await there.finish(0)
    there.begin(1)
    net = here.begin(0)
    net.listen_to([])
    await net.broadcast(Word("this comes late"))
    await eventually(lambda: there.mailbox.late == 1)
    await here.finish(0)
    await there.finish(1)
    assert edges(here) == ([], [1])
    assert edges(there) == ([0], [])


async def test_a_stop_is_understood_of_one_whose_numbers_fell_behind() -> None:
    """It came back from a checkpoint of before it had left out rounds."""
    endpoint = Endpoint(0, PAIR, RUN_ID, 5, LAYOUTS)
    for t, seq, flags in ((3, 3 * SEQUENCES, 0), (4, 7, wire.STOP)):
        endpoint.begin(t)
        endpoint.accept(endpoint.decode(wire.encode(Word("…")).to(RUN_ID, t, 1, seq, flags), 1))
        await endpoint.take(Word.kind(), [1], t)
        await endpoint.finish(t)
    assert edges(endpoint) == ([1], [])


async def test_state_goes_on_in_another_endpoint(mesh: Any, tmp_path: Path) -> None:
    endpoints = await mesh.open(complete(3), LAYOUTS)

    async def talk(net: Net) -> None:
        if net.me == 0:
            net.listen_to([1])
        await net.exchange(Word("…"))

    await together(endpoints, lambda endpoint: rounds(endpoint, 2, talk))
    states = [endpoint.state_dict() for endpoint in endpoints]
    await mesh.close()
    again = await mesh.open(complete(3), LAYOUTS)
    for endpoint, state in zip(again, states, strict=True):
        endpoint.load_state_dict(state)
    assert [edges(endpoint) for endpoint in again] == [edges(endpoint) for endpoint in endpoints]
    heard = await together(again, lambda endpoint: endpoint.begin(2).exchange(Word("…")))
    assert [list(one) for one in heard] == [[1], [0, 2], [0, 1]]
    assert [endpoint.state_dict()["sequence"] for endpoint in again] == [{1: 3, 2: 3}, {0: 3, 2: 3}, {0: 2, 1: 3}]


# ---- equal runs send equal messages


async def conversation(endpoint: Endpoint, seed: int) -> list[tuple[Any, Counts, Counts]]:
    """Some rounds in which peers exchange, stop listening, scatter and reduce as the seed has it."""
    record = []
    for t in range(6):
        net = endpoint.begin(t)
        choice = random.Random(f"{seed} {net.me} {t}")
        await hesitate((seed, net.me, t))
        heard: list[Any] = []
        if choice.random() < 0.4:
            net.listen_to(j for j in net.sources if choice.random() < 0.7)
        heard.append([(j, body.x.tolist()) for j, body in (await net.exchange(vector(net.me, t, seed))).items()])
        if t % 2:
            await net.scatter({j: Word(f"{net.me}→{j}") for j in net.listeners})
            if choice.random() < 0.4:
                net.listen_to(j for j in net.sources if choice.random() < 0.7)
            heard.append(list(words(await net.gather(Word)).items()))
        if t % 3 == 2:
            reduced = await net.allreduce(Vector(torch.full((3,), 0.1) * (net.me + 1)))
            heard.append(reduced.x.tolist())
        await endpoint.finish(t)
        assert endpoint.missing == {}
        record.append((heard, endpoint.out, endpoint.inn))
    return record


@pytest.mark.parametrize("seed", range(4))
async def test_a_conversation_is_the_same_over_any_link_and_with_any_delays(
    mesh: Any, tmp_path: Path, seed: int
) -> None:
    peers = 6
    pairs = [(i, j) for i in range(peers) for j in range(i)]
    draw = random.Random(seed)
    topology = Topology.from_edges(peers, [*((i, i + 1) for i in range(peers - 1)), *draw.sample(pairs, 5)])
    endpoints = await mesh.open(topology, LAYOUTS, jitter=0.01)
    records = await together(endpoints, lambda endpoint: conversation(endpoint, seed))

    for t in range(6):  # both ends of each edge count the same
        for i, j in [*topology.edges, *((j, i) for i, j in topology.edges)]:
            assert records[i][t][1].get(j, {}) == records[j][t][2].get(i, {})

    hub, plain = LocalHub(), [mesh.endpoint(me, topology, LAYOUTS) for me in range(peers)]
    for endpoint in plain:
        hub.join(endpoint)
    assert await together(plain, lambda endpoint: conversation(endpoint, seed)) == records


async def test_counts_are_messages_payload_and_header(mesh: Any) -> None:
    here, there = await mesh.open(PAIR, LAYOUTS)
    net, other = here.begin(0), there.begin(0)
    await net.broadcast(vector(1, 2, 3))
    await net.broadcast(vector(4, 5, 6))
    for _ in range(2):
        await other.gather(Vector)
    messages, payload, header = here.out[1]["Vector"]
    assert (messages, payload) == (2, 24)
    assert 40 < header / 2 < 80
    assert there.inn == {0: here.out[1]}
    assert here.inn == there.out == {}


# ---- no memory in common


async def test_tensors_are_never_shared(mesh: Any) -> None:
    endpoints = await mesh.open(star(3), LAYOUTS)
    net, one, two = (endpoint.begin(0) for endpoint in endpoints)
    mine = torch.tensor([1.0, 2.0, 3.0])
    await net.broadcast(Vector(mine))
    mine.zero_()  # training goes on
    first, second = (await one.gather(Vector))[0].x, (await two.gather(Vector))[0].x
    assert first.tolist() == second.tolist() == [1.0, 2.0, 3.0]
    first.fill_(9.0)
    assert second.tolist() == [1.0, 2.0, 3.0]
    assert mine.tolist() == [0.0, 0.0, 0.0]


async def test_what_arrives_is_stowed_before_it_is_taken(mesh: Any, eventually: Any) -> None:
    here, there = await mesh.open(PAIR, LAYOUTS)
    stowed: list[Body] = []

    def stow(body: Body) -> Body:
        stowed.append(body)
        return Word("stowed") if isinstance(body, Word) else body

    there.stow = stow
    net, other = here.begin(0), there.begin(0)
    await net.broadcast(Word("hello"))
    await net.broadcast(vector(1, 2, 3))
    await eventually(lambda: len(stowed) == 2)
    assert stowed[0] == Word("hello")
    assert (await other.gather(Word))[0].text == "stowed"
    assert (await other.gather(Vector))[0].x.tolist() == [1.0, 2.0, 3.0]
    assert there.inn == {0: here.out[1]}  # what travelled counts, not what was kept


# ---- one process alone


@pytest.fixture
def hub() -> LocalHub:
    return LocalHub()


def joined(hub: LocalHub, topology: Topology) -> list[Endpoint]:
    endpoints = [Endpoint(me, topology, "0" * 16, 0, LAYOUTS) for me in range(topology.peers)]
    for endpoint in endpoints:
        hub.join(endpoint)
    return endpoints


async def test_a_deadlock_names_who_waits_for_whom(hub: LocalHub) -> None:
    endpoints = joined(hub, PAIR)
    outcomes = await asyncio.gather(
        *(endpoint.begin(3).gather(Word) for endpoint in endpoints), return_exceptions=True
    )
    for outcome in outcomes:
        assert isinstance(outcome, Deadlock)
        assert (
            str(outcome) == "peer 0 waits for Word of peer 1 in round 3; peer 1 waits for Word of peer 0 in round 3"
        )


async def test_waiting_for_a_peer_that_has_finished_is_a_deadlock(hub: LocalHub) -> None:
    endpoints = joined(hub, complete(3))
    waiting = asyncio.gather(*(e.begin(0).gather(Word) for e in endpoints[:2]), return_exceptions=True)
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert not waiting.done()  # peer 2 may still speak
    hub.finish(2)
    assert all(isinstance(outcome, Deadlock) for outcome in await waiting)


async def test_waiting_is_no_deadlock_while_a_peer_can_go_on(hub: LocalHub) -> None:
    endpoints = joined(hub, line(4))

    async def relay(endpoint: Endpoint) -> str:
        net = endpoint.begin(0)
        text = "start" if net.me == 0 else words(await net.gather(Word, of=[net.me - 1]))[net.me - 1]
        if net.me < 3:
            await net.send(net.me + 1, Word(f"{text} {net.me}"))
        return text

    assert await together(list(reversed(endpoints)), relay) == ["start 0 1 2", "start 0 1", "start 0", "start"]


async def test_a_body_that_no_peer_takes_is_the_senders_error_in_one_process(hub: LocalHub) -> None:
    endpoints = joined(hub, PAIR)
    with pytest.raises(Unexpected, match=r"x is float32\[4\] instead of float32\[3\]"):
        await endpoints[0].begin(0).broadcast(vector(1, 2, 3, 4))
