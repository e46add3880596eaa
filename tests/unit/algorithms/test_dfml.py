"""DFML against its paper: equations and whole rounds in numpy, every option, every byte."""

from __future__ import annotations

import asyncio
import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor, nn

from p2pfl.algorithms.aggregators import Assignment
from p2pfl.algorithms.dfml import DFML, Hyper
from p2pfl.algorithms.dfml_messages import Pupil, Taught
from p2pfl.algorithms.mutual_learning import Participant, distillation, loss_factors, teacher_weights, wsl_weights
from p2pfl.errors import Unexpected
from p2pfl.messaging.deadline import WaitPolicy
from p2pfl.messaging.endpoint import Endpoint
from p2pfl.messaging.local import LocalHub
from p2pfl.messaging.topology import Topology
from p2pfl.models import GROUPS, Model, build
from p2pfl.tensors import buffers_of, clone, digest, has_diverged, parameters_of
from tests.bodies import RUN_ID, arrive
from tests.support import (
    Traffic,
    linear_model,
    messages,
    payload,
    peer_data,
    random_dataset,
    run_rounds,
    setting,
    softmax_regression,
)

property_of = settings(deadline=None, max_examples=15)

Matrix = NDArray[np.float64]

INPUTS, FEATURES, CLASSES = 4, 5, 3


def hyper(**given: Any) -> Hyper:
    return Hyper.parse({"lr": 0.1, "mutual_epochs": 3, "period": 3, "period_increment": 1, **given})


def complete(peers: int) -> Topology:
    return Topology.from_edges(peers, [(i, j) for i in range(peers) for j in range(i)])


