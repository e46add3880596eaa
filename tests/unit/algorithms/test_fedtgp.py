"""FedTGP against its paper: margin and loss by brute force, training by autograd, equal copies, every option."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, one_hot

from p2pfl import rng
from p2pfl.algorithms.class_means import PrototypeTable, class_means
from p2pfl.algorithms.fedproto import FedProto
from p2pfl.algorithms.fedproto import Hyper as FedProtoHyper
from p2pfl.algorithms.fedtgp import FedTGP, Hyper, TrainablePrototypes, acl_gradient, adaptive_margin
from p2pfl.algorithms.prototypes import distances, margins
from p2pfl.messaging.net import Net
from p2pfl.messaging.topology import Topology
from p2pfl.models import Model
from p2pfl.tensors import digest
from tests.support import linear_model, messages, payload, peer_data, random_dataset, run_rounds, setting

property_of = settings(deadline=None, max_examples=50)

Array = NDArray[np.float64]

FEATURES, CLASSES, SEED = 5, 4, 7
LINE = Topology.from_edges(3, [(0, 1), (1, 2)])
COMPLETE = Topology.from_edges(3, [(0, 1), (1, 2), (0, 2)])
LOCAL_CLASSES: tuple[tuple[int, ...], ...] = ((0, 1), (1, 2), (0, 1, 2))
"""Classes of each peer; no peer has class 3."""


def hyper(**given: Any) -> Hyper:
    return Hyper.parse({"lr": 0.1, "batch": 4, "prototype_epochs": 5, "prototype_batch": 3, **given})


class RecordingFedTGP(FedTGP):
    """Records the received prototypes and the trained ones."""

    def setup(self) -> None:
        super().setup()
        self.received: list[PrototypeTable] = []
        self.trained: list[Tensor] = []

    def train_prototypes(self, table: PrototypeTable, margin: float, net: Net) -> None:
        super().train_prototypes(table, margin, net)
        self.received.append(table)
        self.trained.append(self.prototypes.clone())


def data_of(me: int, classes: Sequence[int]) -> Any:
    dataset = random_dataset(60, classes=CLASSES, seed=me)
    return peer_data(dataset, [n for n in range(60) if dataset.train.labels[n] in classes][: 6 + 3 * me])


def make(h: Hyper, classes_of: Sequence[Sequence[int]] = LOCAL_CLASSES) -> list[RecordingFedTGP]:
    """Peers with linear backbones on gray noise, with different initial values."""
    peers = len(classes_of)
    return [
        RecordingFedTGP(
            h, setting(me, peers, linear_model(4, FEATURES, CLASSES, seed=me), data_of(me, classes), seed=SEED)
        )
        for me, classes in enumerate(classes_of)
    ]


# ---- line 10: margin -----------------------------------------------------------------------------------


def apart(centers: Array) -> dict[tuple[int, int], float]:
    pairs = [(i, j) for i in range(len(centers)) for j in range(len(centers)) if i != j]
    return {(i, j): math.dist(centers[i], centers[j]) for i, j in pairs}


@property_of
@given(st.integers(2, 9), st.integers(0, 2**32 - 1), st.sampled_from([0.5, 3.0, 100.0]))
def test_margin_matches_the_formulas(classes: int, seed: int, threshold: float) -> None:
    centers = np.random.default_rng(seed).normal(scale=2, size=(classes, 3))
    all_pairs = apart(centers)
    nearest = [min(d for (i, _), d in all_pairs.items() if i == c) for c in range(classes)]
    for form, expected in (
        ("adaptive", min(max(nearest), threshold)),
        ("pairwise-max", min(max(all_pairs.values()), threshold)),
        ("fixed", threshold),
        ("none", 0.0),
    ):
        found = adaptive_margin(torch.from_numpy(centers), hyper(margin=form, threshold=threshold))
        assert found == pytest.approx(expected)


@pytest.mark.parametrize("classes", [0, 1])
def test_margin_is_0_with_fewer_than_two_classes(classes: int) -> None:
    centers = torch.ones(classes, 3)
    assert adaptive_margin(centers, hyper()) == 0.0
    assert adaptive_margin(centers, hyper(margin="pairwise-max")) == 0.0


# ---- line 11: loss and gradient --------------------------------------------------------------------


def acl_loss(values: Tensor, labels: Tensor, prototypes: Tensor, margin: float) -> Tensor:
    """Eq. 10 in torch, averaged over the batch: the loss whose gradient ``acl_gradient`` computes."""
    apart = distances(values, prototypes) + margin * one_hot(labels, len(prototypes)).to(values.dtype)
    return cross_entropy(-apart, labels)


def acl_by_hand(values: Array, labels: Sequence[int], prototypes: Array, margin: float) -> float:
    """Eq. 10, term by term, divided by the number of terms."""
    total = 0.0
    for value, label in zip(values, labels, strict=True):
        positive = math.exp(-(math.dist(value, prototypes[label]) + margin))
        others = sum(math.exp(-math.dist(value, row)) for k, row in enumerate(prototypes) if k != label)
        total -= math.log(positive / (positive + others))
    return total / len(values)


problems = st.tuples(
    st.integers(1, 6), st.integers(1, 5), st.integers(1, 4), st.integers(0, 2**32 - 1), st.floats(0, 10)
)


def problem(rows: int, classes: int, width: int, seed: int) -> tuple[Array, NDArray[np.int64], Array]:
    stream = np.random.default_rng(seed)
    values, prototypes = stream.normal(size=(rows, width)), stream.normal(size=(classes, width))
    return values, stream.integers(classes, size=rows), prototypes


@property_of
@given(problems)
def test_reference_loss_matches_eq_10(drawn: tuple[int, int, int, int, float]) -> None:
    *sizes, margin = drawn
    values, labels, prototypes = problem(*sizes)
    found = acl_loss(torch.from_numpy(values), torch.from_numpy(labels), torch.from_numpy(prototypes), margin)
    assert found.item() == pytest.approx(acl_by_hand(values, labels.tolist(), prototypes, margin), rel=1e-9, abs=1e-9)


@pytest.mark.exhaustive
@property_of
@given(problems)
@example((3, 4, 2, 0, 100.0))
def test_gradient_matches_autograd(drawn: tuple[int, int, int, int, float]) -> None:
    *sizes, margin = drawn
    values, labels, prototypes = map(torch.from_numpy, problem(*sizes))
    variable = prototypes.clone().requires_grad_()
    acl_loss(values, labels, variable, margin).backward()  # type: ignore[no-untyped-call]
    targets = one_hot(labels, len(prototypes)).double()
    torch.testing.assert_close(acl_gradient(values, targets, prototypes, margin), variable.grad)


def test_gradient_is_finite_at_a_local_prototype() -> None:
    prototypes = torch.tensor([[1.0, 2.0], [0.0, 0.0]])
    targets = torch.eye(2)
    found = acl_gradient(prototypes[:1], targets[:1], prototypes, 3.0)
    assert torch.isfinite(found).all()
    assert torch.equal(found[0], torch.zeros(2))
    assert torch.equal(acl_gradient(torch.zeros(1, 2), targets[1:], prototypes, 0.0)[1], torch.zeros(2))


@pytest.mark.parametrize("margin", [0.0, 3.0, 30.0])
def test_gradient_at_a_local_prototype_includes_the_rest_of_the_batch(margin: float) -> None:
    torch.manual_seed(1)
    prototypes = (4.0 * torch.randn(3, 2, dtype=torch.float64)).requires_grad_()
    values = torch.stack([prototypes[0].detach(), torch.randn(2, dtype=torch.float64)])
    labels = torch.tensor([0, 1])
    acl_loss(values, labels, prototypes, margin).backward()  # type: ignore[no-untyped-call]
    found = acl_gradient(values, one_hot(labels, 3).to(values.dtype), prototypes.detach(), margin)
    assert prototypes.grad is not None
    torch.testing.assert_close(found, prototypes.grad)
    assert float(found[0].norm()) > 0


@pytest.mark.parametrize("transform", [True, False])
@pytest.mark.parametrize("margin", [0.0, 2.5])
def test_training_matches_sgd_on_the_loss(transform: bool, margin: float) -> None:
    torch.manual_seed(0)
    values, labels = torch.randn(11, FEATURES), torch.arange(11) % CLASSES
    orders = [torch.randperm(11) for _ in range(6)]
    found = TrainablePrototypes(CLASSES, FEATURES, transform)
    expected = copy.deepcopy(found)
    start = found().detach().clone()
    found.fit(values, labels, margin, orders, batch=4, lr=0.2)
    optimizer = torch.optim.SGD(expected.parameters(), lr=0.2)
    for order in orders:
        for first in range(0, 11, 4):  # batches of 4, 4 and 3
            chosen = order[first : first + 4]
            optimizer.zero_grad()
            acl_loss(values[chosen], labels[chosen], expected(), margin).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
    assert not torch.allclose(found(), start, atol=0.1)
    for parameter, reference in zip(found.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(parameter, reference, rtol=1e-4, atol=1e-5)


def test_trainable_prototypes_are_two_layers_over_a_vector_per_class() -> None:
    with_layers, bare = TrainablePrototypes(CLASSES, FEATURES, True), TrainablePrototypes(CLASSES, FEATURES, False)
    shapes = {name: tuple(parameter.shape) for name, parameter in with_layers.named_parameters()}
    d = FEATURES
    assert shapes == {
        "vectors": (CLASSES, d),
        "inner.weight": (d, d),
        "inner.bias": (d,),
        "outer.weight": (d, d),
        "outer.bias": (d,),
    }
    assert [name for name, _ in bare.named_parameters()] == ["vectors"]
    assert torch.equal(bare(), bare.vectors)


def test_trained_prototypes_stay_apart_where_means_shrink() -> None:
    """Fig. 1b: peers map the classes to different points, so that the means are close to each other."""
    stream = np.random.default_rng(0)
    points = 4 * np.eye(8)[[stream.permutation(8)[:3] for _ in range(5)]] + stream.normal(scale=0.1, size=(5, 3, 8))
    values = torch.from_numpy(points.reshape(15, 8)).float()
    labels = torch.arange(15) % 3
    best = max(float(margins(values[first : first + 3]).min()) for first in range(0, 15, 3))
    means = torch.stack([values[labels == k].mean(0) for k in range(3)])
    assert float(margins(means).min()) < 0.8 * best
    torch.manual_seed(0)
    trained = TrainablePrototypes(3, 8, True)
    orders = [torch.from_numpy(stream.permutation(15)) for _ in range(150)]
    trained.fit(values, labels, adaptive_margin(means, hyper()), orders, batch=5, lr=0.05)
    assert float(margins(trained().detach()).min()) > best


# ---- rounds ------------------------------------------------------------------------------------------


def server(h: Hyper, rounds: Sequence[PrototypeTable]) -> list[Tensor]:
    """Return P̂ after each round, trained by autograd and torch's SGD from the shared start in the shared order."""
    with rng.torch_seeded(SEED, "fedtgp.init"):
        trainable = TrainablePrototypes(CLASSES, FEATURES, h.transform)
    trained = []
    for t, table in enumerate(rounds):
        shuffles = rng.shared(SEED, "net.shared", t)
        present = sorted(set(table.labels.tolist()))
        centers = np.array([table.values[table.labels == k].double().mean(0).numpy() for k in present])
        nearest = [min(d for (i, _), d in apart(centers).items() if i == c) for c in range(len(centers))]
        margin = {"adaptive": min(max(nearest), h.threshold), "none": 0.0, "fixed": h.threshold}[h.margin]
        optimizer = torch.optim.SGD(trainable.parameters(), lr=h.prototype_lr)
        for _ in range(h.prototype_epochs):
            order = shuffles.permutation(len(table.labels))
            for first in range(0, len(order), h.prototype_batch):
                chosen = order[first : first + h.prototype_batch]
                optimizer.zero_grad()
                acl_loss(table.values[chosen], table.labels[chosen], trainable(), margin).backward()  # type: ignore[no-untyped-call]
                optimizer.step()
        trained.append(trainable().detach().clone())
    return trained


