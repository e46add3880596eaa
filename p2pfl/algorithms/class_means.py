"""Means per class: what FedProto, FedTGP and FedDistill send, one row for each of the sender's classes."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import one_hot

from p2pfl import PeerId
from p2pfl.aggregation.aggregator import Aggregator
from p2pfl.algorithms.base import Algorithm, Fraction
from p2pfl.learning.optimizers import LocalTraining
from p2pfl.messaging.net import Net
from p2pfl.messaging.schema import Body, Layout


@dataclass(frozen=True)
class ClassMeanTraining(LocalTraining):
    participation: Fraction = 1.0
    """ρ, fraction of the peers that train and send in a round (Table 2 of FedTGP: 0.5)."""


# ---- messages ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Prototypes(Body):
    """P_j^c, float32 [C_j, d], one row for each of the sender's classes; these classes; and |D_{j,c}| of each, or
    nothing if the average is unweighted."""

    values: Tensor
    classes: tuple[int, ...]
    samples: tuple[int, ...]

    def is_consistent(self) -> bool:
        """Return whether there is one row per class, no class twice, and one count per class or none."""
        rows = len(self.values)
        return len(self.classes) == len(set(self.classes)) == rows and len(self.samples) in (0, rows)


@dataclass(frozen=True)
class PrototypeTable:
    """Local prototypes of several peers, one row per peer and class, ascending by peer.

    Attributes:
        values: float32 [n, d].
        labels: int64 [n], the classes.
        senders: int64 [n].
        samples: float64 [n], the weight of each row in a mean.
    """

    values: Tensor
    labels: Tensor
    senders: Tensor
    samples: Tensor

    @classmethod
    def of(cls, bodies: Mapping[PeerId, Prototypes], features: int, device: torch.device) -> PrototypeTable:
        """Collect the rows of all consistent bodies. Without counts each row has weight 1."""
        peers = [j for j in sorted(bodies) if bodies[j].is_consistent()]
        values = torch.cat([torch.empty(0, features), *(bodies[j].values.cpu() for j in peers)])
        labels = [k for j in peers for k in bodies[j].classes]
        senders = [j for j in peers for _ in bodies[j].classes]
        samples = [n for j in peers for n in bodies[j].samples or (1,) * len(bodies[j].classes)]
        return cls(
            values.to(device),
            torch.tensor(labels, dtype=torch.int64).to(device),
            torch.tensor(senders, dtype=torch.int64).to(device),
            torch.tensor(samples, dtype=torch.float64).to(device),
        )

    def __len__(self) -> int:
        return len(self.labels)

    def select(self, rows: Tensor) -> PrototypeTable:
        """Return the table of these rows, bool [n]."""
        return PrototypeTable(self.values[rows], self.labels[rows], self.senders[rows], self.samples[rows])

    def rows(self, weights: Tensor) -> Iterator[tuple[int, PeerId, Tensor, float]]:
        """Yield class, sender, prototype and weight of each row, as ``Aggregator.combine_rows`` takes them."""
        yield from zip(self.labels.tolist(), self.senders.tolist(), self.values, weights.tolist(), strict=True)


def class_means(
    table: PrototypeTable, classes: int, *, weighted: bool, aggregation: Aggregator | None = None
) -> tuple[Tensor, Tensor]:
    """Return the mean prototype of each class: Eq. 3 if weighted by samples, otherwise FedTGP's Q.

    Args:
        aggregation: the run's rules, which replace the mean, class by class over the peers that have it.

    Returns:
        float32 [K, d], rows of absent classes 0; bool [K], the classes that are present.
    """
    weights = table.samples if weighted else torch.ones_like(table.samples)
    members = one_hot(table.labels, classes).to(torch.float64) * weights[:, None]
    totals = members.sum(0)
    present = totals > 0
    if aggregation is not None and not aggregation.is_mean:
        nothing = table.values.new_zeros(classes, table.values.shape[1])
        return aggregation.combine_rows(Prototypes, table.rows(weights), nothing), present
    if aggregation is not None:
        aggregation.measure_rows(Prototypes, table.rows(weights))
    sums = members.T @ table.values.to(torch.float64)
    means = sums / totals.clamp(min=torch.finfo(torch.float64).tiny)[:, None]
    return means.to(table.values.dtype), present


# ---- the part of a peer that the algorithms share ------------------------------------------------------------

C = TypeVar("C", bound=ClassMeanTraining)


class ClassMeans(Algorithm[C]):
    """Global means per class, ``prototypes`` [K, d], of local ones; ``known`` [K] marks the classes that have one."""

    named_loss = asynchronous = True
    state: ClassVar[tuple[str, ...]] = ("model", "optimizer", "prototypes", "known")
    sends_counts = False
    """Whether sample counts are sent with the means."""

    def setup(self) -> None:
        self.optimizer = self.hyper.make_optimizer(self.model.parameters())
        self.prototypes = torch.zeros(self.model.classes, self.width, device=self.device)
        self.known = torch.zeros(self.model.classes, dtype=torch.bool, device=self.device)
        self.measured: dict[str, float] = {}
        """What the method measured in the last round, if it measures anything."""

    @property
    def width(self) -> int:
        """d, the length of a mean: the number of features."""
        return self.model.features

    @abstractmethod
    def local_prototypes(self) -> Prototypes:
        """Return this peer's means after its training."""

    def local_counts(self) -> tuple[int, ...]:
        """Return the number of training samples of each local class, ascending by class."""
        counts = np.bincount(self.data.train.labels, minlength=self.model.classes)
        return tuple(map(int, counts[list(self.data.local_classes)]))

    async def train_and_exchange(self, net: Net) -> PrototypeTable:
        """Train and send the local means, if this peer takes part; return the means of the participants nearby."""
        participants = net.participants(self.hyper.participation)
        body = Prototypes(self.prototypes[:0], (), ())
        if self.me in participants:
            self.local_training()
            body = self.local_prototypes()
        bodies = await self.exchange_including_own(net, body, participants)
        return PrototypeTable.of(bodies, self.width, self.device)

    def local_training(self) -> None:
        """Train for E epochs over the local samples."""
        self.train(epochs=self.hyper.local_epochs, batch=self.hyper.batch)

    def average_prototypes(self, table: PrototypeTable) -> None:
        """Update the global means, Eq. 3 of FedTGP; absent classes keep theirs."""
        means, present = class_means(table, self.model.classes, weighted=True, aggregation=self.aggregation)
        self.prototypes = torch.where(present[:, None], means, self.prototypes)
        self.known = self.known | present

    def diagnostics(self) -> Mapping[str, float]:
        return {name: value for name, value in self.measured.items() if math.isfinite(value)}

    def layouts(self) -> Sequence[Layout]:
        rows = {0: self.model.classes}
        free = {"values": rows, "classes": rows, "samples": rows}
        ranges = {"classes": range(self.model.classes), "samples": self.sample_counts[1:]}
        return [Layout.of(Prototypes(self.prototypes, (), ()), free=free, ranges=ranges)]
