"""Net and Endpoint in one process. What depends on the link is in tests/sockets/test_net.py."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import numpy as np
import pytest

from p2pfl.errors import NetError, NotANeighbor
from p2pfl.messaging.deadline import Deadline
from p2pfl.messaging.endpoint import Endpoint
from p2pfl.messaging.net import Net
from tests.bodies import LAYOUTS, PAIR, Word, complete, line, star, texts, vector
from tests.mesh_fixtures import run_all, run_rounds


async def test_gather_is_ascending_whatever_the_order_of_arrival(local: Any) -> None:
    endpoints = await local.open(star(6), LAYOUTS)
    net, *others = (endpoint.begin(0) for endpoint in endpoints)
    for other in random.sample(others, len(others)):
        await other.send(0, Word(f"from {other.me}"))
    assert list(texts(await net.gather(Word)).items()) == [(j, f"from {j}") for j in range(1, 6)]


async def test_exchange_among_some_peers_reaches_every_peer(local: Any) -> None:
    endpoints = await local.open(complete(4), LAYOUTS)

    async def program(endpoint: Endpoint) -> dict[int, str]:
        return texts(await endpoint.begin(0).exchange(Word(f"from {endpoint.me}"), among=[3, 1]))

    received = await run_all(endpoints, program)
    assert [list(bodies) for bodies in received] == [[1, 3], [3], [1, 3], [1]]
    assert [len(endpoint.sent) for endpoint in endpoints] == [0, 3, 0, 3]


async def test_patience_multiplies_the_deadline_of_a_gather(local: Any) -> None:
    endpoints = await local.open(PAIR, LAYOUTS, deadline=0.05)
    net = endpoints[0].begin(0)
    loop = asyncio.get_running_loop()
    for patience in (1.0, 4.0):
        for answers in (net.gather(Word, patience=patience), net.exchange(Word("?"), patience=patience)):
            began = loop.time()
            assert await answers == {}
            assert loop.time() - began >= 0.05 * patience


async def test_gather_of_some_sources(local: Any) -> None:
    endpoints = await local.open(complete(4), LAYOUTS)
    net, *others = (endpoint.begin(0) for endpoint in endpoints)
    await others[0].send(0, Word("one"))
    await others[2].send(0, Word("three"))
    assert texts(await net.gather(Word, of=[3, 1])) == {1: "one", 3: "three"}
    assert await net.gather(Word, of=[]) == {}
    assert endpoints[0].missing == {}


async def test_scatter_sends_a_different_body_to_each(local: Any) -> None:
    endpoints = await local.open(star(4), LAYOUTS)
    net, *others = (endpoint.begin(0) for endpoint in endpoints)
    await net.scatter({3: Word("to 3"), 1: Word("to 1")})
    assert texts(await others[0].gather(Word)) == {0: "to 1"}
    assert texts(await others[2].gather(Word)) == {0: "to 3"}
    assert sorted(endpoints[0].sent) == [1, 3]


async def test_broadcast_reaches_neighbors_only(local: Any) -> None:
    endpoints = await local.open(line(3), LAYOUTS)
    nets = [endpoint.begin(0) for endpoint in endpoints]
    await nets[0].broadcast(Word("hello"))
    assert texts(await nets[1].gather(Word, of=[0])) == {0: "hello"}
    assert list(endpoints[0].sent) == [1]


@pytest.mark.parametrize("verb", ["send", "scatter", "gather"])
async def test_peers_that_are_not_neighbors_are_rejected(local: Any, verb: str) -> None:
    endpoints = await local.open(line(3), LAYOUTS)
    net = endpoints[0].begin(4)
    calls = {
        "send": lambda: net.send(2, Word("")),
        "scatter": lambda: net.scatter({1: Word(""), 2: Word("")}),
        "gather": lambda: net.gather(Word, of=[1, 2]),
    }
    with pytest.raises(NotANeighbor, match=r"peer 0 .* peer 2 in round 4"):
        await calls[verb]()
    assert endpoints[0].sent == {}  # not even to the neighbor in the list


async def test_net_describes_the_graph(local: Any) -> None:
    endpoints = await local.open(line(3), LAYOUTS)
    net = endpoints[1].begin(9)
    assert (net.me, net.t, net.peers) == (1, 9, 3)
    assert net.neighbors == net.sources == net.receivers == (0, 2)
    assert net.degrees == {0: 1, 1: 2, 2: 1}
    assert endpoints[0].begin(9).neighbors_of(2, 9) == (1,)


async def test_shared_draws_the_same_on_every_peer_and_anew_each_round(local: Any) -> None:
    endpoints = await local.open(complete(3), LAYOUTS)
    drawn = np.array([[endpoint.begin(t).shared.random() for t in range(4)] for endpoint in endpoints])
    assert (drawn == drawn[0]).all()
    assert len(set(drawn[0])) == 4


# ---- allreduce


async def test_allreduce_does_not_modify_its_input(local: Any) -> None:
    endpoints = await local.open(PAIR, LAYOUTS)
    mine = [vector(1, 2, 3), vector(5, 6, 7)]
    await run_all(endpoints, lambda endpoint: endpoint.begin(0).allreduce(mine[endpoint.me]))
    assert [body.x.tolist() for body in mine] == [[1, 2, 3], [5, 6, 7]]


async def test_allreduce_omits_a_peer_that_sends_nothing(local: Any) -> None:
    endpoints = await local.open(line(4), LAYOUTS, deadline=1.0)
    silent = endpoints.pop(3)
    outcomes = await run_all(endpoints, lambda endpoint: endpoint.begin(0).allreduce(vector(endpoint.me, 0, 0)))
    assert [outcome.x.tolist() for outcome in outcomes] == [[1, 0, 0]] * 3
    assert endpoints[2].missing == {"Vector": [3]}
    assert silent.sent == {}


async def test_allreduce_omits_a_body_that_is_not_finite(local: Any) -> None:
    endpoints = await local.open(line(3), LAYOUTS)
    last = 2

    async def one_round(net: Net) -> list[float]:
        summand = vector(*[float("nan") if net.me == last else 1.0] * 3)
        return (await net.allreduce(summand, op="sum")).x.tolist()

    outcomes = await run_all(endpoints, lambda endpoint: run_rounds(endpoint, 1, one_round))
    assert outcomes == [[[2.0] * 3]] * 3


async def test_allreduce_rejects_a_body_with_plain_fields(local: Any) -> None:
    endpoints = await local.open(PAIR, LAYOUTS)
    with pytest.raises(NetError, match="Word must hold tensors only"):
        await endpoints[0].begin(0).allreduce(Word("text"))


# ---- missing peers


async def test_deadlines_ignore_time_in_which_the_process_was_suspended(local: Any, monkeypatch: Any) -> None:
    here, there = await local.open(PAIR, LAYOUTS, deadline=20)
    clock, suspended = asyncio.get_running_loop().time, 0.0
    monkeypatch.setattr(asyncio.get_running_loop(), "time", lambda: clock() + suspended)
    waiting = asyncio.create_task(here.begin(0).gather(Word))
    for _ in range(3):
        await asyncio.sleep(0.05)
        suspended += 40
        await asyncio.sleep(0.05)
        assert not waiting.done()
    await there.begin(0).broadcast(Word("in flight all the time"))
    assert texts(await waiting) == {1: "in flight all the time"}


async def test_idle_receives_the_peers_still_missing(local: Any, eventually: Any) -> None:
    endpoints = await local.open(complete(4), LAYOUTS)
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


async def test_one_deadline_covers_all_senders(local: Any, monkeypatch: Any) -> None:
    endpoints = await local.open(complete(6), LAYOUTS, deadline=0.3)
    passed: list[Deadline] = []

    class Recorded(Deadline):
        async def allows(self, awaitable: Awaitable[Any]) -> bool:
            in_time = await super().allows(awaitable)
            passed.extend([self] * (not in_time))
            return in_time

    monkeypatch.setattr("p2pfl.messaging.mailbox.Deadline", Recorded)
    assert await endpoints[0].begin(0).gather(Word) == {}
    assert len(passed) == 1


async def test_a_late_peer_takes_part_in_the_next_round(local: Any) -> None:
    endpoints = await local.open(PAIR, LAYOUTS, deadline=0.1)
    here, there = endpoints
    assert await here.begin(0).gather(Word) == {}
    here.finish(0)
    net = here.begin(1)
    await there.begin(0).send(0, Word("late"))
    await there.begin(1).send(0, Word("in time"))
    here.wait_policy.deadline = 100
    assert texts(await net.gather(Word)) == {1: "in time"}
    assert here.missing == {}
    assert here.mailbox.expired == 1


async def test_a_failure_ends_waits_now_and_later(local: Any) -> None:
    endpoints = await local.open(PAIR, LAYOUTS)
    net = endpoints[0].begin(0)
    waiting = asyncio.create_task(net.gather(Word))
    await asyncio.sleep(0)
    endpoints[0].fail(RuntimeError("the mesh is broken"))
    with pytest.raises(RuntimeError, match="broken"):
        await waiting
    with pytest.raises(RuntimeError, match="broken"):
        await net.gather(Word)


# ---- sources and receivers


async def test_both_sides_can_drop_an_edge_in_the_same_round(local: Any) -> None:
    endpoints = await local.open(PAIR, LAYOUTS, prunes=True)

    async def one_round(net: Net) -> dict[int, Word]:
        net.receive_only_from([])
        return await net.exchange(Word("the last"))

    outcomes = await run_all(endpoints, lambda endpoint: run_rounds(endpoint, 3, one_round))
    assert [[len(received) for received in outcome] for outcome in outcomes] == [[1, 0, 0]] * 2


async def test_receive_only_from_after_the_last_message_takes_effect_in_the_next_round(local: Any) -> None:
    endpoints = await local.open(PAIR, LAYOUTS, prunes=True)

    async def one_round(net: Net) -> dict[int, Word]:
        received = await net.exchange(Word("…"))
        if net.me == 0:
            net.receive_only_from([])
        return received

    outcomes = await run_all(endpoints, lambda endpoint: run_rounds(endpoint, 4, one_round))
    assert [[len(received) for received in outcome] for outcome in outcomes] == [[1, 0, 0, 0], [1, 1, 1, 1]]


async def test_a_dropped_edge_rejects_messages_on_both_sides(local: Any) -> None:
    endpoints = await local.open(PAIR, LAYOUTS, prunes=True)

    async def one_round(net: Net) -> None:
        if net.me == 0:
            net.receive_only_from([])
        await net.exchange(Word("…"))

    await run_all(endpoints, lambda endpoint: run_rounds(endpoint, 1, one_round))
    with pytest.raises(NotANeighbor, match="peer 1 cannot send to peer 0 in round 1: it stopped receiving"):
        await endpoints[1].begin(1).send(0, Word("hello?"))
    with pytest.raises(NotANeighbor, match="peer 0 does not receive from peer 1 in round 1"):
        await endpoints[0].begin(1).gather(Word, of=[1])
