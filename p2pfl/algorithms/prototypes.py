"""Class prototypes: what FedProto and FedTGP share. Each peer trains guided by global prototypes.

P_j^c is peer j's local prototype of class c, the mean feature of its samples of that class; P^c is the global
prototype. The algorithms differ in how they compute the global prototypes from the local ones; class_means.py sends
them. Equation numbers are those of "FedTGP", https://arxiv.org/abs/2401.03230, which restates FedProto.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, TypeVar

import torch
from pydantic import NonNegativeFloat, PositiveInt
from torch import Tensor
from torch.nn.functional import mse_loss, one_hot

from p2pfl.algorithms.class_means import ClassMeans, ClassMeanTraining, Prototypes, PrototypeTable
from p2pfl.tensors import widened


@dataclass(frozen=True)
class GuidedTraining(ClassMeanTraining):
    batch: PositiveInt = 10
    alignment: NonNegativeFloat | None = None
    """λ, weight of the distance between features and global prototypes; default 10 for mse, 0.1 for euclidean."""
    distance: Literal["mse", "euclidean"] = "mse"
    """mse: mean over batch and dimensions of (f(x) − P^y)²; euclidean: mean over the batch's classes of the
    distance between the class's mean feature and P^c (Eq. 4 as printed)."""


# ---- equations -----------------------------------------------------------------------------------------------


def distances(points: Tensor, prototypes: Tensor) -> Tensor:
    """Return Euclidean distances [n, K] of points [n, d] to prototypes [K, d], exact also near 0."""
    return torch.cdist(points, prototypes, compute_mode="donot_use_mm_for_euclid_dist")


def margins(prototypes: Tensor) -> Tensor:
    """Return the distance [n] of each prototype to the nearest other one (Fig. 1 of FedTGP); inf without others."""
    between = distances(prototypes, prototypes)
    return between.fill_diagonal_(torch.inf).amin(1) if len(between) else between.new_empty(0)


def misalignment(z: Tensor, labels: Tensor, prototypes: Tensor, known: Tensor, distance: str) -> Tensor:
    """φ in Eq. 4 on one batch, without λ. Classes without a prototype contribute 0.

    Args:
        z: features, float [B, d].
        labels: int64 [B].
        prototypes: float [K, d].
        known: bool [K], whether the class has a prototype.
        distance: ``mse`` or ``euclidean``, see GuidedTraining.
    """
    z = widened(z)
    if distance == "mse":
        targets = torch.where(known[labels, None], prototypes[labels], z.detach())
        return mse_loss(z, targets)
    members = one_hot(labels, len(prototypes)).to(z.dtype)
    counts = members.sum(0)
    present = (counts > 0) & known
    means = (members.T @ z)[present] / counts[present, None]
    apart: Tensor = torch.linalg.vector_norm(means - prototypes[present], dim=1)
    return apart.sum() / (counts > 0).sum()


def compare_margins(table: PrototypeTable, prototypes: Tensor, known: Tensor) -> dict[str, float]:
    """Compare the margins of the global prototypes with those of the peers' local ones (Fig. 1 of FedTGP).

    Returns:
        ``margin``: the smallest distance between two global prototypes. ``peer_margin``: the largest over the peers
        of the smallest distance between two local prototypes. ``wider``: the fraction of the classes whose global
        margin is at least the largest local one. Empty if no peer has two classes.
    """
    best = torch.zeros(len(prototypes), dtype=prototypes.dtype, device=prototypes.device)
    smallest = []
    for peer in sorted(set(table.senders.tolist())):
        rows = table.senders == peer
        if len(local := margins(table.values[rows])) > 1:
            labels = table.labels[rows]
            best[labels] = torch.maximum(best[labels], local)
            smallest.append(float(local.min()))
    if not smallest:
        return {}
    widths = torch.zeros_like(best)
    widths[known] = margins(prototypes[known])
    compared = best > 0
    return {
        "margin": float(widths[known].min()),
        "peer_margin": max(smallest),
        "wider": float((widths >= best)[compared].double().mean()) if bool(compared.any()) else 1.0,
    }


# ---- the part of a peer that both algorithms share -----------------------------------------------------------

G = TypeVar("G", bound=GuidedTraining)


class PrototypeGuided(ClassMeans[G]):
    """Local training guided by global prototypes, ``prototypes`` [K, d]; ``known`` [K] marks those that exist."""

    equal_features = True

    def setup(self) -> None:
        super().setup()
        h = self.hyper
        self.alignment = h.alignment if h.alignment is not None else {"mse": 10.0, "euclidean": 0.1}[h.distance]
        self.measured: dict[str, float] = {}

    def loss(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        z = self.model.backbone(x)
        terms = self.label_loss(self.model.head(z), labels)
        if bool(self.known.any()):
            distance = misalignment(z, labels, self.prototypes, self.known, self.hyper.distance)
            terms["proto"] = self.alignment * distance
        return terms

    @torch.no_grad()
    def local_prototypes(self) -> Prototypes:
        """Eq. 2 over the training samples, without augmentation, with the model in evaluation mode."""
        classes, local = self.model.classes, self.data.local_classes
        sums = torch.zeros(classes, self.model.features, device=self.device)
        with self.streams.evaluation():
            for x, labels in self.data.sweep(self.data.train):
                z = widened(self.model.backbone(x))
                sums += one_hot(labels, classes).to(z.dtype).T @ z
        counts = self.local_counts()
        values = sums[list(local)] / torch.tensor(counts, dtype=sums.dtype, device=self.device)[:, None]
        return Prototypes(values, local, counts if self.sends_counts else ())

    def predict(self, x: Tensor) -> Tensor:
        """Return minus the distance to each global prototype, −inf for unknown classes; the head's logits if no
        prototype is known yet."""
        if not bool(self.known.any()):
            return super().predict(x)
        return -distances(self.model.backbone(x), self.prototypes).masked_fill(~self.known, torch.inf)

    def diagnostics(self) -> Mapping[str, float]:
        """Return the margins of the last round (``compare_margins``), if anything was received in it."""
        return {name: value for name, value in self.measured.items() if math.isfinite(value)}
