"""FedStyle's evaluation and options: who reads labels, the probes' scores, what every option changes."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch.nn.functional import cross_entropy

from p2pfl.algorithms.fedstyle import FedStyle, StyleHyper
from p2pfl.learning.evaluation import evaluate
from p2pfl.options import OptionErrors
from p2pfl.tensors import digest
from tests.fedstyle_reference import ALONE, LINE, SIDE, complete, hyper, make
from tests.support import run_rounds

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
    known = set(StyleHyper.known()) - {"betas", "clip_norm", "drop_last"}
    assert {name for given in TRAINING + EVALUATION for name in given} == known


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
def test_drop_last_changes_the_content_net() -> None:
    """Peers have four, six and eight samples."""
    assert content_nets(batch=4, drop_last=True) != content_nets(batch=4)
    assert content_nets(batch=2, drop_last=True) == content_nets(batch=2)


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
