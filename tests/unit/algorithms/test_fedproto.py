"""FedProto against its paper: rounds by hand, predictions, every option, payload bytes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from p2pfl.algorithms.class_means import Prototypes
from p2pfl.algorithms.fedproto import FedProto, Hyper
from p2pfl.learning.evaluation import evaluate
from p2pfl.messaging.topology import Topology
from p2pfl.models import Model
from p2pfl.tensors import digest
from tests.fedproto_peers import CLASSES, COMPLETE, FEATURES, LINE, LOCAL_CLASSES, data_of, hyper, make
from tests.support import messages, payload, peer_data, random_dataset, run_rounds, setting

Array = NDArray[np.float64]


# ---- rounds by hand ----------------------------------------------------------------------------------


@dataclass
class Reference:
    """One peer in numpy: z = A x + a, scores = B z + b; float64."""

    A: Array
    a: Array
    B: Array
    b: Array
    x: Array
    labels: NDArray[np.int64]

    @classmethod
    def of(cls, peer: FedProto) -> Reference:
        backbone: Any = peer.model.backbone[1]  # type: ignore[index]
        head: Any = peer.model.head
        samples = peer.data.train
        images = samples.take(np.arange(len(samples)))[0].reshape(len(samples), -1).numpy() / 255.0
        tensors = (*backbone.parameters(), *head.parameters())
        A, a, B, b = (tensor.detach().double().numpy() for tensor in tensors)
        return cls(A, a, B, b, images, samples.labels)

    def features(self) -> Array:
        return np.asarray(self.x @ self.A.T + self.a)

    def descend(self, prototypes: Mapping[int, Array], h: Hyper) -> None:
        """Take one step on CE + λ φ over all samples."""
        alignment = h.alignment or {"mse": 10.0, "euclidean": 0.1}[h.distance]
        z, count = self.features(), len(self.x)
        scores = np.exp(z @ self.B.T + self.b)
        at_scores = (scores / scores.sum(1, keepdims=True) - np.eye(CLASSES)[self.labels]) / count
        at_z = at_scores @ self.B
        present = sorted(set(self.labels))
        for n, label in enumerate(self.labels):
            if label not in prototypes:
                continue
            if h.distance == "mse":
                at_z[n] += alignment * 2 * (z[n] - prototypes[label]) / (count * FEATURES)
            else:
                members = self.labels == label
                gap = z[members].mean(0) - prototypes[label]
                at_z[n] += alignment * gap / np.linalg.norm(gap) / members.sum() / len(present)
        self.B = self.B - h.lr * at_scores.T @ z
        self.b = self.b - h.lr * at_scores.sum(0)
        self.A = self.A - h.lr * at_z.T @ self.x
        self.a = self.a - h.lr * at_z.sum(0)

    def local_prototypes(self) -> dict[int, tuple[Array, int]]:
        z = self.features()
        return {k: (z[self.labels == k].mean(0), int((self.labels == k).sum())) for k in set(self.labels.tolist())}


def mean_by_hand(sent: Sequence[dict[int, tuple[Array, int]]], label: int, weighted: bool) -> Array:
    rows = [local[label] for local in sent if label in local]
    weights = [count if weighted else 1 for _, count in rows]
    return np.asarray(sum(w * row for w, (row, _) in zip(weights, rows, strict=True)) / sum(weights))


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("given", "edges"),
    [
        ({}, COMPLETE),
        ({}, LINE),
        ({"weighted": False, "local_epochs": 2}, COMPLETE),
        ({"weighted": False, "local_epochs": 2}, LINE),
        # Not on the line: there peer 0 is the only source of class 0, and the distance is 0, without a direction.
        ({"distance": "euclidean", "alignment": 0.3}, COMPLETE),
    ],
    ids=str,
)
def test_rounds_match_the_paper(given: dict[str, Any], edges: list[tuple[int, int]]) -> None:
    h, topology = hyper(**given), Topology.from_edges(3, edges)
    peers = make(h)
    references = [Reference.of(peer) for peer in peers]
    known: list[dict[int, Array]] = [{}, {}, {}]
    run_rounds(peers, topology, 3)
    for _ in range(3):
        for reference, prototypes in zip(references, known, strict=True):
            for _ in range(h.local_epochs):
                reference.descend(prototypes, h)
        sent = [reference.local_prototypes() for reference in references]
        for me in range(3):
            received = [sent[j] for j in sorted((me, *topology.neighbors[me]))]
            for label in {label for local in received for label in local}:
                known[me][label] = mean_by_hand(received, label, h.weighted)
    for peer, reference, prototypes in zip(peers, references, known, strict=True):
        found = Reference.of(peer)
        for name in ("A", "a", "B", "b"):
            np.testing.assert_allclose(getattr(found, name), getattr(reference, name), rtol=1e-4, atol=1e-5)
        assert [k for k in range(CLASSES) if peer.known[k]] == sorted(prototypes)
        for label, expected in prototypes.items():
            np.testing.assert_allclose(peer.prototypes[label], expected, rtol=1e-4, atol=1e-5)


def test_prototypes_are_bit_identical_on_a_complete_graph() -> None:
    for weighted in (True, False):
        peers = make(hyper(weighted=weighted, batch=2))
        run_rounds(peers, Topology.from_edges(3, COMPLETE), 3)
        assert len({digest([peer.prototypes, peer.known]) for peer in peers}) == 1
        assert len({digest(peer.model.state_dict()) for peer in peers}) == 3


def test_first_round_trains_without_prototypes() -> None:
    peers = make(hyper())
    terms: list[set[str]] = []
    run_rounds(
        peers, Topology.from_edges(3, COMPLETE), 2, after=lambda peer, t: terms.append(set(peer.meter.drain()))
    )
    assert terms == [{"ce"}] * 3 + [{"ce", "proto"}] * 3


def test_mean_skips_a_missing_neighbor() -> None:
    peers = make(hyper())
    traffic = run_rounds(peers, Topology.from_edges(3, COMPLETE), 1, silent=[2])
    assert traffic[0][0].missing == {"Prototypes": [2]}
    sent = [Reference.of(peer).local_prototypes() for peer in peers[:2]]
    for peer in peers[:2]:
        for label in (0, 1, 2):
            np.testing.assert_allclose(peer.prototypes[label], mean_by_hand(sent, label, True), rtol=1e-4, atol=1e-6)


def test_mean_skips_the_peers_own_diverged_prototypes() -> None:
    """All copies stay equal, and no model becomes NaN."""
    peers = make(hyper())

    class Diverged(FedProto):
        def local_prototypes(self) -> Prototypes:
            local = super().local_prototypes()
            return Prototypes(local.values * torch.nan, local.classes, local.samples)

    peers[1].__class__ = Diverged
    run_rounds(peers, Topology.from_edges(3, COMPLETE), 2)
    assert len({digest([peer.prototypes, peer.known]) for peer in peers}) == 1
    assert all(bool(tensor.isfinite().all()) for peer in peers for tensor in peer.model.state_dict().values())


def test_absent_class_keeps_its_prototype() -> None:
    peers = make(hyper(participation=1 / 3))  # one peer per round
    after: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}

    def note(peer: Any, t: int) -> None:
        after[peer.me, t] = peer.prototypes.clone(), peer.known.clone()

    traffic = run_rounds(peers, Topology.from_edges(3, COMPLETE), 6, after=note)
    senders = [next(me for me in range(3) if messages(traffic[me][t].sent)) for t in range(6)]
    assert set(senders) == {0, 1, 2}
    for t in range(1, 6):
        for k in range(CLASSES):
            if k not in LOCAL_CLASSES[senders[t]]:
                assert torch.equal(after[0, t][0][k], after[0, t - 1][0][k])
            else:
                assert not torch.equal(after[0, t][0][k], after[0, t - 1][0][k])
        assert bool((after[0, t][1] | ~after[0, t - 1][1]).all())
    assert peers[0].known.tolist() == [True, True, True, False]


@pytest.mark.exhaustive
@pytest.mark.parametrize("fraction", [1 / 3, 2 / 3, 1.0])
def test_only_participants_train_and_send_and_all_peers_receive(fraction: float) -> None:
    peers = make(hyper(participation=fraction))
    states: list[list[str]] = [[digest(peer.model.state_dict())] for peer in peers]

    def note(peer: Any, t: int) -> None:
        states[peer.me].append(digest(peer.model.state_dict()))

    traffic = run_rounds(peers, Topology.from_edges(3, COMPLETE), 4, after=note)
    for t in range(4):
        trained = {me for me in range(3) if states[me][t] != states[me][t + 1]}
        sent = {me for me in range(3) if messages(traffic[me][t].sent) == 2}
        assert trained == sent
        assert len(sent) == {1 / 3: 1, 2 / 3: 2, 1.0: 3}[fraction]
        for me in range(3):
            assert messages(traffic[me][t].received) == len(sent - {me})
    assert len({digest([peer.prototypes, peer.known]) for peer in peers}) == 1


def test_peer_without_neighbors_uses_its_local_prototypes() -> None:
    (peer,) = make(hyper(), classes_of=[(0, 2)])
    run_rounds([peer], Topology.from_edges(1, []), 2)
    assert peer.known.tolist() == [True, False, True, False]
    assert torch.equal(peer.prototypes[[0, 2]], peer.local_prototypes().values)


def test_peer_without_samples_sends_empty_prototypes_and_receives() -> None:
    peers = make(hyper(), classes_of=[(), (0, 1)])
    traffic = run_rounds(peers, Topology.from_edges(2, [(0, 1)]), 2)
    assert [payload(record.sent) for record in traffic[0]] == [0, 0]
    assert torch.equal(peers[0].prototypes, peers[1].prototypes)


# ---- local prototypes and predictions ------------------------------------------------------------------------


def test_local_prototypes_are_means_in_evaluation_mode_without_augmentation() -> None:
    backbone = nn.Sequential(nn.Flatten(), nn.Linear(4, FEATURES), nn.BatchNorm1d(FEATURES), nn.Dropout(0.5))
    dataset = random_dataset(30, classes=CLASSES)
    data = peer_data(dataset, range(20), augment=torch.zeros_like)
    peer = FedProto(hyper(batch=4, lr=0.01), setting(0, 1, Model("bn", backbone, FEATURES, CLASSES), data))
    run_rounds([peer], Topology.from_edges(1, []), 2)
    statistics = digest(peer.model.state_dict())
    found = peer.local_prototypes()
    assert digest(peer.model.state_dict()) == statistics
    assert found.classes == (0, 1, 2, 3)
    assert found.samples == (5, 5, 5, 5)
    x = torch.from_numpy(dataset.train.images[:20]).float() / 255
    z = peer.model.eval().backbone(x).detach()
    for label in range(CLASSES):
        torch.testing.assert_close(found.values[label], z[label:20:CLASSES].mean(0))


def test_head_predicts_until_a_prototype_is_known() -> None:
    peer = make(hyper())[0]
    x = torch.rand(3, 1, 2, 2)
    assert torch.equal(peer.predict(x), peer.model(x))


def test_accuracy_of_the_head_is_recorded_besides() -> None:
    peer = make(hyper())[0]
    run_rounds([peer], Topology.from_edges(1, []), 1)
    (metric,) = peer.extra_metrics(whole=False)
    assert (metric.name, metric.samples) == ("head", peer.data.test)
    x = torch.rand(3, 1, 2, 2)
    assert torch.equal(metric.predict(x), peer.model(x))
    assert not torch.equal(metric.predict(x), peer.predict(x))
    assert [found.name for found in peer.extra_metrics(whole=True)] == ["head", "head_global"]


def test_nearest_known_prototype_predicts() -> None:
    peers = make(hyper())
    run_rounds(peers, Topology.from_edges(3, LINE), 2)
    peer, x = peers[0], torch.rand(7, 1, 2, 2)
    scores, z = peer.predict(x).detach(), peer.model.backbone(x).detach()
    for n in range(7):
        for label in range(CLASSES):
            apart = float(np.linalg.norm(z[n] - peer.prototypes[label])) if label < 3 else math.inf
            assert float(scores[n, label]) == pytest.approx(-apart, rel=1e-5)
    assert scores.argmax(1).max() < 3


def test_evaluation_loss_is_infinite_only_with_unknown_classes() -> None:
    dataset = random_dataset(60, classes=CLASSES)
    peer = make(hyper(), classes_of=[(0, 1)])[0]
    for test, finite in (([0, 1], True), ([0, 1, 3], False)):
        data = peer_data(dataset, [0, 1], test)
        run_rounds([peer], Topology.from_edges(1, []), 1)
        evaluation = evaluate(peer.predict, data, data.test)
        assert evaluation is not None
        assert math.isfinite(evaluation.loss) is finite
        assert not math.isnan(evaluation.loss)


def test_heads_may_differ_between_peers() -> None:
    """As in FedTGP's HtC4: only the number of features must be equal."""
    peers = []
    for me, hidden in enumerate((0, 7, 3)):
        head = nn.Sequential(nn.Linear(FEATURES, hidden), nn.ReLU(), nn.Linear(hidden, CLASSES)) if hidden else None
        backbone = nn.Sequential(nn.Flatten(), nn.Linear(4, FEATURES))
        model = Model(f"with-{hidden}", backbone, FEATURES, CLASSES, head)
        peers.append(FedProto(hyper(), setting(me, 3, model, data_of(me, LOCAL_CLASSES[me]))))
    run_rounds(peers, Topology.from_edges(3, COMPLETE), 2)
    assert len({digest(peer.prototypes) for peer in peers}) == 1


