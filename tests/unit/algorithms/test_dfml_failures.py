"""DFML with dead, late and diverged peers: who keeps which model, and who waits for whom."""

from __future__ import annotations

import asyncio
import copy
import math
from collections.abc import Mapping

import numpy as np
import pytest
import torch

from p2pfl.messaging.conversation import Conversation
from p2pfl.messaging.deadline import WaitPolicy
from p2pfl.messaging.endpoint import Endpoint
from p2pfl.messaging.neighborhood import Neighborhood
from p2pfl.models import Model
from p2pfl.simulation.local_link import LocalHub
from p2pfl.tensors import digest, has_diverged
from tests.bodies import RUN_ID, complete, round_of
from tests.dfml_reference import Reference, agree, assignments, hyper, make, run_reference, train_reference, values
from tests.support import run_rounds


@pytest.mark.exhaustive
def test_dead_sender_is_skipped() -> None:
    h = hyper(participation=1.0)
    peers = make(h)
    expected = [Reference(peer) for peer in peers]
    traffic = run_rounds(peers, complete(4), 6, silent=[3])
    run_reference(expected, assignments(peers, complete(4), 6), h, dead=[3])
    agree(peers, expected, alive=[0, 1, 2])
    assert traffic[0][0].missing == {"Pupil": [3]}
    assert peers[0].diagnostics()["alpha"] == h.alpha_at(5)


def test_sender_keeps_model_and_peak_if_aggregator_is_dead() -> None:
    h = hyper(participation=1.0, fixed_aggregator=True)
    peers = make(h)
    expected = [Reference(peer) for peer in peers]
    peak = digest(peers[2].peak.state_dict())
    traffic = run_rounds(peers, complete(4), 2, silent=[0])
    run_reference(expected, assignments(peers, complete(4), 2), h, dead=[0])
    agree(peers, expected, alive=[1, 2, 3])
    assert all(one.missing == {"Taught": [0]} for peer in traffic[1:] for one in peer)
    assert digest(peers[2].peak.state_dict()) == peak
    assert peers[2].peak_alpha == 0.0


def test_aggregator_without_models_only_trains_locally() -> None:
    h = hyper(participation=1.0, fixed_aggregator=True)
    peers = make(h)
    (expected, *_) = [Reference(peer) for peer in peers]
    run_rounds(peers, complete(4), 1, silent=[1, 2, 3])
    train_reference(expected, h)
    np.testing.assert_allclose(values(peers[0]), expected.values(), atol=2e-5)
    assert peers[0].peak_alpha == 0.0
    assert "models" not in peers[0].diagnostics()


async def test_wait_for_reply_ends_at_its_deadline() -> None:
    """The aggregator is alive but silent; the sender keeps its trained model."""
    peers = make(hyper(participation=1.0, fixed_aggregator=True, patience=0.5), names=("flat", "flat"))
    hub = LocalHub()
    endpoints = [
        Endpoint(Neighborhood(peer.me, complete(2)), RUN_ID, Conversation(peer.layouts()), WaitPolicy(0.02))
        for peer in peers
    ]
    for endpoint in endpoints:
        hub.join(endpoint)
    loop = asyncio.get_running_loop()
    began = loop.time()
    await peers[1].round(0, round_of(endpoints[1], 0))
    assert loop.time() - began >= 1.5 * 0.02
    assert endpoints[1].missing == {"Taught": [0]}
    assert peers[1].peak_alpha == 0.0
    # The model stays in the aggregator's mailbox until its round.
    assert (0, "Pupil", 1) in endpoints[0].mailbox


async def test_late_sender_learns_not_to_wait() -> None:
    peers = make(hyper(participation=1.0, fixed_aggregator=True), names=("flat", "flat"))
    (_, expected) = [Reference(peer) for peer in peers]
    hub = LocalHub()
    endpoints = [
        Endpoint(Neighborhood(peer.me, complete(2)), RUN_ID, Conversation(peer.layouts()), WaitPolicy(deadline))
        for peer, deadline in zip(peers, (0.01, math.inf), strict=True)
    ]
    for endpoint in endpoints:
        hub.join(endpoint)
    await peers[0].round(0, round_of(endpoints[0], 0))
    await peers[1].round(0, round_of(endpoints[1], 0))
    assert [endpoint.missing for endpoint in endpoints] == [{"Pupil": [1]}, {}]
    train_reference(expected, peers[1].hyper)
    np.testing.assert_allclose(values(peers[1]), expected.values(), atol=2e-5)
    assert peers[1].peak_alpha == 0.0


