"""FedProto against its paper: each equation by another way, whole rounds by hand, every switch, every byte."""

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

from p2pfl.algorithms.fedproto import (
    FedProto,
    Hyper,
    Prototypes,
    class_means,
    compared,
    distances,
    gaps,
    misalignment,
    together,
)
from p2pfl.models import Model
from p2pfl.tensors import digest
from p2pfl.topology import Topology
from p2pfl.training import PeerData, evaluate
from tests.p2pfl.support import CPU, linear_model, messages, payload, peer_data, play, random_dataset, setting

property_of = settings(deadline=None, max_examples=50)

Array = NDArray[np.float64]

FEATURES, CLASSES = 5, 4
LINE = [(0, 1), (1, 2)]
COMPLETE = [(0, 1), (1, 2), (0, 2)]
OWN: tuple[tuple[int, ...], ...] = ((0, 1), (1, 2), (0, 1, 2))
"""Classes of each peer; nobody has class 3."""


def hyper(**given: Any) -> Hyper:
    return Hyper.parse({"lr": 0.1, "batch": 1000, **given})


def data_of(me: int, classes: Sequence[int]) -> PeerData:
    """6 + 3 me training samples of these classes, and all four test samples of the peer's dataset."""
    dataset = random_dataset(60, classes=CLASSES, seed=me)
    chosen = [n for n in range(60) if dataset.train.labels[n] in classes][: 6 + 3 * me]
    return peer_data(dataset, chosen, range(4))


def make(h: Hyper, own: Sequence[Sequence[int]] = OWN) -> list[FedProto]:
    """Peers with linear backbones on grey noise."""
    return [
        FedProto(h, setting(me, len(own), linear_model(4, FEATURES, CLASSES, seed=me), data_of(me, classes)))
        for me, classes in enumerate(own)
    ]


def body(rows: Mapping[int, Sequence[float]], samples: Sequence[int] = ()) -> Prototypes:
    return Prototypes(torch.tensor(list(rows.values())), tuple(rows), tuple(samples))


# ---- the equations -----------------------------------------------------------------------------------------

tables = st.tuples(st.integers(0, 12), st.integers(1, 5), st.integers(0, 2**32 - 1))


@property_of
@given(tables)
def test_means_of_classes_are_those_of_a_loop(table: tuple[int, int, int]) -> None:
    rows, classes, seed = table
    stream = np.random.default_rng(seed)
    values = stream.normal(size=(rows, 3)).astype(np.float32)
    labels, weights = stream.integers(classes, size=rows), stream.integers(1, 9, size=rows).astype(float)
    found, present = class_means(
        torch.from_numpy(values), torch.from_numpy(labels), torch.from_numpy(weights), classes
    )
    assert found.dtype == torch.float32
    for label in range(classes):
        mine = [n for n in range(rows) if labels[n] == label]
        assert bool(present[label]) == bool(mine)
        total = sum(weights[n] for n in mine) or 1.0
        expected = sum((weights[n] / total * values[n].astype(float) for n in mine), np.zeros(3))
        np.testing.assert_allclose(found[label], expected, rtol=1e-6, atol=1e-7)


@property_of
@given(tables)
def test_gaps_are_the_distances_to_the_nearest_other(table: tuple[int, int, int]) -> None:
    rows, width, seed = table
    points = np.random.default_rng(seed).normal(size=(rows, width)).astype(np.float32)
    found = gaps(torch.from_numpy(points))
    for n in range(rows):
        others = [float(np.linalg.norm(points[n] - points[m])) for m in range(rows) if m != n]
        assert float(found[n]) == pytest.approx(min(others, default=math.inf), rel=1e-5)


def test_distances_of_equal_points_are_zero_however_far_from_the_origin() -> None:
    points = 1000 * torch.rand(40, 30)  # with a matrix product cancellation would leave a few units
    assert torch.equal(distances(points, points).diagonal(), torch.zeros(40))


