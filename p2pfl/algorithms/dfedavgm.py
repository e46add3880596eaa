"""DFedAvgM: decentralized federated averaging with momentum.

Tao Sun, Dongsheng Li, Bao Wang: «Decentralized Federated Averaging», IEEE TPAMI 2022. https://arxiv.org/abs/2104.11375

Algorithm 1, in round t on peer i:

    1  y ← x_i, y_before ← x_i
    2  local steps: y ← y − η g(y) + θ (y − y_before)       (momentum starts anew in each round)
    3  send z_i = y to the neighbours
    4  x_i ← Σ_j W_ij z_j                                   (W: Metropolis weights)

Differs from the paper:

- local work is counted in epochs over random batches rather than in steps.
- the variant that sends quantised differences is not built.
- batch-normalisation statistics stay local.
- a last training batch of one sample is left out when there are others.
- a neighbour that misses a deadline, or whose model holds NaN or infinity, hands its weight to the own model;
  ``weights`` shows the nominal row.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt
from torch import Tensor
from torch.nn.functional import cross_entropy

from p2pfl.algorithms.base import Algorithm
from p2pfl.algorithms.dpsgd import Parameters, metropolis_row, mix, values
from p2pfl.net import Net
from p2pfl.options import Options
from p2pfl.runfolder import PeerId
from p2pfl.tensors import assign, parameters_of
from p2pfl.training import make_optimizer
from p2pfl.wire import Layout


@dataclass(frozen=True)
class Hyper(Options):
    local_epochs: PositiveInt = 1
    """Epochs over the own samples in one round."""
    batch: PositiveInt = 64
    """Samples in one step."""
    lr: PositiveFloat = 0.01
    """η."""
    momentum: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.9
    """θ."""
    weight_decay: NonNegativeFloat = 0.0
    """ℓ2 penalty added to the gradient."""


class DFedAvgM(Algorithm[Hyper]):
    """DFedAvgM, Algorithm 1."""

    name = "dfedavgm"
    gist = "whole models travel; mixed by the graph's Metropolis weights after an epoch with momentum"
    title = "Decentralized Federated Averaging"
    authors = "Sun, Li, Wang"
    venue = "IEEE TPAMI 2022"
    url = "https://arxiv.org/abs/2104.11375"
    Hyper = Hyper
    homogeneous = True
    state = ("model", "row")  # momentum does not outlive a round

    def setup(self) -> None:
        self.row: dict[PeerId, float] = {}

    async def round(self, t: int, net: Net) -> None:
        h, x = self.hyper, parameters_of(self.model)
        self.optimizer = make_optimizer(
            "sgd", self.model.parameters(), lr=h.lr, momentum=h.momentum, weight_decay=h.weight_decay
        )  # line 1
        self.train(epochs=h.local_epochs, batch=h.batch)  # line 2
        theirs = await net.exchange(Parameters(x))  # line 3
        self.row = metropolis_row(self.me, net.degrees)
        assign(x, mix(x, values(theirs), self.row, self.me))  # line 4

    def loss(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        return {"ce": cross_entropy(self.model(x), labels)}

    def layouts(self) -> Sequence[Layout]:
        return [Layout.of(Parameters(parameters_of(self.model)))]

    def weights(self) -> Mapping[PeerId, float]:
        row = {**self.row, self.me: 1.0 - sum(self.row.values())}
        return {j: row[j] for j in sorted(row)}
