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
        ages: of the models to merge, ``me``'s among them.
    """
    weights, age = {me: 1.0}, ages[me]
    for j in sorted(ages.keys() - {me}):
        share = ages[j] / (age + ages[j]) if age + ages[j] else 0.5
        weights = {k: weight * (1.0 - share) for k, weight in weights.items()} | {j: share}
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
        arrived = await net.collect(
            Aged, lambda t: [j for j in net.neighbors_of(self.me, t) if self.me in drawn(net, t, j)]
        )
        models = self.including_local({j: bodies[-1] for j, bodies in arrived.items()}, Aged(w, self.age))
        if self.me in models:
            ages = {j: models[j].age for j in sorted(models)}
            self.merged, self.age = merge_weights(ages, self.me)
            self.aggregation.combine(models, self.merged, w)  # line 2
        self.train(epochs=self.hyper.local_epochs, batch=self.hyper.batch)  # line 3
        self.age += self.steps

    @property
    def steps(self) -> int:
        """Gradient steps in a round."""
        return self.hyper.local_epochs * self.data.batch_count(self.hyper.batch, drop_last=self.drop_last)

    def layouts(self) -> Sequence[Layout]:
        steps = self.hyper.local_epochs * self.rounds * self.sample_counts.stop
        return [Layout.of(Aged(shared_tensors(self.model, self.hyper), 0), ranges={"age": range(1 + steps)})]

    def weights(self) -> Mapping[PeerId, float]:
        return self.merged


def drawn(net: Net, t: int, sender: PeerId) -> Sequence[PeerId]:
    """Return to whom a peer sends in round ``t``: to one random receiver, which everybody draws, if it has any."""
    receivers = net.receivers_of(sender, t)
    chosen = int(rng.shared(net.seed, "gossip.receivers", t).random(net.peers)[sender] * len(receivers))
    return receivers[chosen : chosen + 1]