def features(seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """z [6, d], labels of classes 0, 1 and 3, prototypes [K, d]."""
    stream = torch.Generator().manual_seed(seed)
    z = torch.randn(6, FEATURES, generator=stream)
    return z, torch.tensor([0, 1, 0, 3, 1, 0]), torch.randn(CLASSES, FEATURES, generator=stream)


@pytest.mark.parametrize("unknown", [(), (3,), (0, 1, 3)])
def test_the_mean_squared_error_is_over_batch_and_dimensions_and_skips_unknown_classes(unknown: Any) -> None:
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
def test_the_euclidean_distance_is_that_of_the_means_of_the_batch(unknown: Any) -> None:
    z, labels, prototypes = features()
    known = torch.tensor([k not in unknown for k in range(CLASSES)])
    means = {k: z[[n for n in range(6) if labels[n] == k]].mean(0) for k in (0, 1, 3)}
    apart = {k: float(np.linalg.norm(mean - prototypes[k])) for k, mean in means.items()}
    expected = sum(apart[k] for k in apart if k not in unknown) / 3
    found = misalignment(z, labels, prototypes, known, "euclidean")
    assert float(found) == pytest.approx(expected, rel=1e-5, abs=1e-7)


@pytest.mark.parametrize("distance", ["mse", "euclidean"])
def test_the_pull_on_a_feature_that_is_there_already_is_zero_not_nan(distance: str) -> None:
    labels, prototypes = torch.tensor([0, 1, 3]), features()[2]
    z = prototypes[labels].clone().requires_grad_()
    misalignment(z, labels, prototypes, torch.ones(CLASSES, dtype=torch.bool), distance).backward()  # type: ignore[no-untyped-call]
    assert z.grad is not None
    assert torch.equal(z.grad, torch.zeros_like(z))


# ---- what came in ------------------------------------------------------------------------------------------


def test_what_came_in_is_sorted_by_peer_whatever_the_order_of_arrival() -> None:
    bodies = {3: body({1: [1.0, 2.0]}, [7]), 1: body({0: [3.0, 4.0], 2: [5.0, 6.0]}, [1, 2])}
    for arrived in (bodies, dict(reversed(bodies.items()))):
        heard = together(arrived, 3, 2, CPU)
        assert heard.values.tolist() == [[3.0, 4.0], [5.0, 6.0], [1.0, 2.0]]
        assert heard.labels.tolist() == [0, 2, 1]
        assert heard.senders.tolist() == [1, 1, 3]
        assert heard.samples.tolist() == [1.0, 2.0, 7.0]
        assert heard.of(1).tolist() == [[3.0, 4.0], [5.0, 6.0]]


def test_without_counts_all_weigh_the_same() -> None:
    assert together({0: body({0: [1.0], 2: [2.0]})}, 3, 1, CPU).samples.tolist() == [1.0, 1.0]


@pytest.mark.parametrize(
    ("strange", "left"),
    [
        (Prototypes(torch.ones(2, 1), (-1, 3), (1, 1)), []),
        (Prototypes(torch.ones(3, 1), (0, 10**12, 1), (1, 1, 1)), [0, 1]),
        (Prototypes(torch.ones(2, 1), (0, 1), (0, -5)), []),
        (Prototypes(torch.ones(1, 1), (0, 1, 2), (1, 1, 1)), [0]),
        (Prototypes(torch.ones(3, 1), (0,), (1, 1)), [0]),
        (Prototypes(torch.ones(3, 1), (0, 1), (1,)), [0]),
        (Prototypes(torch.ones(0, 1), (), ()), []),
        (Prototypes(torch.ones(3, 1), (1, 0, 1), (1, 1, 1)), [1, 0]),
        (Prototypes(torch.tensor([[1e19], [1.0]]), (0, 1), (1, 1)), [1]),
    ],
)
def test_rows_that_make_no_sense_are_left_out(strange: Prototypes, left: list[int]) -> None:
    heard = together({0: strange}, 3, 1, CPU)
    assert heard.labels.tolist() == left
    assert len(heard.values) == len(heard.samples) == len(heard.senders) == len(left)


def test_a_neighbour_that_says_nothing_sensible_does_no_harm() -> None:
    class Liar(FedProto):
        def own_prototypes(self) -> Prototypes:
            return Prototypes(torch.full((2, FEATURES), torch.nan), (CLASSES, -1), (5, 5))

    honest, liar, _ = make(hyper())
    peers = [honest, Liar(hyper(), setting(1, 2, liar.model, liar.data))]
    play(peers, Topology.from_edges(2, [(0, 1)]), 2)
    assert honest.known.tolist() == [True, True, False, False]
    assert torch.equal(honest.prototypes[:2], honest.own_prototypes().values)


# ---- whole rounds by hand ----------------------------------------------------------------------------------


@dataclass
class Sheet:
    """One peer on paper: z = A x + a, scores = B z + b; float64."""

    A: Array
    a: Array
    B: Array
    b: Array
    x: Array
    labels: NDArray[np.int64]

    @classmethod
    def of(cls, peer: FedProto) -> Sheet:
        backbone: Any = peer.model.backbone[1]  # type: ignore[index]
        head: Any = peer.model.head
        images = peer.data.train.images.images[peer.data.train.indices].reshape(len(peer.data.train), -1) / 255.0
        numbers = [tensor.detach().double().numpy() for tensor in (*backbone.parameters(), *head.parameters())]
        return cls(*numbers, images, peer.data.train.labels)  # type: ignore[arg-type]

    def features(self) -> Array:
        return np.asarray(self.x @ self.A.T + self.a)

    def descend(self, prototypes: Mapping[int, Array], h: Hyper) -> None:
        """One step on CE + λ φ over all samples."""
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
                mine = self.labels == label
                gap = z[mine].mean(0) - prototypes[label]
                at_z[n] += alignment * gap / np.linalg.norm(gap) / mine.sum() / len(present)
        self.B = self.B - h.lr * at_scores.T @ z
        self.b = self.b - h.lr * at_scores.sum(0)
        self.A = self.A - h.lr * at_z.T @ self.x
        self.a = self.a - h.lr * at_z.sum(0)

    def own(self) -> dict[int, tuple[Array, int]]:
        z = self.features()
        return {k: (z[self.labels == k].mean(0), int((self.labels == k).sum())) for k in set(self.labels.tolist())}


def mean_by_hand(said: Sequence[dict[int, tuple[Array, int]]], label: int, weighted: bool) -> Array:
    rows = [one[label] for one in said if label in one]
    weights = [count if weighted else 1 for _, count in rows]
    return np.asarray(sum(w * row for w, (row, _) in zip(weights, rows, strict=True)) / sum(weights))


@pytest.mark.parametrize(
    ("given", "edges"),
    [
        ({}, COMPLETE),
        ({}, LINE),
        ({"weighted": False, "local_epochs": 2}, COMPLETE),
        ({"weighted": False, "local_epochs": 2}, LINE),
        # On the line peer 0 is the only one that it hears of class 0: a distance of 0, with no direction.
        ({"distance": "euclidean", "alignment": 0.3}, COMPLETE),
    ],
    ids=str,
)
def test_rounds_are_the_papers(given: dict[str, Any], edges: list[tuple[int, int]]) -> None:
    h, topology = hyper(**given), Topology.from_edges(3, edges)
    peers = make(h)
    sheets = [Sheet.of(peer) for peer in peers]
    known: list[dict[int, Array]] = [{}, {}, {}]
    play(peers, topology, 3)
    for _ in range(3):
        for sheet, prototypes in zip(sheets, known, strict=True):
            for _ in range(h.local_epochs):
                sheet.descend(prototypes, h)
        said = [sheet.own() for sheet in sheets]
        for me in range(3):
            heard = [said[j] for j in sorted((me, *topology.neighbors[me]))]
            for label in {label for one in heard for label in one}:
                known[me][label] = mean_by_hand(heard, label, h.weighted)
    for peer, sheet, prototypes in zip(peers, sheets, known, strict=True):
        found = Sheet.of(peer)
        for name in ("A", "a", "B", "b"):
            np.testing.assert_allclose(getattr(found, name), getattr(sheet, name), rtol=1e-4, atol=1e-5)
        assert [k for k in range(CLASSES) if peer.known[k]] == sorted(prototypes)
        for label, expected in prototypes.items():
            np.testing.assert_allclose(peer.prototypes[label], expected, rtol=1e-4, atol=1e-5)


def test_on_a_complete_graph_all_peers_have_the_same_prototypes_bit_for_bit() -> None:
    for weighted in (True, False):
        peers = make(hyper(weighted=weighted, batch=2))
        play(peers, Topology.from_edges(3, COMPLETE), 3)
        assert len({digest([peer.prototypes, peer.known]) for peer in peers}) == 1
        assert len({digest(peer.model.state_dict()) for peer in peers}) == 3


def test_the_first_round_trains_without_prototypes_and_the_second_with_them() -> None:
    peers = make(hyper())
    terms: list[set[str]] = []
    play(peers, Topology.from_edges(3, COMPLETE), 2, after=lambda peer, t: terms.append(set(peer.meter.drain())))
    assert terms == [{"ce"}] * 3 + [{"ce", "proto"}] * 3


def test_a_missing_neighbour_is_left_out_of_the_mean() -> None:
    peers = make(hyper())
    spoken = play(peers, Topology.from_edges(3, COMPLETE), 1, silent=[2])
    assert spoken[0][0].missing == {"Prototypes": [2]}
    said = [Sheet.of(peer).own() for peer in peers[:2]]
    for peer in peers[:2]:
        for label in (0, 1, 2):
            np.testing.assert_allclose(peer.prototypes[label], mean_by_hand(said, label, True), rtol=1e-4, atol=1e-6)


def test_own_prototypes_that_diverged_are_left_out_at_home_too() -> None:
    """So that all copies stay equal, and a model that is fine is not drawn to NaN."""
    peers = make(hyper())

    class Spoilt(FedProto):
        def own_prototypes(self) -> Prototypes:
            own = super().own_prototypes()
            return Prototypes(own.values * torch.nan, own.classes, own.samples)

    peers[1].__class__ = Spoilt
    play(peers, Topology.from_edges(3, COMPLETE), 2)
    assert len({digest([peer.prototypes, peer.known]) for peer in peers}) == 1
    assert all(bool(tensor.isfinite().all()) for peer in peers for tensor in peer.model.state_dict().values())


def test_a_class_that_was_not_heard_of_in_a_round_keeps_its_prototype() -> None:
    peers = make(hyper(participation=1 / 3))  # one peer a round
    after: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}

    def note(peer: Any, t: int) -> None:
        after[peer.me, t] = peer.prototypes.clone(), peer.known.clone()

    spoken = play(peers, Topology.from_edges(3, COMPLETE), 6, after=note)
    speakers = [next(me for me in range(3) if messages(spoken[me][t].out)) for t in range(6)]
    assert set(speakers) == {0, 1, 2}
    for t in range(1, 6):
        for k in range(CLASSES):
            if k not in OWN[speakers[t]]:
                assert torch.equal(after[0, t][0][k], after[0, t - 1][0][k])
            else:
                assert not torch.equal(after[0, t][0][k], after[0, t - 1][0][k])
        assert bool((after[0, t][1] | ~after[0, t - 1][1]).all())
    assert peers[0].known.tolist() == [True, True, True, False]


