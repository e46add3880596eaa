"""FedProto against its paper: equations against reference code, rounds by hand, every option, payload bytes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from p2pfl.algorithms.class_means import Prototypes, PrototypeTable, class_means
from p2pfl.algorithms.fedproto import FedProto, Hyper
from p2pfl.algorithms.prototypes import compare_margins, distances, margins, misalignment
from p2pfl.errors import Unexpected
from p2pfl.learning.evaluation import evaluate
from p2pfl.learning.peer_data import PeerData
from p2pfl.messaging.schema import MAX_HEADER, MessageSchema
from p2pfl.messaging.topology import Topology
from p2pfl.models import Model
from p2pfl.tensors import digest
from tests.bodies import arrive
from tests.support import CPU, linear_model, messages, payload, peer_data, random_dataset, run_rounds, setting

property_of = settings(deadline=None, max_examples=50)

Array = NDArray[np.float64]

FEATURES, CLASSES = 5, 4
LINE = [(0, 1), (1, 2)]
COMPLETE = [(0, 1), (1, 2), (0, 2)]
LOCAL_CLASSES: tuple[tuple[int, ...], ...] = ((0, 1), (1, 2), (0, 1, 2))
"""Classes of each peer; no peer has class 3."""


def hyper(**given: Any) -> Hyper:
    return Hyper.parse({"lr": 0.1, "batch": 1000, **given})


def data_of(me: int, classes: Sequence[int]) -> PeerData:
    """6 + 3 me training samples of these classes, and all four test samples of the peer's dataset."""
    dataset = random_dataset(60, classes=CLASSES, seed=me)
    chosen = [n for n in range(60) if dataset.train.labels[n] in classes][: 6 + 3 * me]
    return peer_data(dataset, chosen, range(4))


def make(h: Hyper, classes_of: Sequence[Sequence[int]] = LOCAL_CLASSES) -> list[FedProto]:
    """Peers with linear backbones on gray noise."""
    return [
        FedProto(h, setting(me, len(classes_of), linear_model(4, FEATURES, CLASSES, seed=me), data_of(me, classes)))
        for me, classes in enumerate(classes_of)
    ]


def body(rows: Mapping[int, Sequence[float]], samples: Sequence[int] = ()) -> Prototypes:
    return Prototypes(torch.tensor(list(rows.values())), tuple(rows), tuple(samples))


def table_of(bodies: Mapping[int, Prototypes], features: int) -> PrototypeTable:
    return PrototypeTable.of(bodies, features, CPU)


# ---- equations -----------------------------------------------------------------------------------------

tables = st.tuples(st.integers(0, 12), st.integers(1, 5), st.integers(0, 2**32 - 1))


@property_of
@given(tables)
def test_class_means_match_a_loop(table: tuple[int, int, int]) -> None:
    rows, classes, seed = table
    stream = np.random.default_rng(seed)
    values = stream.normal(size=(rows, 3)).astype(np.float32)
    labels, weights = stream.integers(classes, size=rows), stream.integers(1, 9, size=rows).astype(float)
    senders = torch.zeros(rows, dtype=torch.int64)
    received = PrototypeTable(torch.from_numpy(values), torch.from_numpy(labels), senders, torch.from_numpy(weights))
    found, present = class_means(received, classes, weighted=True)
    assert found.dtype == torch.float32
    for label in range(classes):
        members = [n for n in range(rows) if labels[n] == label]
        assert bool(present[label]) == bool(members)
        total = sum(weights[n] for n in members) or 1.0
        expected = sum((weights[n] / total * values[n].astype(float) for n in members), np.zeros(3))
        np.testing.assert_allclose(found[label], expected, rtol=1e-6, atol=1e-7)


@property_of
@given(tables)
def test_margins_are_the_distances_to_the_nearest_other_prototype(table: tuple[int, int, int]) -> None:
    rows, width, seed = table
    points = np.random.default_rng(seed).normal(size=(rows, width)).astype(np.float32)
    found = margins(torch.from_numpy(points))
    for n in range(rows):
        others = [float(np.linalg.norm(points[n] - points[m])) for m in range(rows) if m != n]
        assert float(found[n]) == pytest.approx(min(others, default=math.inf), rel=1e-5)


def test_distances_of_equal_points_are_zero_far_from_the_origin() -> None:
    points = 1000 * torch.rand(40, 30)  # a matrix product would lose several units to cancellation
    assert torch.equal(distances(points, points).diagonal(), torch.zeros(40))


