"""L2C against its paper: gradients by autograd, whole rounds in numpy, every option, every byte."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor
from torch.func import functional_call
from torch.nn.functional import cross_entropy

from p2pfl.algorithms import base
from p2pfl.algorithms.l2c import (
    L2C,
    Hyper,
    Update,
    aggregate,
    directional_derivative,
    logit_gradient,
    mixing_weights,
    strongest,
    validation_gradient,
)
from p2pfl.data import Dataset, Split
from p2pfl.errors import RunFileError
from p2pfl.learning.peer_data import PeerData
from p2pfl.messaging.tensor_file import Spool
from p2pfl.messaging.topology import Topology
from p2pfl.models import Model
from p2pfl.session.simulate import simulate
from p2pfl.tensors import LIMIT, digest, parameters_of
from tests.regression import Matrix, gradient, regression_data, theta
from tests.support import (
    linear_model,
    messages,
    payload,
    peer_data,
    random_dataset,
    run_rounds,
    setting,
    softmax_regression,
)

property_of = settings(deadline=None, max_examples=20)

Vector = NDArray[np.float64]

INPUTS, CLASSES = 4, 3
NUMBERS = CLASSES * (INPUTS + 1)
LINE = Topology.from_edges(3, [(0, 1), (1, 2)])


def complete(peers: int) -> Topology:
    return Topology.from_edges(peers, [(i, j) for i in range(peers) for j in range(i)])


def hyper(**given: Any) -> Hyper:
    """All samples in one batch, so that an epoch is a step."""
    return Hyper.parse({"local_epochs": 2, "batch": 64, "lr": 0.5, "prune_round": None, **given})


def data_of(me: int) -> PeerData:
    """Peer i trains on 6 + i samples of private noise and validates on 5 others."""
    return peer_data(random_dataset(20, classes=CLASSES, seed=me), range(6 + me), validation=range(15, 20))


def make(h: Hyper, peers: int = 3) -> list[L2C]:
    """Return peers with equal softmax regressions."""
    model = [softmax_regression(INPUTS, CLASSES, seed=7) for _ in range(peers)]
    return [L2C(h, setting(me, peers, model[me], data_of(me))) for me in range(peers)]


# ---- line 18: the gradient of the weights --------------------------------------------------------------------


@st.composite
def aggregates(draw: st.DrawFn) -> tuple[int, int, float]:
    return draw(st.integers(1, 6)), draw(st.integers(0, 2**32 - 1)), draw(st.sampled_from([0.0, 0.3, 3.0]))


@property_of
@given(aggregates())
@example((1, 0, 0.0))
def test_closed_form_gradient_equals_autograd_through_the_aggregate(drawn: tuple[int, int, float]) -> None:
    peers, seed, spread = drawn
    generator = torch.Generator().manual_seed(seed)
    model = linear_model(INPUTS, 5, CLASSES, seed=seed % 1000)
    data = data_of(seed % 50)
    before = {name: tensor.clone() for name, tensor in parameters_of(model).items()}
    updates = {
        j: {name: torch.randn(x.shape, generator=generator) * 0.1 for name, x in before.items()} for j in range(peers)
    }
    logits = (torch.randn(peers, generator=generator, dtype=torch.float64) * spread).requires_grad_()

    # Everything in one graph: softmax, aggregate, network, loss.
    w = logits.softmax(0)
    aggregated = {name: x - sum(w[j].float() * updates[j][name] for j in updates) for name, x in before.items()}
    (x, labels), *rest = data.sweep(data.validation)
    assert not rest
    cross_entropy(functional_call(model, aggregated, x), labels).backward()  # type: ignore[no-untyped-call]

    # The closed form.
    row = mixing_weights(logits, range(peers))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(aggregate(before, updates, row)[name])
    _, g = validation_gradient(model, data)
    derivatives = torch.tensor([directional_derivative(g, updates[j]) for j in range(peers)], dtype=torch.float64)
    found = logit_gradient(torch.tensor(list(row.values()), dtype=torch.float64), derivatives)
    assert logits.grad is not None
    np.testing.assert_allclose(found.numpy(), logits.grad.numpy(), rtol=1e-3, atol=2e-7)


@property_of
@given(st.lists(st.tuples(st.floats(0.01, 1.0), st.floats(-5.0, 5.0)), min_size=1, max_size=8))
def test_logit_gradient_is_softmax_jacobian_times_weight_gradient(
    pairs: list[tuple[float, float]],
) -> None:
    w, d = np.array(pairs).T
    w = w / w.sum()
    found = logit_gradient(torch.from_numpy(w), torch.from_numpy(d.copy())).numpy()
    jacobian = np.diag(w) - np.outer(w, w)
    np.testing.assert_allclose(found, jacobian @ -d, atol=1e-12)
    assert abs(found.sum()) < 1e-12  # adding a constant to all logits changes nothing


def test_validation_gradient_is_independent_of_batch_size(monkeypatch: pytest.MonkeyPatch) -> None:
    model, data = softmax_regression(INPUTS, CLASSES, seed=1), data_of(0)
    inputs, labels = regression_data(data.validation)
    for batch in (512, 2):
        monkeypatch.setattr("p2pfl.learning.peer_data.EVALUATION_BATCH", batch)
        loss, g = validation_gradient(model, data)
        found = torch.cat([g["head.weight"], g["head.bias"][:, None]], dim=1)
        np.testing.assert_allclose(found, gradient(theta(model), inputs, labels), atol=1e-6)
        scores = inputs @ theta(model).T
        expected = np.mean(np.log(np.exp(scores).sum(axis=1)) - scores[np.arange(5), labels])
        assert loss == pytest.approx(expected, abs=1e-6)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_validation_gradient_uses_evaluation_mode() -> None:
    class Dropping(torch.nn.Dropout):
        def forward(self, x: Tensor) -> Tensor:
            assert not self.training
            return super().forward(x)

    model = Model("drop", torch.nn.Sequential(torch.nn.Flatten(), Dropping(0.5)), INPUTS, CLASSES)
    peer = L2C(hyper(local_epochs=1), setting(0, 1, model, data_of(0)))
    peer.train = lambda **options: None  # type: ignore[method-assign]
    run_rounds([peer], Topology.from_edges(1, []), 1)


def test_unused_and_frozen_parameters_have_zero_gradient() -> None:
    model = softmax_regression(INPUTS, CLASSES)
    model.unused = torch.nn.Parameter(torch.ones(2))
    model.head.bias.requires_grad_(False)
    _, g = validation_gradient(model, data_of(0))
    assert g["unused"].tolist() == [0.0, 0.0]
    assert g["head.bias"].tolist() == [0.0] * CLASSES
    assert g["head.weight"].any()


def test_directional_derivatives_are_summed_in_float64() -> None:
    g = {"a": torch.ones(3), "b": torch.tensor([2.0])}
    update = {"a": torch.tensor([1e8, 1.0, -1e8]), "b": torch.tensor([0.5])}
    assert directional_derivative(g, update) == 2.0
    assert directional_derivative(g, {name: tensor.bfloat16() for name, tensor in update.items()}) == 2.0


# ---- lines 13, 16, 21 ----------------------------------------------------------------------------------------


@property_of
@given(st.lists(st.floats(-30, 30), min_size=1, max_size=8), st.floats(-1e4, 1e4))
def test_weights_are_softmax_over_present_peers(entries: list[float], shift: float) -> None:
    logits = torch.tensor([99.0, *entries, 99.0], dtype=torch.float64)
    ids = range(1, 1 + len(entries))
    found = mixing_weights(logits + shift, list(reversed(ids)))
    assert list(found) == list(ids)
    expected = np.exp(np.array(entries) - max(entries))
    np.testing.assert_allclose(list(found.values()), expected / expected.sum(), rtol=1e-9)


def test_aggregate_subtracts_weighted_updates() -> None:
    stream = np.random.default_rng(0)
    before = {"x": torch.from_numpy(stream.normal(size=(5, 7)).astype(np.float32)), "y": torch.tensor(2.0)}
    updates = {
        j: {"x": torch.from_numpy(stream.normal(size=(5, 7)).astype(np.float32)), "y": torch.tensor(float(j))}
        for j in (4, 0, 2)
    }
    w = {0: 0.5, 2: 0.125, 4: 0.375}
    found = aggregate(before, updates, w)
    expected = before["x"].double() - sum(w[j] * updates[j]["x"].double() for j in w)
    torch.testing.assert_close(found["x"].double(), expected, rtol=0, atol=1e-6)
    assert found["y"].item() == 2.0 - 0.25 - 1.5
    assert torch.equal(found["x"], aggregate(before, dict(sorted(updates.items())), w)["x"])


def test_aggregate_of_bfloat16_updates_is_float32() -> None:
    before, half = {"x": torch.full((3,), 1.0)}, {"x": torch.full((3,), 1 / 256).bfloat16()}
    found = aggregate(before, {0: half, 1: half}, {0: 0.5, 1: 0.25})["x"]
    assert found.dtype == torch.float32
    assert found.tolist() == [1.0 - 0.75 / 256] * 3


def test_helpful_neighbor_gains_weight_and_harmful_one_loses() -> None:
    g = {"x": torch.tensor([1.0, -1.0])}  # downhill is (-1, 1), and θ moves by −Δ
    derivatives = [directional_derivative(g, {"x": torch.tensor(way)}) for way in ([1.0, -1.0], [-1.0, 1.0])]
    with_, against = logit_gradient(torch.tensor([0.5, 0.5]).double(), torch.tensor(derivatives).double()).tolist()
    assert with_ < 0 < against  # Adam goes against the gradient


@property_of
@given(st.dictionaries(st.integers(0, 20), st.sampled_from([0.0, 0.1, 0.2, 0.3]), min_size=1), st.integers(0, 12))
def test_pruning_keeps_sources_with_largest_weights(w: dict[int, float], count: int) -> None:
    found = strongest(w, w, count)
    assert list(found) == sorted(found)
    assert len(found) == min(count, len(w))
    removed = set(w) - set(found)
    assert all((w[j], -j) > (w[k], -k) for j in found for k in removed)


def test_source_without_weight_is_pruned_first() -> None:
    assert strongest({0: 0.5, 2: 0.25}, [2, 3], 1) == (2,)
    assert strongest({0: 0.5, 2: 0.25}, [2, 3], 0) == ()


# ---- whole rounds in numpy -----------------------------------------------------------------------------------


@dataclass
class Reference:
    """Algorithm 1 for one peer in numpy, float64, with Adam and AdamW written out."""

    me: int
    h: Hyper
    x: Matrix
    alpha: Vector
    first: Vector
    second: Vector
    steps: int = 0

    def local(self) -> tuple[Matrix, Matrix]:
        """θ^t and Δ."""
        x, velocity = self.x, np.zeros_like(self.x)
        inputs, labels = regression_data(data_of(self.me).train)
        for _ in range(self.h.local_epochs):
            velocity = self.h.momentum * velocity + gradient(x, inputs, labels) + self.h.weight_decay * x
            x = x - self.h.lr * velocity
        return self.x, self.x - x

    def aggregate(self, updates: Mapping[int, Matrix]) -> Vector:
        ids = sorted(updates)
        w = np.exp(self.alpha[ids])
        w = w / w.sum()
        self.x = self.x - sum(weight * updates[j] for weight, j in zip(w, ids, strict=True))
        g = gradient(self.x, *regression_data(data_of(self.me).validation))
        d = np.array([(g * updates[j]).sum() for j in ids])
        alpha_gradient = np.zeros_like(self.alpha)
        alpha_gradient[ids] = (np.diag(w) - np.outer(w, w)) @ -d
        self.learn(ids, alpha_gradient)
        row = np.zeros(len(self.alpha))
        row[ids] = w
        return row

    def learn(self, ids: Sequence[int], g: Vector) -> None:
        h, alpha = self.h, self.alpha.copy()
        if h.mixing_optimizer == "adam":
            g = g + h.mixing_weight_decay * alpha
        else:
            alpha = alpha * (1 - h.mixing_lr * h.mixing_weight_decay)
        self.steps += 1
        self.first = 0.9 * self.first + 0.1 * g
        self.second = 0.999 * self.second + 0.001 * g**2
        unbiased = self.first / (1 - 0.9**self.steps), self.second / (1 - 0.999**self.steps)
        alpha = alpha - h.mixing_lr * unbiased[0] / (np.sqrt(unbiased[1]) + 1e-8)
        self.alpha[ids] = alpha[ids]


def reference_run(
    peers: Sequence[L2C], topology: Topology, rounds: int, silent: Sequence[int] = ()
) -> list[Reference]:
    number = len(peers)
    expected = [
        Reference(p.me, p.hyper, theta(p.model), np.zeros(number), np.zeros(number), np.zeros(number))
        for p in peers
        if p.me not in silent
    ]
    for _ in range(rounds):
        updates = {reference.me: reference.local()[1] for reference in expected}
        for reference in expected:
            present = [reference.me, *(j for j in topology.neighbors[reference.me] if j not in silent)]
            reference.aggregate({j: updates[j] for j in present})
    return expected


@pytest.mark.exhaustive
@pytest.mark.parametrize("optimizer", ["adamw", "adam"])
@pytest.mark.parametrize("topology", [LINE, complete(4)], ids=["line", "complete"])
def test_rounds_follow_algorithm_1(topology: Topology, optimizer: str) -> None:
    peers = make(hyper(mixing_optimizer=optimizer, mixing_weight_decay=0.05), topology.peers)
    expected = reference_run(peers, topology, 6)
    run_rounds(peers, topology, 6)
    for peer, reference in zip(peers, expected, strict=True):
        np.testing.assert_allclose(theta(peer.model), reference.x, atol=2e-5)
        np.testing.assert_allclose(peer.logits.detach().numpy(), reference.alpha, atol=2e-3)
        assert np.abs(reference.alpha).max() > 0.05  # the weights moved


def test_momentum_and_weight_decay_match_sgd() -> None:
    peers = make(hyper(momentum=0.5, weight_decay=0.1, local_epochs=3))
    expected = reference_run(peers, LINE, 1)
    run_rounds(peers, LINE, 1)
    for peer, reference in zip(peers, expected, strict=True):
        np.testing.assert_allclose(theta(peer.model), reference.x, atol=1e-5)


def test_first_round_on_complete_graph_is_federated_averaging() -> None:
    peers = make(hyper(), 4)
    expected = [Reference(p.me, p.hyper, theta(p.model), np.zeros(4), np.zeros(4), np.zeros(4)) for p in peers]
    mean = np.mean([x - delta for x, delta in (reference.local() for reference in expected)], axis=0)
    run_rounds(peers, complete(4), 1)
    for peer in peers:
        np.testing.assert_allclose(theta(peer.model), mean, atol=1e-6)
        assert peer.weights() == dict.fromkeys(range(4), 0.25)
    assert len({digest(peer.model.state_dict()) for peer in peers}) == 1


def test_single_peer_trains_locally() -> None:
    (peer,) = make(hyper(), peers=1)
    x, delta = Reference(0, peer.hyper, theta(peer.model), np.zeros(1), np.zeros(1), np.zeros(1)).local()
    run_rounds([peer], Topology.from_edges(1, []), 1)
    np.testing.assert_allclose(theta(peer.model), x - delta, atol=1e-6)
    assert peer.weights() == {0: 1.0}
    assert peer.logits.item() == 0.0


def test_records_hold_weights_and_validation_loss() -> None:
    peers = make(hyper())
    run_rounds(peers, LINE, 3)
    assert list(peers[1].weights()) == [0, 1, 2]
    assert list(peers[0].weights()) == [0, 1]
    for peer in peers:
        assert sum(peer.weights().values()) == pytest.approx(1.0)
        loss, _ = validation_gradient(peer.model, peer.data)
        assert peer.diagnostics() == {"validation_loss": loss}


def test_peers_with_the_same_task_find_each_other() -> None:
    """Four peers, two tasks with swapped labels."""
    stream = np.random.default_rng(0)

    def task(me: int) -> PeerData:
        labels = np.arange(60) % 2
        images = stream.integers(0, 120, size=(60, 1, 2, 2), dtype=np.uint8)
        images[labels == 1, 0, 0] += 120
        split = Split(images, labels if me % 2 else 1 - labels)
        return peer_data(Dataset("task", split, split, 2, (0.0,), (1.0,), False), range(40), validation=range(40, 60))

    peers = [L2C(hyper(), setting(me, 4, softmax_regression(4, 2), task(me))) for me in range(4)]
    run_rounds(peers, complete(4), 10)
    for peer in peers:
        w = peer.weights()
        assert min(w[j] for j in (peer.me, (peer.me + 2) % 4)) > 2 * max(
            w[j] for j in ((peer.me + 1) % 4, (peer.me + 3) % 4)
        )


# ---- missing neighbors and divergence ------------------------------------------------------------------------


def test_weight_of_missing_neighbor_is_redistributed_and_its_logit_stays() -> None:
    peers = make(hyper(), 4)
    expected = reference_run(peers, complete(4), 4, silent=[2])
    with torch.no_grad():
        peers[0].logits[2] = 0.75
    traffic = run_rounds(peers, complete(4), 4, silent=[2])
    assert traffic[1][0].missing == {"Update": [2]}
    for peer, reference in zip([peers[0], peers[1], peers[3]], expected, strict=True):
        np.testing.assert_allclose(theta(peer.model), reference.x, atol=1e-5)
        assert list(peer.weights()) == [0, 1, 3]
        assert float(peer.logits[2].detach()) == (0.75 if peer.me == 0 else 0.0)


class Diverging(L2C):
    """An L2C peer whose training diverges."""

    value = math.nan

    def train(self, **options: Any) -> None:
        self.model.linear_head.weight.data[0, 0] = self.value


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_diverged_training_is_rolled_back(value: float) -> None:
    peers: list[Any] = make(hyper(), 3)
    peers[2] = Diverging(hyper(), setting(2, 3, softmax_regression(INPUTS, CLASSES, seed=7), data_of(2)))
    peers[2].value = value
    expected = [
        Reference(peer.me, peer.hyper, theta(peer.model), np.zeros(3), np.zeros(3), np.zeros(3)) for peer in peers
    ]
    updates = {reference.me: reference.local()[1] for reference in expected[:2]}
    run_rounds(peers, complete(3), 1)
    for peer, reference in zip(peers, expected, strict=True):
        np.testing.assert_allclose(theta(peer.model), reference.x - (updates[0] + updates[1]) / 3, atol=1e-6)


@pytest.mark.parametrize("lr", [1e9, 1e38])
def test_peer_trains_again_after_divergence(lr: float) -> None:
    """The optimizer is rolled back too."""
    (peer,) = make(hyper(momentum=0.9, local_epochs=2), 1)
    start = theta(peer.model)
    peer.optimizer.param_groups[0]["lr"] = lr
    run_rounds([peer], complete(1), 1)
    np.testing.assert_array_equal(theta(peer.model), start)
    peer.optimizer.param_groups[0]["lr"] = 0.1
    run_rounds([peer], complete(1), 1)
    assert np.isfinite(theta(peer.model)).all()
    assert not np.allclose(theta(peer.model), start)


def test_diverged_aggregate_is_discarded() -> None:
    class Huge(L2C):
        def train(self, **options: Any) -> None:
            self.model.linear_head.weight.data.fill_(0.9 * LIMIT)

    peers: list[Any] = make(hyper(), 3)
    for me in (1, 2):
        peers[me] = Huge(hyper(), setting(me, 3, softmax_regression(INPUTS, CLASSES, seed=7), data_of(me)))
    with torch.no_grad():
        peers[0].model.head.weight.fill_(0.9 * LIMIT)
    traffic = run_rounds(peers, complete(3), 2)
    assert all(record.missing == {} for record in traffic[0])
    assert all(np.abs(theta(peer.model)).max() < LIMIT for peer in peers)


def test_nonfinite_gradient_skips_the_step() -> None:
    (peer,) = make(hyper(), 1)
    peer.w = {0: 1.0}
    peer.learn({0: math.nan})
    assert peer.logits.tolist() == [0.0]
    assert peer.mixing_optimizer.state_dict()["state"] == {}


# ---- pruning -------------------------------------------------------------------------------------------------


def test_after_t0_peers_receive_from_strongest_sources_only() -> None:
    peers = make(hyper(prune_round=2, prune_to=2), 5)
    rows: list[dict[int, Any]] = [{} for _ in peers]
    traffic = run_rounds(
        peers, complete(5), 6, after=lambda peer, t: rows[peer.me].__setitem__(t, dict(peer.weights() or {}))
    )
    for me, rounds in enumerate(traffic):
        assert [len(one.sources) for one in rounds] == [4, 4, 4, 2, 2, 2]
        at_t0 = rows[me][2]
        kept = sorted(sorted((j for j in at_t0 if j != me), key=lambda j: (-at_t0[j], j))[:2])
        for t in (3, 4, 5):
            assert list(rounds[t].sources) == kept
            assert sorted(rows[me][t]) == sorted([me, *kept])
            assert sum(rows[me][t].values()) == pytest.approx(1.0)


def test_pruned_edges_carry_no_update() -> None:
    peers = make(hyper(prune_round=1, prune_to=2), 5)
    traffic = run_rounds(peers, complete(5), 4)
    for rounds in traffic:
        for t, one in enumerate(rounds):
            # Sent to receivers only, and received completely.
            assert {j for j, kinds in one.sent.items() if "Update" in kinds} == set(one.receivers)
            assert {j for j, kinds in one.received.items() if "Update" in kinds} == set(one.sources)
            assert one.missing == {}
            if t < 2:
                assert messages(one.sent, "Update") == 4
    for t in (2, 3):
        edges = sum(len(rounds[t].sources) for rounds in traffic)
        assert edges == 5 * 2
        assert sum(messages(rounds[t].sent, "Update") for rounds in traffic) == edges
        assert sum(payload(rounds[t].sent) for rounds in traffic) == edges * 4 * NUMBERS
    assert any(set(rounds[2].sources) != set(rounds[2].receivers) for rounds in traffic)  # some edges are one-way


def test_pruning_to_zero_leaves_local_training() -> None:
    peers = make(hyper(prune_round=0, prune_to=0))
    traffic = run_rounds(peers, LINE, 3)
    assert [[one.sources for one in rounds[1:]] for rounds in traffic] == [[(), ()]] * 3
    assert all(peer.weights() == {peer.me: 1.0} for peer in peers)
    assert sum(payload(one.sent) for rounds in traffic for one in rounds[1:]) == 0


@pytest.mark.exhaustive
@pytest.mark.parametrize("given", [{"prune_round": None}, {"prune_round": 0, "prune_to": 4}, {"prune_round": 99}])
def test_unpruned_sources_are_kept_to_the_end(given: Mapping[str, Any]) -> None:
    peers = make(hyper(prune_to=0, **given) if "prune_to" not in given else hyper(**given), 4)
    traffic = run_rounds(peers, complete(4), 3)
    assert all(len(one.sources) == 3 for rounds in traffic for one in rounds)


# ---- bytes and memory ----------------------------------------------------------------------------------------


def test_round_costs_one_model_per_directed_edge() -> None:
    peers = make(hyper())
    traffic = run_rounds(peers, LINE, 2)
    assert [[messages(one.sent) for one in rounds] for rounds in traffic] == [[1, 1], [2, 2], [1, 1]]
    assert sum(payload(one.sent) for rounds in traffic for one in rounds) == 2 * 4 * 4 * NUMBERS
    (layout,) = peers[0].layouts()
    assert {key: str(spec) for (_, key), spec in layout.tensors.items()} == {
        "head.weight": "float32[3, 4]",
        "head.bias": "float32[3]",
    }


@pytest.mark.exhaustive
def test_bfloat16_halves_bytes_and_changes_little() -> None:
    full, half = make(hyper(), 4), make(hyper(precision="bfloat16"), 4)
    start = theta(full[0].model)
    traffic = {name: run_rounds(peers, complete(4), 3) for name, peers in (("full", full), ("half", half))}
    total = {name: sum(payload(one.sent) for peer in peers for one in peer) for name, peers in traffic.items()}
    assert total["full"] == 2 * total["half"]
    for one, other in zip(full, half, strict=True):
        moved = np.abs(theta(one.model) - start).max()
        assert 0 < np.abs(theta(one.model) - theta(other.model)).max() < 0.01 * moved


@pytest.fixture
def spools(monkeypatch: pytest.MonkeyPatch) -> list[Spool]:
    """The spools that the algorithms of the test create."""
    made: list[Spool] = []

    def create() -> Spool:
        made.append(Spool())
        return made[-1]

    monkeypatch.setattr(base, "Spool", create)
    return made


@pytest.mark.exhaustive
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_spooled_updates_are_bit_identical(precision: str, spools: list[Spool]) -> None:
    digests = []
    for spool in (False, True):
        peers = make(hyper(precision=precision, spool=spool, prune_round=1, prune_to=2), 4)
        run_rounds(peers, complete(4), 3)
        digests.append([digest(peer.state_dict()) for peer in peers])
        assert len(spools) == (4 if spool else 0)
    assert digests[0] == digests[1]


def test_spool_files_hold_at_most_two_rounds(spools: list[Spool]) -> None:
    peers = make(hyper(spool=True), 4)
    run_rounds(peers, complete(4), 6)
    # Neighbors may be one round ahead.
    assert all(0 < spool.size <= 2 * 3 * 4 * NUMBERS for spool in spools)


def test_spooled_update_reads_back_unchanged() -> None:
    (peer,) = make(hyper(spool=True), 1)
    body = Update(parameters_of(peer.model))
    spooled = peer.on_receive(body)
    assert isinstance(spooled, Update)
    assert not isinstance(spooled.values, dict)
    assert {name: tensor.tolist() for name, tensor in spooled.values.items()} == {
        name: tensor.tolist() for name, tensor in body.values.items()
    }


# ---- switches ------------------------------------------------------------------------------------------------


CHANGES: dict[str, dict[str, Any]] = {
    "local_epochs": {"local_epochs": 1},
    "batch": {"batch": 3},
    "lr": {"lr": 0.1},
    "momentum": {"momentum": 0.5},
    "weight_decay": {"weight_decay": 0.1},
    "mixing_lr": {"mixing_lr": 0.3},
    "mixing_weight_decay": {"mixing_weight_decay": 0.5},
    "mixing_optimizer": {"mixing_optimizer": "adam"},
    "prune_round": {"prune_round": 1, "prune_to": 1},
    "precision": {"precision": "bfloat16"},
    "optimizer": {"optimizer": "adam"},
    "loss": {"loss": "focal"},
}


@pytest.mark.exhaustive
@pytest.mark.parametrize("key", CHANGES)
def test_every_option_changes_the_outcome(key: str) -> None:
    outcomes = []
    for h in (hyper(), replace(hyper(), **CHANGES[key])):
        peers = make(h)
        run_rounds(peers, complete(3), 3)
        outcomes.append([theta(peer.model) for peer in peers])
    changed, default = outcomes
    assert not np.allclose(changed, default, atol=1e-7, rtol=0)


def test_all_options_are_covered() -> None:
    assert set(Hyper.known()) == {*CHANGES, "prune_to", "spool", "betas", "preset"}


def test_weights_stay_equal_with_zero_mixing_lr() -> None:
    peers = make(hyper(mixing_lr=0.0), 4)
    run_rounds(peers, complete(4), 3)
    assert all(peer.weights() == dict.fromkeys(range(4), 0.25) for peer in peers)


def test_defaults_match_the_paper() -> None:
    h = Hyper()
    assert (h.local_epochs, h.batch, h.lr, h.momentum, h.weight_decay) == (5, 10, 0.01, 0.0, 5e-4)
    assert (h.mixing_lr, h.mixing_weight_decay, h.prune_round, h.prune_to) == (0.1, 0.01, 10, 10)
    assert L2C.homogeneous
    assert L2C.needs_validation


def test_run_file_without_validation_samples_is_rejected(make_run: Any) -> None:
    with pytest.raises(RunFileError, match=r"data\.partition\.validation: l2c learns from validation samples"):
        simulate(make_run(algorithm="l2c"))


def test_checkpoint_holds_adam_state() -> None:
    peers = make(hyper())
    run_rounds(peers, LINE, 3)
    saved = peers[1].state_dict()
    moments = saved["mixing_optimizer"]["state"][0]
    assert float(moments["step"]) == 3.0
    assert moments["exp_avg"].abs().min() > 0
    assert moments["exp_avg"].dtype == saved["logits"].dtype == torch.float64