def normalized(seed: int) -> Model:
    """A backbone with batch normalization and dropout."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        layers = (nn.Flatten(), nn.Linear(INPUTS, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Dropout(0.3))
        return Model("normalized", nn.Sequential(*layers), 6, CLASSES)


def model(name: str, seed: int) -> Model:
    if name == "flat":
        return softmax_regression(INPUTS, CLASSES, seed)
    return linear_model(INPUTS, FEATURES, CLASSES, seed) if name == "linear" else normalized(seed)


def make(h: Hyper, names: Sequence[str] = ("flat", "linear", "flat", "linear"), samples: int = 6) -> list[DFML]:
    """Peers with these architectures; peer i has ``samples`` + i samples of private noise."""
    peers = []
    for me, name in enumerate(names):
        data = peer_data(random_dataset(samples + me, classes=CLASSES, seed=me), test=range(4))
        given = setting(me, len(names), model(name, seed=me), data)
        peers.append(
            DFML(
                h, replace(given, architectures=tuple(names), build=lambda peer: model(names[peer], seed=100 + peer))
            )
        )
    return peers


def assignments(peers: Sequence[DFML], topology: Topology, rounds: int) -> list[Assignment]:
    net = Endpoint(0, topology, RUN_ID, 0, []).begin(0)
    return [peers[0].schedule.assignment(t, net) for t in range(rounds)]


# ---- α -------------------------------------------------------------------------------------------------------


def schedule_reference(h: Hyper, periods: int) -> list[float]:
    alphas: list[float] = []
    for number in range(periods):
        length = h.period + number * h.period_increment
        if h.shape == "fixed":
            alphas += [h.alpha_max] * length
            continue
        if h.shape == "falling":
            alphas += [*(h.alpha_max * (1 + np.cos(np.linspace(0, np.pi, length + 1)[:-1])) / 2)]
            continue
        if h.shape == "linear":
            alphas += [*(h.alpha_max * np.linspace(1, 0, length))] if length > 1 else [0.0]
            continue
        rise = length if h.shape == "half" else math.ceil(length / 2)
        up = h.alpha_max * (1 - np.cos(np.linspace(0, np.pi, rise + 1)[1:])) / 2
        down = h.alpha_max * (1 + np.cos(np.linspace(0, np.pi, length - rise + 1)[1:])) / 2
        alphas += [*up, *down]
    return alphas


schedules = st.builds(
    lambda shape, period, increment, most: hyper(
        shape=shape, period=period, period_increment=increment, alpha_max=most
    ),
    st.sampled_from(["half", "full", "fixed", "falling", "linear"]),
    st.integers(1, 12),
    st.integers(0, 5),
    st.integers(0, 100).map(lambda percent: percent / 100),
)


@property_of
@given(schedules)
def test_alpha_follows_a_cosine_in_every_period(h: Hyper) -> None:
    expected = schedule_reference(h, 4)
    np.testing.assert_allclose([h.alpha_at(t) for t in range(len(expected))], expected, atol=1e-12)


def test_alpha_of_the_first_two_periods_of_the_paper() -> None:
    h = Hyper(alpha_max=1.0)
    assert [h.period_of(t) for t in (0, 9, 10, 29, 30)] == [
        range(10),
        range(10),
        range(10, 30),
        range(10, 30),
        range(30, 60),
    ]
    first = [h.alpha_at(t) for t in range(10)]
    assert first[0] == pytest.approx(0.0244717, abs=1e-6)
    assert first[4] == pytest.approx(0.5)
    assert first == sorted(first)
    assert h.alpha_at(10) < 0.01
    assert [h.alpha_at(t) for t in (9, 29, 59)] == [1.0, 1.0, 1.0]


@property_of
@given(schedules.filter(lambda h: h.shape in ("half", "full")))
def test_alpha_reaches_its_maximum_once_per_period(h: Hyper) -> None:
    for number in range(3):
        rounds = h.period_of(sum(h.period + n * h.period_increment for n in range(number)))
        alphas = [h.alpha_at(t) for t in rounds]
        assert max(alphas) == h.alpha_max
        assert all(0.0 <= alpha <= h.alpha_max for alpha in alphas)
        if h.alpha_max > 0.01:
            assert alphas.count(h.alpha_max) == 1


@property_of
@given(schedules.filter(lambda h: h.shape in ("half", "full") and h.alpha_max > 0.01), st.integers(1, 5))
def test_is_among_largest_selects_rounds_with_largest_alpha(h: Hyper, number: int) -> None:
    rounds = h.period_of(h.period)
    chosen = [t for t in rounds if h.is_among_largest(number, t)]
    left = [h.alpha_at(t) for t in rounds if t not in chosen]
    assert all(h.alpha_at(t) > max(left, default=-1.0) - 1e-9 for t in chosen)
    if h.shape == "half":
        assert chosen == list(rounds)[-number:]
    else:  # α may be the same on the way up and down
        assert len(chosen) == min(number, len(rounds))


def test_loss_factors_match_equation_10() -> None:
    assert loss_factors(0.3, "both") == (0.7, 0.3)
    assert loss_factors(0.3, "supervision") == (0.7, 1.0)
    assert loss_factors(0.3, "distillation") == (1.0, 0.3)
    assert loss_factors(0.3, "common") == (0.3, 0.3)


# ---- distillation --------------------------------------------------------------------------------------------


def softmax(z: Matrix) -> Matrix:
    powers = np.exp(z - z.max(axis=-1, keepdims=True))
    return np.asarray(powers / powers.sum(axis=-1, keepdims=True))


def divergence(p: Matrix, q: Matrix) -> float:
    return float(sum(p[k] * math.log(p[k] / q[k]) for k in range(len(p))))


@property_of
@given(st.integers(2, 6), st.integers(1, 4), st.integers(2, 7), st.integers(0, 2**32 - 1))
def test_distillation_loss_and_gradient_match_equation_3(models: int, batch: int, classes: int, seed: int) -> None:
    stream = np.random.default_rng(seed)
    z = stream.normal(scale=3.0, size=(models, batch, classes))
    sizes = [int(size) for size in stream.integers(1, 10**6, size=models)]
    n = int(stream.integers(models))
    student = torch.tensor(z[n], requires_grad=True)
    phi = torch.tensor(sizes, dtype=torch.float64)
    phi[n] = 0.0
    found = distillation(student, torch.from_numpy(z).log_softmax(2), phi)
    found.backward()  # type: ignore[no-untyped-call]

    p, others = softmax(z), [q for q in range(models) if q != n]
    share = {q: sizes[q] / sum(sizes[u] for u in others) for q in others}
    expected = sum(share[q] * divergence(p[q][x], p[n][x]) for q in others for x in range(batch)) / batch
    gradient = sum(share[q] * (p[n] - p[q]) for q in others) / batch
    assert float(found.detach()) == pytest.approx(expected, rel=1e-5, abs=1e-9)
    assert student.grad is not None
    np.testing.assert_allclose(student.grad.numpy(), gradient, atol=1e-6)


def test_wsl_weights_samples_less_where_the_teacher_is_less_certain() -> None:
    student, labels = torch.zeros(3, 2), torch.tensor([0, 0, 0])
    teachers = torch.tensor([[[0.0, 0.0], [2.0, 0.0], [-2.0, 0.0]], [[100.0, 0.0]] * 3]).log_softmax(2)
    equal, right, wrong = wsl_weights(student, teachers, labels)[0].tolist()
    assert equal == pytest.approx(1 - math.exp(-1))
    assert right == pytest.approx(1 - math.exp(-math.log(2) / math.log(1 + math.exp(-2))))
    assert wrong < equal < right
    assert wsl_weights(student, teachers, labels)[1].tolist() == [1.0] * 3


def test_distillation_without_teachers_is_zero() -> None:
    logits = torch.randn(2, 3, requires_grad=True)
    loss = distillation(logits, torch.randn(2, 2, 3).log_softmax(2), torch.zeros(2))
    loss.backward()  # type: ignore[no-untyped-call]
    assert loss.item() == 0.0
    assert logits.grad is not None
    assert not logits.grad.any()


@pytest.mark.parametrize(("form", "expected"), [("size", [15.0, 43.0, 0.0, 43.0]), ("equal", [1.0, 1.0, 0.0, 1.0])])
def test_teacher_weights_are_sizes_or_equal_and_zero_for_itself(form: Any, expected: list[float]) -> None:
    models = [model(name, seed=0) for name in ("flat", "linear", "flat", "linear")]
    assert teacher_weights(models, by_size=form == "size")[2].tolist() == expected


# ---- rounds against a reference in numpy ---------------------------------------------------------------------


class Reference:
    """A peer in numpy: its layers as matrices, [outputs, inputs + 1], on all samples in each step."""

    def __init__(self, peer: DFML) -> None:
        values = {name: x.double().numpy() for name, x in parameters_of(peer.model).items()}
        self.layers = [np.hstack([values["head.weight"], values["head.bias"][:, None]])]
        if "backbone.1.weight" in values:
            self.layers.insert(0, np.hstack([values["backbone.1.weight"], values["backbone.1.bias"][:, None]]))
        self.size = sum(layer.size for layer in self.layers)
        train = peer.data.train
        images = train.take(np.arange(len(train)))[0].numpy().reshape(len(train), -1)
        self.x: Matrix = images / 255.0
        self.labels = peer.data.train.labels
        counts = np.bincount(self.labels, minlength=CLASSES)
        self.beta: Matrix = counts / counts.sum()
        self.peak, self.peak_alpha = [layer.copy() for layer in self.layers], 0.0

    def logits(self, x: Matrix) -> Matrix:
        for layer in self.layers:
            x = np.hstack([x, np.ones((len(x), 1))]) @ layer.T
        return x

    def gradients(self, x: Matrix, g: Matrix) -> list[Matrix]:
        """Gradients of the layers, given that of the logits, g [B, K]."""
        inputs = [x]
        for layer in self.layers[:-1]:
            inputs.append(np.hstack([inputs[-1], np.ones((len(x), 1))]) @ layer.T)
        found: list[Matrix] = []
        for layer, below in zip(reversed(self.layers), reversed(inputs), strict=True):
            found.insert(0, g.T @ np.hstack([below, np.ones((len(x), 1))]))
            g = g @ layer[:, :-1]
        return found

    def values(self) -> Matrix:
        return np.concatenate([layer.ravel() for layer in self.layers])


def wsm_gradient(z: Matrix, labels: NDArray[np.int64], beta: Matrix) -> Matrix:
    """Of Eq. 2, as a mean, by the logits."""
    weighted = beta * np.exp(z)
    return np.asarray((weighted / weighted.sum(axis=1, keepdims=True) - np.eye(CLASSES)[labels]) / len(z))


class Sgd:
    def __init__(self, h: Hyper) -> None:
        self.h = h
        self.velocity: list[Matrix] | None = None

    def step(self, layers: list[Matrix], gradients: Sequence[Matrix]) -> None:
        decayed = [g + self.h.weight_decay * x for g, x in zip(gradients, layers, strict=True)]
        if self.velocity is None:
            self.velocity = decayed
        else:
            self.velocity = [self.h.momentum * v + g for v, g in zip(self.velocity, decayed, strict=True)]
        for n, v in enumerate(self.velocity):
            layers[n] = layers[n] - self.h.lr * v


def train_reference(peer: Reference, h: Hyper) -> None:
    sgd = Sgd(h)
    for _ in range(h.local_epochs):
        sgd.step(peer.layers, peer.gradients(peer.x, wsm_gradient(peer.logits(peer.x), peer.labels, peer.beta)))


def wsl_reference(student: Matrix, teacher: Matrix, labels: NDArray[np.int64]) -> Matrix:
    """WSL's weights, [B, 1]."""
    rows = np.arange(len(labels))
    return np.asarray(1 - np.exp(-np.log(student[rows, labels]) / np.log(teacher[rows, labels])))[:, None]


