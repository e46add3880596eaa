"""Local training: no peer says anything. The yardstick of every personalized method."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pydantic import NonNegativeFloat, PositiveFloat, PositiveInt
from torch import Tensor
from torch.nn.functional import cross_entropy

from p2pfl.algorithms.base import Algorithm
from p2pfl.net import Net
from p2pfl.options import Options
from p2pfl.training import OptimizerName, make_optimizer
from p2pfl.wire import Layout


@dataclass(frozen=True)
class Hyper(Options):
    local_epochs: PositiveInt = 1
    """Epochs over the own samples in one round."""
    batch: PositiveInt = 64
    """Samples in one training step."""
    optimizer: OptimizerName = "sgd"
    """sgd or adam; its state lives as long as the peer."""
    lr: PositiveFloat = 0.01
    """Learning rate."""
    momentum: NonNegativeFloat = 0.9
    """Of SGD; Adam uses betas (0.9, 0.999)."""
    weight_decay: NonNegativeFloat = 0.0
    """ℓ2 penalty added to the gradient."""


class Local(Algorithm[Hyper]):
    """Each peer trains on its own samples with the cross-entropy."""

    name = "local"
    gist = "nothing travels; each peer trains on its own samples: the yardstick of the others"
    title = "Local training"
    authors = "—"
    venue = "—"
    url = "—"
    Hyper = Hyper

    def setup(self) -> None:
        h = self.hyper
        self.optimizer = make_optimizer(
            h.optimizer, self.model.parameters(), lr=h.lr, momentum=h.momentum, weight_decay=h.weight_decay
        )

    async def round(self, t: int, net: Net) -> None:
        self.train(epochs=self.hyper.local_epochs, batch=self.hyper.batch)

    def loss(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        return {"ce": cross_entropy(self.model(x), labels)}

    def layouts(self) -> Sequence[Layout]:
        return ()
