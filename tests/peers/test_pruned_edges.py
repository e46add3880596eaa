"""What really comes out of the sockets once MAPL has pruned its graph, frame by frame: accounts can be wrong."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import msgpack
import pytest
import torch

from p2pfl.algorithms.mapl import MAPL, Hyper
from p2pfl.net import Counts, Endpoint
from p2pfl.topology import Topology
from p2pfl.wire import Buffer
from peers.zmqlink import ZmqLink
from tests.p2pfl.support import linear_model, peer_data, random_dataset, setting

PEERS, ROUNDS = 4, 5
COMPLETE = Topology.from_edges(PEERS, [(i, j) for i in range(PEERS) for j in range(i)])
CONTROL = {"Hello", "Close"}

Traffic = defaultdict[tuple[int, int], dict[str, list[int]]]
"""{(sender, round): {kind: [messages, bytes of all frames]}}"""


class Opinionated(MAPL):
    """Heads are as the test says: 0 and 1 agree, and so do 2 and 3; peer 0 alone never hears of a difference."""

    def personalized_model_learning(self) -> None:
        super().personalized_model_learning()
        with torch.no_grad():
            self.model.head.weight.fill_(1.0 if self.me < 2 else -1.0)

    def learn_graph(self, heads: Any) -> None:
        super().learn_graph(heads if self.me else {j: self.own_head() for j in heads})


def overhear(link: ZmqLink) -> Traffic:
    """Count every message that ``link`` reads from its ROUTER, before anything else sees it."""
    traffic: Traffic = defaultdict(dict)
    heard = link._heard

    def count(identity: bytes, frames: list[Buffer]) -> None:
        kind, t, sender = msgpack.unpackb(frames[0])[2:5]
        assert identity == f"{sender}>{link.me}".encode()
        if kind not in CONTROL:
            entry = traffic[sender, t].setdefault(kind, [0, 0])
            entry[0] += 1
            entry[1] += sum(len(memoryview(frame)) for frame in frames)
        heard(identity, frames)

    link._heard = count  # type: ignore[method-assign]
    return traffic


async def play(algorithm: MAPL, endpoint: Endpoint) -> list[Counts]:
    """What the peer says that it sent, round by round."""
    accounts = []
    for t in range(ROUNDS):
        await algorithm.round(t, endpoint.begin(t))
        await endpoint.finish(t)
        accounts.append(endpoint.out)
    return accounts


@pytest.fixture
async def outcome(sockets: Any) -> tuple[Sequence[Traffic], Sequence[Sequence[Counts]]]:
    h = Hyper.parse({"warmup": 1, "graph_lr": 4.0, "projector_hidden": 4, "lr": 0.01})
    algorithms = []
    for me in range(PEERS):
        data = peer_data(random_dataset(6, seed=me))
        algorithms.append(Opinionated(h, setting(me, PEERS, linear_model(4, 5, 3, seed=me), data)))
    endpoints = [sockets.endpoint(me, COMPLETE, algorithms[me].layouts()) for me in range(PEERS)]
    links = [sockets.link(endpoint) for endpoint in endpoints]
    traffic = [overhear(link) for link in links]
    for link in links:
        await link.start()
    accounts = await asyncio.gather(*map(play, algorithms, endpoints))
    await asyncio.gather(*(sockets.shut(link) for link in links))
    return traffic, accounts


def kinds(traffic: Sequence[Traffic], sender: int, receiver: int) -> list[dict[str, int]]:
    """Messages by kind on one directed edge, round by round."""
    return [{kind: entry[0] for kind, entry in traffic[receiver][sender, t].items()} for t in range(ROUNDS)]


async def test_nothing_travels_on_pruned_edges(outcome: Any) -> None:
    traffic, _ = outcome
    before, full = {"Prototypes": 1}, {"Head": 1, "Prototypes": 1}
    # Round 1 learns the graph, and still speaks to all.
    assert kinds(traffic, 1, 0) == kinds(traffic, 0, 1) == kinds(traffic, 3, 2) == [before] + [full] * 4
    # Dropped from both sides: silence.
    assert kinds(traffic, 1, 2) == kinds(traffic, 2, 1) == kinds(traffic, 1, 3) == [before, full, {}, {}, {}]
    # Peer 0 hears 2 and 3 for ever, who do not hear it any more: one way everything, the other a bare header.
    assert kinds(traffic, 2, 0) == kinds(traffic, 3, 0) == [before] + [full] * 4
    assert kinds(traffic, 0, 2) == kinds(traffic, 0, 3) == [before, full] + [{"Listening": 1}] * 3
    assert all(entry[1] < 64 for t in (2, 3, 4) for entry in traffic[2][0, t].values())


async def test_the_accounts_are_what_the_sockets_carried(outcome: Any) -> None:
    traffic, accounts = outcome
    for sender in range(PEERS):
        for t, account in enumerate(accounts[sender]):
            for receiver in COMPLETE.neighbors[sender]:
                said = {kind: [n, body + head] for kind, (n, body, head) in account.get(receiver, {}).items()}
                assert said == traffic[receiver][sender, t]