def mutual_learning_reference(peers: Mapping[int, Reference], aggregator: Reference, alpha: float, h: Hyper) -> None:
    """Algorithm 1's aggregator side, with Eqs. 1, 2 and 3, on all of the aggregator's samples at once."""
    sgds = {n: Sgd(h) for n in peers}
    x = aggregator.x
    for _ in range(h.mutual_epochs):
        z = {n: peer.logits(x) for n, peer in peers.items()}
        p = {n: softmax(z[n]) for n in peers}
        for n, peer in peers.items():
            others = sum(peers[u].size for u in peers if u != n)
            weights = {q: wsl_reference(p[n], p[q], aggregator.labels) if h.wsl else 1 for q in peers}
            pull = sum(peers[q].size / others * weights[q] * (p[n] - p[q]) for q in peers if q != n) / len(x)
            g = (1 - alpha) * wsm_gradient(z[n], aggregator.labels, aggregator.beta) + alpha * pull
            sgds[n].step(peer.layers, peer.gradients(x, g))


def run_reference(peers: list[Reference], schedule: Sequence[Assignment], h: Hyper, dead: Sequence[int] = ()) -> None:
    for t, assignment in enumerate(schedule):
        alpha = h.alpha_at(t)
        present = {n: peers[n] for n in assignment.participants if n not in dead}
        for peer in present.values():
            train_reference(peer, h)
        if assignment.aggregator in dead or len(present) < 2:
            continue
        mutual_learning_reference(present, peers[assignment.aggregator], alpha, h)
        for peer in present.values():
            if alpha >= peer.peak_alpha:
                peer.peak, peer.peak_alpha = [layer.copy() for layer in peer.layers], alpha