# ---- options ----------------------------------------------------------------------------------------------


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "change",
    [
        {"weighted": False},
        {"distance": "euclidean"},
        {"alignment": 0.5},
        {"participation": 0.67},
        {"local_epochs": 2},
        {"batch": 3},
        {"momentum": 0.9},
        {"weight_decay": 0.1},
    ],
    ids=str,
)
def test_every_option_changes_the_model(change: dict[str, Any]) -> None:
    digests = []
    for h in (hyper(), hyper(**change)):
        peers = make(h)
        run_rounds(peers, Topology.from_edges(3, COMPLETE), 3)
        digests.append(digest([peer.model.state_dict() for peer in peers]))
    assert digests[0] != digests[1]


def test_without_alignment_it_equals_local_training() -> None:
    (alone,), connected = make(hyper(), classes_of=[LOCAL_CLASSES[0]]), make(hyper(alignment=0.0))
    run_rounds(connected, Topology.from_edges(3, COMPLETE), 3)
    for _ in range(3):
        alone.optimizer.zero_grad()
        data = alone.data
        x, labels = next(data.sweep(data.train))
        cross_entropy(alone.model(x), labels).backward()  # type: ignore[no-untyped-call]
        alone.optimizer.step()
    for parameter, expected in zip(alone.model.parameters(), connected[0].model.parameters(), strict=True):
        torch.testing.assert_close(parameter, expected)


# ---- messages -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("edges", [COMPLETE, LINE], ids=["complete", "line"])
def test_payload_bytes_match_table_5_without_a_server(edges: list[tuple[int, int]]) -> None:
    traffic = run_rounds(make(hyper()), Topology.from_edges(3, edges), 3)
    directed = [*edges, *((j, i) for i, j in edges)]
    numbers = sum(FEATURES * len(LOCAL_CLASSES[sender]) for sender, _ in directed)
    for t in range(3):
        for side in ("sent", "received"):
            assert sum(payload(getattr(peer[t], side)) for peer in traffic) == 4 * numbers
        assert sum(messages(peer[t].sent, "Prototypes") for peer in traffic) == len(directed)


@pytest.mark.parametrize("weighted", [True, False])
def test_sample_counts_are_sent_only_if_weighted(weighted: bool) -> None:
    peer = make(hyper(weighted=weighted))[2]
    sent = peer.local_prototypes()
    assert sent.classes == (0, 1, 2)
    counts = np.bincount(peer.data.train.labels)
    assert sent.samples == (tuple(counts) if weighted else ())
