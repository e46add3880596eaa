"""AD-PSGD against its paper: pairs, rounds and events by hand on softmax regression."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from p2pfl.algorithms.ad_psgd import ADPSGD, Hyper
from p2pfl.errors import RunFileError
from p2pfl.messaging.newest import Take
from p2pfl.messaging.topology import Topology
from p2pfl.run_file.load import from_dict
from p2pfl.session import metrics
from p2pfl.simulation.simulate import simulate
from tests.conftest import tree
from tests.regression import Matrix, gradient, regression_data, theta
from tests.support import messages, peers_of, run_rounds, softmax_regression

INPUTS, CLASSES = 4, 3
LINE = Topology.from_edges(3, [(0, 1), (1, 2)])
"""Peers 0 and 2 are active, and draw peer 1 in each round."""
PAIR = Topology.from_edges(2, [(0, 1)])
"""Peer 0 is active."""
RING = Topology.from_edges(6, [(i, (i + 1) % 6) for i in range(6)])


def make(peers: int = 3, **hyper: Any) -> list[ADPSGD]:
    """Softmax regressions with different initial values; peer i has 6 + i samples, which are one batch."""
    h = Hyper.parse({"lr": 0.5, **hyper})
    return peers_of(ADPSGD, h, lambda me: softmax_regression(INPUTS, CLASSES, seed=me), peers, more=1)


def step(peer: ADPSGD, x: Matrix, steps: int = 1) -> Matrix:
    """Return the displacement by full-batch gradient steps from x."""
    y = x
    for _ in range(steps):
        y = y - 0.5 * gradient(y, *regression_data(peer.data.train))
    return y - x


def diverge(peer: ADPSGD) -> None:
    with torch.no_grad():
        peer.model.linear_head.weight[0, 0] = torch.nan


# ---- rounds by hand


@pytest.mark.parametrize("steps", [None, 1, 4])
def test_pairs_average_one_after_another_and_apply_the_steps_from_the_old_models(steps: int | None) -> None:
    peers = make(local_steps=steps)
    x = [theta(peer.model) for peer in peers]
    traffic = run_rounds(peers, LINE, 2)
    for _ in range(2):
        d = [step(peer, x[me], steps or 1) for me, peer in enumerate(peers)]
        first = (x[0] + x[1]) / 2
        second = (first + x[2]) / 2
        x = [first + d[0], second + d[1], second + d[2]]
    for me, peer in enumerate(peers):
        np.testing.assert_allclose(theta(peer.model), x[me], atol=1e-5)
    assert [dict(peer.weights()) for peer in peers] == [
        {0: 0.5, 1: 0.5},
        {0: 0.25, 1: 0.25, 2: 0.5},
        {1: 0.5, 2: 0.5},
    ]
    kinds = [{kind for kinds in peer[1].sent.values() for kind in kinds} for peer in traffic]
    assert kinds == [{"Request"}, {"Reply"}, {"Request"}]
    assert [messages(peer[1].sent) for peer in traffic] == [1, 2, 1]
    assert not any(each.missing for peer in traffic for each in peer)


def test_both_of_a_pair_end_with_the_same_bits() -> None:
    peers = make(2, lr=1e-30)
    run_rounds(peers, PAIR, 1)
    np.testing.assert_array_equal(theta(peers[0].model), theta(peers[1].model))


def test_averages_conserve_the_mean_of_all_models() -> None:
    peers = make(6, lr=1e-30)
    x = np.array([theta(peer.model) for peer in peers])
    run_rounds(peers, RING, 40)
    found = np.array([theta(peer.model) for peer in peers])
    np.testing.assert_allclose(found.mean(axis=0), x.mean(axis=0), atol=1e-6)
    assert found.std(axis=0).max() < 0.02 * x.std(axis=0).max()


def test_mean_of_all_models_follows_the_mean_gradient() -> None:
    peers = make(6)
    for _ in range(3):
        x = [theta(peer.model) for peer in peers]
        steps = [step(peer, x[me]) for me, peer in enumerate(peers)]
        run_rounds(peers, RING, 1)
        found = np.mean([theta(peer.model) for peer in peers], axis=0)
        np.testing.assert_allclose(found, np.mean(x, axis=0) + np.mean(steps, axis=0), atol=1e-6)


def test_an_active_peer_continues_alone_without_its_neighbor() -> None:
    peers = make(2)
    x = theta(peers[0].model)
    traffic = run_rounds(peers, PAIR, 1, silent=[1])
    assert traffic[0][0].missing == {"Reply": [1]}
    np.testing.assert_allclose(theta(peers[0].model), x + step(peers[0], x), atol=1e-6)
    assert peers[0].weights() == {0: 1.0}


# ---- rounds that do not wait for one another, by hand


def test_a_late_answer_averages_the_models_of_that_time_with_the_gradients_of_their_rounds() -> None:
    """In its rounds 0 to 3, peer 1 answers nobody, then peer 0, then peers 0 and 2, then nobody."""
    peers = make()
    x = [theta(peer.model) for peer in peers]
    states: dict[int, list[Matrix]] = {me: [] for me in range(3)}
    answered = {0: [[], [0], [1], []], 2: [[], [], [0], []]}
    run_rounds(
        peers,
        LINE,
        4,
        after=lambda peer, t: states[peer.me].append(theta(peer.model)),
        orders={
            0: [Take(0, "Reply", {1: [1]}), Take(1, "Reply", {1: [2]}), *(Take(t, "Reply", {1: []}) for t in (2, 3))],
            1: [Take(t, "Request", {i: rounds[t] for i, rounds in answered.items()}) for t in range(4)],
            2: [Take(0, "Reply", {1: [2]}), *(Take(t, "Reply", {1: []}) for t in (1, 2, 3))],
        },
    )

    def d(me: int, x: Matrix) -> Matrix:
        return step(peers[me], x)

    one = [x[1] + d(1, x[1])]
    zero = [(x[0] + one[0]) / 2 + d(0, x[0])]
    one.append((one[0] + x[0]) / 2 + d(1, one[0]))
    with_zero = (one[1] + zero[0]) / 2
    zero.append(with_zero + d(0, zero[0]))
    two = [(with_zero + x[2]) / 2 + d(2, x[2])]
    one.append((with_zero + x[2]) / 2 + d(1, one[1]))
    one.append(one[2] + d(1, one[2]))
    for _ in (2, 3):  # peer 1 has finished
        zero.append(zero[-1] + d(0, zero[-1]))
    for _ in (1, 2, 3):
        two.append(two[-1] + d(2, two[-1]))
    for found, expected in zip(states.values(), (zero, one, two), strict=True):
        np.testing.assert_allclose(found, expected, atol=1e-5)


def test_of_several_requests_of_a_peer_the_last_one_is_answered() -> None:
    """Peer 0 has given up its round 0 when peer 1 answers."""
    peers = make(2, lr=1e-30)
    x = [theta(peer.model) for peer in peers]

    def moves(peer: Any, t: int) -> None:
        if (peer.me, t) == (0, 0):
            with torch.no_grad():
                peer.model.linear_head.bias.add_(1.0)

    traffic = run_rounds(
        peers,
        PAIR,
        2,
        after=moves,
        orders={
            0: [Take(0, "Reply", {1: []}), Take(1, "Reply", {1: [0]})],
            1: [Take(0, "Request", {0: [0, 1]}), Take(1, "Request", {0: []})],
        },
    )
    x[0][:, -1] += 1.0
    assert [messages(each.sent) for each in traffic[1]] == [1, 0]
    for peer in peers:
        np.testing.assert_allclose(theta(peer.model), (x[0] + x[1]) / 2, atol=1e-6)


def test_nobody_waits_for_a_passive_neighbor_that_has_finished(prepare: Any, tmp_path: Path) -> None:
    """The passive peer is ten times as fast as the two active ones."""
    speeds = tmp_path / "speeds.csv"
    speeds.write_text("peer,speed\n0,1e7\n1,1e8\n2,1e7\n")
    run = from_dict(
        tree(
            algorithm={"name": "ad-psgd", "batch": 16, "lr": 0.05, "local_steps": 4},
            peers=3,
            rounds=10,
            graph="line",
            synchrony="none",
            eval_every=100,
            time={"devices": {"file": str(speeds)}, "network": {"latency": 0.01}},
        )
    )
    folder = prepare(tmp_path / "run", run)
    simulate(run, folder, clock=True)
    fast, slow = (metrics.read(folder.peer(me).metrics) for me in (1, 0))
    ended = fast[-1]["elapsed"]
    after = [record for record in slow if record["elapsed"] - record["seconds"]["total"] > ended + 0.1]
    assert 5 < len(after) < 10
    assert {tuple(record["weights"]) for record in slow} == {("0",), ("0", "1")}
    for record in after:
        assert record["seconds"]["waiting"] == 0.0
        assert record["missing"] == {"Reply": [1]}
        assert record["weights"] == {"0": 1.0}
    assert all(record["seconds"]["waiting"] == 0.0 for record in fast[1:])  # it waits for nobody, but for their start


# ---- models that have diverged


@pytest.mark.parametrize("diverged", [0, 1])
def test_a_peer_whose_model_has_diverged_takes_its_neighbors(diverged: int) -> None:
    peers = make(2)
    other = 1 - diverged
    x = theta(peers[other].model)
    diverge(peers[diverged])
    traffic = run_rounds(peers, PAIR, 1)
    np.testing.assert_allclose(theta(peers[diverged].model), x, atol=1e-6)  # its gradient has diverged too
    np.testing.assert_allclose(theta(peers[other].model), x + step(peers[other], x), atol=1e-6)
    assert peers[diverged].weights() == {other: 1.0, diverged: 0.0}
    assert peers[other].weights() == {other: 1.0}
    assert not any(each.missing for peer in traffic for each in peer)


def test_two_models_that_have_diverged_do_not_spread() -> None:
    peers = make()
    x = theta(peers[2].model)
    diverge(peers[0])
    diverge(peers[1])
    run_rounds(peers, LINE, 1)
    assert np.isnan(theta(peers[0].model)).any()
    np.testing.assert_allclose(theta(peers[1].model), x, atol=1e-6)
    np.testing.assert_allclose(theta(peers[2].model), x + step(peers[2], x), atol=1e-6)
    run_rounds(peers, LINE, 1)
    assert not any(np.isnan(theta(peer.model)).any() for peer in peers)


# ---- the graph


@pytest.mark.parametrize(
    ("peers", "edges", "sides"),
    [
        (2, [(0, 1)], (0, 1)),
        (3, [(0, 1), (1, 2)], (0, 1, 0)),
        (4, [(0, 1), (0, 2), (0, 3)], (1, 0, 0, 0)),  # the larger side begins
        (6, [(i, (i + 1) % 6) for i in range(6)], (0, 1, 0, 1, 0, 1)),
        (6, [(0, 5), (5, 2), (2, 1), (3, 4)], (0, 1, 0, 0, 1, 1)),
        (2, [], (0, 0)),
    ],
)
def test_neighbors_are_on_different_sides(peers: int, edges: list[tuple[int, int]], sides: tuple[int, ...]) -> None:
    assert Topology.from_edges(peers, edges).sides == sides


@pytest.mark.parametrize(
    ("graph", "peers", "pair"),
    [
        ("complete", 3, "1 and 2"),
        ("ring", 5, "2 and 3"),
        ({"name": "list", "graphs": ["line", {"name": "edges", "edges": [[0, 2], [1, 3]]}]}, 4, "1 and 2"),
    ],
)
def test_other_graphs_are_refused(graph: Any, peers: int, pair: str) -> None:
    with pytest.raises(
        RunFileError, match=f"graph: ad-psgd needs two sides .*odd length through peers {pair}; choose"
    ):
        from_dict(tree(algorithm="ad-psgd", graph=graph, peers=peers))


@pytest.mark.parametrize(
    ("graph", "peers"), [("ring", 4), ("line", 5), ("star", 5), ({"name": "list", "graphs": ["ring", "line"]}, 4)]
)
def test_bipartite_graphs_are_accepted(graph: Any, peers: int) -> None:
    from_dict(tree(algorithm="ad-psgd", graph=graph, peers=peers))