@pytest.mark.parametrize("share", [1 / 3, 2 / 3, 1.0])
def test_only_those_who_take_part_train_and_send_and_all_others_hear_them(share: float) -> None:
    peers = make(hyper(participation=share))
    states: list[list[str]] = [[digest(peer.model.state_dict())] for peer in peers]

    def note(peer: Any, t: int) -> None:
        states[peer.me].append(digest(peer.model.state_dict()))

    spoken = play(peers, Topology.from_edges(3, COMPLETE), 4, after=note)
    for t in range(4):
        trained = {me for me in range(3) if states[me][t] != states[me][t + 1]}
        sent = {me for me in range(3) if messages(spoken[me][t].out) == 2}
        assert trained == sent
        assert len(sent) == {1 / 3: 1, 2 / 3: 2, 1.0: 3}[share]
        for me in range(3):
            assert messages(spoken[me][t].inn) == len(sent - {me})
    assert len({digest([peer.prototypes, peer.known]) for peer in peers}) == 1


def test_a_peer_alone_follows_its_own_prototypes() -> None:
    (peer,) = make(hyper(), own=[(0, 2)])
    play([peer], Topology.from_edges(1, []), 2)
    assert peer.known.tolist() == [True, False, True, False]
    assert torch.equal(peer.prototypes[[0, 2]], peer.own_prototypes().values)