@pytest.mark.exhaustive
@pytest.mark.parametrize("topology", [COMPLETE, LINE], ids=["complete", "line"])
@pytest.mark.parametrize(
    "given", [{}, {"margin": "none", "transform": False}, {"margin": "fixed", "threshold": 2.0}], ids=str
)
def test_every_peer_computes_what_the_papers_server_computes(given: dict[str, Any], topology: Topology) -> None:
    h = hyper(prototype_lr=0.1, **given)
    peers = make(h)
    sent: dict[tuple[int, int], Any] = {}

    def record(peer: Any, t: int) -> None:
        sent[peer.me, t] = peer.local_prototypes()

    run_rounds(peers, topology, 3, after=record)
    for peer in peers:
        for t in range(3):
            senders = sorted((peer.me, *topology.neighbors[peer.me]))
            assert peer.received[t].senders.tolist() == [j for j in senders for _ in LOCAL_CLASSES[j]]
            assert peer.received[t].labels.tolist() == [k for j in senders for k in LOCAL_CLASSES[j]]
            torch.testing.assert_close(peer.received[t].values, torch.cat([sent[j, t].values for j in senders]))
        for found, expected in zip(peer.trained, server(h, peer.received), strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(("topology", "trainings"), [(COMPLETE, 3), (LINE, 9)], ids=["complete", "line"])
def test_simulated_peers_with_equal_prototypes_train_them_once(
    topology: Topology, trainings: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bit-identical to each of them training its copy, as peers in processes of their own do."""
    calls: list[int] = []
    fit = TrainablePrototypes.fit

    def counted(self: TrainablePrototypes, *given: Any) -> None:
        calls.append(0)
        fit(self, *given)

    monkeypatch.setattr(TrainablePrototypes, "fit", counted)
    once, each = make(hyper()), make(hyper())
    run_rounds(once, topology, 3)
    assert len(calls) == trainings
    monkeypatch.setattr(Net, "memoized", lambda self, name, inputs, compute: compute())
    run_rounds(each, topology, 3)
    assert len(calls) == trainings + 3 * len(each)
    assert [digest(peer.state_dict()) for peer in once] == [digest(peer.state_dict()) for peer in each]


def copies(peers: Sequence[Any]) -> set[str]:
    """Digests of the peers' copies of P̂."""
    return {digest([peer.prototypes, peer.known, peer.trainable.state_dict()]) for peer in peers}


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "given",
    [{}, {"margin": "pairwise-max"}, {"transform": False}, {"participation": 0.67}, {"participation": 0.34}],
    ids=str,
)
def test_copies_are_bit_identical_on_a_complete_graph(given: dict[str, Any]) -> None:
    """With different backbones, heads and samples."""
    peers = []
    for me, hidden in enumerate((3, 7, 16, 5)):
        backbone = nn.Sequential(nn.Flatten(), nn.Linear(4, hidden), nn.ReLU(), nn.Linear(hidden, FEATURES))
        head = nn.Sequential(nn.Linear(FEATURES, hidden), nn.ReLU(), nn.Linear(hidden, CLASSES)) if me % 2 else None
        model = Model(f"net-{me}", backbone, FEATURES, CLASSES, head)
        data = data_of(me, [(0, 1), (1, 2), (0, 1, 2, 3), (3,)][me])
        peers.append(FedTGP(hyper(**given), setting(me, 4, model, data, seed=SEED)))
    assert len(copies(peers)) == 1
    complete = Topology.from_edges(4, [(i, j) for i in range(4) for j in range(i)])
    digests: dict[int, set[str]] = {}

    def note(peer: Any, t: int) -> None:
        digests.setdefault(t, set()).update(copies([peer]))

    run_rounds(peers, complete, 3, after=note)
    assert [len(digests[t]) for t in range(3)] == [1, 1, 1]
    assert len({*digests[0], *digests[1], *digests[2]}) == 3


def test_copies_differ_on_a_sparse_graph_after_an_equal_start() -> None:
    peers = make(hyper())
    assert len(copies(peers)) == 1
    run_rounds(peers, LINE, 1)
    assert len(copies(peers)) == 3


def test_initial_prototypes_depend_on_the_seed() -> None:
    peers = [
        FedTGP(hyper(), setting(0, 1, linear_model(4, FEATURES, CLASSES), data_of(0, (0,)), seed=seed))
        for seed in (0, 1)
    ]
    assert len(copies(peers)) == 2


def test_unknown_classes_are_never_predicted() -> None:
    peers = make(hyper())
    run_rounds(peers, LINE, 2)
    assert [peer.known.tolist() for peer in peers] == [[True, True, True, False]] * 3
    x = torch.rand(50, 1, 2, 2)
    for peer in peers:
        scores = peer.predict(x)
        assert scores[:, 3].tolist() == [-math.inf] * 50
        z = peer.model.backbone(x)
        for k in range(3):
            expected = torch.linalg.vector_norm(z - peer.prototypes[k], dim=1)
            torch.testing.assert_close(scores[:, k], -expected)


def test_features_approach_the_trained_prototypes() -> None:
    peers = make(hyper(alignment=10.0, lr=0.05, local_epochs=8))
    gap: list[float] = []

    def note(peer: Any, t: int) -> None:
        local = peer.local_prototypes()
        gap.append(float((local.values - peer.prototypes[list(local.classes)]).norm(dim=1).mean()))

    run_rounds(peers, COMPLETE, 5, after=note)
    assert np.mean(gap[-3:]) < 0.5 * np.mean(gap[:3])


def test_training_skips_a_missing_neighbor() -> None:
    peers = make(hyper())
    traffic = run_rounds(peers, COMPLETE, 2, silent=[2])
    assert traffic[0][0].missing == {"Prototypes": [2]}
    assert len(copies(peers[:2])) == 1
    for found, expected in zip(peers[0].trained, server(peers[0].hyper, peers[0].received), strict=True):
        assert set(peers[0].received[0].senders.tolist()) == {0, 1}
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4)


