"""FedDistill against its paper: equations by hand, rounds against the server's, both forms, messages."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from p2pfl.algorithms.class_means import Prototypes, PrototypeTable
from p2pfl.algorithms.feddistill import FedDistill, Hyper, disagreement, probabilities
from p2pfl.errors import Unexpected
from p2pfl.learning.peer_data import PeerData
from p2pfl.messaging.topology import Topology
from p2pfl.options import OptionErrors
from p2pfl.tensors import digest
from tests.bodies import arrive
from tests.regression import Matrix, regression_data, softmax, theta
from tests.support import CPU, messages, payload, peer_data, random_dataset, run_rounds, setting, softmax_regression

INPUTS, CLASSES = 4, 4
LINE = [(0, 1), (1, 2)]
COMPLETE = [(0, 1), (1, 2), (0, 2)]
LOCAL_CLASSES: tuple[tuple[int, ...], ...] = ((0, 1), (1, 2), (0, 1, 2))
"""Classes of each peer; no peer has class 3."""
FORMS: list[dict[str, Any]] = [
    {},
    {"preset": "paper"},
    {"outputs": "probabilities", "distillation": 0.5},
    {"teachers": "others", "local_epochs": 2},
]


def hyper(**given: Any) -> Hyper:
    return Hyper.parse({"lr": 0.2, "batch": 1000, **given})


def data_of(me: int, classes: Sequence[int]) -> PeerData:
    """6 + 3 me training samples of these classes."""
    dataset = random_dataset(60, classes=CLASSES, seed=me)
    return peer_data(dataset, [n for n in range(60) if dataset.train.labels[n] in classes][: 6 + 3 * me])


def make(h: Hyper) -> list[FedDistill]:
    """Softmax regressions with different initial values."""
    return [
        FedDistill(h, setting(me, 3, softmax_regression(INPUTS, CLASSES, seed=me), data_of(me, classes)))
        for me, classes in enumerate(LOCAL_CLASSES)
    ]


def train(peer: FedDistill, w: Matrix, means: Mapping[int, Matrix]) -> tuple[Matrix, dict[int, Matrix]]:
    """Lines 1 and 2 with full batches: the parameters after them, and the local means by class."""
    h, (x, labels) = peer.hyper, regression_data(peer.data.train)
    seen: dict[int, list[Matrix]] = {}
    for _ in range(h.local_epochs):
        scores = x @ w.T
        p = softmax(scores)
        at_scores = p - np.eye(CLASSES)[labels]
        for n, label in enumerate(labels.tolist()):
            seen.setdefault(label, []).append(p[n] if h.outputs == "probabilities" else scores[n])
            if label in means:
                if h.outputs == "probabilities":  # the gradient of the cross-entropy with targets that sum to 1
                    at_scores[n] += h.distillation * (p[n] - means[label])
                else:
                    at_scores[n] += h.distillation * 2 * (scores[n] - means[label]) / CLASSES
        w = w - h.lr * at_scores.T @ x / len(x)
    return w, {label: np.mean(rows, axis=0) for label, rows in seen.items()}


# ---- equations -----------------------------------------------------------------------------------------


LOGITS = torch.tensor([[1.0, 0.0], [0.0, 2.0], [3.0, 1.0]])
LABELS = torch.tensor([0, 1, 0])


def test_disagreement_of_logits_is_their_mean_squared_error() -> None:
    means = torch.tensor([[2.0, 0.0], [1.0, 1.0]])
    known = torch.tensor([True, True])
    found = disagreement(LOGITS, LABELS, means, known, "logits")
    assert float(found) == pytest.approx((1 + 0 + 1 + 1 + 1 + 1) / 6)


def test_disagreement_of_probabilities_is_the_cross_entropy_with_the_mean() -> None:
    means = torch.tensor([[0.75, 0.25], [0.5, 0.5]])
    known = torch.tensor([True, True])
    found = disagreement(LOGITS, LABELS, means, known, "probabilities")
    expected = (
        *(math.log(math.e + 1) - 0.75 * 1, math.log(1 + math.e**2) - 0.5 * 2),
        math.log(math.e**3 + math.e) - 0.75 * 3 - 0.25 * 1,
    )
    assert float(found) == pytest.approx(sum(expected) / 3)


@pytest.mark.parametrize("outputs", ["logits", "probabilities"])
def test_classes_without_a_global_mean_contribute_nothing(outputs: str) -> None:
    means = torch.full((2, 2), 0.5)
    one = disagreement(LOGITS, LABELS, means, torch.tensor([False, True]), outputs)
    alone = disagreement(LOGITS[1:2], LABELS[1:2], means, torch.tensor([True, True]), outputs)
    assert float(one) == pytest.approx(float(alone) / 3)
    assert float(disagreement(LOGITS, LABELS, means, torch.tensor([False, False]), outputs)) == 0.0


def test_probabilities_are_nonnegative_and_sum_to_one() -> None:
    rows = torch.tensor([[0.25, 0.75], [1.5, -0.5], [0.5, 0.6], [0.0, 1.0]])
    assert probabilities(rows).tolist() == [True, False, False, True]


# ---- rounds ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("edges", [COMPLETE, LINE], ids=["complete", "line"])
@pytest.mark.parametrize("given", FORMS, ids=str)
def test_rounds_match_algorithm_1(given: dict[str, Any], edges: list[tuple[int, int]]) -> None:
    h, topology = hyper(**given), Topology.from_edges(3, edges)
    peers = make(h)
    w = [theta(peer.model) for peer in peers]
    means: list[dict[int, Matrix]] = [{}, {}, {}]
    run_rounds(peers, topology, 3)
    for _ in range(3):
        trained = [train(peer, w[me], means[me]) for me, peer in enumerate(peers)]
        w = [after for after, _ in trained]
        for me in range(3):
            teachers = [j for j in sorted((me, *topology.neighbors[me])) if h.teachers == "all" or j != me]
            for label in {label for j in teachers for label in trained[j][1]}:
                means[me][label] = np.mean([trained[j][1][label] for j in teachers if label in trained[j][1]], axis=0)
    for me, peer in enumerate(peers):
        np.testing.assert_allclose(theta(peer.model), w[me], rtol=1e-4, atol=1e-5)
        assert [k for k in range(CLASSES) if peer.known[k]] == sorted(means[me])
        for label, expected in means[me].items():
            np.testing.assert_allclose(peer.prototypes[label], expected, rtol=1e-4, atol=1e-5)


def test_means_are_the_servers_on_a_complete_graph_and_models_stay_local() -> None:
    peers = make(hyper(batch=2))
    run_rounds(peers, Topology.from_edges(3, COMPLETE), 3)
    assert len({digest([peer.prototypes, peer.known]) for peer in peers}) == 1
    assert len({digest(peer.model.state_dict()) for peer in peers}) == 3


def test_payload_is_one_row_of_k_numbers_for_each_local_class() -> None:
    traffic = run_rounds(make(hyper()), Topology.from_edges(3, LINE), 2)
    for me, neighbors in enumerate((1, 2, 1)):
        assert payload(traffic[me][1].sent) == neighbors * 4 * CLASSES * len(LOCAL_CLASSES[me])


def test_mean_skips_a_missing_neighbor() -> None:
    peers = make(hyper())
    w = [theta(peer.model) for peer in peers]
    traffic = run_rounds(peers, Topology.from_edges(3, COMPLETE), 1, silent=[2])
    assert traffic[0][0].missing == {"Prototypes": [2]}
    sent = [train(peer, w[me], {})[1] for me, peer in enumerate(peers)]
    np.testing.assert_allclose(peers[0].prototypes[1], (sent[0][1] + sent[1][1]) / 2, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(peers[0].prototypes[2], sent[1][2], rtol=1e-5, atol=1e-6)


def test_alone_with_the_others_means_a_peer_trains_on_labels_only() -> None:
    peers = make(hyper(teachers="others"))
    w = theta(peers[0].model)
    run_rounds(peers, Topology.from_edges(3, LINE), 2, silent=[1, 2])
    for _ in range(2):
        w = train(peers[0], w, {})[0]
    np.testing.assert_allclose(theta(peers[0].model), w, rtol=1e-4, atol=1e-5)
    assert not bool(peers[0].known.any())


@pytest.mark.parametrize("value", [math.nan, 1e30])
def test_means_of_a_diverged_model_are_skipped(value: float) -> None:
    without, beside = make(hyper()), make(hyper())
    with torch.no_grad():
        beside[2].model.linear_head.weight[0, 0] = value
    run_rounds(without, Topology.from_edges(3, COMPLETE), 2, silent=[2])
    traffic = run_rounds(beside, Topology.from_edges(3, COMPLETE), 2)
    assert traffic[0][1].missing == {"Prototypes": [2]}
    assert torch.equal(beside[0].prototypes, without[0].prototypes)
    assert torch.equal(beside[2].prototypes, beside[0].prototypes)


def test_model_that_diverges_in_training_is_restored() -> None:
    peers = make(hyper())
    before = theta(peers[0].model)
    peers[0].prototypes.fill_(9e5)
    peers[0].known.fill_(True)
    peers[0].optimizer.param_groups[0]["lr"] = 1e6
    run_rounds(peers, Topology.from_edges(3, COMPLETE), 1)
    np.testing.assert_array_equal(theta(peers[0].model), before)
    assert np.isfinite(peers[0].prototypes.numpy()).all()


def test_received_rows_that_are_no_probabilities_are_skipped() -> None:
    peer = make(hyper(outputs="probabilities"))[0]
    rows = torch.tensor([[0.1, 0.2, 0.3, 0.4], [-9.0, 10.0, 0.0, 0.0]])
    bodies = {1: Prototypes(rows, (0, 2), ()), 2: Prototypes(rows[:1], (2,), ())}
    peer.average_prototypes(peer.teaching(PrototypeTable.of(bodies, CLASSES, CPU)))
    assert peer.known.tolist() == [True, False, True, False]
    torch.testing.assert_close(peer.prototypes[2], rows[0])


def test_nonparticipants_neither_train_nor_send_but_receive() -> None:
    peers = make(hyper(participation=1 / 3))
    initial = [theta(peer.model) for peer in peers]
    traffic = run_rounds(peers, Topology.from_edges(3, COMPLETE), 1)
    senders = [me for me in range(3) if messages(traffic[me][0].sent)]
    assert len(senders) == 1
    changed = [me for me in range(3) if not np.array_equal(theta(peers[me].model), initial[me])]
    assert changed == senders
    assert len({digest([peer.prototypes, peer.known]) for peer in peers}) == 1
    assert bool(peers[0].known.any())


def test_evaluates_the_local_model() -> None:
    peer = make(hyper())[0]
    run_rounds([peer], Topology.from_edges(1, []), 1)
    x = torch.rand(3, 1, 2, 2)
    assert torch.equal(peer.predict(x), peer.model(x))


@pytest.mark.parametrize(
    "body",
    [
        Prototypes(torch.zeros(CLASSES + 1, CLASSES), (), ()),
        Prototypes(torch.zeros(1, INPUTS + 1), (0,), ()),
        Prototypes(torch.zeros(1, CLASSES), (CLASSES,), ()),
    ],
    ids=["too many rows", "wrong width", "class too large"],
)
def test_rejects_messages_of_other_shapes_and_classes(body: Prototypes) -> None:
    with pytest.raises(Unexpected):
        arrive(body, make(hyper())[0].layouts())


@pytest.mark.parametrize(
    ("key", "value"), [("outputs", "features"), ("teachers", "none"), ("distillation", -1.0), ("participation", 0.0)]
)
def test_wrong_hyper_parameters_are_errors(key: str, value: Any) -> None:
    with pytest.raises(OptionErrors, match=key):
        hyper(**{key: value})
