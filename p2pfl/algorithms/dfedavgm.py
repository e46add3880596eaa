"""DFedAvgM: decentralized federated averaging with momentum.

Tao Sun, Dongsheng Li, Bao Wang: "Decentralized Federated Averaging", IEEE TPAMI 2022. https://arxiv.org/abs/2104.11375

Algorithm 1, in round t on peer i:

    1  y ← x_i, y_before ← x_i
    2  local steps: y ← y − η g(y) + θ (y − y_before)       (momentum restarts in each round)
    3  send z_i = y to the neighbors
    4  x_i ← Σ_j W_ij z_j                                   (W: Metropolis weights, or W(t))

Differs from the paper:

- Local work is counted in epochs over random batches rather than in steps.
- The variant that sends quantized differences is not implemented.
- Batch-normalization statistics stay local.
- The weight of a neighbor that misses the deadline, or whose model has diverged, goes to the local model;
  ``weights`` returns the nominal row.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated

from pydantic import Field

from p2pfl import PeerId
from p2pfl.algorithms.base import Algorithm
from p2pfl.algorithms.dpsgd import Parameters, average_neighborhood, with_self_weight
from p2pfl.algorithms.registration import algorithm
from p2pfl.algorithms.shared_model import SharedModel, shared_tensors
from p2pfl.messaging.net import Net
from p2pfl.messaging.schema import Layout


@dataclass(frozen=True)
class Hyper(SharedModel):
    momentum: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.9
    """θ, restarted in each round; sgd only."""


@algorithm("dfedavgm")
class DFedAvgM(Algorithm[Hyper]):
    """DFedAvgM, Algorithm 1."""

    summary = "whole models are sent; averaged with the graph's Metropolis weights after an epoch with momentum"
    title = "Decentralized Federated Averaging"
    authors = "Sun, Li, Wang"
    venue = "IEEE TPAMI 2022"
    url = "https://arxiv.org/abs/2104.11375"
    Hyper = Hyper
    homogeneous = asynchronous = True
    screened = Parameters
    state = ("model", "row")  # momentum does not outlive a round

    def setup(self) -> None:
        self.row: dict[PeerId, float] = {}

    async def round(self, t: int, net: Net) -> None:
        x = shared_tensors(self.model, self.hyper)
        self.optimizer = self.hyper.make_optimizer(self.model.parameters())  # line 1
        self.train(epochs=self.hyper.local_epochs, batch=self.hyper.batch)  # line 2
        self.note_contribution(Parameters(x))
        received = await net.exchange(Parameters(x))  # line 3
        self.row = net.mixing_weights
        average_neighborhood(self.aggregation, x, received, self.row)  # line 4

    def layouts(self) -> Sequence[Layout]:
        return [Layout.of(Parameters(shared_tensors(self.model, self.hyper)))]

    def weights(self) -> Mapping[PeerId, float]:
        return with_self_weight(self.row, self.me)