def test_a_peer_without_samples_says_so_and_hears_the_others() -> None:
    peers = make(hyper(), own=[(), (0, 1)])
    spoken = play(peers, Topology.from_edges(2, [(0, 1)]), 2)
    assert [payload(one.out) for one in spoken[0]] == [0, 0]
    assert torch.equal(peers[0].prototypes, peers[1].prototypes)


# ---- own prototypes and predictions ------------------------------------------------------------------------


def test_own_prototypes_are_means_in_evaluation_mode_of_samples_as_they_are() -> None:
    backbone = nn.Sequential(nn.Flatten(), nn.Linear(4, FEATURES), nn.BatchNorm1d(FEATURES), nn.Dropout(0.5))
    dataset = random_dataset(30, classes=CLASSES)
    data = peer_data(dataset, range(20), augment=torch.zeros_like)
    peer = FedProto(hyper(batch=4, lr=0.01), setting(0, 1, Model("bn", backbone, FEATURES, CLASSES), data))
    play([peer], Topology.from_edges(1, []), 2)
    statistics = digest(peer.model.state_dict())
    found = peer.own_prototypes()
    assert digest(peer.model.state_dict()) == statistics
    assert found.classes == (0, 1, 2, 3)
    assert found.samples == (5, 5, 5, 5)
    x = torch.from_numpy(dataset.train.images[:20]).float() / 255
    z = peer.model.eval().backbone(x).detach()
    for label in range(CLASSES):
        torch.testing.assert_close(found.values[label], z[label:20:CLASSES].mean(0))


