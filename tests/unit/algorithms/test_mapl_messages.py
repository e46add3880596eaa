"""MAPL's messages: when heads travel, pruning, the message budget, payload bytes, what is rejected."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from p2pfl.algorithms.mapl import Head, Spent
from p2pfl.algorithms.mapl_prototypes import Prototypes
from p2pfl.errors import Unexpected
from p2pfl.messaging.topology import Topology
from tests.bodies import arrive, complete
from tests.mapl_reference import CLASSES, FEATURES, Clustered, hyper, make
from tests.support import Traffic, messages, payload, run_rounds

# ---- heads and pruning ---------------------------------------------------------------------------------------


def heads_and_prototypes(traffic: Sequence[Sequence[Traffic]], t: int) -> tuple[int, int]:
    return tuple(sum(messages(peer[t].sent, kind) for peer in traffic) for kind in ("Head", "Prototypes"))  # type: ignore[return-value]


def test_heads_are_sent_after_the_warmup() -> None:
    traffic = run_rounds(make(hyper(warmup=2, prune=False)), complete(3), 4)
    assert [heads_and_prototypes(traffic, t) for t in range(4)] == [(0, 6), (0, 6), (6, 6), (6, 6)]


def test_without_cgl_no_head_is_sent_and_weights_stay_uniform() -> None:
    peers = make(hyper(warmup=0, cgl=False))
    traffic = run_rounds(peers, Topology.from_edges(3, [(0, 1), (1, 2)]), 3)
    assert [heads_and_prototypes(traffic, t) for t in range(3)] == [(0, 4)] * 3
    assert peers[0].weights() == {0: 0.5, 1: 0.5}
    assert peers[1].weights() == pytest.approx({0: 1 / 3, 1: 1 / 3, 2: 1 / 3})


@pytest.mark.exhaustive
@pytest.mark.parametrize("prune", [True, False])
def test_pruning_ends_messages_between_peers_with_weight_0(prune: bool) -> None:
    peers = make(hyper(warmup=1, graph_lr=4.0, prune=prune), peers=4, of=Clustered)
    traffic = run_rounds(peers, complete(4), 4)
    assert set(peers[0].weights()) == {0, 1}
    assert set(peers[3].weights()) == {2, 3}
    # Round 1 learns the graph and still sends to all; from round 2 on only within clusters.
    expected = [(0, 12), (12, 12), (4, 4), (4, 4)] if prune else [(0, 12), (12, 12), (12, 12), (12, 12)]
    assert [heads_and_prototypes(traffic, t) for t in range(4)] == expected
    assert [record.sources for record in traffic[0]] == [(1, 2, 3)] * 2 + ([(1,)] * 2 if prune else [(1, 2, 3)] * 2)
    assert [record.receivers for record in traffic[2]] == [(0, 1, 3)] * 2 + ([(3,)] * 2 if prune else [(0, 1, 3)] * 2)


@pytest.mark.exhaustive
def test_pruned_graph_converges_to_the_unpruned_one() -> None:
    """Because pruned peers' samples still count in γ; otherwise each peer would end alone."""
    rows = []
    for prune in (True, False):
        peers = make(hyper(warmup=0, graph_lr=1.0, prune=prune), peers=6, classes_of=[range(3)] * 6, of=Clustered)
        run_rounds(peers, complete(6), 8)
        rows.append(torch.stack([peer.w for peer in peers]))
    torch.testing.assert_close(*rows)
    assert (rows[0] > 0).sum(1).tolist() == [2, 2, 4, 4, 4, 4]


# ---- message budget --------------------------------------------------------------------------------


@pytest.mark.exhaustive
@pytest.mark.parametrize(("budget", "rounds"), [(1, 1), (8, 1), (9, 2), (24, 3), (25, 4)])
def test_all_peers_end_in_the_round_that_reaches_the_budget(budget: int, rounds: int) -> None:
    peers = make(hyper(cgl=False, message_budget=budget), peers=4)
    traffic = run_rounds(peers, Topology.from_edges(4, [(0, 1), (1, 2), (2, 3), (3, 0)]), 6)
    assert [len(peer) for peer in traffic] == [rounds] * 4
    assert sum(messages(record.sent, "Prototypes") for peer in traffic for record in peer) == 8 * rounds
    assert [peer.spent for peer in peers] == [2 * rounds] * 4


@pytest.mark.exhaustive
@pytest.mark.parametrize("wrong", [-1, -(2**63), 12 * 3, 2**63 - 100])
def test_an_impossible_count_of_a_neighbor_does_not_end_the_run(wrong: int) -> None:
    peers = make(hyper(cgl=False, message_budget=24), peers=4)
    peers[3].spent = wrong  # it sends another 3 in each round
    traffic = run_rounds(peers, complete(4), 3)
    assert [len(peer) for peer in traffic] == [3] * 4


def test_pruned_messages_do_not_count_toward_the_budget() -> None:
    peers = make(hyper(warmup=0, graph_lr=4.0, message_budget=12 + 4 + 4), peers=4, of=Clustered)
    traffic = run_rounds(peers, complete(4), 9)
    assert [len(peer) for peer in traffic] == [3] * 4


def test_without_a_budget_no_counts_are_sent() -> None:
    peers = make(hyper())
    traffic = run_rounds(peers, complete(3), 2)
    assert sum(messages(record.sent, "Spent") for peer in traffic for record in peer) == 0
    assert not any(peer.finished for peer in peers)


# ---- bytes -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("edges", [[(0, 1), (1, 2), (0, 2)], [(0, 1), (1, 2)]], ids=["complete", "line"])
def test_payload_bytes_match_table_7(edges: list[tuple[int, int]]) -> None:
    traffic = run_rounds(make(hyper(warmup=1, prune=False)), Topology.from_edges(3, edges), 3)
    d_p = d_z = FEATURES
    prototypes, head = d_p * CLASSES, d_z * CLASSES
    for t, numbers in enumerate([prototypes, prototypes + head, prototypes + head]):
        for side in ("sent", "received"):
            assert sum(payload(getattr(peer[t], side)) for peer in traffic) == 4 * 2 * len(edges) * numbers


@pytest.mark.parametrize(
    "body",
    [
        Head(torch.zeros(CLASSES, FEATURES), -1),
        Head(torch.zeros(CLASSES, FEATURES + 1), 1),
        Prototypes(torch.zeros(CLASSES, FEATURES), (0, CLASSES)),
        Prototypes(torch.zeros(CLASSES, FEATURES), (-1,)),
        Prototypes(torch.zeros(CLASSES, FEATURES), (0,) * (CLASSES + 1)),
        Spent(torch.zeros(2, dtype=torch.int64)),
    ],
    ids=["negative count", "wrong shape", "class too large", "negative class", "too many classes", "wrong rank"],
)
def test_rejects_messages_with_wrong_shapes_counts_or_classes(body: Any) -> None:
    (algorithm,) = make(hyper(), peers=1)
    with pytest.raises(Unexpected):
        arrive(body, algorithm.layouts())
