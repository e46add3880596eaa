"""Gossip learning: each peer sends its model to one random neighbor, and merges those that arrive by their ages.

Róbert Ormándi, István Hegedűs, Márk Jelasity: "Gossip Learning with Linear Models on Fully Distributed Data",
Concurrency and Computation 2013. István Hegedűs, Gábor Danner, Márk Jelasity: "Decentralized Learning Works: An
Empirical Comparison of Gossip Learning and Federated Learning", JPDC 2021, Algorithm 1.
https://doi.org/10.1016/j.jpdc.2020.10.006

Peer i has a model w_i and its age a_i, the number of gradient steps behind it. In each round:

    1  send (w_i, a_i) to a random neighbor
    2  for each (w, a) that has arrived:   w_i ← (a_i w_i + a w) / (a_i + a),   a_i ← max(a_i, a)
    3  train w_i on the local samples;     a_i ← a_i + gradient steps

With ``synchrony: none`` peers never wait, as in the paper; with rounds, each waits for the models of its round.

Differs from the paper:

- The model is updated once in a round, after all merges, not after each one.
- Of several models of one peer that have arrived, the newest is merged.
- Models are sent whole; the variants that send samples of the parameters, or wait for tokens, are not implemented.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from p2pfl import PeerId, rng
from p2pfl.algorithms.base import Algorithm
from p2pfl.algorithms.registration import algorithm
from p2pfl.algorithms.shared_model import SharedModel, shared_tensors
from p2pfl.messaging.net import Net
from p2pfl.messaging.schema import Body, Layout


@dataclass(frozen=True)
class Hyper(SharedModel):
    pass


@dataclass(frozen=True)
class Aged(Body):
    """w, parameters by name, float32; and a, the gradient steps behind them."""

    counts = "arrived"

    values: dict[str, Tensor]
    age: int


def merge_weights(ages: Mapping[PeerId, int], me: PeerId) -> tuple[dict[PeerId, float], int]:
    """Return the weights of line 2 after one merge after another, ascending, and the age that results.

    Models of age 0 have not learned anything: two of them are averaged.

    Args:
        ages: of the models to merge into that of ``me``; if ``me`` is not among them, into the first one.
    """
    first, *others = sorted(ages, key=lambda j: (j != me, j))
    weights, age = {first: 1.0}, ages[first]
    for j in others:
        fraction = ages[j] / (age + ages[j]) if age + ages[j] else 0.5
        weights = {k: weight * (1.0 - fraction) for k, weight in weights.items()} | {j: fraction}
        age = max(age, ages[j])
    return dict(sorted(weights.items())), age


@algorithm("gossip")
class Gossip(Algorithm[Hyper]):
    """Gossip learning, Algorithm 1."""

    summary = "whole models are sent to one random neighbor each; averaged with weights by their ages"
    title = "Decentralized Learning Works: An Empirical Comparison of Gossip Learning and Federated Learning"
    authors = "Hegedűs, Danner, Jelasity"
    venue = "JPDC 2021"
    url = "https://doi.org/10.1016/j.jpdc.2020.10.006"
    Hyper = Hyper
    homogeneous = asynchronous = True
    state = ("model", "optimizer", "age", "merged")

    def setup(self) -> None:
        self.optimizer = self.hyper.make_optimizer(self.model.parameters())
        self.age = 0
        self.merged: dict[PeerId, float] = {}
        """The weights of the last merge."""

    async def round(self, t: int, net: Net) -> None:
        w = shared_tensors(self.model, self.hyper)
        await net.broadcast(Aged(w, self.age), to=drawn(net, t, self.me))  # line 1
        arrived = await net.collect(Aged, partial(senders_of, net, self.me))
        models = self.including_local({j: bodies[-1] for j, bodies in arrived.items()}, Aged(w, self.age))
        self.merge(models, w)
        self.train(epochs=self.hyper.local_epochs, batch=self.hyper.batch)  # line 3
        self.age += self.steps

    def merge(self, models: Mapping[PeerId, Aged], w: dict[str, Tensor]) -> None:
        """Line 2, in place. The local model is among them unless it has diverged: then the others replace it."""
        if not models:
            self.merged = {}
            return
        if self.me not in models:
            self.reset_after_divergence()
        self.merged, self.age = merge_weights({j: body.age for j, body in models.items()}, self.me)
        self.aggregation.combine(models, self.merged, w)

    @property
    def steps(self) -> int:
        """Gradient steps in a round."""
        return self.hyper.local_epochs * self.data.batch_count(self.hyper.batch, drop_last=self.drop_last)

    def layouts(self) -> Sequence[Layout]:
        # Where rounds do not wait, a model may pass through all rounds of one peer after those of another.
        oldest = self.peers * self.rounds * self.hyper.local_epochs * self.sample_counts.stop
        return [Layout.of(Aged(shared_tensors(self.model, self.hyper), 0), ranges={"age": range(1 + oldest)})]

    def weights(self) -> Mapping[PeerId, float]:
        return self.merged


def drawn(net: Net, t: int, sender: PeerId) -> Sequence[PeerId]:
    """Return to whom a peer sends in round ``t``: to one random receiver, which everybody draws, if it has any."""
    receivers = net.receivers_of(sender, t)
    chosen = int(_draws(net.seed, t, net.peers)[sender] * len(receivers))
    return receivers[chosen : chosen + 1]


def senders_of(net: Net, receiver: PeerId, t: int) -> Sequence[PeerId]:
    """Return the peers that send to ``receiver`` in round ``t``, ascending."""
    return [j for j in net.neighbors_of(receiver, t) if receiver in drawn(net, t, j)]


@lru_cache(maxsize=64)  # simulated peers ask for the same ones
def _draws(seed: int, t: int, peers: int) -> NDArray[np.float64]:
    return rng.shared(seed, "gossip.receivers", t).random(peers)
