"""Net, Endpoint and Mailbox over every kind of link: local, mapped, TCP, encrypted."""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from p2pfl.errors import BodyTooLarge, HeaderTooLarge, Unexpected
from p2pfl.messaging import wire
from p2pfl.messaging.conversation import Conversation
from p2pfl.messaging.endpoint import Endpoint
from p2pfl.messaging.inbox import MessageCounts
from p2pfl.messaging.neighborhood import Neighborhood
from p2pfl.messaging.net import Net
from p2pfl.messaging.schema import MAX_HEADER, Body, Layout
from p2pfl.messaging.topology import Topology
from p2pfl.simulation.local_link import LocalHub
from tests import bodies
from tests.bodies import PAIR, RUN_ID, Vector, Word, complete, line, round_of, star, texts, vector
from tests.mesh_fixtures import run_all, run_rounds, yield_randomly


@dataclass(frozen=True)
class Model(Body):
    values: dict[str, Tensor]
    count: Tensor


LAYOUTS = [
    *bodies.LAYOUTS,
    Layout.of(Model({"w": torch.zeros(2, 2), "b": torch.zeros(0)}, torch.tensor(0))),
]


async def test_messages_of_one_sender_and_kind_keep_their_order(mesh: Any) -> None:
    here, there = await mesh.open(PAIR, LAYOUTS)
    net, other = round_of(here, 0), round_of(there, 0)
    for number in range(40):
        await other.send(0, Word(str(number)))
        await other.send(0, vector(number, 0, 0))
    vectors = [float((await net.gather(Vector))[1].x[0]) for _ in range(40)]
    words = [texts(await net.gather(Word))[1] for _ in range(40)]
    assert vectors == list(range(40))
    assert words == list(map(str, range(40)))


async def test_a_body_that_all_receivers_would_drop_is_refused_by_its_sender(mesh: Any) -> None:
    here, _ = await mesh.open(PAIR, LAYOUTS)
    net = round_of(here, 0)
    for sending in (net.exchange, net.broadcast, net.publish):
        with pytest.raises(Unexpected, match=r"^Vector: x must be float32\[3\], got float32\[2\]$"):
            await sending(vector(1, 2))
    assert here.sent == {}