def features(seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """z [6, d], labels of classes 0, 1 and 3, prototypes [K, d]."""
    stream = torch.Generator().manual_seed(seed)
    z = torch.randn(6, FEATURES, generator=stream)
    return z, torch.tensor([0, 1, 0, 3, 1, 0]), torch.randn(CLASSES, FEATURES, generator=stream)


@pytest.mark.parametrize("unknown", [(), (3,), (0, 1, 3)])
def test_mse_misalignment_averages_over_batch_and_dimensions_and_skips_unknown_classes(unknown: Any) -> None:
    z, labels, prototypes = features()
    known = torch.tensor([k not in unknown for k in range(CLASSES)])
    expected = sum(
        float((z[n, d] - prototypes[labels[n], d]) ** 2)
        for n in range(6)
        for d in range(FEATURES)
        if int(labels[n]) not in unknown
    )
    found = misalignment(z, labels, prototypes, known, "mse")
    assert float(found) == pytest.approx(expected / (6 * FEATURES), rel=1e-5)


@pytest.mark.parametrize("unknown", [(), (3,), (0, 1, 3)])
def test_euclidean_misalignment_compares_the_class_means_of_the_batch(unknown: Any) -> None:
    z, labels, prototypes = features()
    known = torch.tensor([k not in unknown for k in range(CLASSES)])
    means = {k: z[[n for n in range(6) if labels[n] == k]].mean(0) for k in (0, 1, 3)}
    apart = {k: float(np.linalg.norm(mean - prototypes[k])) for k, mean in means.items()}
    expected = sum(apart[k] for k in apart if k not in unknown) / 3
    found = misalignment(z, labels, prototypes, known, "euclidean")
    assert float(found) == pytest.approx(expected, rel=1e-5, abs=1e-7)


@pytest.mark.parametrize("distance", ["mse", "euclidean"])
def test_misalignment_gradient_is_zero_at_the_prototype(distance: str) -> None:
    labels, prototypes = torch.tensor([0, 1, 3]), features()[2]
    z = prototypes[labels].clone().requires_grad_()
    misalignment(z, labels, prototypes, torch.ones(CLASSES, dtype=torch.bool), distance).backward()  # type: ignore[no-untyped-call]
    assert z.grad is not None
    assert torch.equal(z.grad, torch.zeros_like(z))


# ---- received prototypes ------------------------------------------------------------------------------------------


def test_table_is_sorted_by_peer_regardless_of_arrival() -> None:
    bodies = {3: body({1: [1.0, 2.0]}, [7]), 1: body({0: [3.0, 4.0], 2: [5.0, 6.0]}, [1, 2])}
    for arrived in (bodies, dict(reversed(bodies.items()))):
        table = table_of(arrived, 2)
        assert table.values.tolist() == [[3.0, 4.0], [5.0, 6.0], [1.0, 2.0]]
        assert table.labels.tolist() == [0, 2, 1]
        assert table.senders.tolist() == [1, 1, 3]
        assert table.samples.tolist() == [1.0, 2.0, 7.0]


def test_rows_without_counts_have_equal_weights() -> None:
    assert table_of({0: body({0: [1.0], 2: [2.0]})}, 1).samples.tolist() == [1.0, 1.0]


@pytest.mark.parametrize(
    "received",
    [
        Prototypes(torch.ones(1, 1), (0, 1, 2), (1, 1, 1)),
        Prototypes(torch.ones(3, 1), (0,), (1,)),
        Prototypes(torch.ones(2, 1), (0, 1), (1,)),
        Prototypes(torch.ones(3, 1), (1, 0, 1), (1, 1, 1)),
        Prototypes(torch.ones(0, 1), (), ()),
    ],
    ids=["too few rows", "too many rows", "too few counts", "a class twice", "empty"],
)
def test_table_skips_inconsistent_bodies(received: Prototypes) -> None:
    table = table_of({0: received}, 1)
    assert len(table) == len(table.values) == len(table.samples) == len(table.senders) == 0


@pytest.mark.parametrize("value", [math.nan, 1e30])
def test_average_skips_diverged_prototypes(value: float) -> None:
    class Diverged(FedProto):
        def local_prototypes(self) -> Prototypes:
            body = super().local_prototypes()
            body.values[0, 0] = value
            return body

    without, beside = make(hyper()), make(hyper())
    beside[2] = Diverged(hyper(), setting(2, 3, linear_model(4, FEATURES, CLASSES, seed=2), data_of(2, (0, 1, 2))))
    run_rounds(without, Topology.from_edges(3, COMPLETE), 2, silent=[2])
    traffic = run_rounds(beside, Topology.from_edges(3, COMPLETE), 2)
    assert traffic[0][1].missing == {"Prototypes": [2]}
    assert torch.equal(beside[0].prototypes, without[0].prototypes)


def test_size_of_prototypes_is_bounded_by_the_number_of_classes() -> None:
    layouts = make(hyper())[0].layouts()
    assert MessageSchema(layouts).largest(1 << 40) == MAX_HEADER + CLASSES * FEATURES * 4
    for body in (
        Prototypes(torch.ones(200_000, FEATURES), (), ()),
        Prototypes(torch.ones(0, FEATURES), (0,) * 200_000, ()),
        Prototypes(torch.ones(0, FEATURES), (), (1,) * 200_000),
    ):
        with pytest.raises(Unexpected):
            arrive(body, layouts)


@pytest.mark.parametrize(
    ("classes", "samples", "width"),
    [((CLASSES,), (1,), FEATURES), ((-1,), (1,), FEATURES), ((0,), (0,), FEATURES), ((0,), (1,), FEATURES + 1)],
    ids=["class too large", "negative class", "no samples", "wrong width"],
)
def test_rejects_messages_with_wrong_classes_counts_or_shapes(classes: Any, samples: Any, width: int) -> None:
    with pytest.raises(Unexpected):
        arrive(Prototypes(torch.zeros(1, width), classes, samples), make(hyper())[0].layouts())


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


# ---- Fig. 1 ------------------------------------------------------------------------------------------------


def nearest(rows: Sequence[Sequence[float]], n: int) -> float:
    return min(math.dist(rows[n], rows[m]) for m in range(len(rows)) if m != n)


def test_compare_margins_compares_global_with_local_prototypes() -> None:
    first = {0: [0.0, 0.0], 1: [3.0, 4.0], 3: [9.0, 0.0]}
    second = {1: [1.0, 1.0], 2: [1.0, 8.0]}
    third = {0: [2.0, 2.0]}
    table = table_of({0: body(first), 4: body(second), 5: body(third)}, 2)
    shared = {0: [1.0, 1.0], 1: [2.0, 2.5], 2: [1.0, 8.0], 3: [9.0, 0.0]}
    prototypes = torch.tensor([*shared.values(), [1.0, 1.0]])
    known = torch.tensor([True] * 4 + [False])
    rows = list(shared.values())
    widths = [nearest(rows, n) for n in range(4)]
    best = [nearest(list(first.values()), 0), 7.0, 7.0, nearest(list(first.values()), 2)]
    assert compare_margins(table, prototypes, known) == {
        "margin": pytest.approx(min(widths)),
        "peer_margin": pytest.approx(7.0),
        "wider": sum(width >= other for width, other in zip(widths, best, strict=True)) / 4,
    }


@pytest.mark.parametrize("classes_of", [[(0,), (1,)], [(2,), (2,)]])
def test_peers_with_one_class_each_have_no_margins(classes_of: Any) -> None:
    peers = make(hyper(), classes_of=classes_of)
    run_rounds(peers, Topology.from_edges(2, [(0, 1)]), 2)
    assert peers[0].diagnostics() == {}


def test_means_of_separate_prototypes_lie_closer_together() -> None:
    """FedTGP, Fig. 1a."""
    bodies = {j: body({k: (3 * np.eye(4)[(j + k) % 4]).tolist() for k in range(3)}, [1] * 3) for j in range(4)}
    table = table_of(bodies, 4)
    observed = compare_margins(table, *class_means(table, 3, weighted=True))
    assert observed["margin"] == pytest.approx(0.0, abs=1e-6)
    assert observed["peer_margin"] == pytest.approx(3 * math.sqrt(2))
    assert observed["wider"] == 0.0


def test_diagnostics_are_empty_in_rounds_without_messages() -> None:
    peers = make(hyper(participation=1 / 3))
    topology = Topology.from_edges(3, LINE)
    seen: dict[tuple[int, int], set[str]] = {}
    traffic = run_rounds(
        peers, topology, 5, after=lambda peer, t: seen.update({(peer.me, t): set(peer.diagnostics())})
    )
    active = {(me, t): bool(messages(traffic[me][t].received) or messages(traffic[me][t].sent)) for me, t in seen}
    assert set(active.values()) == {True, False}
    for peer_and_round, names in seen.items():
        assert names == ({"margin", "peer_margin", "wider"} if active[peer_and_round] else set())
