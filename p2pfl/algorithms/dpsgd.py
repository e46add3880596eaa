"""D-PSGD: decentralized parallel stochastic gradient descent.

Xiangru Lian, Ce Zhang, Huan Zhang, Cho-Jui Hsieh, Wei Zhang, Ji Liu: «Can Decentralized Algorithms Outperform
Centralized Algorithms?», NeurIPS 2017. https://arxiv.org/abs/1705.09056

Algorithm 1, in round t on peer i:

    1  draw a batch and compute the gradient ∇F_i(x_i)
    2  x_i^{½} = Σ_j W_ij x_j            (exchanged with the neighbours)
    3  x_i ← x_i^{½} − η ∇F_i(x_i)

W are the Metropolis weights of the graph: symmetric and doubly stochastic, and each peer knows its row.

Differs from the paper: ``local_steps`` > 1 adds the displacement of so many local steps in line 3 instead of one
gradient step; ``local_epochs`` trains first and mixes the trained models after (adapt, then combine).
Batches come from a random permutation that each round starts afresh, so steps of different rounds draw with
replacement. Batch-normalisation statistics stay local. A neighbour that is missing hands its weight to the own model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pydantic import NonNegativeFloat, PositiveFloat, PositiveInt, model_validator
from torch import Tensor
from torch.nn.functional import cross_entropy

from p2pfl.algorithms.base import Algorithm
from p2pfl.net import Net
from p2pfl.options import Options
from p2pfl.runfolder import PeerId
from p2pfl.tensors import Tensors, assign, clone, parameters_of, subtract, weighted_sum
from p2pfl.training import make_optimizer
from p2pfl.wire import Body, Layout


@dataclass(frozen=True)
class Hyper(Options):
    local_steps: PositiveInt | None = None
    """Gradient steps in one round, added to the mix of the old models (Algorithm 1; the paper has 1)."""
    local_epochs: PositiveInt | None = None
    """Or: epochs in one round, before the trained models are mixed. Default when neither is given: 1 step."""
    batch: PositiveInt = 64
    """Samples in one step."""
    lr: PositiveFloat = 0.05
    """η."""
    momentum: NonNegativeFloat = 0.0
    """Of the local SGD."""
    weight_decay: NonNegativeFloat = 0.0
    """ℓ2 penalty added to the gradient."""

    @model_validator(mode="after")
    def _one_of_two(self) -> Hyper:
        if self.local_steps is not None and self.local_epochs is not None:
            raise ValueError("give local_steps or local_epochs, not both")
        return self


@dataclass(frozen=True)
class Parameters(Body):
    """x_j: all parameters of the model by name, float32."""

    values: dict[str, Tensor]


def mix(own: Tensors, theirs: Mapping[PeerId, Tensors], row: Mapping[PeerId, float], me: PeerId) -> dict[str, Tensor]:
    """Line 2: Σ_j W_ij x_j in ascending order of j. Weights of absent neighbours go to ``own``."""
    self_weight = 1.0 - sum(row[j] for j in sorted(theirs))
    models = {**theirs, me: own}
    return weighted_sum((self_weight if j == me else row[j], models[j]) for j in sorted(models))


def metropolis_row(me: PeerId, degrees: Mapping[PeerId, int]) -> dict[PeerId, float]:
    """W_ij = 1 / (1 + max(d_i, d_j)) for the neighbours j of ``me``, given its own degree and theirs."""
    return {j: 1.0 / (1 + max(degrees[me], degree)) for j, degree in degrees.items() if j != me}


class DPSGD(Algorithm[Hyper]):
    """D-PSGD, Algorithm 1."""

    name = "dpsgd"
    gist = "whole models travel; mixed by the graph's Metropolis weights around one gradient step"
    title = "Can Decentralized Algorithms Outperform Centralized Algorithms?"
    authors = "Lian, Zhang, Zhang, Hsieh, Zhang, Liu"
    venue = "NeurIPS 2017"
    url = "https://arxiv.org/abs/1705.09056"
    Hyper = Hyper
    homogeneous = True
    state = ("model", "optimizer", "row")

    def setup(self) -> None:
        h = self.hyper
        self.optimizer = make_optimizer(
            "sgd", self.model.parameters(), lr=h.lr, momentum=h.momentum, weight_decay=h.weight_decay
        )
        self.row: dict[PeerId, float] = {}

    async def round(self, t: int, net: Net) -> None:
        self.row = metropolis_row(self.me, net.degrees)
        x = parameters_of(self.model)
        if self.hyper.local_epochs:
            self.train(epochs=self.hyper.local_epochs, batch=self.hyper.batch)
            theirs = await net.exchange(Parameters(x))
            assign(x, mix(x, values(theirs), self.row, self.me))
        else:
            before = clone(x)
            self.train(steps=self.hyper.local_steps or 1, batch=self.hyper.batch)  # line 1
            displacement = subtract(x, before)
            theirs = await net.exchange(Parameters(before))
            mixed = mix(before, values(theirs), self.row, self.me)  # line 2
            assign(x, weighted_sum([(1.0, mixed), (1.0, displacement)]))  # line 3

    def loss(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        return {"ce": cross_entropy(self.model(x), labels)}

    def layouts(self) -> Sequence[Layout]:
        return [Layout.of(Parameters(parameters_of(self.model)))]

    def weights(self) -> Mapping[PeerId, float]:
        row = {**self.row, self.me: 1.0 - sum(self.row.values())}
        return {j: row[j] for j in sorted(row)}


def values(theirs: Mapping[PeerId, Parameters]) -> dict[PeerId, Tensors]:
    return {j: body.values for j, body in theirs.items()}
