"""FedStyle against its paper: equations, whole rounds in float64, every option, and who reads labels."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy import ndimage
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from p2pfl.algorithms.fedavg_ssl import Content, FedAvgSSL
from p2pfl.algorithms.fedstyle import FedStyle, StyleHyper
from p2pfl.algorithms.fedstyle_extraction import sobel, style_loss
from p2pfl.learning.evaluation import evaluate
from p2pfl.messaging.net import Net
from p2pfl.messaging.topology import Topology
from p2pfl.run_file.options import OptionErrors
from p2pfl.tensors import digest, has_diverged
from tests.fedstyle_reference import (
    ALONE,
    FEATURES,
    LINE,
    SIDE,
    Reference,
    StyleReference,
    agree,
    complete,
    hyper,
    make,
    network,
    participants,
    reference_rounds,
    styled,
)
from tests.support import messages, payload, peer_data, run_rounds, setting

property_of = settings(deadline=None, max_examples=15)

# ---- Sobel ---------------------------------------------------------------------------------------------------


def bytes_of(rows: Sequence[Sequence[int]]) -> Tensor:
    return torch.tensor(rows, dtype=torch.uint8)[None, None]


def test_sobel_of_a_step_marks_both_sides() -> None:
    step = bytes_of([[10, 10, 90, 90]] * 4)
    # G_x is 4·80 in both columns beside the step and 0 elsewhere; the range stays 10 … 90.
    assert sobel(step)[0, 0].tolist() == [[10, 90, 90, 10]] * 4
    assert sobel(step.mT)[0, 0].tolist() == [[10] * 4, [90] * 4, [90] * 4, [10] * 4]


def test_sobel_of_a_dot_is_a_ring() -> None:
    found = sobel(bytes_of([[0] * 5, [0] * 5, [0, 0, 100, 0, 0], [0] * 5, [0] * 5]))[0, 0]
    # Around the dot: √(2² + 0²) above, below and beside it, √(1² + 1²) at its corners, in units of 100; 0 on it.
    corner = round(100 * math.sqrt(2) / 2)
    assert found.tolist() == [
        [0, 0, 0, 0, 0],
        [0, corner, 100, corner, 0],
        [0, 100, 0, 100, 0],
        [0, corner, 100, corner, 0],
        [0, 0, 0, 0, 0],
    ]


def test_sobel_of_a_constant_image_is_constant() -> None:
    assert sobel(bytes_of([[77] * 3] * 3)).flatten().tolist() == [77] * 9


images = st.tuples(
    st.integers(1, 3), st.sampled_from([1, 3]), st.integers(2, 7), st.integers(2, 7), st.integers(0, 999)
)


def random_images(shape: tuple[int, int, int, int, int]) -> Tensor:
    *size, seed = shape
    return torch.from_numpy(np.random.default_rng(seed).integers(0, 256, size=size, dtype=np.uint8))


@property_of
@given(images)
def test_sobel_matches_scipy_in_the_range_of_the_image(shape: tuple[int, int, int, int, int]) -> None:
    batch = random_images(shape)
    for image, found in zip(batch.double().numpy(), sobel(batch).numpy(), strict=True):
        strength = np.stack(
            [np.hypot(*(ndimage.sobel(channel, axis, mode="nearest") for axis in (0, 1))) for channel in image]
        )
        expected = image.min() + np.ptp(image) * strength / max(strength.max(), 1.0)
        assert found.dtype == np.uint8
        np.testing.assert_allclose(found, expected, atol=0.501)


@property_of
@given(images)
def test_sobel_commutes_with_rotation_brightness_and_negation(shape: tuple[int, int, int, int, int]) -> None:
    batch = random_images(shape) // 2
    edges = sobel(batch).int()
    darkest, brightest = (extreme((1, 2, 3), keepdim=True).int() for extreme in (batch.amin, batch.amax))
    for found, expected in (
        (sobel(batch.rot90(dims=(2, 3))), edges.rot90(dims=(2, 3))),
        (sobel(batch + 100), edges + 100),
        (sobel(255 - batch), 255 - brightest + edges - darkest),
    ):
        torch.testing.assert_close(found.int(), expected, atol=1, rtol=0)  # halves round to even numbers


# ---- losses --------------------------------------------------------------------------------------------------

projections = st.tuples(st.integers(2, 6), st.integers(2, 5), st.integers(0, 2**32 - 1), st.sampled_from([0.07, 0.5]))


def random_projections(size: int, width: int, seed: int) -> Tensor:
    return torch.from_numpy(np.random.default_rng(seed).normal(size=(2 * size, width)))


def probability(z: NDArray[np.float64], i: int, j: int, temperature: float) -> float:
    """exp(cos(z_i, z_j)/τ) / Σ_{n≠i} exp(cos(z_i, z_n)/τ)."""
    z = z / np.linalg.norm(z, axis=1, keepdims=True)
    scores = [math.exp(float(z[i] @ z[n]) / temperature) for n in range(len(z)) if n != i]
    return math.exp(float(z[i] @ z[j]) / temperature) / sum(scores)


@property_of
@given(projections)
def test_style_loss_is_equation_2_up_to_a_constant(drawn: tuple[int, int, int, float]) -> None:
    size, width, seed, temperature = drawn
    z = random_projections(size, width, seed)
    style = [0] * size + [1] * size
    equation = sum(
        -math.log(probability(z.numpy(), i, j, temperature)) / (2 * size - 1)
        for i in range(2 * size)
        for j in range(2 * size)
        if i != j and style[i] == style[j]
    )
    constant = 2 * size * (size - 1) / (2 * size - 1)
    assert constant * float(style_loss(z, temperature)) == pytest.approx(equation, rel=1e-9)


# ---- whole rounds against a reference ------------------------------------------------------------------------


SWITCHES: dict[str, dict[str, Any]] = {
    "simclr": {},
    "simsiam": {"loss": "simsiam", "hidden": 3, "output": 2},
    "generator trained": {"train_generator": True, "style_weight": 2.0},
    "untrained style net": {"style_epochs": 0},
}


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", SWITCHES)
def test_rounds_follow_the_papers_algorithms(name: str) -> None:
    h = hyper(**SWITCHES[name])
    expected = [StyleReference(peer) for peer in make(h)]
    peers = make(h)
    start = Reference.of(peers[0].content)
    run_rounds(peers, LINE, 3)
    reference_rounds(expected, LINE, 3)
    for peer, reference in zip(peers, expected, strict=True):
        assert (
            min(float((reference.local[name] - start[name]).abs().max()) for name in start) > 1e-3
        )  # more than allowed
        agree(peer.content, reference.local)
        agree(peer.averaged, reference.w)
        agree(peer.infusion.style_net, reference.style)
        agree(peer.infusion.generator, reference.generator)


@pytest.mark.exhaustive
@pytest.mark.parametrize("fraction", [1.0, 0.5])
def test_complete_graph_yields_the_papers_global_model(fraction: float) -> None:
    h = hyper(participation=fraction)
    expected = [StyleReference(peer) for peer in make(h, 6)]
    peers = make(h, 6)
    digests: dict[int, set[str]] = {}

    def remember(peer: Any, t: int) -> None:
        digests.setdefault(t, set()).add(digest(peer.averaged.state_dict()))

    run_rounds(peers, complete(6), 3, after=remember)
    assert [len(digests[t]) for t in range(3)] == [1, 1, 1]
    reference_rounds(expected, complete(6), 3, fraction)
    for peer, reference in zip(peers, expected, strict=True):
        agree(peer.averaged, reference.w)
        agree(peer.content, reference.local)


@pytest.mark.exhaustive
def test_style_leaves_sample_order_views_and_initial_values_unchanged() -> None:
    """So that the baseline differs in style infusion only."""
    infused = make(hyper(batch=3, style_weight=0.0))
    plain = make(hyper(FedAvgSSL, batch=3), of=FedAvgSSL)
    run_rounds(infused, LINE, 2)
    run_rounds(plain, LINE, 2)
    for one, other in zip(infused, plain, strict=True):
        agree(one.content, Reference.of(other.content))


# ---- what travels --------------------------------------------------------------------------------------------

BACKBONE = SIDE * SIDE * FEATURES + FEATURES
CONTENT = BACKBONE + (FEATURES * 3 + 3) + (3 * 3 + 3)
"""Numbers in f_c, and in f_c and g_c, of these tests."""


@pytest.mark.exhaustive
def test_idle_peers_only_receive() -> None:
    peers = make(hyper(participation=0.5), 6)
    contents: dict[int, list[str]] = {me: [] for me in range(6)}

    def remember(peer: Any, t: int) -> None:
        contents[peer.me].append(digest(peer.content.state_dict()))

    traffic = run_rounds(peers, complete(6), 6, after=remember)
    chosen = [participants(6, 0.5, t) for t in range(6)]
    for me in range(6):
        for t in range(6):
            takes_part = me in chosen[t]
            assert messages(traffic[me][t].sent, "Content") == (5 if takes_part else 0)
            assert payload(traffic[me][t].sent) == (5 * 4 * CONTENT if takes_part else 0)
            assert messages(traffic[me][t].received) == len(set(chosen[t]) - {me})
            if t > 0:
                assert (contents[me][t] != contents[me][t - 1]) == takes_part


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("given", "kind", "numbers"),
    [
        ({}, "linear", CONTENT),
        ({"share_projector": False}, "linear", BACKBONE),
        ({"train_generator": True}, "linear", CONTENT),
        ({"loss": "simsiam"}, "linear", CONTENT + 2 * (3 * 3 + 3)),
        ({}, "normalised", CONTENT + 4 * FEATURES),
        ({"share_statistics": False}, "normalised", CONTENT + 2 * FEATURES),
    ],
)
def test_only_content_net_and_projector_travel(given: dict[str, Any], kind: str, numbers: int) -> None:
    peers = make(hyper(**given), kind=kind)
    traffic = run_rounds(peers, LINE, 2)
    for t in range(2):
        assert [payload(one[t].sent) for one in traffic] == [4 * numbers * degree for degree in (1, 2, 1)]
    (layout,) = peers[0].layouts()
    parts = {str(name).partition(".")[0] for _, name in layout.tensors}
    assert parts <= {"backbone", "projector", "predictor"}


def test_missing_neighbor_is_excluded_from_the_average() -> None:
    expected = [StyleReference(peer) for peer in make(hyper())]
    peers = make(hyper())
    traffic = run_rounds(peers, LINE, 1, silent=[2])
    assert traffic[1][0].missing == {"Content": [2]}
    for reference in expected[:2]:
        reference.extract()
        reference.train()
    mean = {name: (4 * expected[0].local[name] + 6 * expected[1].local[name]) / 10 for name in expected[0].local}
    agree(peers[1].averaged, mean)
    assert peers[1].weights() == pytest.approx({0: 0.4, 1: 0.6})


def test_peer_without_participating_neighbors_keeps_its_average() -> None:
    line = Topology.from_edges(6, [(i, i + 1) for i in range(5)])
    peers = make(hyper(participation=0.2), 6)
    before = [digest(peer.averaged.state_dict()) for peer in peers]
    run_rounds(peers, line, 1)
    (chosen,) = participants(6, 0.2, 0)
    assert [digest(peer.averaged.state_dict()) != one for peer, one in zip(peers, before, strict=True)] == [
        abs(me - chosen) <= 1 for me in range(6)
    ]
    assert peers[chosen].weights() == {chosen: 1.0}


def test_first_round_waits_for_style_extraction(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[float] = []
    exchange = Net.exchange

    async def spy(net: Net, body: Content, among: Any = None, patience: float = 1.0) -> Any:
        asked.append(patience)
        return await exchange(net, body, among, patience)

    monkeypatch.setattr(Net, "exchange", spy)
    run_rounds(make(hyper(style_epochs=6), 1), ALONE, 3)
    assert asked == [4.0, 1.0, 1.0]


def test_peer_without_samples_adopts_the_average() -> None:
    peers = make(hyper())
    peers[0] = FedStyle(hyper(), setting(0, 3, network("linear"), peer_data(styled(10, 0), [], test=range(4))))
    run_rounds(peers, LINE, 2)
    assert peers[0].weights() == {0: 0.0, 1: 1.0}
    agree(peers[0].averaged, Reference.of(peers[1].content))
    assert evaluate(peers[0].predict, peers[0].data, peers[0].data.test) is not None


# ---- style net, generator, statistics ------------------------------------------------------------------------


def test_style_net_is_trained_in_round_0_and_then_frozen() -> None:
    (peer,) = make(hyper(), 1, kind="normalised")
    network, seen = peer.infusion.style_net, [digest(peer.infusion.style_net.state_dict())]
    modes: list[bool] = []
    network.register_forward_hook(lambda module, *_: modes.append(module.training))
    run_rounds([peer], ALONE, 3, after=lambda *_: seen.append(digest(network.state_dict())))
    assert seen[0] != seen[1] == seen[2] == seen[3]
    assert modes == [True] * 2 + [False] * 2 * 3  # epochs of one batch
    assert not any(parameter.requires_grad for parameter in network.parameters())


@pytest.mark.parametrize("trained", [False, True])
def test_generator_is_trained_only_with_train_generator(trained: bool) -> None:
    (peer,) = make(hyper(train_generator=trained), 1)
    before = digest(peer.infusion.generator.state_dict())
    run_rounds([peer], ALONE, 1)
    assert (digest(peer.infusion.generator.state_dict()) != before) == trained


def test_style_net_gets_images_and_edges_and_content_net_gets_views() -> None:
    (peer,) = make(hyper(), 1)
    images, _ = peer.data.train.take(np.arange(4))
    x = peer.inputs(images)
    plain = images / 255.0
    torch.testing.assert_close(x, torch.cat([plain, plain * 0.6, plain, sobel(images) / 255.0]))
    seen: dict[str, Tensor] = {}
    for name, module in (("content", peer.content.backbone), ("style", peer.infusion.style_net)):
        module.register_forward_hook(lambda module, given, out, name=name: seen.update({name: given[0]}))
    peer.loss(x, torch.zeros(16))
    assert torch.equal(seen["content"], x[:8])
    assert torch.equal(seen["style"], x[8:])


def test_infusion_pairs_content_and_style_features() -> None:
    (peer,) = make(hyper(), 1)
    content, style = torch.randn(4, FEATURES), torch.randn(4, FEATURES)
    infused = peer.infusion(content, style)
    torch.testing.assert_close(infused[3], peer.infusion.generator(torch.cat([content[3], style[3]])))


@pytest.mark.exhaustive
@pytest.mark.parametrize("shared", [True, False])
def test_statistics_are_averaged_or_stay_local(shared: bool) -> None:
    peers = make(hyper(share_statistics=shared), kind="normalised")
    run_rounds(peers, complete(3), 2)
    local = [dict(peer.content.named_buffers())["backbone.2.running_mean"] for peer in peers]
    averaged = [dict(peer.averaged.named_buffers())["backbone.2.running_mean"] for peer in peers]
    mean = sum((4 + 2 * j) * local[j] for j in range(3)) / 18
    for j in range(3):
        torch.testing.assert_close(averaged[j], mean if shared else local[j])
    assert not torch.equal(local[0], local[1])


def test_projectors_stay_local_without_share_projector() -> None:
    peers: list[Any] = make(hyper(share_projector=False))
    start = peers[0].content.projector[0].weight.detach().clone()
    run_rounds(peers, complete(3), 2)
    kept = [peer.content.projector[0].weight for peer in peers]
    assert not torch.equal(kept[0], kept[1])
    assert all(torch.equal(peer.averaged.projector[0].weight, start) for peer in peers)
    assert len({digest(peer.averaged.backbone.state_dict()) for peer in peers}) == 1


def test_widths_follow_from_features_and_content_nets_start_equal() -> None:
    one, two = make(hyper())[:2]
    assert one.widths == (FEATURES, 3, 3)
    assert make(hyper(hidden=None, output=None))[0].widths == (FEATURES, FEATURES // 2, FEATURES // 4)
    assert [tuple(layer.weight.shape) for layer in one.infusion.generator if isinstance(layer, nn.Linear)] == [
        (3, 2 * FEATURES),
        (FEATURES, 3),
    ]
    assert digest(one.content.state_dict()) == digest(two.content.state_dict()) == digest(one.averaged.state_dict())
    assert digest(one.infusion.generator.state_dict()) != digest(two.infusion.generator.state_dict())


# ---- labels and evaluation -----------------------------------------------------------------------------------


def states(peers: Sequence[FedStyle]) -> list[str]:
    return [digest([peer.state_dict(), peer.streams.state_dict()]) for peer in peers]


@pytest.mark.exhaustive
@pytest.mark.parametrize("given", [{}, {"loss": "simsiam", "train_generator": False}])
def test_training_ignores_labels(given: dict[str, Any]) -> None:
    truth = make(hyper(batch=3, **given))
    lies = make(hyper(batch=3, **given), labels=lambda y: np.random.default_rng(0).permutation(y))
    assert not np.array_equal(truth[2].data.train.labels, lies[2].data.train.labels)
    for peers in (truth, lies):
        run_rounds(peers, LINE, 3)
    assert states(truth) == states(lies)


def evaluations(peer: FedStyle) -> list[Any]:
    """Everything that the session would evaluate."""
    found: list[Any] = [evaluate(peer.predict, peer.data, peer.data.test)]
    return found + [
        (one.name, one.part_of, evaluate(one.predict, peer.data, one.samples)) for one in peer.extra_metrics(False)
    ]


@pytest.mark.exhaustive
def test_evaluation_has_no_side_effects() -> None:
    often, once = make(hyper(batch=3), kind="normalised"), make(hyper(batch=3), kind="normalised")
    torch.manual_seed(1)
    generator = torch.get_rng_state()
    run_rounds(often, LINE, 3, after=lambda peer, t: evaluations(peer))  # type: ignore[arg-type]
    assert torch.equal(torch.get_rng_state(), generator)
    run_rounds(once, LINE, 3)
    assert states(often) == states(once)
    for one, other in zip(often, once, strict=True):
        assert evaluations(one) == evaluations(other) == evaluations(one)


@pytest.mark.exhaustive
def test_evaluation_depends_on_the_state_only() -> None:
    peers, again = make(hyper()), make(hyper())
    run_rounds(peers, LINE, 2)
    for peer, other in zip(peers, again, strict=True):
        evaluations(other)  # of the initial nets; loading a state must discard these
        other.load_state_dict(copy.deepcopy(peer.state_dict()))
        assert evaluations(other) == evaluations(peer)


@pytest.mark.exhaustive
def test_peers_on_a_complete_graph_agree_on_generalization() -> None:
    peers = make(hyper(participation=0.5), 6, kind="normalised")
    run_rounds(peers, complete(6), 2)
    first, *others = (evaluations(peer)[1:] for peer in peers)
    assert [(name, part) for name, part, _ in first] == [
        (f"generalization, style {n}", "generalization") for n in range(2)
    ]
    assert [one.samples for _, _, one in first] == [6, 6]
    assert all(other == first for other in others)


def test_generalization_probe_uses_all_or_probe_samples_of_a_style() -> None:
    (peer,) = make(hyper(), 1)
    seen: list[int] = []
    peer.averaged.backbone.register_forward_hook(lambda module, given, out: seen.append(len(out)))
    list(peer.extra_metrics(False))
    assert seen == [30, 30]  # of 60 samples in two styles; the peer has 4
    (peer,) = make(hyper(probe_samples=7), 1)
    peer.averaged.backbone.register_forward_hook(lambda module, given, out: seen.append(len(out)))
    list(peer.extra_metrics(False))
    assert seen[2:] == [7, 7]


def test_probe_peers_limits_who_evaluates_generalization() -> None:
    peers = make(hyper(probe_peers=2))
    assert [len(list(peer.extra_metrics(False))) for peer in peers] == [2, 2, 0]


def features(peer: FedStyle, samples: Any) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.int64]]:
    """h_c of the peer's local content net and h_s, and the labels."""
    x = samples.take(np.arange(len(samples)))[0].numpy().reshape(len(samples), -1) / 255.0
    nets = [net[1].state_dict() for net in (peer.content.backbone, peer.infusion.style_net)]  # type: ignore[index]
    h = [x @ net["weight"].double().numpy().T + net["bias"].double().numpy() for net in nets]
    return h[0], h[1], samples.labels