def values(peer: DFML, which: str = "model") -> Matrix:
    found = {name: x.double().numpy() for name, x in parameters_of(getattr(peer, which)).items()}
    layers = [np.hstack([found["head.weight"], found["head.bias"][:, None]])]
    if "backbone.1.weight" in found:
        layers.insert(0, np.hstack([found["backbone.1.weight"], found["backbone.1.bias"][:, None]]))
    return np.concatenate([layer.ravel() for layer in layers])


def agree(peers: Sequence[DFML], expected: Sequence[Reference], alive: Sequence[int] | None = None) -> None:
    for me in range(len(peers)) if alive is None else alive:
        np.testing.assert_allclose(values(peers[me]), expected[me].values(), atol=2e-5)
        peak = np.concatenate([layer.ravel() for layer in expected[me].peak])
        np.testing.assert_allclose(values(peers[me], "peak"), peak, atol=2e-5)
        assert peers[me].peak_alpha == pytest.approx(expected[me].peak_alpha, abs=1e-12)


@pytest.mark.exhaustive
@pytest.mark.parametrize("topology", [complete(4), Topology.from_edges(4, [(0, 1), (1, 2), (2, 3)])])
@pytest.mark.parametrize("wsl", [False, True])
def test_rounds_follow_algorithm_1(wsl: bool, topology: Topology) -> None:
    h = hyper(local_epochs=2, wsl=wsl)
    peers = make(h)
    expected = [Reference(peer) for peer in peers]
    run_rounds(peers, topology, 8)
    run_reference(expected, assignments(peers, topology, 8), h)
    agree(peers, expected)
    assert len({assignment.aggregator for assignment in assignments(peers, topology, 8)}) > 2
    assert h.alpha_max in {peer.peak_alpha for peer in peers}


@pytest.mark.exhaustive
def test_peak_model_is_from_round_with_highest_alpha() -> None:
    h = hyper(participation=1.0, period=4, period_increment=0)
    peers = make(h)
    seen: dict[int, list[Tensor]] = {me: [] for me in range(4)}
    peaks: dict[int, list[Tensor]] = {me: [] for me in range(4)}

    def keep(peer: Any, t: int) -> None:
        seen[peer.me].append(peer.model.head.weight.detach().clone())
        peaks[peer.me].append(peer.peak.head.weight.detach().clone())

    run_rounds(peers, complete(4), 12, after=keep)
    # Follows α up to its first maximum, and changes only at maxima from then on.
    source = [0, 1, 2, 3, 3, 3, 3, 7, 7, 7, 7, 11]
    for me in range(4):
        assert all(torch.equal(peaks[me][t], seen[me][source[t]]) for t in range(12))
        assert not torch.equal(seen[me][10], seen[me][7])


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("given", "source"),
    [
        ({"participation": 0.25}, [0, 1, 2, 3, 4, 4, 6, 7, 8, 9]),  # N/|S| = 4 of 5 rounds
        ({"participation": 0.25, "peak_updates": 2}, [0, 1, 2, 3, 4, 4, 4, 4, 8, 9]),
        ({"participation": 0.5, "peak_updates": 1}, [0, 1, 2, 3, 4, 4, 4, 4, 4, 9]),
    ],
)
def test_few_senders_mean_more_peak_rounds_per_period(given: dict[str, Any], source: list[int]) -> None:
    h = hyper(fixed_aggregator=True, period=5, period_increment=0, **given)
    peers = make(h)
    seen: list[Tensor] = []
    peaks: list[Tensor] = []
    ages: list[float] = []

    def keep(peer: Any, t: int) -> None:
        if peer.me == 0:
            seen.append(peer.model.head.weight.detach().clone())
            peaks.append(peer.peak.head.weight.detach().clone())
            ages.append(peer.diagnostics()["peak_age"])

    run_rounds(peers, complete(4), 10, after=keep)
    assert all(torch.equal(peaks[t], seen[source[t]]) for t in range(10))
    assert ages == [t - source[t] for t in range(10)]
    assert peers[0].peak_alpha == h.alpha_max


