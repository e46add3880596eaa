"""SGP and OSGP: stochastic gradient push, on directed graphs, and with messages that arrive late.

Mahmoud Assran, Nicolas Loizou, Nicolas Ballas, Michael Rabbat: "Stochastic Gradient Push for Distributed Deep
Learning", ICML 2019. https://arxiv.org/abs/1811.10792

Peer i has a numerator x_i, a push-sum weight w_i, 1 at the start, and the de-biased model z_i = x_i / w_i.
Algorithm 1, with d_i out-neighbors in the round's graph:

    1  x_i ← x_i − γ ∇F_i(z_i)
    2  send (p_i x_i, p_i w_i) to each out-neighbor, and keep the same;   p_i = 1 / (d_i + 1)
    3  x_i ← p_i x_i + Σ_j p_j x_j,   w_i ← p_i w_i + Σ_j p_j w_j         (over those that have arrived)
    4  z_i ← x_i / w_i

What is sent and kept sums to what was there. So Σ_i w_i = n, including the messages in flight, and only gradients
change the average model Σ_i x_i / n, whatever the graph: D-PSGD's weights must be doubly stochastic for that.

Algorithm 2, τ-overlap SGP, is ``synchrony: {staleness: τ}``: line 3 of round t waits for the messages of round t − τ
only, and takes each message once.

Line 1 with any optimizer, whose local steps lead from z_i to z_i⁺:

    adapt: x    x_i ← x_i + (z_i⁺ − z_i),      so z_i ← z_i + (z_i⁺ − z_i) / w_i
    adapt: z    x_i ← x_i + w_i (z_i⁺ − z_i),  so z_i ← z_i⁺

x is the paper's: the steps of all peers count alike in the average model. But a peer that sends more often than it
receives has a small w_i, so that z_i may diverge. With z, z_i moves as the optimizer says, and that counts with w_i.

Differs from the paper:

- z_i and p_i w_i are sent, and line 3 computes z_i ← Σ_j (p_j w_j / w_i) z_j: the same but for rounding, and no
  product gets too small for float32. Aggregation rules see models; one that clips them does not keep Σ_i x_i.
- OSGP's rounds send each time; the paper's send every τ steps: that is ``local_steps: τ`` with ``staleness: 1``.
- Batch-normalization statistics stay local; ``share_statistics: true`` averages them with the weights of z_j.
- A message is lost with its weight if its receiver has finished or was declared dead, it misses the deadline of
  ``synchrony: rounds``, or its model has diverged. A peer that joins late brings the weight 1.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from p2pfl import PeerId
from p2pfl.algorithms.base import Algorithm
from p2pfl.algorithms.registration import algorithm
from p2pfl.algorithms.shared_model import StepsOrEpochs, shared_parameters, shared_tensors
from p2pfl.messaging.net import Net
from p2pfl.messaging.schema import Body, Layout
from p2pfl.tensors import clone, displacement, fractions, weighted_sum

LEAST = torch.finfo(torch.float32).tiny
"""The smallest weight that is sent or kept: a peer may send a hundred times, and receive nothing."""


@dataclass(frozen=True)
class Hyper(StepsOrEpochs):
    adapt: Literal["x", "z"] = "x"
    """What the optimizer's steps move: x, as in the paper, so that the steps of all peers count alike; or z, so that
    they count with w: for synchrony none, where the w of fast peers gets small."""


@dataclass(frozen=True)
class Push(Body):
    """z_j, parameters by name, float32, and statistics if these are shared; and p_j w_j, above 0, at most n."""

    counts = "all"

    values: dict[str, Tensor]
    weight: float


def merged(pushes: Sequence[Push]) -> Push:
    """Return one body with the sums of x and w of several: (Σ w z / Σ w, Σ w)."""
    if len(pushes) == 1:
        return pushes[0]
    row = fractions({n: push.weight for n, push in enumerate(pushes)})
    values = weighted_sum([(row[n], push.values) for n, push in enumerate(pushes)])
    return Push(dict(values), sum(push.weight for push in pushes))


@algorithm("sgp")
class SGP(Algorithm[Hyper]):
    """Stochastic gradient push, Algorithms 1 and 2."""

    summary = "whole models are sent with push-sum weights, which make averages exact on directed graphs and late"
    title = "Stochastic Gradient Push for Distributed Deep Learning"
    authors = "Assran, Loizou, Ballas, Rabbat"
    venue = "ICML 2019"
    url = "https://arxiv.org/abs/1811.10792"
    Hyper = Hyper
    homogeneous = asynchronous = learns_weights = True
    state = ("model", "optimizer", "w", "row")

    def setup(self) -> None:
        self.optimizer = self.hyper.make_optimizer(self.model.parameters())
        self.w = 1.0
        self.row: dict[PeerId, float] = {}
        """The weights of the models in the last average."""

    async def round(self, t: int, net: Net) -> None:
        self.adapt()  # line 1
        z, p = shared_tensors(self.model, self.hyper), 1 / (1 + len(net.receivers))
        kept = Push(z, max(p * self.w, LEAST))
        await net.broadcast(kept)  # line 2
        arrived = await net.collect(Push)
        pushes = self.including_local(self.usable(arrived, net), kept)
        self.w = sum(pushes[j].weight for j in sorted(pushes)) or kept.weight  # line 3
        if pushes:
            if self.me not in pushes:
                self.reset_after_divergence()
            self.row = fractions({j: push.weight for j, push in pushes.items()})
            self.aggregation.combine(pushes, self.row, z)  # line 4

    def adapt(self) -> None:
        """Line 1: z_i ← z_i + (z_i⁺ − z_i) / w_i, or z_i ← z_i⁺, of the parameters that are sent."""
        z, stretched = shared_parameters(self.model, self.hyper), self.hyper.adapt == "x" and self.w != 1.0
        before = clone(z) if stretched else z
        self.train(epochs=self.hyper.local_epochs, steps=self.hyper.steps, batch=self.hyper.batch)
        if stretched:
            weighted_sum([(1.0, before), (1.0 / self.w, displacement(z, before))], out=z)

    def usable(self, arrived: Mapping[PeerId, Sequence[Push]], net: Net) -> dict[PeerId, Push]:
        """Return by sender what has arrived, without bodies whose weight is impossible."""
        found = {}
        for j, pushes in arrived.items():
            possible = [push for push in pushes if 0.0 < push.weight <= self.peers]
            if len(possible) < len(pushes):
                net.count_as_missing(Push, j)
            if possible:
                found[j] = merged(possible)
        return found

    def layouts(self) -> Sequence[Layout]:
        return [Layout.of(Push(shared_tensors(self.model, self.hyper), 1.0))]

    def weights(self) -> Mapping[PeerId, float]:
        return self.row

    def diagnostics(self) -> Mapping[str, float]:
        return {"push_sum_weight": self.w}
