"""FML against its paper: losses by hand, rounds of two softmax regressions against the server's, failures."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import pytest
import torch

from p2pfl.algorithms.fedavg import Shared
from p2pfl.algorithms.fml import FML, MemeHyper, distillation
from p2pfl.errors import ModelError, RunFileError, Unexpected
from p2pfl.messaging.topology import Topology
from p2pfl.models import Model
from p2pfl.options import OptionErrors
from p2pfl.run_file.load import from_dict
from p2pfl.tensors import digest, parameters_of
from tests.bodies import arrive
from tests.conftest import tree
from tests.regression import Matrix, regression_data, softmax, theta
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

INPUTS, CLASSES = 4, 3
LINE = [(0, 1), (1, 2)]
COMPLETE = [(0, 1), (1, 2), (0, 2)]
SAMPLES = (6, 8, 10)
MEME = 9
"""Seed of the meme's initial weights."""


def hyper(**given: Any) -> MemeHyper:
    return MemeHyper.parse({"lr": 0.5, "batch": 1000, **given})


def make(h: MemeHyper, private: Any = softmax_regression) -> list[FML]:
    """Private models with different initial values, memes with equal ones; peer i has 6 + 2i samples."""
    peers = []
    for me, samples in enumerate(SAMPLES):
        model = private(INPUTS, CLASSES, seed=me)
        context = setting(me, 3, model, peer_data(random_dataset(samples, classes=CLASSES, seed=me)))
        meme = dataclasses.replace(context, build_named=lambda name: softmax_regression(INPUTS, CLASSES, seed=MEME))
        peers.append(FML(h, meme))
    return peers


def train(peer: FML, w: Matrix, m: Matrix) -> tuple[Matrix, Matrix]:
    """Line 2 with full batches."""
    h, samples = peer.hyper, peer.data.train
    x, labels = regression_data(samples)
    targets = np.eye(CLASSES)[labels]
    for _ in range(h.local_epochs):
        p, q = softmax(x @ w.T), softmax(x @ m.T)
        at_private = h.alpha * (p - targets) + (1 - h.alpha) * (p - q)
        at_meme = h.beta * (q - targets) + (1 - h.beta) * (q - p)
        w, m = w - h.lr * at_private.T @ x / len(x), m - h.lr * at_meme.T @ x / len(x)
    return w, m


# ---- equations -----------------------------------------------------------------------------------------


def test_distillation_is_the_mean_divergence_of_the_student_from_the_teacher() -> None:
    student = torch.tensor([[0.0, 0.0], [0.0, math.log(3.0)]])
    teacher = torch.tensor([[0.0, math.log(3.0)], [0.0, 0.0]])
    first = 0.25 * math.log(0.25 / 0.5) + 0.75 * math.log(0.75 / 0.5)
    second = 0.5 * math.log(0.5 / 0.25) + 0.5 * math.log(0.5 / 0.75)
    assert float(distillation(student, teacher)) == pytest.approx((first + second) / 2, rel=1e-5)


def test_teacher_learns_nothing_from_a_student() -> None:
    student, teacher = torch.randn(4, 3, requires_grad=True), torch.randn(4, 3, requires_grad=True)
    distillation(student, teacher).backward()  # type: ignore[no-untyped-call]
    assert teacher.grad is None
    assert student.grad is not None
    torch.testing.assert_close(student.grad, (student.softmax(1) - teacher.softmax(1)).detach() / 4)


# ---- rounds ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("edges", [COMPLETE, LINE], ids=["complete", "line"])
@pytest.mark.parametrize("given", [{}, {"alpha": 0.9, "beta": 0.2, "local_epochs": 2}], ids=str)
def test_rounds_match_the_paper(given: dict[str, Any], edges: list[tuple[int, int]]) -> None:
    topology = Topology.from_edges(3, edges)
    peers = make(hyper(**given))
    w, m = [theta(peer.model) for peer in peers], [theta(peer.meme) for peer in peers]
    run_rounds(peers, topology, 3)
    for _ in range(3):
        trained = [train(peer, w[me], m[me]) for me, peer in enumerate(peers)]
        w = [private for private, _ in trained]
        groups = [sorted((me, *topology.neighbors[me])) for me in range(3)]
        m = [np.average([trained[j][1] for j in g], axis=0, weights=[SAMPLES[j] for j in g]) for g in groups]
    for me, peer in enumerate(peers):
        np.testing.assert_allclose(theta(peer.model), w[me], atol=1e-5)
        np.testing.assert_allclose(theta(peer.meme), m[me], atol=1e-5)


def test_memes_are_the_servers_on_a_complete_graph_and_private_models_stay_local() -> None:
    peers = make(hyper(batch=2, momentum=0.9), private=lambda *sizes, seed: linear_model(INPUTS, 5, CLASSES, seed))
    traffic = run_rounds(peers, Topology.from_edges(3, COMPLETE), 3)
    assert len({digest(parameters_of(peer.meme)) for peer in peers}) == 1
    assert len({digest(peer.model.state_dict()) for peer in peers}) == 3
    assert payload(traffic[0][1].sent) == 2 * 4 * CLASSES * (INPUTS + 1)


def test_without_distillation_the_private_model_trains_alone_and_memes_are_fedavgs() -> None:
    peers = make(hyper(alpha=1.0, beta=1.0))
    w, m = theta(peers[0].model), theta(peers[0].meme)
    run_rounds(peers, Topology.from_edges(3, LINE), 2, silent=[1, 2])
    for _ in range(2):
        w, _ = train(peers[0], w, w)
        m, _ = train(peers[0], m, m)
    np.testing.assert_allclose(theta(peers[0].model), w, atol=1e-5)
    np.testing.assert_allclose(theta(peers[0].meme), m, atol=1e-5)