def test_personal_scores_match_equation_4() -> None:
    peer = make(hyper())[1]
    run_rounds([make(hyper())[0], peer, make(hyper())[2]], LINE, 2)
    x = peer.data.test.take(np.arange(len(peer.data.test)))[0] / 255.0
    found = peer.predict(x).detach()
    content, style, _ = features(peer, peer.data.test)
    classifier: Any = peer.classifier
    both = torch.from_numpy(np.hstack([content, style])).float()
    h = torch.from_numpy(content).float() + classifier.generator(both)
    expected = h @ classifier.probe.weight.T + classifier.probe.bias
    torch.testing.assert_close(found, expected.detach(), atol=1e-4, rtol=1e-4)


@pytest.mark.exhaustive
@pytest.mark.parametrize("stylized", [True, False])
def test_probe_and_generator_are_trained_by_adam_on_local_samples(stylized: bool) -> None:
    (peer,) = make(hyper(stylized=stylized, probe_epochs=40, probe_lr=0.02), 1)
    run_rounds([peer], ALONE, 1)
    x = torch.zeros(1, 1, SIDE, SIDE)
    peer.predict(x)
    found: Any = peer.classifier
    # The same, with Adam written out.
    start = make(hyper(stylized=stylized, probe_epochs=1, probe_lr=1e-30), 1)[0]
    start.load_state_dict(copy.deepcopy(peer.state_dict()))
    start.predict(x)
    initial: Any = start.classifier
    values = [parameter.detach().double() for parameter in initial.parameters()]
    content, style, labels = (torch.from_numpy(part) for part in features(peer, peer.data.train))
    first, second = ([torch.zeros_like(value) for value in values] for _ in range(2))
    for step in range(1, 41):
        values = [value.requires_grad_() for value in values]
        if stylized:
            w1, b1, w2, b2, w, b = values
            h = content + (torch.cat([content, style], 1) @ w1.T + b1).clamp(min=0) @ w2.T + b2
        else:
            (w, b), h = values, content
        gradients = torch.autograd.grad(cross_entropy(h @ w.T + b, labels), values)
        with torch.no_grad():
            for n, gradient in enumerate(gradients):
                first[n] = 0.9 * first[n] + 0.1 * gradient
                second[n] = 0.999 * second[n] + 0.001 * gradient**2
                update = first[n] / (1 - 0.9**step) / ((second[n] / (1 - 0.999**step)).sqrt() + 1e-8)
                values[n] = values[n] - 0.02 * update
    for parameter, value in zip(found.parameters(), values, strict=True):
        torch.testing.assert_close(parameter.detach().double(), value.detach(), atol=2e-3, rtol=1e-2)