def test_before_any_prototype_is_known_the_head_decides() -> None:
    peer = make(hyper())[0]
    x = torch.rand(3, 1, 2, 2)
    assert torch.equal(peer.predict(x), peer.model(x))


def test_then_the_nearest_known_prototype_does() -> None:
    peers = make(hyper())
    play(peers, Topology.from_edges(3, LINE), 2)
    peer, x = peers[0], torch.rand(7, 1, 2, 2)
    scores, z = peer.predict(x).detach(), peer.model.backbone(x).detach()
    for n in range(7):
        for label in range(CLASSES):
            apart = float(np.linalg.norm(z[n] - peer.prototypes[label])) if label < 3 else math.inf
            assert float(scores[n, label]) == pytest.approx(-apart, rel=1e-5)
    assert scores.argmax(1).max() < 3


def test_the_loss_of_an_evaluation_is_finite_as_long_as_the_classes_are_known() -> None:
    dataset = random_dataset(60, classes=CLASSES)
    peer = make(hyper(), own=[(0, 1)])[0]
    for test, finite in (([0, 1], True), ([0, 1, 3], False)):
        data = peer_data(dataset, [0, 1], test)
        play([peer], Topology.from_edges(1, []), 1)
        evaluation = evaluate(peer.predict, data, data.test)
        assert evaluation is not None
        assert math.isfinite(evaluation.loss) is finite
        assert not math.isnan(evaluation.loss)


def test_heads_may_differ() -> None:
    """FedTGP's HtC4: only the backbones' features need to agree."""
    peers = []
    for me, hidden in enumerate((0, 7, 3)):
        head = nn.Sequential(nn.Linear(FEATURES, hidden), nn.ReLU(), nn.Linear(hidden, CLASSES)) if hidden else None
        backbone = nn.Sequential(nn.Flatten(), nn.Linear(4, FEATURES))
        model = Model(f"with-{hidden}", backbone, FEATURES, CLASSES, head)
        peers.append(FedProto(hyper(), setting(me, 3, model, data_of(me, OWN[me]))))
    play(peers, Topology.from_edges(3, COMPLETE), 2)
    assert len({digest(peer.prototypes) for peer in peers}) == 1


# ---- switches ----------------------------------------------------------------------------------------------


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
def test_every_switch_changes_what_is_learned(change: dict[str, Any]) -> None:
    digests = []
    for h in (hyper(), hyper(**change)):
        peers = make(h)
        play(peers, Topology.from_edges(3, COMPLETE), 3)
        digests.append(digest([peer.model.state_dict() for peer in peers]))
    assert digests[0] != digests[1]


def test_without_alignment_it_is_local_training() -> None:
    (alone,), together_ = make(hyper(), own=[OWN[0]]), make(hyper(alignment=0.0))
    play(together_, Topology.from_edges(3, COMPLETE), 3)
    for _ in range(3):
        alone.optimizer.zero_grad()
        data = alone.data
        x, labels = next(data.sweep(data.train))
        cross_entropy(alone.model(x), labels).backward()  # type: ignore[no-untyped-call]
        alone.optimizer.step()
    for one, other in zip(alone.model.parameters(), together_[0].model.parameters(), strict=True):
        torch.testing.assert_close(one, other)