def test_average_skips_a_missing_neighbor() -> None:
    peers = make(hyper())
    w, m = [theta(peer.model) for peer in peers], theta(peers[0].meme)
    traffic = run_rounds(peers, Topology.from_edges(3, COMPLETE), 1, silent=[2])
    assert traffic[0][0].missing == {"Shared": [2]}
    trained = [train(peer, w[me], m)[1] for me, peer in enumerate(peers)]
    np.testing.assert_allclose(theta(peers[1].meme), (6 * trained[0] + 8 * trained[1]) / 14, atol=1e-6)


@pytest.mark.parametrize("value", [math.nan, 1e30])
def test_meme_that_diverged_is_skipped_and_replaced_by_the_average_of_the_others(value: float) -> None:
    peers = make(hyper())
    w, m = [theta(peer.model) for peer in peers], theta(peers[0].meme)
    with torch.no_grad():
        peers[2].meme.linear_head.weight[0, 0] = value
    traffic = run_rounds(peers, Topology.from_edges(3, COMPLETE), 2)
    assert [record.missing for record in traffic[0]] == [{"Shared": [2]}, {}]
    run_rounds(without := make(hyper()), Topology.from_edges(3, COMPLETE), 1, silent=[2])
    trained = [train(peer, w[me], m)[1] for me, peer in enumerate(without[:2])]
    np.testing.assert_allclose(theta(without[0].meme), (6 * trained[0] + 8 * trained[1]) / 14, atol=1e-6)
    assert all(np.isfinite(theta(peer.meme)).all() for peer in peers)
    assert len({digest(parameters_of(peer.meme)) for peer in peers}) == 1


@pytest.mark.parametrize("which", ["model", "meme"])
def test_both_models_are_restored_if_one_diverges_in_training(which: str) -> None:
    peers = make(hyper(alpha=1.0, beta=1.0, momentum=0.9))
    before = [theta(model) for model in (peers[0].model, peers[0].meme)]
    diverging = {id(parameter) for parameter in getattr(peers[0], which).parameters()}
    for group in list(peers[0].optimizer.param_groups):
        group["params"] = [parameter for parameter in group["params"] if id(parameter) in diverging]
        group["lr"] = 1e30
    run_rounds(peers, Topology.from_edges(3, []), 1)
    assert np.array_equal(theta(peers[0].model), before[0])
    assert np.array_equal(theta(peers[0].meme), before[1])
    assert not np.array_equal(theta(peers[1].meme), before[1])


def test_nonparticipants_receive_the_average_and_keep_their_private_models() -> None:
    peers = make(hyper(participation=1 / 3))
    before = [theta(peer.model) for peer in peers]
    traffic = run_rounds(peers, Topology.from_edges(3, COMPLETE), 1)
    senders = [me for me in range(3) if messages(traffic[me][0].sent)]
    assert len(senders) == 1
    assert [me for me in range(3) if not np.array_equal(theta(peers[me].model), before[me])] == senders
    assert len({digest(parameters_of(peer.meme)) for peer in peers}) == 1


def test_private_model_is_evaluated_and_the_meme_beside_it() -> None:
    peer = make(hyper())[0]
    x = torch.rand(3, 1, 2, 2)
    assert torch.equal(peer.predict(x), peer.model(x))
    (metric,) = peer.extra_metrics(whole=False)
    assert metric.name == "meme"
    assert torch.equal(metric.predict(x), peer.meme(x))
    assert [metric.name for metric in peer.extra_metrics(whole=True)] == ["meme", "meme_global"]


def test_accepts_memes_of_its_architecture_and_sample_counts_of_the_run_only() -> None:
    peer = make(hyper(), private=lambda *sizes, seed: linear_model(INPUTS, 5, CLASSES, seed))[0]
    (layout,) = peer.layouts()
    body = Shared(peer.shared_part(), 1000)
    assert arrive(body, [layout]) is not None
    for wrong in (
        Shared(peer.shared_part(), 1001),
        Shared(parameters_of(peer.model), 1000),
    ):
        with pytest.raises(Unexpected):
            arrive(wrong, [layout])


# ---- the run file ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("meme", "tiny-cn", "unknown 'tiny-cn'.*did you mean 'tiny-cnn'"),
        ("meme", "tiny4", "'tiny4' has several architectures; name one of tiny-cnn, tiny-wide"),
        ("meme", "my_nets.Net", "'my_nets.Net' is an import path; name a model"),
        ("alpha", 1.5, "alpha"),
        ("beta", -0.1, "beta"),
    ],
)
def test_wrong_hyper_parameters_are_errors(key: str, value: Any, message: str) -> None:
    with pytest.raises(OptionErrors, match=message):
        hyper(**{key: value})
    with pytest.raises(RunFileError, match=f"algorithm.{key}"):
        from_dict(tree(algorithm={"name": "fml", key: value}))


def test_meme_that_does_not_suit_the_inputs_is_an_error() -> None:
    def build(name: str) -> Model:
        raise ModelError("images are too small")

    context = setting(0, 1, softmax_regression(INPUTS, CLASSES), peer_data(random_dataset(6)))
    with pytest.raises(OptionErrors, match=r"meme.*too small"):
        FML(hyper(), dataclasses.replace(context, build_named=build))