def test_sender_of_nonfinite_model_keeps_it() -> None:
    h = hyper(participation=1.0, fixed_aggregator=True)
    peers = make(h)
    expected = [Reference(peer) for peer in peers]
    with torch.no_grad():
        peers[2].model.linear_head.bias[1] = torch.nan
    traffic = run_rounds(peers, complete(4), 3)
    run_reference(expected, assignments(peers, complete(4), 3), h, dead=[2])
    agree(peers, expected, alive=[0, 1, 3])
    assert [traffic[me][0].missing for me in range(4)] == [{"Pupil": [2]}, {}, {}, {}]
    assert peers[2].peak_alpha == 0.0


@pytest.mark.parametrize("value", [math.inf, 1e30])
def test_diverged_reply_is_not_adopted(value: float) -> None:
    peers = make(hyper(participation=1.0, fixed_aggregator=True))
    expected = Reference(peers[2])

    def diverge(models: Mapping[int, Model], alpha: float) -> None:
        with torch.no_grad():
            for n in (0, 2):
                models[n].linear_head.weight[0, 0] = value

    peers[0].mutual_learning = diverge  # type: ignore[method-assign]
    traffic = run_rounds(peers, complete(4), 1)
    train_reference(expected, peers[2].hyper)
    np.testing.assert_allclose(values(peers[2]), expected.values(), atol=2e-5)
    assert traffic[2][0].missing == {"Taught": [0]}
    assert not any(map(has_diverged, peers[0].state_dict()["model"].values()))
    assert peers[0].peak_alpha == 0.0
    assert (peers[1].peak_alpha, peers[2].peak_alpha) == (peers[0].hyper.alpha_at(0), 0.0)


def test_diverged_model_stops_teaching() -> None:
    peers = make(hyper())
    with_it, without = (copy.deepcopy([peer.model for peer in peers[:3]]) for _ in range(2))
    with torch.no_grad():
        with_it[2].linear_head.weight[0, 0] = torch.inf
    twins = make(hyper())
    peers[0].model, twins[0].model = with_it[0], without[0]
    peers[0].mutual_learning(dict(enumerate(with_it)), alpha=0.7)
    twins[0].mutual_learning(dict(enumerate(without[:2])), alpha=0.7)
    for one, other in zip(with_it[:2], without[:2], strict=True):
        for x, y in zip(one.parameters(), other.parameters(), strict=True):
            torch.testing.assert_close(x, y)


@pytest.mark.exhaustive
def test_peers_many_rounds_apart_get_the_same_result() -> None:
    """Peer 0 starts only when all others wait for it; peers without a role in a round do not wait."""
    h = hyper(participation=0.25)
    together, apart = make(h), make(h)
    topology = complete(4)
    run_rounds(together, topology, 12)

    async def late() -> list[int]:
        hub = LocalHub()
        endpoints = [
            Endpoint(Neighborhood(peer.me, topology), RUN_ID, Conversation(peer.layouts())) for peer in apart
        ]
        for endpoint in endpoints:
            hub.join(endpoint)
            endpoint.mailbox.on_block = lambda: None  # not a deadlock: peer 0 starts later
        reached = [-1] * 4

        async def run(me: int) -> None:
            for t in range(12):
                reached[me] = t
                endpoints[me].open(t)
                await apart[me].round(t, round_of(endpoints[me], t))

        others = [asyncio.create_task(run(me)) for me in (1, 2, 3)]
        for _ in range(2000):
            await asyncio.sleep(0)
        stuck = list(reached)
        await run(0)
        await asyncio.gather(*others)
        return stuck

    stuck = asyncio.run(late())
    assert stuck[0] == -1
    assert max(stuck) > 2
    assert [digest(peer.state_dict()) for peer in apart] == [digest(peer.state_dict()) for peer in together]
