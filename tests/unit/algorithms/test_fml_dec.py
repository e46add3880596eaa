"""Decentralized FML against appendix A.3.4 of DFML: rounds in numpy, what travels, missing peers, divergence."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from p2pfl.algorithms.fedavg_dec import Trained
from p2pfl.algorithms.fml_dec import FMLDec, MutualHyper
from p2pfl.errors import ModelError, RunFileError, Unexpected
from p2pfl.messaging.topology import Topology
from p2pfl.models import Model
from p2pfl.options import OptionErrors
from p2pfl.run_file.load import from_dict
from p2pfl.tensors import digest, parameters_of
from tests.bodies import arrive
from tests.conftest import tree
from tests.regression import Matrix, regression_data, theta
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
from tests.unit.algorithms.test_fedavg_dec import COMPLETE, LINE, assignments

INPUTS, CLASSES, PEERS = 4, 3, 4
MEME = 9
"""Seed of the meme's initial weights."""


def make(private: Any = softmax_regression, **given: Any) -> list[FMLDec]:
    """Private models with different initial values, memes with equal ones; peer i has 6 + 2 i samples."""
    peers = []
    for me in range(PEERS):
        dataset = random_dataset(3 * (6 + 2 * me), classes=CLASSES, seed=me)
        mine = [n for n in range(len(dataset.train)) if n % CLASSES != me % CLASSES][: 6 + 2 * me]
        context = setting(me, PEERS, private(INPUTS, CLASSES, seed=me), peer_data(dataset, mine))
        build = replace(context, build_named=lambda name: softmax_regression(INPUTS, CLASSES, seed=MEME))
        peers.append(FMLDec(MutualHyper.parse({"lr": 0.3, "batch": 1000, **given}), build))
    return peers


def trained(peer: FMLDec, w: Matrix, m: Matrix) -> tuple[Matrix, Matrix]:
    """Line 1 with all samples at once."""
    h, (x, labels) = peer.hyper, regression_data(peer.data.train)
    targets, counts = np.eye(CLASSES)[labels], np.bincount(labels, minlength=CLASSES) / len(x)
    velocities = [np.zeros_like(w), np.zeros_like(m)]
    for _ in range(h.local_epochs):
        gradients = []
        for one, other, weight in ((w, m, h.alpha), (m, w, h.beta)):
            scores, others = np.exp(x @ one.T), np.exp(x @ other.T)
            reweighted = counts * scores
            p, q = scores / scores.sum(1, keepdims=True), others / others.sum(1, keepdims=True)
            residual = weight * (reweighted / reweighted.sum(1, keepdims=True) - targets) + (1 - weight) * (p - q)
            gradients.append(residual.T @ x / len(x) + h.weight_decay * one)
        velocities = [h.momentum * v + g for v, g in zip(velocities, gradients, strict=True)]
        w, m = w - h.lr * velocities[0], m - h.lr * velocities[1]
    return w, m


def follow(peers: Sequence[FMLDec], w: list[Matrix], m: list[Matrix], topology: Topology, rounds: int) -> None:
    """Rounds of the paper on ``w`` and ``m``, in place."""
    for assignment in assignments(peers, topology, rounds):
        group = assignment.participants
        for n in group:
            w[n], m[n] = trained(peers[n], w[n], m[n])
        mean = np.average([m[n] for n in group], axis=0, weights=[len(peers[n].data.train) for n in group])
        for n in group:
            m[n] = mean


@pytest.mark.parametrize("topology", [COMPLETE, LINE], ids=["complete", "line"])
@pytest.mark.parametrize("given", [{}, {"alpha": 0.8, "beta": 0.1, "local_epochs": 3}], ids=str)
def test_rounds_follow_the_appendix(given: dict[str, Any], topology: Topology) -> None:
    peers = make(**given)
    w, m = [theta(peer.model) for peer in peers], [theta(peer.meme) for peer in peers]
    run_rounds(peers, topology, 5)
    follow(make(**given), w, m, topology, 5)
    for me, peer in enumerate(peers):
        np.testing.assert_allclose(theta(peer.model), w[me], atol=1e-5)
        np.testing.assert_allclose(theta(peer.meme), m[me], atol=1e-5)