def test_round_without_received_prototypes_changes_nothing() -> None:
    peers = make(hyper(participation=1 / 3))
    states: dict[tuple[int, int], str] = {}
    run_rounds(peers, LINE, 5, after=lambda peer, t: states.update({(peer.me, t): next(iter(copies([peer])))}))
    senders = [int(rng.shared(SEED, "net.participants", t).permutation(3)[0]) for t in range(5)]
    for peer in peers:
        for t in range(1, 5):
            receives = senders[t] in (peer.me, *LINE.neighbors[peer.me])
            assert (states[peer.me, t] != states[peer.me, t - 1]) == receives
    assert any(abs(sender - me) == 2 for sender in senders[1:] for me in range(3))


# ---- options ----------------------------------------------------------------------------------------------


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "change",
    [
        {"margin": "pairwise-max"},
        {"margin": "fixed"},
        {"margin": "none"},
        {"threshold": 0.01},
        {"transform": False},
        {"prototype_epochs": 2},
        {"prototype_batch": 1},
        {"prototype_lr": 0.1},
        {"alignment": 0.5},
        {"distance": "euclidean"},
        {"participation": 0.67},
    ],
    ids=str,
)
def test_every_option_changes_the_model(change: dict[str, Any]) -> None:
    digests = []
    for h in (hyper(), hyper(**change)):
        peers = make(h)
        run_rounds(peers, COMPLETE, 2)
        digests.append(digest([peer.model.state_dict() for peer in peers]))
    assert digests[0] != digests[1]


