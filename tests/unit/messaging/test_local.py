"""All peers in one process: copies, sums, and deadlocks that are found."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch

from p2pfl.errors import Deadlock, Unexpected
from p2pfl.messaging.control import Id
from p2pfl.messaging.endpoint import Endpoint
from p2pfl.messaging.local import LocalHub
from p2pfl.messaging.topology import Topology
from tests.bodies import LAYOUTS, PAIR, RUN_ID, Word, complete, line, texts, vector


@pytest.fixture
def hub() -> LocalHub:
    return LocalHub()


def join(hub: LocalHub, topology: Topology) -> list[Endpoint]:
    endpoints = [Endpoint(me, topology, RUN_ID, 0, LAYOUTS) for me in range(topology.peers)]
    for endpoint in endpoints:
        hub.join(endpoint)
    return endpoints


async def test_a_deadlock_error_names_the_waiting_peers(hub: LocalHub) -> None:
    endpoints = join(hub, PAIR)
    outcomes = await asyncio.gather(
        *(endpoint.begin(3).gather(Word) for endpoint in endpoints), return_exceptions=True
    )
    for outcome in outcomes:
        assert isinstance(outcome, Deadlock)
        expected = "peer 0 waits for Word of peer 1 in round 3; peer 1 waits for Word of peer 0 in round 3"
        assert str(outcome) == expected


async def test_waiting_for_a_peer_that_has_finished_is_a_deadlock(hub: LocalHub) -> None:
    endpoints = join(hub, complete(3))
    waiting = asyncio.gather(*(e.begin(0).gather(Word) for e in endpoints[:2]), return_exceptions=True)
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert not waiting.done()  # peer 2 may still send
    hub.finish(2)
    assert all(isinstance(outcome, Deadlock) for outcome in await waiting)


async def test_no_deadlock_is_reported_while_a_peer_can_continue(hub: LocalHub) -> None:
    async def relay(endpoint: Endpoint) -> str:
        net = endpoint.begin(0)
        text = "start" if net.me == 0 else texts(await net.gather(Word, of=[net.me - 1]))[net.me - 1]
        if net.me < 3:
            await net.send(net.me + 1, Word(f"{text} {net.me}"))
        return text

    outcomes = await asyncio.gather(*map(relay, reversed(join(hub, line(4)))))
    assert outcomes == ["start 0 1 2", "start 0 1", "start 0", "start"]


async def test_in_one_process_a_body_without_a_layout_raises_at_the_sender(hub: LocalHub) -> None:
    endpoints = join(hub, PAIR)
    with pytest.raises(Unexpected, match=r"x must be float32\[3\], got float32\[4\]"):
        await endpoints[0].begin(0).broadcast(vector(1, 2, 3, 4))


async def test_in_one_process_bodies_are_copies_and_the_journal_stays_empty(hub: LocalHub) -> None:
    endpoints = join(hub, complete(3))
    body = vector(1, 2, 3)
    await endpoints[0].begin(0).broadcast(body)
    received = [await endpoint.take("Vector", [0], 0) for endpoint in endpoints[1:]]
    tensors: list[Any] = [message[0].body for message in received]
    tensors[0].x.zero_()
    assert torch.equal(tensors[1].x, body.x)
    assert endpoints[0].journal.after(1, Id(0, 0)) is None


async def test_the_mean_of_an_allreduce_counts_every_peer_once(hub: LocalHub) -> None:
    endpoints = join(hub, line(4))
    totals = await asyncio.gather(*(each.begin(0).allreduce(vector(each.me, 0, 8)) for each in endpoints))
    assert [total.x.tolist() for total in totals] == [[1.5, 0.0, 8.0]] * 4
    sent = [counts["Vector"][0] for endpoint in endpoints for counts in endpoint.sent.values()]
    assert sent == [1] * 6
