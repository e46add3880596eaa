"""Rounds of FedAvg: train, exchange a part of each model, average it. What follows from having no server: fedavg.py.

A method states the part (``share``), and composes its ``round`` of ``train_and_exchange`` and ``average``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from p2pfl import PeerId, rng
from p2pfl.algorithms.base import Algorithm, Fraction
from p2pfl.algorithms.shared_model import Share, SharedModel, SharedStatistics, shared_tensors
from p2pfl.learning.optimizers import LocalTraining
from p2pfl.messaging.net import Net
from p2pfl.messaging.schema import Body, Layout
from p2pfl.models import Model
from p2pfl.tensors import fractions


@dataclass(frozen=True)
class Participation(LocalTraining):
    participation: Fraction = 1.0
    """C, fraction of the peers that train and send in a round."""


@dataclass(frozen=True)
class WholeModel(Participation, SharedStatistics):
    pass


@dataclass(frozen=True)
class AnyPart(WholeModel, SharedModel):
    pass


@dataclass(frozen=True)
class Shared(Body):
    """w_j, the tensors to average by name, float32; and n_j, its weight in the average."""

    values: dict[str, Tensor]
    samples: int


class Averaging(Algorithm[Participation]):
    """The family of FedAvg."""

    asynchronous = True
    share: ClassVar[Share] = "trainable"
    """The part of a model that is sent and averaged, if the run file cannot choose it."""
    weighted: ClassVar[bool] = True
    """n_j is the number of training samples; otherwise 1."""

    def setup(self) -> None:
        if self.share == "head":  # as if sent by a server
            with rng.torch_seeded(self.seed, "lg-fedavg.init"):
                self.model.reset_linear_head()
        self.optimizer = self.hyper.make_optimizer(self.model.parameters())

    async def round(self, t: int, net: Net) -> None:
        self.average(await self.train_and_exchange(net))

    async def train_and_exchange(self, net: Net) -> dict[PeerId, Shared]:
        """Return the parts of the participants among this peer and its neighbors."""
        participants = net.participants(self.hyper.participation)
        if self.me in participants:
            self.local_training()
        return await self.exchange_including_own(net, self.local_part(), participants)

    def local_training(self) -> None:
        """Train for E epochs over the local samples."""
        self.train(epochs=self.hyper.local_epochs, batch=self.hyper.batch)

    def average(self, received: Mapping[PeerId, Shared]) -> bool:
        """w_i ← Σ_j n_j w_j / Σ_j n_j; return whether there was anything to average."""
        w, n = self.shared_part(), {j: body.samples for j, body in received.items()}
        if not any(n.values()):
            return False
        diverged = self.what_diverged(w)  # in this round, or before without a neighbor to help
        self.aggregation.combine(received, fractions(n), out=w)
        if diverged:
            self.reset_after_divergence()
        return True

    @property
    def sent(self) -> Model:
        """The model of which a part is sent and averaged."""
        return self.model

    def shared_part(self) -> dict[str, Tensor]:
        """Return w_i, the tensors to average, without a copy."""
        return shared_tensors(self.sent, self.hyper, self.share)

    def local_part(self) -> Shared:
        return Shared(self.shared_part(), len(self.data.train) if self.weighted else 1)

    def layouts(self) -> Sequence[Layout]:
        samples = self.sample_counts if self.weighted else range(1, 2)
        return [Layout.of(self.local_part(), ranges={"samples": samples})]