@pytest.mark.parametrize("mesh", ["local", "tcp"], indirect=True)
async def test_a_header_that_all_receivers_would_drop_is_refused_by_its_sender(mesh: Any) -> None:
    there, here = await mesh.open(PAIR, LAYOUTS)
    net = round_of(here, 0)
    largest = 2 * MAX_HEADER - len(wire.encode(Word("x" * MAX_HEADER)).header)
    long, longest = Word("x" * (largest + 1)), Word("x" * largest)
    attempts: list[Callable[[], Awaitable[object]]] = [
        partial(net.send, 0, long),
        partial(net.scatter, {0: long}),
        partial(net.broadcast, long),
        partial(net.broadcast, long, to=[0]),
        partial(net.publish, long),
    ]
    for attempt in attempts:
        with pytest.raises(HeaderTooLarge, match=rf"^Word cannot be sent: its header has {MAX_HEADER + 1} bytes"):
            await attempt()
    named = Model({str(number): torch.zeros(0) for number in range(MAX_HEADER // 10)}, torch.tensor(0))
    with pytest.raises(
        HeaderTooLarge, match=r"^Model cannot be sent: its header has .* concatenate many small tensors$"
    ):
        await net.allreduce(named)
    assert here.sent == {}
    assert HeaderTooLarge.exit_code == BodyTooLarge.exit_code, "the launcher restarts no such peer"
    await net.send(0, longest)
    assert texts(await round_of(there, 0).gather(Word)) == {1: longest.text}


@pytest.mark.parametrize("topology", [line(4), line(1), star(5), star(5, hub=3), complete(5)], ids=str)
@pytest.mark.parametrize("op", ["mean", "sum"])
async def test_allreduce_is_bit_identical_on_every_peer(mesh: Any, topology: Topology, op: Any) -> None:
    endpoints = await mesh.open(topology, LAYOUTS)
    draw = torch.Generator().manual_seed(1)
    bodies = [
        Model({"w": torch.randn(2, 2, generator=draw), "b": torch.zeros(0)}, torch.tensor(me + 1))
        for me in range(topology.peers)
    ]

    async def one_round(net: Net) -> Model:
        await yield_randomly((net.me, net.t))
        return await net.allreduce(bodies[net.me], op)

    outcomes = await run_all(endpoints, lambda endpoint: run_rounds(endpoint, 3, one_round))
    stacked = torch.stack([body.values["w"] for body in bodies])
    for model in (model for outcome in outcomes for model in outcome):
        torch.testing.assert_close(model.values["w"], stacked.sum(0) if op == "sum" else stacked.mean(0))
        assert torch.equal(model.values["w"], outcomes[0][0].values["w"])
        assert model.count == sum(range(1, topology.peers + 1)) / (topology.peers if op == "mean" else 1)
    assert [body.count for body in bodies] == list(range(1, topology.peers + 1))  # not modified
    # Two messages per edge of the tree: one up, one down.
    sent = [sum(kinds["Model"][0] for kinds in endpoint.sent.values()) for endpoint in endpoints]
    assert sum(sent) == 2 * (topology.peers - 1)


@pytest.mark.parametrize("receives", [(True, True), (True, False), (False, True), (False, False)])
async def test_peers_that_disagree_on_an_edge_do_not_wait_for_deadlines(
    receives: tuple[bool, bool], mesh: Any
) -> None:
    """Each takes the other for a receiver of the last state that it knows; both have rolled back separately."""
    endpoints = await mesh.open(PAIR, LAYOUTS, deadline=600.0, prunes=True)
    for endpoint, here, there in zip(endpoints, receives, reversed(receives), strict=True):
        endpoint._directions.sources = {1 - endpoint.me} if here else set()
        endpoint._directions.state(1 - endpoint.me, 0, [] if there else [endpoint.me])  # the opposite of the truth

    async def one_round(net: Net) -> list[int]:
        return list(await net.exchange(Word("…")))

    await run_all(endpoints, lambda endpoint: run_rounds(endpoint, 4, one_round))
    for endpoint, here in zip(endpoints, receives, strict=True):
        assert endpoint.missing == {} or here
        assert endpoint.waits.seconds < 60


async def random_program(endpoint: Endpoint, seed: int) -> list[tuple[Any, MessageCounts, MessageCounts]]:
    """Rounds that exchange, drop edges, scatter and reduce as drawn from the seed."""
    record = []
    for t in range(6):
        net = round_of(endpoint, t)
        choice = random.Random(f"{seed} {net.me} {t}")
        await yield_randomly((seed, net.me, t))
        received: list[Any] = []
        if choice.random() < 0.4:
            net.receive_only_from(j for j in net.sources if choice.random() < 0.7)
        exchanged = await net.exchange(vector(net.me, t, seed))
        assert list(exchanged) == sorted(exchanged)
        received.append([(j, body.x.tolist()) for j, body in exchanged.items()])
        if t % 2:
            await net.scatter({j: Word(f"{net.me}→{j}") for j in net.receivers})
            if choice.random() < 0.4:
                net.receive_only_from(j for j in net.sources if choice.random() < 0.7)
            received.append(list(texts(await net.gather(Word)).items()))
        if t % 3 == 2:
            reduced = await net.allreduce(Vector(torch.full((3,), 0.1) * (net.me + 1)))
            received.append(reduced.x.tolist())
        endpoint.finish(t)
        assert endpoint.missing == {}
        record.append((received, endpoint.sent, endpoint.received))
    return record


@pytest.mark.parametrize("seed", range(4))
async def test_equal_programs_send_equal_messages_over_any_link_and_with_any_delays(mesh: Any, seed: int) -> None:
    peers = 6
    pairs = [(i, j) for i in range(peers) for j in range(i)]
    draw = random.Random(seed)
    topology = Topology.from_edges(peers, [*((i, i + 1) for i in range(peers - 1)), *draw.sample(pairs, 5)])
    endpoints = await mesh.open(topology, LAYOUTS, prunes=True, faults={"jitter": 0.01})
    records = await run_all(endpoints, lambda endpoint: random_program(endpoint, seed))

    for t in range(6):  # both ends of each edge count the same bytes
        for i, j in [*topology.edges, *((j, i) for i, j in topology.edges)]:
            assert records[i][t][1].get(j, {}) == records[j][t][2].get(i, {})

    hub, conversation = LocalHub(), Conversation(LAYOUTS, prunes=True)
    plain = [Endpoint(Neighborhood(me, topology), RUN_ID, conversation) for me in range(peers)]
    for endpoint in plain:
        hub.join(endpoint)
    for endpoint in plain:
        endpoint.open(0)
    assert await run_all(plain, lambda endpoint: random_program(endpoint, seed)) == records


async def test_peers_share_no_tensor_memory(mesh: Any) -> None:
    endpoints = await mesh.open(star(3), LAYOUTS)
    net, one, two = (round_of(endpoint, 0) for endpoint in endpoints)
    mine = torch.tensor([1.0, 2.0, 3.0])
    await net.broadcast(Vector(mine))
    mine.zero_()  # training continues
    first, second = (await one.gather(Vector))[0].x, (await two.gather(Vector))[0].x
    assert first.tolist() == second.tolist() == [1.0, 2.0, 3.0]
    first.fill_(9.0)
    assert second.tolist() == [1.0, 2.0, 3.0]
    assert mine.tolist() == [0.0, 0.0, 0.0]


async def test_on_receive_replaces_bodies_as_they_arrive(mesh: Any, eventually: Any) -> None:
    here, there = await mesh.open(PAIR, LAYOUTS)
    arrived: list[Body] = []

    def on_receive(body: Body) -> Body:
        arrived.append(body)
        return Word("replaced") if isinstance(body, Word) else body

    there.on_receive = on_receive
    net, other = round_of(here, 0), round_of(there, 0)
    await net.broadcast(Word("hello"))
    await net.broadcast(vector(1, 2, 3))
    await eventually(lambda: len(arrived) == 2)
    assert arrived[0] == Word("hello")
    assert (await other.gather(Word))[0].text == "replaced"
    assert (await other.gather(Vector))[0].x.tolist() == [1.0, 2.0, 3.0]
    assert there.received == {0: here.sent[1]}  # counts what was sent, not its replacement


async def test_on_receive_may_modify_bodies_in_place(mesh: Any) -> None:
    here, there = await mesh.open(PAIR, LAYOUTS)

    def on_receive(body: Body) -> Body:
        assert isinstance(body, Vector)
        body.x.mul_(2)
        return body

    there.on_receive = on_receive
    await round_of(here, 0).broadcast(vector(1, 2, 3))
    assert (await round_of(there, 0).gather(Vector))[0].x.tolist() == [2.0, 4.0, 6.0]
