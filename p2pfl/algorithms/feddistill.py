"""FedDistill, federated distillation (FD): class means of the models' outputs are averaged, and teach all models.

Eunjeong Jeong, Seungeun Oh, Hyesung Kim, Jihong Park, Mehdi Bennis, Seong-Lyun Kim: "Communication-Efficient
On-Device Machine Learning: Federated Distillation and Augmentation under Non-IID Private Data", NeurIPS workshop
MLPCD 2018. https://arxiv.org/abs/1811.11479
As FedTGP's paper compares with it (Table 1; https://arxiv.org/abs/2401.03230).

Peers with any models exchange K numbers for each of their classes. With the logits F_i(x), peer i in round t (the
paper's Algorithm 1; line numbers are ours)

    1  trains on  φ(F_i(x), y) + γ · φ(F_i(x), F̂^y)   with the cross-entropy φ, where a global mean F̂^y exists
    2  computes its local means  F̄_i^c = mean of F_i(x) over its training samples x of class c, as line 1 sees them
    3  sends them, and averages its neighbors' class by class, each peer's equally, to F̂

and classifies x by its model. The messages, and line 3, are FedProto's (class_means.py), with logits for features.

Differs from the paper:

- The defaults are what FedTGP's authors ran: F̂ averages logits, the second term of line 1 is their mean squared error
  over batch and classes, and F̂ includes the peer's own means. ``preset: paper`` has the paper's formulas: F_i are
  probabilities (softmax of the logits), the term is the cross-entropy with F̂^y, and F̂ are the others' means. On a
  complete graph these are the paper's.
- F̂^c is the mean over the peers that have samples of class c. The paper divides by the number of all.
- A class without a received mean in a round keeps its global mean.
- Federated augmentation, a generative model of all classes that the paper trains at the server from samples that
  devices upload, is left out.
- Peers that do not take part in a round (``participation``) receive, and update their global means.
- On a sparse graph each peer's global means are over its neighborhood.
- The mean skips neighbors that miss the deadline or whose means have diverged, the peer's own if they have, and means
  of probabilities that are none. A peer whose model diverges in training restores it from before.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from pydantic import NonNegativeFloat
from torch import Tensor
from torch.nn.functional import cross_entropy, mse_loss, one_hot

from p2pfl.algorithms import presets
from p2pfl.algorithms.class_means import ClassMeans, ClassMeanTraining, Prototypes, PrototypeTable
from p2pfl.algorithms.presets import Presets
from p2pfl.algorithms.registration import algorithm
from p2pfl.messaging.net import Net
from p2pfl.tensors import widened


@dataclass(frozen=True)
class Hyper(ClassMeanTraining):
    preset: Literal["default", "paper"] = "default"
    """default: as FedTGP's authors ran it; paper: the formulas as printed. Other keys override it."""
    distillation: NonNegativeFloat = 1.0
    """γ, weight of what the global means teach."""
    outputs: Literal["logits", "probabilities"] = "logits"
    """What is averaged and taught: logits, by the mean squared error; or their softmax, by the cross-entropy."""
    teachers: Literal["all", "others"] = "all"
    """Average the means of all, or without the peer's own."""

    PRESETS: ClassVar[Presets] = presets.FEDDISTILL


def disagreement(logits: Tensor, labels: Tensor, means: Tensor, known: Tensor, outputs: str) -> Tensor:
    """Return the second term of line 1 on one batch, without γ. Classes without a global mean contribute 0.

    Args:
        logits: float [B, K].
        labels: int64 [B].
        means: F̂, float [K, K], one row per class: logits or probabilities.
        known: bool [K], whether the class has a global mean.
        outputs: see Hyper.
    """
    if outputs == "logits":
        return mse_loss(logits, torch.where(known[labels, None], means[labels], logits.detach()))
    return (cross_entropy(logits, means[labels], reduction="none") * known[labels]).mean()


def probabilities(values: Tensor) -> Tensor:
    """Return which rows of ``values`` [n, K] are probabilities, bool [n]: from 0 on, with the sum 1."""
    return (values >= 0.0).all(1) & ((values.sum(1) - 1.0).abs() < 1e-3)


@algorithm("feddistill")
class FedDistill(ClassMeans[Hyper]):
    """FedDistill, Algorithm 1 without augmentation. ``prototypes`` are the global means F̂."""

    summary = "class means of logits are sent and averaged; each model learns from them too"
    title = (
        "Communication-Efficient On-Device Machine Learning: "
        "Federated Distillation and Augmentation under Non-IID Private Data"
    )
    authors = "Jeong, Oh, Kim, Park, Bennis, Kim"
    venue = "NeurIPS workshop MLPCD 2018"
    url = "https://arxiv.org/abs/1811.11479"
    Hyper = Hyper
    sends_training = True

    def setup(self) -> None:
        super().setup()
        classes = self.model.classes
        self.sums = torch.zeros(classes, self.width, device=self.device)  # of the round's outputs, by class
        self.counts = torch.zeros(classes, dtype=torch.int64, device=self.device)

    @property
    def width(self) -> int:
        """The length of a mean: the number of classes."""
        return self.model.classes

    async def round(self, t: int, net: Net) -> None:
        table = await self.train_and_exchange(net)  # lines 1 and 2
        self.average_prototypes(self.teaching(table))  # line 3

    def local_training(self) -> None:
        self.sums.zero_()
        self.counts.zero_()
        self.train_or_roll_back(epochs=self.hyper.local_epochs, batch=self.hyper.batch)

    def loss(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        h, logits = self.hyper, self.model(x)
        terms = self.label_loss(logits, labels)
        if bool(self.known.any()):
            term = disagreement(logits, labels, self.prototypes, self.known, h.outputs)
            terms["distill"] = h.distillation * term
        outputs = widened(logits.detach())
        if h.outputs == "probabilities":
            outputs = outputs.softmax(1)
        members = one_hot(labels, self.model.classes)
        self.sums += members.to(outputs.dtype).T @ outputs
        self.counts += members.sum(0)
        return terms

    def local_prototypes(self) -> Prototypes:
        """Line 2: the means of the outputs that this round's training has seen."""
        local = self.counts.nonzero()[:, 0]
        return Prototypes(self.sums[local] / self.counts[local, None], tuple(local.tolist()), ())

    def teaching(self, table: PrototypeTable) -> PrototypeTable:
        """Return the rows of ``table`` that line 3 averages."""
        h, rows = self.hyper, torch.ones_like(table.labels, dtype=torch.bool)
        if h.teachers == "others":
            rows &= table.senders != self.me
        if h.outputs == "probabilities":
            rows &= probabilities(table.values)
        return table.select(rows)
