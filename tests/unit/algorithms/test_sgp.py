"""SGP against its paper: push-sum by hand on directed graphs, with messages that arrive late, together, or never."""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from p2pfl.algorithms.sgp import LEAST, SGP, Hyper, Push, merged
from p2pfl.messaging.conversation import Conversation
from p2pfl.messaging.endpoint import Endpoint
from p2pfl.messaging.mailbox import Mailbox
from p2pfl.messaging.neighborhood import Neighborhood
from p2pfl.messaging.net import Net
from p2pfl.messaging.newest import NewestMailbox
from p2pfl.messaging.topology import Rounds, Topology, WeightedTopology
from p2pfl.messaging.wire import Message
from p2pfl.simulation.local_link import LocalHub
from tests.bodies import RUN_ID
from tests.regression import Matrix, gradient, regression_data, theta
from tests.support import payload, peers_of, run_rounds, softmax_regression
from tests.unit.algorithms.test_shared_statistics import normalized

INPUTS, CLASSES, LR = 4, 3, 0.25
ARCS = [(0, 1), (0, 2), (1, 2), (2, 3), (3, 0), (3, 1)]
IRREGULAR = WeightedTopology.averaging(4, ARCS)
"""Peers send to 2, 1, 1 and 2 others, and receive from 1, 2, 2 and 1."""
P = np.array([[1 / 3, 0, 0, 1 / 3], [1 / 3, 1 / 2, 0, 1 / 3], [1 / 3, 1 / 2, 1 / 2, 0], [0, 0, 1 / 2, 1 / 3]])
"""Column-stochastic: column j has what peer j sends."""


def make(peers: int = 4, **hyper: Any) -> list[SGP]:
    h = Hyper.parse({"lr": LR, **hyper})
    return peers_of(SGP, h, lambda me: softmax_regression(INPUTS, CLASSES, seed=me), peers, more=1)


class Mesh:
    """Peers whose rounds the test starts, and whose messages arrive when the test says so."""

    def __init__(self, peers: Sequence[SGP], rounds: Rounds, staleness: float | None = None) -> None:
        self.peers = list(peers)
        n = len(peers)
        union = Topology.from_edges(n, [(i, j) for i in range(n) for j in range(i)])
        hub = LocalHub()
        self.endpoints: list[Endpoint] = []
        self.late: list[deque[Message]] = [deque() for _ in peers]
        """By receiver: messages on their way."""
        for peer in peers:
            conversation = Conversation(peer.layouts(), peer.prunes, peer.on_receive)
            place = Neighborhood(peer.me, union, rounds)
            box = Mailbox if staleness is None else _newest(staleness, conversation)
            self.endpoints.append(Endpoint(place, RUN_ID, conversation, mailbox=box(place.neighbors)))
            hub.join(self.endpoints[-1])
        for endpoint in self.endpoints:
            endpoint.open(0)

    def hold(self) -> None:
        """From now on, messages arrive by ``deliver``."""
        for endpoint, late in zip(self.endpoints, self.late, strict=True):
            endpoint.accept = late.append  # type: ignore[method-assign, assignment]

    def deliver(self, to: int, count: int) -> int:
        """Deliver the next messages to a peer; return how many of them are pushes."""
        found = [self.late[to].popleft() for _ in range(min(count, len(self.late[to])))]
        for message in found:
            Endpoint.accept(self.endpoints[to], message)
        return sum(isinstance(message.body, Push) for message in found)

    async def round(self, me: int) -> Endpoint:
        endpoint, peer = self.endpoints[me], self.peers[me]
        endpoint.begin(endpoint.t)
        await peer.round(endpoint.t, Net(endpoint, endpoint.t, 0))
        endpoint.finish(endpoint.t)
        return endpoint

    def run(self, rounds: int) -> None:
        async def all_rounds() -> None:
            for _ in range(rounds):
                await asyncio.gather(*(self.round(peer.me) for peer in self.peers))

        asyncio.run(all_rounds())


def _newest(staleness: float, conversation: Conversation) -> Callable[[Any], Mailbox]:
    return lambda senders: NewestMailbox(senders, staleness, conversation.once)


def step(peer: SGP, z: Matrix, lr: float = LR) -> Matrix:
    return -lr * gradient(z, *regression_data(peer.data.train))