def test_memes_travel_and_private_models_of_any_architecture_do_not() -> None:
    peers = make(private=lambda *sizes, seed: linear_model(INPUTS, 5 + seed, CLASSES, seed), participation=0.75)
    traffic = run_rounds(peers, COMPLETE, 2)
    meme = 4 * CLASSES * (INPUTS + 1)
    for t, assignment in enumerate(assignments(peers, COMPLETE, 2)):
        assert len(assignment.senders) == 3
        for me in range(PEERS):
            sent = traffic[me][t].sent
            count = 3 if me == assignment.aggregator else 1
            assert (messages(sent), payload(sent)) == (count, count * meme)
    assert len({digest(parameters_of(peer.meme)) for peer in peers}) == 1
    assert len({digest(peer.model.state_dict()) for peer in peers}) == PEERS


def test_private_models_start_different_and_memes_equal() -> None:
    peers = make()
    assert len({digest(peer.model.state_dict()) for peer in peers}) == PEERS
    assert len({digest(peer.meme.state_dict()) for peer in peers}) == 1


def test_sender_whose_aggregator_is_dead_keeps_what_it_trained() -> None:
    peers = make()
    (assignment,) = assignments(peers, COMPLETE, 1)
    w, m = [theta(peer.model) for peer in peers], [theta(peer.meme) for peer in peers]
    run_rounds(peers, COMPLETE, 1, silent=[assignment.aggregator])
    for me in assignment.senders:
        private, meme = trained(peers[me], w[me], m[me])
        np.testing.assert_allclose(theta(peers[me].model), private, atol=1e-6)
        np.testing.assert_allclose(theta(peers[me].meme), meme, atol=1e-6)


@pytest.mark.parametrize("value", [math.nan, 1e30])
@pytest.mark.parametrize("of_aggregator", [True, False])
def test_meme_that_diverged_is_left_out_of_the_average(of_aggregator: bool, value: float) -> None:
    peers = make(participation=0.75)
    (assignment,) = assignments(peers, COMPLETE, 1)
    diverged = assignment.aggregator if of_aggregator else assignment.senders[0]
    w, m = [theta(peer.model) for peer in peers], [theta(peer.meme) for peer in peers]
    with torch.no_grad():
        peers[diverged].meme.linear_head.weight[0, 0] = value
    run_rounds(peers, COMPLETE, 1)
    others = [n for n in range(PEERS) if n != diverged]
    memes = [trained(peers[n], w[n], m[n])[1] for n in others]
    mean = np.average(memes, axis=0, weights=[len(peers[n].data.train) for n in others])
    for n in range(PEERS) if of_aggregator else others:
        np.testing.assert_allclose(theta(peers[n].meme), mean, atol=1e-6)


def test_private_model_is_evaluated_and_the_meme_beside_it() -> None:
    (peer, *_) = make()
    x = torch.rand(3, 1, 2, 2)
    assert torch.equal(peer.predict(x), peer.model(x))
    local, meme = peer.extra_metrics(whole=False)
    assert (local.name, meme.name) == ("local", "meme")
    assert torch.equal(meme.predict(x), peer.meme(x))


def test_accepts_memes_only() -> None:
    (peer, *_) = make(private=lambda *sizes, seed: linear_model(INPUTS, 5, CLASSES, seed))
    body = peer.trained(peer.meme)
    assert arrive(body, peer.layouts()) is not None
    assert arrive(peer.averaged(parameters_of(peer.meme)), peer.layouts()) is not None
    for wrong in (replace(body, samples=1001), replace(body, architecture="linear"), peer.trained(peer.model)):
        assert isinstance(wrong, Trained)
        with pytest.raises(Unexpected):
            arrive(wrong, peer.layouts())


@pytest.mark.parametrize(("key", "value"), [("meme", "tiny4"), ("alpha", 1.5), ("beta", -0.1), ("mu", 1.0)])
def test_wrong_hyper_parameters_are_errors(key: str, value: Any) -> None:
    with pytest.raises(OptionErrors, match=key):
        MutualHyper.parse({key: value})
    with pytest.raises(RunFileError, match=f"algorithm.{key}"):
        from_dict(tree(algorithm={"name": "fml-dec", key: value}))


def test_meme_that_does_not_suit_the_inputs_is_an_error() -> None:
    def build(name: str) -> Model:
        raise ModelError("images are too small")

    context = setting(0, 1, softmax_regression(INPUTS, CLASSES), peer_data(random_dataset(6)))
    with pytest.raises(OptionErrors, match=r"meme.*too small"):
        FMLDec(MutualHyper(), replace(context, build_named=build))
