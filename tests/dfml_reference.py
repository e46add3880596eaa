"""DFML's small peers, and its rounds in NumPy as the paper has them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import nn

from p2pfl.algorithms.aggregator_roles import Assignment
from p2pfl.algorithms.dfml import DFML, Hyper
from p2pfl.messaging.topology import Topology
from p2pfl.models import Model
from p2pfl.tensors import parameters_of
from tests.bodies import net_of
from tests.support import linear_model, peer_data, random_dataset, setting, softmax_regression

Matrix = NDArray[np.float64]

INPUTS, FEATURES, CLASSES = 4, 5, 3


def hyper(**given: Any) -> Hyper:
    return Hyper.parse({"lr": 0.1, "mutual_epochs": 3, "period": 3, "period_increment": 1, **given})


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
    net = net_of(0, topology, 0, 0)
    return [peers[0].schedule.assignment(t, net) for t in range(rounds)]


def softmax(z: Matrix) -> Matrix:
    powers = np.exp(z - z.max(axis=-1, keepdims=True))
    return np.asarray(powers / powers.sum(axis=-1, keepdims=True))


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