def test_state_of_an_earlier_version_has_no_peak_round() -> None:
    (peer, *_) = make(hyper())
    state = peer.state_dict()
    del state["peak_round"]
    peer.load_state_dict(state)
    assert peer.peak_round == -1


def test_idle_peers_neither_change_nor_send() -> None:
    peers = make(hyper(participation=0.25))
    before = [digest(peer.state_dict()) for peer in peers]
    (assignment,) = assignments(peers, complete(4), 1)
    traffic = run_rounds(peers, complete(4), 1)
    for me in range(4):
        idle = me not in assignment.participants
        assert (digest(peers[me].state_dict()) == before[me]) == idle
        assert (traffic[me][0].sent == {} and traffic[me][0].received == {}) == idle


@pytest.mark.exhaustive
def test_models_agree_more_after_mutual_learning() -> None:
    @torch.no_grad()
    def disagreement(peers: list[DFML]) -> float:
        x = peers[0].data.input(peers[0].data.train.take(np.arange(6))[0], augmented=False)
        p = torch.stack([peer.predict(x).softmax(1) for peer in peers])
        return float((p - p.mean(0)).abs().mean())

    peers = make(hyper(participation=1.0, shape="fixed", alpha_max=1.0, mutual_epochs=30, lr=0.5))
    before = disagreement(peers)
    run_rounds(peers, complete(4), 1)
    assert disagreement(peers) < 0.3 * before


# ---- what travels --------------------------------------------------------------------------------------------


def bytes_of(peer: DFML) -> int:
    tensors = {**parameters_of(peer.model), **buffers_of(peer.model)}
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())


def sent(traffic: list[list[Traffic]], t: int) -> int:
    return sum(payload(one[t].sent) for one in traffic)


@pytest.mark.exhaustive
@pytest.mark.parametrize("participation", [0.25, 0.5, 1.0])
def test_two_models_travel_per_sender_and_round(participation: float) -> None:
    peers = make(hyper(participation=participation), names=("flat", "linear", "normalized", "linear", "flat"))
    traffic = run_rounds(peers, complete(5), 5)
    for t, assignment in enumerate(assignments(peers, complete(5), 5)):
        assert len(assignment.senders) == min(4, max(1, round(participation * 5)))
        assert sent(traffic, t) == sum(2 * bytes_of(peers[n]) for n in assignment.senders)
        for me, peer in enumerate(traffic):
            aggregates = me == assignment.aggregator
            assert messages(peer[t].sent, "Pupil") == (me in assignment.senders)
            assert messages(peer[t].sent, "Taught") == (len(assignment.senders) if aggregates else 0)
            assert messages(peer[t].received, "Pupil") == (len(assignment.senders) if aggregates else 0)
            assert messages(peer[t].received, "Taught") == (me in assignment.senders)


def test_batch_norm_statistics_travel_both_ways() -> None:
    peers = make(hyper(participation=1.0, lr=1e-9), names=("normalized",) * 3)
    run_rounds(peers, complete(3), 1)
    local_batches, mutual_batches = 1, 3
    for peer in peers:
        found = buffers_of(peer.model)
        assert int(found["backbone.2.num_batches_tracked"]) == local_batches + mutual_batches
        assert not peer.model.training


def test_model_with_wrong_name_or_shape_is_rejected_on_arrival() -> None:
    peers = make(hyper())
    layouts = peers[0].layouts()
    flat, linear = ((peer.model.name, parameters_of(peer.model), buffers_of(peer.model)) for peer in peers[:2])
    assert arrive(Pupil(*linear), layouts).architecture == "linear"
    assert arrive(Taught(*flat[1:]), layouts).parameters.keys() == flat[1].keys()
    wide = {**flat[1], "head.weight": torch.zeros(CLASSES, INPUTS + 1)}
    for wrong in (
        Pupil("linear", *flat[1:]),
        Pupil("flat", *linear[1:]),
        Pupil("resnet18", *flat[1:]),
        Pupil("flat", wide, {}),
        Pupil("flat", flat[1], {"running_mean": torch.zeros(3)}),
        Taught(*linear[1:]),  # a flat model cannot come back as a linear one
    ):
        with pytest.raises(Unexpected):
            arrive(wrong, layouts)


# ---- missing peers and divergence ----------------------------------------------------------------------------


@pytest.mark.exhaustive
def test_dead_sender_is_skipped() -> None:
    h = hyper(participation=1.0)
    peers = make(h)
    expected = [Reference(peer) for peer in peers]
    traffic = run_rounds(peers, complete(4), 6, silent=[3])
    run_reference(expected, assignments(peers, complete(4), 6), h, dead=[3])
    agree(peers, expected, alive=[0, 1, 2])
    assert traffic[0][0].missing == {"Pupil": [3]}
    assert peers[0].diagnostics()["alpha"] == h.alpha_at(5)