# ---- rounds by hand ----------------------------------------------------------------------------------------


def test_rounds_on_a_directed_graph_match_algorithm_1() -> None:
    peers = make()
    z = np.array([theta(peer.model) for peer in peers])
    x, w = z.copy(), np.ones(4)
    Mesh(peers, lambda t: IRREGULAR).run(4)
    for _ in range(4):
        x = x + np.array([step(peer, z[i]) for i, peer in enumerate(peers)])  # line 1
        x, w = np.einsum("ij,jkl->ikl", P, x), P @ w  # lines 2 and 3
        z = x / w[:, None, None]  # line 4
    assert np.abs(w - 1).max() > 0.3
    for i, peer in enumerate(peers):
        assert peer.w == pytest.approx(w[i], rel=1e-12)
        np.testing.assert_allclose(theta(peer.model), z[i], atol=1e-5)


def test_momentum_and_several_steps_move_x_by_what_they_move_z() -> None:
    peers = make(momentum=0.5, local_steps=2)
    z = [theta(peer.model) for peer in peers]
    x, w, velocity = np.array(z), np.ones(4), [np.zeros((CLASSES, INPUTS + 1))] * 4
    Mesh(peers, lambda t: IRREGULAR).run(3)
    for _ in range(3):
        for i, peer in enumerate(peers):
            trained = z[i]
            for _ in range(2):
                velocity[i] = 0.5 * velocity[i] + step(peer, trained)
                trained = trained + velocity[i]
            x[i] += trained - z[i]
        x, w = np.einsum("ij,jkl->ikl", P, x), P @ w
        z = list(x / w[:, None, None])
    for i, peer in enumerate(peers):
        np.testing.assert_allclose(theta(peer.model), z[i], atol=1e-5)


def test_adapt_z_takes_steps_of_the_optimizers_length() -> None:
    peers = make(adapt="z")
    mesh = Mesh(peers, lambda t: IRREGULAR)
    mesh.run(2)
    z, w = [theta(peer.model) for peer in peers], np.array([peer.w for peer in peers])
    trained = np.array([z[i] + step(peer, z[i]) for i, peer in enumerate(peers)])
    mesh.run(1)
    for i, peer in enumerate(peers):
        np.testing.assert_allclose(theta(peer.model), np.tensordot(P[i] * w, trained, 1) / (P[i] @ w), atol=1e-5)


@pytest.mark.parametrize("rounds", [1, 3])
def test_only_gradients_change_the_average_model(rounds: int) -> None:
    """With row weights, as D-PSGD averages over this graph, it would drift to that of the peers which send more."""
    peers = make()
    mesh = Mesh(peers, lambda t: IRREGULAR)
    mesh.run(rounds)
    z, w = [theta(peer.model) for peer in peers], [peer.w for peer in peers]
    mesh.run(1)
    before = sum(w[i] * z[i] for i in range(4)) / 4
    found = sum(peer.w * theta(peer.model) for peer in peers) / 4
    gradients = sum(step(peer, z[i]) for i, peer in enumerate(peers)) / 4
    np.testing.assert_allclose(found, before + gradients, atol=1e-5)
    rows = np.array([[IRREGULAR.row(i).get(j, 0.0) for j in range(4)] for i in range(4)])
    rows += np.diag(1 - rows.sum(axis=1))
    drift = np.tensordot(rows.mean(axis=0) - 1 / 4, np.array(z), 1)
    assert np.abs(drift).max() > 1e-3


def test_without_gradients_models_agree_on_the_mean_whatever_the_weights() -> None:
    peers = make(lr=1e-12)
    mean = np.mean([theta(peer.model) for peer in peers], axis=0)
    Mesh(peers, lambda t: IRREGULAR).run(40)
    for peer in peers:
        np.testing.assert_allclose(theta(peer.model), mean, atol=1e-5)
    assert max(peer.w for peer in peers) > 1.2
    assert sum(peer.w for peer in peers) == pytest.approx(4, rel=1e-12)


# ---- late messages -----------------------------------------------------------------------------------------