# ---- bytes -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("edges", [COMPLETE, LINE], ids=["complete", "line"])
def test_payload_bytes_are_those_of_table_5_without_a_server(edges: list[tuple[int, int]]) -> None:
    spoken = play(make(hyper()), Topology.from_edges(3, edges), 3)
    directed = [*edges, *((j, i) for i, j in edges)]
    numbers = sum(FEATURES * len(OWN[sender]) for sender, _ in directed)
    for t in range(3):
        for side in ("out", "inn"):
            assert sum(payload(getattr(peer[t], side)) for peer in spoken) == 4 * numbers
        assert sum(messages(peer[t].out, "Prototypes") for peer in spoken) == len(directed)


@pytest.mark.parametrize("weighted", [True, False])
def test_sample_counts_travel_only_where_they_are_needed(weighted: bool) -> None:
    peer = make(hyper(weighted=weighted))[2]
    said = peer.own_prototypes()
    assert said.classes == (0, 1, 2)
    counts = np.bincount(peer.data.train.labels)
    assert said.samples == (tuple(counts) if weighted else ())


def test_nothing_but_prototypes_of_that_width_is_understood() -> None:
    (layout,) = make(hyper())[0].layouts()
    assert {path: str(spec) for path, spec in layout.tensors.items()} == {("values", None): "float32[*, 5]"}


# ---- Fig. 1 ------------------------------------------------------------------------------------------------


def nearest(rows: Sequence[Sequence[float]], n: int) -> float:
    return min(math.dist(rows[n], rows[m]) for m in range(len(rows)) if m != n)


def test_what_is_observed_compares_global_with_own_prototypes() -> None:
    first = {0: [0.0, 0.0], 1: [3.0, 4.0], 3: [9.0, 0.0]}
    second = {1: [1.0, 1.0], 2: [1.0, 8.0]}
    third = {0: [2.0, 2.0]}
    heard = together({0: body(first), 4: body(second), 5: body(third)}, 5, 2, CPU)
    shared = {0: [1.0, 1.0], 1: [2.0, 2.5], 2: [1.0, 8.0], 3: [9.0, 0.0]}
    prototypes = torch.tensor([*shared.values(), [1.0, 1.0]])
    known = torch.tensor([True] * 4 + [False])
    rows = list(shared.values())
    margins = [nearest(rows, n) for n in range(4)]
    best = [nearest(list(first.values()), 0), 7.0, 7.0, nearest(list(first.values()), 2)]
    assert compared(heard, prototypes, known) == {
        "margin": pytest.approx(min(margins)),
        "peer_margin": pytest.approx(7.0),
        "wider": sum(own >= other for own, other in zip(margins, best, strict=True)) / 4,
    }


@pytest.mark.parametrize("own", [[(0,), (1,)], [(2,), (2,)]])
def test_peers_of_one_class_have_nothing_to_compare(own: Any) -> None:
    peers = make(hyper(), own=own)
    play(peers, Topology.from_edges(2, [(0, 1)]), 2)
    assert peers[0].observations() == {}


def test_the_mean_of_prototypes_that_lie_apart_lies_closer() -> None:
    """FedTGP, Fig. 1a: what is wrong with means."""
    bodies = {j: body({k: (3 * np.eye(4)[(j + k) % 4]).tolist() for k in range(3)}, [1] * 3) for j in range(4)}
    heard = together(bodies, 3, 4, CPU)
    means, present = class_means(heard.values, heard.labels, heard.samples, 3)
    observed = compared(heard, means, present)
    assert observed["margin"] == pytest.approx(0.0, abs=1e-6)
    assert observed["peer_margin"] == pytest.approx(3 * math.sqrt(2))
    assert observed["wider"] == 0.0


def test_observations_are_of_the_round_only() -> None:
    peers = make(hyper(participation=1 / 3))
    topology = Topology.from_edges(3, LINE)
    seen: dict[tuple[int, int], set[str]] = {}
    spoken = play(peers, topology, 5, after=lambda peer, t: seen.update({(peer.me, t): set(peer.observations())}))
    speaking = {(me, t): bool(messages(spoken[me][t].inn) or messages(spoken[me][t].out)) for me, t in seen}
    assert set(speaking.values()) == {True, False}
    for place, names in seen.items():
        assert names == ({"margin", "peer_margin", "wider"} if speaking[place] else set())