def test_sender_keeps_model_and_peak_if_aggregator_is_dead() -> None:
    h = hyper(participation=1.0, fixed_aggregator=True)
    peers = make(h)
    expected = [Reference(peer) for peer in peers]
    peak = digest(peers[2].peak.state_dict())
    traffic = run_rounds(peers, complete(4), 2, silent=[0])
    run_reference(expected, assignments(peers, complete(4), 2), h, dead=[0])
    agree(peers, expected, alive=[1, 2, 3])
    assert all(one.missing == {"Taught": [0]} for peer in traffic[1:] for one in peer)
    assert digest(peers[2].peak.state_dict()) == peak
    assert peers[2].peak_alpha == 0.0


def test_aggregator_without_models_only_trains_locally() -> None:
    h = hyper(participation=1.0, fixed_aggregator=True)
    peers = make(h)
    (expected, *_) = [Reference(peer) for peer in peers]
    run_rounds(peers, complete(4), 1, silent=[1, 2, 3])
    train_reference(expected, h)
    np.testing.assert_allclose(values(peers[0]), expected.values(), atol=2e-5)
    assert peers[0].peak_alpha == 0.0
    assert "models" not in peers[0].diagnostics()


async def test_wait_for_reply_ends_at_its_deadline() -> None:
    """The aggregator is alive but silent; the sender keeps its trained model."""
    peers = make(hyper(participation=1.0, fixed_aggregator=True, patience=0.5), names=("flat", "flat"))
    hub = LocalHub()
    endpoints = [Endpoint(peer.me, complete(2), RUN_ID, 0, peer.layouts(), WaitPolicy(0.02)) for peer in peers]
    for endpoint in endpoints:
        hub.join(endpoint)
    loop = asyncio.get_running_loop()
    began = loop.time()
    await peers[1].round(0, endpoints[1].begin(0))
    assert loop.time() - began >= 1.5 * 0.02
    assert endpoints[1].missing == {"Taught": [0]}
    assert peers[1].peak_alpha == 0.0
    # The model stays in the aggregator's mailbox until its round.
    assert (0, "Pupil", 1) in endpoints[0].mailbox


async def test_late_sender_learns_not_to_wait() -> None:
    peers = make(hyper(participation=1.0, fixed_aggregator=True), names=("flat", "flat"))
    (_, expected) = [Reference(peer) for peer in peers]
    hub = LocalHub()
    endpoints = [
        Endpoint(peer.me, complete(2), RUN_ID, 0, peer.layouts(), WaitPolicy(deadline))
        for peer, deadline in zip(peers, (0.01, math.inf), strict=True)
    ]
    for endpoint in endpoints:
        hub.join(endpoint)
    await peers[0].round(0, endpoints[0].begin(0))
    await peers[1].round(0, endpoints[1].begin(0))
    assert [endpoint.missing for endpoint in endpoints] == [{"Pupil": [1]}, {}]
    train_reference(expected, peers[1].hyper)
    np.testing.assert_allclose(values(peers[1]), expected.values(), atol=2e-5)
    assert peers[1].peak_alpha == 0.0


def test_sender_of_nonfinite_model_keeps_it() -> None:
    h = hyper(participation=1.0, fixed_aggregator=True)
    peers = make(h)
    expected = [Reference(peer) for peer in peers]
    with torch.no_grad():
        peers[2].model.linear_head.bias[1] = torch.nan
    traffic = run_rounds(peers, complete(4), 3)
    run_reference(expected, assignments(peers, complete(4), 3), h, dead=[2])
    agree(peers, expected, alive=[0, 1, 3])
    assert [traffic[me][0].missing for me in range(4)] == [{"Pupil": [2]}, {}, {}, {}]
    assert peers[2].peak_alpha == 0.0


@pytest.mark.parametrize("value", [math.inf, 1e30])
def test_diverged_reply_is_not_adopted(value: float) -> None:
    peers = make(hyper(participation=1.0, fixed_aggregator=True))
    expected = Reference(peers[2])

    def diverge(models: Mapping[int, Model], alpha: float) -> None:
        with torch.no_grad():
            for n in (0, 2):
                models[n].linear_head.weight[0, 0] = value

    peers[0].mutual_learning = diverge  # type: ignore[method-assign]
    traffic = run_rounds(peers, complete(4), 1)
    train_reference(expected, peers[2].hyper)
    np.testing.assert_allclose(values(peers[2]), expected.values(), atol=2e-5)
    assert traffic[2][0].missing == {"Taught": [0]}
    assert not any(map(has_diverged, peers[0].state_dict()["model"].values()))
    assert peers[0].peak_alpha == 0.0
    assert (peers[1].peak_alpha, peers[2].peak_alpha) == (peers[0].hyper.alpha_at(0), 0.0)


