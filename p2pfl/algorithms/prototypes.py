"""Class prototypes: what FedProto and FedTGP share. Each peer trains guided by global prototypes.

P_j^c is peer j's local prototype of class c, the mean feature of its samples of that class; P^c is the global
prototype. The algorithms differ in how they compute the global prototypes from the local ones; class_means.py sends
them. Equation numbers are FedTGP's, https://arxiv.org/abs/2401.03230, which restates FedProto.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

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

    @property
    def weight(self) -> float:
        """λ."""
        return {"mse": 10.0, "euclidean": 0.1}[self.distance] if self.alignment is None else self.alignment


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
    """Compare the margins of the global prototypes with the margins of the peers' local ones (Fig. 1 of FedTGP).

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


# ---- the parts of a peer that both algorithms share ----------------------------------------------------------


def guided_loss(peer: ClassMeans[Any], x: Tensor, labels: Tensor) -> dict[str, Tensor]:
    """Eq. 4: the loss on the labels, and the distance of the features to the global prototypes, as far as known."""
    z = peer.model.backbone(x)
    terms = peer.label_loss(peer.model.head(z), labels)
    if bool(peer.known.any()):
        distance = misalignment(z, labels, peer.prototypes, peer.known, peer.hyper.distance)
        terms["proto"] = peer.hyper.weight * distance
    return terms


@torch.no_grad()
def mean_features(peer: ClassMeans[Any]) -> Prototypes:
    """Eq. 2 over the training samples, without augmentation, with the model in evaluation mode."""
    classes, local = peer.model.classes, peer.data.local_classes
    sums = torch.zeros(classes, peer.model.features, device=peer.device)
    with peer.streams.evaluation():
        for x, labels in peer.data.sweep(peer.data.train):
            z = widened(peer.model.backbone(x))
            sums += one_hot(labels, classes).to(z.dtype).T @ z
    counts = peer.local_counts()
    values = sums[list(local)] / torch.tensor(counts, dtype=sums.dtype, device=peer.device)[:, None]
    return Prototypes(values, local, counts if peer.sends_counts else ())


def nearest_prototype(peer: ClassMeans[Any], x: Tensor) -> Tensor:
    """Return minus the distance to each global prototype, [B, K], −inf for unknown classes; the head's logits if no
    prototype is known yet."""
    if not bool(peer.known.any()):
        logits: Tensor = peer.model(x)
        return logits
    return -distances(peer.model.backbone(x), peer.prototypes).masked_fill(~peer.known, torch.inf)
