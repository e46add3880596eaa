"""FedAvg without a server: train, exchange whole models, average.

Brendan McMahan, Eider Moore, Daniel Ramage, Seth Hampson, Blaise Agüera y Arcas: «Communication-Efficient Learning of
Deep Networks from Decentralized Data», AISTATS 2017. https://arxiv.org/abs/1602.05629

Algorithm 1, in round t on peer i:

    1  S_t ← a random share C of the peers         (drawn alike on every peer)
    2  i ∈ S_t: w_i ← E epochs of SGD from w_i, and send w_i to the neighbours
    3  w_i ← Σ_j n_j w_j / Σ_j n_j  over the j ∈ S_t that are i or its neighbours

What the paper's server computes, every peer computes itself over what it hears; on a complete graph the parameters of
all peers are equal after each round, and with ``momentum: 0`` the paper's.

Differs from the paper:

- on a sparse graph each peer averages over its own neighbourhood.
- peers outside S_t do not train nor send, but hear and average, so that they start from the current model when their
  turn comes; one that hears nobody of S_t keeps its model.
- local SGD has a momentum of 0.9 unless told otherwise, the paper's none; its state lives as long as the peer.
- batch-normalisation statistics stay local.
- a last training batch of one sample is left out when there are others.
- a neighbour that misses a deadline is left out of that round's average, and so is any model with NaN or infinity: a
  peer whose training diverged goes on with the average of the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from p2pfl.algorithms.base import Algorithm
from p2pfl.net import Net
from p2pfl.options import Options
from p2pfl.tensors import Tensors, assign, average, parameters_of
from p2pfl.training import OptimizerName, make_optimizer
from p2pfl.wire import Body, Layout, is_finite

Share = Annotated[float, Field(gt=0.0, le=1.0)]


@dataclass(frozen=True)
class Hyper(Options):
    local_epochs: PositiveInt = 1
    """E, epochs over the own samples in one round."""
    batch: PositiveInt = 64
    """B, samples in one step."""
    optimizer: OptimizerName = "sgd"
    """sgd or adam; its state lives as long as the peer."""
    lr: PositiveFloat = 0.01
    """η."""
    momentum: NonNegativeFloat = 0.9
    """Of SGD (the paper has 0); Adam uses betas (0.9, 0.999)."""
    weight_decay: NonNegativeFloat = 0.0
    """ℓ2 penalty added to the gradient."""
    participation: Share = 1.0
    """C, share of the peers that train and send in a round."""


@dataclass(frozen=True)
class Shared(Body):
    """w_j: the parameters that are averaged, by name, float32; and n_j, how many samples they were trained on."""

    values: dict[str, Tensor]
    samples: int


class FedAvg(Algorithm[Hyper]):
    """FedAvg, Algorithm 1."""

    name = "fedavg"
    gist = "whole models travel; each peer averages its own and its neighbours', weighted by samples"
    title = "Communication-Efficient Learning of Deep Networks from Decentralized Data"
    authors = "McMahan, Moore, Ramage, Hampson, Agüera y Arcas"
    venue = "AISTATS 2017"
    url = "https://arxiv.org/abs/1602.05629"
    Hyper = Hyper
    homogeneous = True

    def setup(self) -> None:
        h = self.hyper
        self.optimizer = make_optimizer(
            h.optimizer, self.model.parameters(), lr=h.lr, momentum=h.momentum, weight_decay=h.weight_decay
        )

    def shared_part(self) -> dict[str, Tensor]:
        """What is averaged: all parameters of the model."""
        return parameters_of(self.model)

    async def round(self, t: int, net: Net) -> None:
        h, w = self.hyper, self.shared_part()
        chosen = net.participants(h.participation)  # line 1
        mine = Shared(w, len(self.data.train))
        if self.me in chosen:
            self.train(epochs=h.local_epochs, batch=h.batch)  # line 2
        heard = await net.exchange(mine, among=chosen)
        if self.me in chosen and is_finite(mine):
            heard[self.me] = mine
        models: dict[int, Tensors] = {j: body.values for j, body in heard.items()}
        samples = {j: float(body.samples) for j, body in heard.items()}
        if sum(samples.values()) > 0:
            assign(w, average(models, samples))  # line 3
            if self.me in chosen and self.me not in heard:
                self.forget()

    def forget(self) -> None:
        """What training that diverged has left besides the parameters: momentum, batch-normalisation statistics."""
        self.optimizer.state.clear()
        for module in self.model.modules():
            if isinstance(module, nn.modules.batchnorm._BatchNorm):
                module.reset_running_stats()

    def loss(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        return {"ce": cross_entropy(self.model(x), labels)}

    def layouts(self) -> Sequence[Layout]:
        return [Layout.of(Shared(self.shared_part(), 0))]