@pytest.mark.exhaustive
@pytest.mark.parametrize("value", [math.nan, 1e30])
def test_diverged_local_net_is_excluded_from_the_average(value: float) -> None:
    peers = make(hyper(lr=1e-9))
    with torch.no_grad():
        for parameters in (peers[1].content, peers[1].averaged):
            parameters.backbone[1].weight[0, 0] = value
    traffic = run_rounds(peers, LINE, 2)
    assert "Content" in traffic[0][0].missing
    assert traffic[0][1].missing == {}
    for peer in peers:
        assert not any(map(has_diverged, peer.averaged.state_dict().values()))
        assert not any(map(has_diverged, peer.infusion.generator.state_dict().values()))


@pytest.mark.exhaustive
def test_personalization_uses_local_net_and_generalization_the_average() -> None:
    peers = make(hyper())
    run_rounds(peers, LINE, 2)
    peer = peers[1]
    assert not torch.equal(peer.content.backbone[1].weight, peer.averaged.backbone[1].weight)
    before = evaluations(peer)
    with torch.no_grad():
        peer.averaged.backbone[1].weight.zero_()
    peer.classifier = None
    after = evaluations(peer)
    assert after[0] == before[0]
    assert after[1:] != before[1:]


# ---- options -------------------------------------------------------------------------------------------------