def test_local_training_equals_fedprotos_with_the_same_prototypes() -> None:
    class Means(FedTGP):
        def train_prototypes(self, table: PrototypeTable, margin: float, net: Net) -> None:
            means, present = class_means(table, CLASSES, weighted=False)
            self.prototypes = torch.where(present[:, None], means, self.prototypes)

    ends = []
    for method, h in ((FedProto, FedProtoHyper.parse({"lr": 0.1, "batch": 4, "weighted": False})), (Means, hyper())):
        peers: list[Any] = [
            method(h, setting(me, 3, linear_model(4, FEATURES, CLASSES, seed=me), data_of(me, classes), seed=SEED))  # type: ignore[arg-type]
            for me, classes in enumerate(LOCAL_CLASSES)
        ]
        run_rounds(peers, COMPLETE, 3)
        ends.append(digest([[peer.model.state_dict(), peer.prototypes] for peer in peers]))
    assert ends[0] == ends[1]


# ---- messages and state ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("topology", [COMPLETE, LINE], ids=["complete", "line"])
def test_payload_bytes_match_table_5_without_a_server(topology: Topology) -> None:
    peers = make(hyper())
    traffic = run_rounds(peers, topology, 2)
    numbers = sum(FEATURES * len(LOCAL_CLASSES[sender]) for sender in range(3) for _ in topology.neighbors[sender])
    for t in range(2):
        assert sum(payload(peer[t].sent) for peer in traffic) == 4 * numbers
        assert sum(payload(peer[t].received) for peer in traffic) == 4 * numbers
        assert sum(messages(peer[t].sent) for peer in traffic) == sum(map(len, topology.neighbors))