def test_diverged_model_stops_teaching() -> None:
    peers = make(hyper())
    with_it, without = (copy.deepcopy([peer.model for peer in peers[:3]]) for _ in range(2))
    with torch.no_grad():
        with_it[2].linear_head.weight[0, 0] = torch.inf
    twins = make(hyper())
    peers[0].model, twins[0].model = with_it[0], without[0]
    peers[0].mutual_learning(dict(enumerate(with_it)), alpha=0.7)
    twins[0].mutual_learning(dict(enumerate(without[:2])), alpha=0.7)
    for one, other in zip(with_it[:2], without[:2], strict=True):
        for x, y in zip(one.parameters(), other.parameters(), strict=True):
            torch.testing.assert_close(x, y)


@pytest.mark.exhaustive
def test_peers_many_rounds_apart_get_the_same_result() -> None:
    """Peer 0 starts only when all others wait for it; peers without a role in a round do not wait."""
    h = hyper(participation=0.25)
    together, apart = make(h), make(h)
    topology = complete(4)
    run_rounds(together, topology, 12)

    async def late() -> list[int]:
        hub = LocalHub()
        endpoints = [Endpoint(peer.me, topology, RUN_ID, 0, peer.layouts()) for peer in apart]
        for endpoint in endpoints:
            hub.join(endpoint)
            endpoint.mailbox.on_block = lambda: None  # not a deadlock: peer 0 starts later
        reached = [-1] * 4

        async def run(me: int) -> None:
            for t in range(12):
                reached[me] = t
                endpoints[me].open(t)
                await apart[me].round(t, endpoints[me].begin(t))

        others = [asyncio.create_task(run(me)) for me in (1, 2, 3)]
        for _ in range(2000):
            await asyncio.sleep(0)
        stuck = list(reached)
        await run(0)
        await asyncio.gather(*others)
        return stuck

    stuck = asyncio.run(late())
    assert stuck[0] == -1
    assert max(stuck) > 2
    assert [digest(peer.state_dict()) for peer in apart] == [digest(peer.state_dict()) for peer in together]


# ---- memory at the aggregator --------------------------------------------------------------------------------

MIXED = ("normalized", "flat", "normalized", "linear", "normalized")


def outcome(h: Hyper, rounds: int = 2) -> list[str]:
    peers = make(h, names=MIXED, samples=9)
    run_rounds(peers, complete(len(MIXED)), rounds)
    return [digest(peer.state_dict()) for peer in peers]


@pytest.mark.exhaustive
def test_mutual_batch_models_is_bit_identical() -> None:
    unbounded = outcome(hyper(batch=4, participation=1.0))
    for bound in (1, 3, 99):
        assert outcome(hyper(batch=4, participation=1.0, mutual_batch_models=bound)) == unbounded


@pytest.mark.exhaustive
@pytest.mark.parametrize("bound", [1, 3, None])
def test_mutual_batch_models_bounds_held_activations(bound: int | None, monkeypatch: Any) -> None:
    held, most, learned = 0, 0, 0
    logits, step = Participant.logits, Participant.step

    def counted_logits(self: Participant, x: Tensor, draws: int) -> Tensor:
        nonlocal held, most
        held += torch.is_grad_enabled()
        most = max(most, held)
        return logits(self, x, draws)

    def counted_step(self: Participant, loss: Tensor) -> None:
        nonlocal held, learned
        step(self, loss)
        assert all(parameter.grad is None for parameter in self.model.parameters())
        held -= 1
        learned += 1

    monkeypatch.setattr(Participant, "logits", counted_logits)
    monkeypatch.setattr(Participant, "step", counted_step)
    outcome(hyper(participation=1.0, mutual_batch_models=bound), rounds=1)
    assert (held, most, learned) == (0, bound or len(MIXED), 3 * len(MIXED))