TRAINING: list[dict[str, Any]] = [
    {"style_epochs": 3},
    {"style_weight": 0.1},
    {"train_generator": False},
    {"preset": "paper"},
    {"loss": "simsiam"},
    {"temperature": 0.1},
    {"local_epochs": 1},
    {"batch": 3},
    {"lr": 0.01},
    {"momentum": 0.5},
    {"weight_decay": 0.1},
    {"participation": 0.4},
    {"hidden": 2},
    {"output": 2},
    {"share_projector": False},
    {"share_statistics": False},
    {"optimizer": "adam"},
]
EVALUATION: list[dict[str, Any]] = [
    {"stylized": False},
    {"probe_samples": 5},
    {"probe_peers": 1},
    {"probe_epochs": 20},
    {"probe_steps": 21},
    {"probe_lr": 0.3},
    {"probe_batch": 2},
]


def test_all_options_are_covered() -> None:
    assert {name for given in TRAINING + EVALUATION for name in given} == set(StyleHyper.known()) - {"betas"}


def trained(**given: Any) -> FedStyle:
    peers: list[FedStyle] = make(hyper(**given), kind="normalised")
    run_rounds(peers, LINE, 2)
    return peers[1]


@cache
def content_nets(**given: Any) -> str:
    peer = trained(**given)
    return digest([peer.content.backbone.state_dict(), peer.averaged.backbone.state_dict()])


@pytest.mark.exhaustive
@pytest.mark.parametrize("given", TRAINING, ids=lambda given: next(iter(given)))
def test_every_training_option_changes_the_content_net(given: dict[str, Any]) -> None:
    assert content_nets(**given) != content_nets()


@pytest.mark.exhaustive
@pytest.mark.parametrize("given", EVALUATION, ids=lambda given: next(iter(given)))
def test_every_evaluation_option_changes_evaluation_only(given: dict[str, Any]) -> None:
    changed, plain = trained(**given), trained()
    assert digest(changed.state_dict()) == digest(plain.state_dict())
    assert evaluations(changed) != evaluations(plain)


@pytest.mark.parametrize("wrong", [{"participation": 0.0}, {"participation": 1.5}, {"style_weight": -1}, {"lr": 0}])
def test_out_of_range_option_is_rejected(wrong: dict[str, Any]) -> None:
    with pytest.raises(OptionErrors, match=next(iter(wrong))):
        hyper(**wrong)
