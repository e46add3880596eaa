"""MAPL's small peers, and Algorithm 2 in NumPy."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from p2pfl.algorithms.mapl import MAPL, Hyper
from tests.support import linear_model, peer_data, random_dataset, setting

Vector = NDArray[np.float64]

FEATURES, CLASSES = 5, 3


def hyper(**given: Any) -> Hyper:
    return Hyper.parse({"projector_hidden": 4, "lr": 0.01, **given})


def make(
    h: Hyper, peers: int = 3, *, classes_of: Sequence[Sequence[int]] | None = None, of: type[MAPL] = MAPL
) -> list[Any]:
    """Peers with linear backbones on gray noise; peer i has 4 + 2 i samples, of ``classes_of[i]`` if given."""
    made = []
    for me in range(peers):
        dataset = random_dataset(60, classes=CLASSES, seed=me)
        labels = dataset.train.labels
        local = classes_of[me] if classes_of else range(CLASSES)
        chosen = [n for n in range(len(labels)) if labels[n] in local][: 4 + 2 * me]
        model = linear_model(4, FEATURES, CLASSES, seed=me)
        made.append(of(h, setting(me, peers, model, peer_data(dataset, chosen))))
    return made


def project_by_bisection(v: Vector, mass: float) -> Vector:
    """max(v − θ, 0) for the θ at which the entries sum to ``mass``, found by bisection."""
    low, high = v.min() - mass, v.max()
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if np.maximum(v - middle, 0).sum() > mass else (low, middle)
    return np.asarray(np.maximum(v - high, 0))


def gradient_by_hand(w: Vector, s: Vector, gamma: Vector, me: int, h: Hyper) -> Vector:
    norm = w / math.sqrt(float(w @ w)) if h.norm == "l2" else np.sign(w)
    gradient = -h.mu_similarity * gamma * s + h.mu_regularizer * h.beta * norm
    if h.degree_term == "exact":
        others = np.arange(len(w)) != me
        gradient[others] -= h.mu_regularizer / (w[others].sum() + h.epsilon)
    return np.asarray(gradient)


def learn_by_hand(w: Vector, s: Vector, gamma: Vector, me: int, h: Hyper) -> Vector:
    """Algorithm 2 in numpy, with an explicit Adam."""
    mass = w.sum()
    first, second = np.zeros_like(w), np.zeros_like(w)
    for step in range(1, h.graph_steps + 1):
        gradient = gradient_by_hand(w, s, gamma, me, h)
        if h.graph_optimizer == "adam":
            first = h.betas[0] * first + (1 - h.betas[0]) * gradient
            second = h.betas[1] * second + (1 - h.betas[1]) * gradient**2
            unbiased = first / (1 - h.betas[0] ** step), second / (1 - h.betas[1] ** step)
            w = w - h.graph_lr * unbiased[0] / (np.sqrt(unbiased[1]) + 1e-8)
        else:
            w = w - h.graph_lr * gradient
        w = project_by_bisection(w, float(mass))
    return w


class Clustered(MAPL):
    """Heads are fixed: those of peers 0 and 1 are equal, and those of all others."""

    def personalized_model_learning(self) -> None:
        super().personalized_model_learning()
        with torch.no_grad():
            self.model.linear_head.weight.fill_(1.0 if self.me < 2 else -1.0)