def test_sends_no_sample_counts() -> None:
    assert make(hyper())[2].local_prototypes().samples == ()


def test_state_round_trips() -> None:
    one, other = make(hyper()), make(hyper())
    run_rounds(one, COMPLETE, 2)
    state = one[0].state_dict()
    other[0].load_state_dict(state)
    assert digest(other[0].state_dict()) == digest(state)


def test_diagnostics_include_the_margin() -> None:
    peers = make(hyper(margin="fixed", threshold=2.0))
    observed: list[Mapping[str, float]] = []
    run_rounds(peers, COMPLETE, 2, after=lambda peer, t: observed.append(dict(peer.diagnostics())))
    assert all(set(values) == {"margin", "peer_margin", "wider", "delta"} for values in observed)
    assert {values["delta"] for values in observed} == {2.0}
    assert peers[0].diagnostics()["margin"] == pytest.approx(float(margins(peers[0].prototypes[:3]).min()))


def test_stop_interrupts_the_training_of_prototypes() -> None:
    class Stopped(Exception):
        pass

    (peer,) = make(hyper(prototype_epochs=1000), classes_of=[(0, 1)])
    calls = 0

    def after_batch() -> None:
        nonlocal calls
        calls += 1
        if calls == 20:  # 2 batches of local training, then epochs of P̂
            raise Stopped

    peer.after_batch = after_batch
    with pytest.raises(ExceptionGroup) as group:
        run_rounds([peer], Topology.from_edges(1, []), 1)
    assert group.group_contains(Stopped)
    assert calls == 20
