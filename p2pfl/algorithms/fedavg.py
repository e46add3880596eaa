"""FedAvg without a server: train, exchange whole models, average.

Brendan McMahan, Eider Moore, Daniel Ramage, Seth Hampson, Blaise Agüera y Arcas: "Communication-Efficient Learning of
Deep Networks from Decentralized Data", AISTATS 2017. https://arxiv.org/abs/1602.05629

Algorithm 1, in round t on peer i:

    1  S_t ← a random fraction C of the peers      (the same draw on every peer)
    2  i ∈ S_t: w_i ← E epochs of SGD from w_i; send w_i to the neighbors
    3  w_i ← Σ_j n_j w_j / Σ_j n_j  over the j ∈ S_t that are i or its neighbors

Every peer computes what the paper's server computes, from what it receives. On a complete graph the parameters of all
peers are equal after each round, and they are the paper's.

Differs from the paper:

- On a sparse graph each peer averages over its own neighborhood.
- Peers outside S_t neither train nor send, but receive and average, so that they start from the current model when
  selected. A peer that receives no model in a round keeps its own.
- With a momentum, which the paper does not have, the optimizer's state persists across rounds.
- Batch-normalization statistics stay local, unless ``share_statistics: true`` averages them too; then those of a peer
  that receives no model in a round stay.
- A last training batch of a single sample is skipped, unless it is the only batch.
- The average skips neighbors that miss the deadline and models that have diverged: a peer whose training diverged
  continues with the average of the others.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from p2pfl import PeerId
from p2pfl.algorithms.base import Algorithm, Fraction, Work
from p2pfl.algorithms.registration import algorithm
from p2pfl.algorithms.shared_model import SharedModel, shared_tensors, shares_statistics
from p2pfl.learning.optimizers import LocalTraining
from p2pfl.messaging.net import Net
from p2pfl.messaging.schema import Body, Layout
from p2pfl.tensors import average


@dataclass(frozen=True)
class Participation(LocalTraining):
    participation: Fraction = 1.0
    """C, fraction of the peers that train and send in a round."""


@dataclass(frozen=True)
class Hyper(Participation, SharedModel):
    pass


@dataclass(frozen=True)
class Shared(Body):
    """w_j, the tensors to average by name, float32; and n_j, its weight in the average."""

    values: dict[str, Tensor]
    samples: int


@algorithm("fedavg")
class FedAvg(Algorithm[Participation]):
    """FedAvg, Algorithm 1."""

    summary = "whole models are sent; each peer averages its own and its neighbors', weighted by sample counts"
    title = "Communication-Efficient Learning of Deep Networks from Decentralized Data"
    authors = "McMahan, Moore, Ramage, Hampson, Agüera y Arcas"
    venue = "AISTATS 2017"
    url = "https://arxiv.org/abs/1602.05629"
    Hyper: ClassVar[type[Participation]] = Hyper
    homogeneous = True
    trained_models: ClassVar[int] = 1
    """Models that line 2 trains on each batch."""
    weighted: ClassVar[bool] = True
    """n_j is the number of training samples; otherwise 1."""

    def setup(self) -> None:
        self.optimizer = self.hyper.make_optimizer(self.model.parameters())

    async def round(self, t: int, net: Net) -> None:
        w = self.shared_part()
        participants = net.participants(self.hyper.participation)  # line 1
        if self.me in participants:
            self.local_training()  # line 2
        shared = self.opened(await self.exchange_including_own(net, self.local_part(), participants), net)
        n = {j: float(body.samples) for j, body in shared.items()}
        if sum(n.values()) > 0:
            diverged = self.what_diverged(w)  # in this round, or before without a neighbor to help
            average({j: body.values for j, body in shared.items()}, n, out=w)  # line 3
            self.on_averaged(shared, net)
            if diverged:
                self.reset_after_divergence()

    async def dry_round(self, t: int, net: Net, work: Work) -> None:
        participants = net.participants(self.hyper.participation)
        if self.me in participants:
            await work.train(epochs=self.hyper.local_epochs, batch=self.hyper.batch, models=self.trained_models)
        await net.exchange(self.local_part(), participants)

    def opened(self, received: Mapping[PeerId, Shared], net: Net) -> dict[PeerId, Shared]:
        """Return what line 3 averages. A subclass that compresses w_j recovers it here."""
        return dict(received)

    def on_averaged(self, received: Mapping[PeerId, Shared], net: Net) -> None:
        """Do what a subclass adds to line 3."""

    def local_part(self) -> Shared:
        return Shared(self.shared_part(), len(self.data.train) if self.weighted else 1)

    def local_training(self) -> None:
        """Line 2: E epochs over the local samples."""
        self.train(epochs=self.hyper.local_epochs, batch=self.hyper.batch)

    def shared_part(self) -> dict[str, Tensor]:
        """Return the tensors to average, w_i: all parameters of the model, and its statistics if these are shared."""
        return shared_tensors(self.model, self.hyper)

    def reset_after_divergence(self) -> None:
        """Clear the optimizer's state, and the statistics unless the average has replaced them."""
        if shares_statistics(self.hyper):
            self.optimizer.state.clear()
        else:
            super().reset_after_divergence()

    def layouts(self) -> Sequence[Layout]:
        samples = self.sample_counts if self.weighted else range(1, 2)
        return [Layout.of(self.local_part(), ranges={"samples": samples})]