LINE = Topology.from_edges(3, [(0, 1), (1, 2)])
GRAPHS: list[tuple[int, Rounds]] = [
    (4, lambda t: IRREGULAR),
    (4, lambda t: WeightedTopology.averaging(4, [(i, (i + 2 ** (t % 2)) % 4) for i in range(4)])),
    (3, lambda t: LINE),
]
WHAT = ["round", "round", "deliver one", "deliver all", "restart"]
EVENTS = st.lists(st.tuples(st.sampled_from(WHAT), st.integers(0, 3)), max_size=40)
AHEAD = [*[("round", 0)] * 3, ("deliver all", 1), ("restart", 0), ("round", 1), ("deliver one", 0), ("round", 0)]


@settings(deadline=None, max_examples=25)
@example(GRAPHS[0], AHEAD)
@given(st.sampled_from(GRAPHS), EVENTS)
def test_no_weight_is_lost_whatever_the_order_of_events(
    graph: tuple[int, Rounds], events: list[tuple[str, int]]
) -> None:
    """Push-sum with numerators, in fractions, sees the same events: peers far ahead, early ends, restored states."""
    n, rounds = graph
    peers = make(n)
    mesh = Mesh(peers, rounds, math.inf)
    mesh.hold()
    w, sent = [Fraction(1)] * n, [0] * n
    x = [theta(peer.model) for peer in peers]
    late: list[deque[tuple[Fraction, Matrix]]] = [deque() for _ in peers]
    arrived: list[list[tuple[Fraction, Matrix]]] = [[] for _ in peers]

    async def play() -> None:
        for what, i in events:
            me = i % n
            if what.startswith("deliver"):
                for _ in range(mesh.deliver(me, 1 if what == "deliver one" else len(mesh.late[me]))):
                    arrived[me].append(late[me].popleft())
            elif what == "restart":
                state = mesh.peers[me].state_dict()
                mesh.peers[me] = make(n)[me]
                mesh.peers[me].load_state_dict(state)
            else:
                receivers = rounds(sent[me]).receivers[me]
                sent[me] += 1
                x[me] = x[me] + step(peers[me], x[me] / float(w[me]))
                p = Fraction(1, len(receivers) + 1)
                for j in receivers:
                    late[j].append((p * w[me], float(p) * x[me]))
                w[me] = p * w[me] + sum(weight for weight, _ in arrived[me])
                x[me] = float(p) * x[me] + sum(values for _, values in arrived[me])
                arrived[me].clear()
                await mesh.round(me)

    asyncio.run(play())
    assert sum(w) + sum(weight for each in (*late, *arrived) for weight, _ in each) == n
    for me, peer in enumerate(mesh.peers):
        assert peer.w == pytest.approx(float(w[me]), rel=1e-12)
        if w[me] > 0.05:  # otherwise steps are too long for float32
            np.testing.assert_allclose(theta(peer.model), x[me] / float(w[me]), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("staleness", [1, 2])
def test_overlap_takes_messages_that_many_rounds_late_at_most(staleness: int) -> None:
    peers = make(2, lr=1e-12)
    mesh = Mesh(peers, lambda t: Topology.from_edges(2, [(0, 1)]), staleness)
    mesh.hold()

    async def play() -> list[float]:
        found = []
        for _ in range(staleness):  # nothing arrives, and peer 0 need not wait
            await mesh.round(0)
            await mesh.round(1)
            found.append(peers[0].w)
        waiting = asyncio.ensure_future(mesh.round(0))
        for _ in range(5):
            await asyncio.sleep(0)
        assert not waiting.done()
        mesh.deliver(0, 100)
        await waiting
        return [*found, peers[0].w]

    halves = [2.0**-t for t in range(1, staleness + 2)]
    assert asyncio.run(play()) == [*halves[:-1], halves[-1] + sum(halves[:-1])]


def test_several_messages_of_a_peer_are_added() -> None:
    pushes = [Push({"a": torch.tensor([value])}, weight) for value, weight in ((4.0, 0.5), (1.0, 0.25))]
    assert merged(pushes).weight == 0.75
    assert merged(pushes).values["a"].item() == pytest.approx((0.5 * 4.0 + 0.25 * 1.0) / 0.75)


def test_a_peer_that_receives_nothing_keeps_its_model_and_some_weight() -> None:
    peers = make(2, lr=1e-12)
    before = theta(peers[0].model)
    mesh = Mesh(peers, lambda t: Topology.from_edges(2, [(0, 1)]), math.inf)

    async def alone() -> None:
        for _ in range(140):
            await mesh.round(0)

    asyncio.run(alone())
    assert peers[0].w == LEAST
    assert np.isfinite(theta(peers[0].model)).all()
    asyncio.run(_rounds(mesh, [1]))
    assert peers[1].w == pytest.approx(1.5, rel=1e-12)
    expected = (theta(peers[1].model) * 1.5 - before) / 0.5
    assert np.abs(expected - before).max() > 1e-3  # it holds the average of both now


async def _rounds(mesh: Mesh, order: Sequence[int]) -> None:
    for me in order:
        await mesh.round(me)


# ---- neighbors that fail or lie ------------------------------------------------------------------------------


@pytest.mark.parametrize("claimed", [-0.5, 0.0, 1e9, math.inf, math.nan])
def test_a_push_with_an_impossible_weight_counts_as_missing(claimed: float) -> None:
    peers = make(2)
    mesh = Mesh(peers, lambda t: Topology.from_edges(2, [(0, 1)]), math.inf)
    alone = make(2)[0]
    alone.adapt()
    mesh.endpoints[0].begin(0)

    async def play() -> Endpoint:
        endpoint = mesh.endpoints[1]
        z = {name: tensor.detach() for name, tensor in peers[1].model.named_parameters()}
        await Net(endpoint, 0, 0).broadcast(Push(z, claimed))
        return await mesh.round(0)

    assert asyncio.run(play()).t == 1
    assert peers[0].w == 0.5
    np.testing.assert_array_equal(theta(peers[0].model), theta(alone.model))
    assert mesh.endpoints[0].missing == ({"Push": [1]} if math.isfinite(claimed) else {})


def test_a_missing_neighbor_takes_the_weight_of_what_it_was_sent() -> None:
    peers = make(3)
    traffic = run_rounds(peers, LINE, 1, silent=[2])
    assert traffic[1][0].missing == {"Push": [2]}
    assert [peer.w for peer in peers[:2]] == pytest.approx([1 / 2 + 1 / 3, 1 / 3 + 1 / 2])


def test_a_diverged_model_is_replaced_by_those_of_the_neighbors() -> None:
    peers = make(3, lr=1e-12)
    with torch.no_grad():
        peers[1].model.linear_head.weight[0, 0] = math.nan
    z = [theta(peer.model) for peer in peers]
    run_rounds(peers, LINE, 1)
    np.testing.assert_allclose(theta(peers[0].model), z[0], atol=1e-6)
    np.testing.assert_allclose(theta(peers[1].model), (z[0] + z[2]) / 2, atol=1e-6)
    assert [peer.w for peer in peers] == [1 / 2, 1.0, 1 / 2]


def test_a_peer_that_has_diverged_loses_its_momentum_and_its_weight_only_once() -> None:
    peers = make(3, lr=0.1, momentum=0.9)
    run_rounds(peers, LINE, 1)
    with torch.no_grad():
        peers[1].model.linear_head.weight[0, 0] = math.nan
    run_rounds(peers, LINE, 1)
    kept = sum(peer.w for peer in peers)
    run_rounds(peers, LINE, 3)
    assert sum(peer.w for peer in peers) == pytest.approx(kept)
    assert np.isfinite([theta(peer.model) for peer in peers]).all()


# ---- what is sent --------------------------------------------------------------------------------------------


def test_variances_stay_positive_and_are_averaged_with_the_models_weights() -> None:
    h = Hyper.parse({"share_statistics": True, "lr": 1.0, "batch": 4, "local_epochs": 1})
    peers = peers_of(SGP, h, lambda me: normalized(), 4)
    Mesh(peers, lambda t: IRREGULAR).run(1)
    weights = [peer.w for peer in peers]
    Mesh(peers, lambda t: IRREGULAR).run(3)
    assert min(weights) < 1.0
    for peer in peers:
        assert (peer.model.backbone[2].running_var > 0).all()


def test_sends_parameters_and_a_weight() -> None:
    traffic = run_rounds(make(3), LINE, 1)
    assert [payload(records[0].sent) for records in traffic] == [4 * CLASSES * (INPUTS + 1) * n for n in (1, 2, 1)]
    assert all({kind for kinds in records[0].sent.values() for kind in kinds} == {"Push"} for records in traffic)


def test_no_push_replaces_another_one() -> None:
    assert Conversation(make(1)[0].layouts()).counting("all") == {"Push"}