ARCHITECTURES = (*GROUPS["tiny4"].members, "dfml-resnet-4", "dfml-vit-32", "shufflenet")


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_detached_logits_equal_logits(name: str) -> None:
    """Bit-identical with batch normalization and dropout, and without side effects."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        network = build(name, 0, 3, (32, 32), CLASSES).train()
        x = torch.randn(3, 3, 32, 32)
        one = Participant(network, torch.optim.SGD(network.parameters()), torch.zeros(1))
        before = digest(network.state_dict())
        detached = one.detached_logits(x, 5)
        assert digest(network.state_dict()) == before
        again = copy.deepcopy(network)
        assert torch.equal(detached, one.logits(x, 5))
        assert torch.equal(detached, Participant(again, one.optimizer, one.phi).logits(x, 5))
        assert digest(network.state_dict()) == digest(again.state_dict())
        # Logits update the statistics, if any, and dropout depends on the seed.
        assert (digest(network.state_dict()) != before) == bool(buffers_of(network))
        drops = any(isinstance(module, nn.Dropout) and module.p > 0 for module in network.modules())
        assert torch.equal(detached, one.detached_logits(x, 6)) != drops or bool(buffers_of(network))


# ---- switches ------------------------------------------------------------------------------------------------


def make_with_absent_classes(h: Hyper) -> list[DFML]:
    """Each peer lacks one of the classes."""
    names = ("flat", "linear", "flat", "linear")
    peers = []
    for me, name in enumerate(names):
        dataset = random_dataset(9 + me, classes=CLASSES, seed=me)
        mine = [n for n in range(9 + me) if n % CLASSES != me % CLASSES]
        given = setting(me, 4, model(name, seed=me), peer_data(dataset, mine))
        peers.append(DFML(h, replace(given, architectures=names, build=lambda peer: model(names[peer], seed=peer))))
    return peers


@cache
def option_outcome(**given: Any) -> list[str]:
    peers = make_with_absent_classes(hyper(**given))
    run_rounds(peers, complete(4), 5)
    return [digest(peer.state_dict()) for peer in peers]


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "given",
    [
        {"supervision": "ce"},
        {"supervision": "ace"},
        {"supervision": "masked"},
        {"mutual_epochs": 2},
        {"mutual": False},
        {"teachers": "equal"},
        {"alpha_max": 0.5},
        {"shape": "full"},
        {"shape": "fixed"},
        {"shape": "linear"},
        {"wsl": True},
        {"period": 4},
        {"period_increment": 0},
        {"scheduled": "supervision"},
        {"scheduled": "distillation"},
        {"scheduled": "common"},
        {"peak_updates": 3},
        {"participation": 0.25},
        {"fixed_aggregator": True},
        {"local_epochs": 2},
        {"momentum": 0.5},
        {"weight_decay": 0.1},
        {"batch": 3},
        {"optimizer": "adam"},
    ],
    ids=lambda given: ", ".join(f"{key} {value}" for key, value in given.items()),
)
def test_every_option_changes_the_outcome(given: dict[str, Any]) -> None:
    assert option_outcome(**given) != option_outcome()


def test_without_mutual_only_the_aggregators_model_learns() -> None:
    h = hyper(mutual=False, participation=1.0, shape="fixed")
    peers = make(h, names=("flat", "linear", "normalized"))
    trained = make(h, names=("flat", "linear", "normalized"))
    for peer in trained:
        peer.local_training()
    run_rounds(peers, complete(3), 1)
    assert digest(peers[0].model.state_dict()) != digest(trained[0].model.state_dict())
    for me in (1, 2):
        assert digest(peers[me].model.state_dict()) == digest(trained[me].model.state_dict())


@pytest.mark.exhaustive
def test_fixed_alpha_makes_peak_and_regular_model_equal() -> None:
    peers = make(hyper(shape="fixed", participation=1.0))
    run_rounds(peers, complete(4), 3)
    for peer in peers:
        assert digest(peer.peak.state_dict()) == digest(peer.model.state_dict())


# ---- what is evaluated and recorded --------------------------------------------------------------------------


def test_extra_metrics_evaluate_the_peak_model() -> None:
    peers = make(hyper(participation=1.0, period=2, period_increment=0))
    run_rounds(peers, complete(4), 3)
    x = torch.rand(5, 1, 2, 2)
    for peer in peers:
        found = {measure.name: measure for measure in peer.extra_metrics(whole=True)}
        assert list(found) == ["peak", "peak_global", "local", "peak_local"]
        assert [measure.name for measure in peer.extra_metrics(whole=False)] == ["peak", "local", "peak_local"]
        assert found["peak"].samples is peer.data.test
        assert found["peak_global"].samples is peer.data.global_test
        assert found["local"].samples is found["peak_local"].samples is peer.data.validation
        assert torch.equal(found["peak"].predict(x), peer.peak(x))
        assert torch.equal(found["local"].predict(x), peer.model(x))
        assert not torch.equal(peer.peak(x), peer.model(x))
        assert not peer.peak.training


def test_diagnostics_report_alpha_models_and_peak() -> None:
    h = hyper(participation=0.5)
    peers = make(h)
    seen: dict[tuple[int, int], Mapping[str, float]] = {}
    run_rounds(peers, complete(4), 4, after=lambda peer, t: seen.update({(peer.me, t): dict(peer.diagnostics())}))
    for t, assignment in enumerate(assignments(peers, complete(4), 4)):
        for me in range(4):
            assert seen[me, t]["alpha"] == h.alpha_at(t)
            assert seen[me, t].get("models") == (3 if me == assignment.aggregator else None)
            if me in assignment.participants and t < 3:
                assert (seen[me, t]["peak_alpha"], seen[me, t]["peak_age"]) == (h.alpha_at(t), 0)


def test_peers_share_no_memory() -> None:
    """Received tensors are copies: training one peer changes no other peer's model."""
    peers = make(hyper(participation=1.0))
    run_rounds(peers, complete(4), 1)
    before = clone(parameters_of(peers[0].model))
    peers[1].local_training()
    assert all(torch.equal(before[name], value) for name, value in parameters_of(peers[0].model).items())
