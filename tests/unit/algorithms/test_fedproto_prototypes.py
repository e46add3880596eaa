"""FedProto's prototypes: equations against reference code, what a peer accepts, margins as in FedTGP's Fig. 1."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from p2pfl.algorithms.class_means import Prototypes, PrototypeTable, class_means
from p2pfl.algorithms.fedproto import FedProto
from p2pfl.algorithms.prototypes import compare_margins, distances, margins, misalignment
from p2pfl.errors import Unexpected
from p2pfl.messaging.schema import MAX_HEADER, MessageSchema
from p2pfl.messaging.topology import Topology
from tests.bodies import arrive
from tests.fedproto_peers import CLASSES, COMPLETE, FEATURES, LINE, data_of, hyper, make
from tests.support import CPU, linear_model, messages, run_rounds, setting

property_of = settings(deadline=None, max_examples=50)


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
