"""Losses that several papers share, as pure functions."""

from __future__ import annotations

from functools import partial
from typing import Literal, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cosine_similarity, cross_entropy, normalize

from p2pfl.tensors import Tensors, is_finite


def supervised_contrastive(p: Tensor, labels: Tensor, temperature: float, *, cosine: bool = True) -> Tensor:
    """Supervised contrastive loss (Khosla et al., 2020, L_out).

    −(1/|Q|) Σ_q 1/|X+(q)| Σ_{r∈X+(q)} log[ exp(cos(p_q, p_r)/τ) / Σ_{m≠q} exp(cos(p_q, p_m)/τ) ],
    where X+(q) are the other samples with q's label; a sample q without any contributes 0.

    Args:
        p: projections, float [Q, d], of any norm.
        labels: int64 [Q].
        temperature: τ.
        cosine: compare by the cosine, as above; otherwise by the inner product.
    """
    if cosine:
        p = normalize(p, dim=1)
    similarity = p @ p.T / temperature
    diagonal = torch.eye(len(p), dtype=torch.bool, device=p.device)
    log_probability = similarity - similarity.masked_fill(diagonal, -torch.inf).logsumexp(1, keepdim=True)
    positive = (labels[:, None] == labels[None, :]) & ~diagonal
    per_sample = log_probability.masked_fill(~positive, 0.0).sum(1) / positive.sum(1).clamp(min=1)
    return -per_sample.mean()


def supervised_contrastive_inside(p: Tensor, labels: Tensor, temperature: float) -> Tensor:
    """The variant with the sum inside the logarithm (Khosla et al., 2020, L_in, without its 1/|X+|).

    −(1/|Q|) Σ_q log[ Σ_{r∈X+(q)} exp(cos/τ) / Σ_{m≠q} exp(cos/τ) ]; same arguments.
    """
    p = normalize(p, dim=1)
    similarity = p @ p.T / temperature
    diagonal = torch.eye(len(p), dtype=torch.bool, device=p.device)
    positive = (labels[:, None] == labels[None, :]) & ~diagonal
    others = similarity.masked_fill(diagonal, -torch.inf).logsumexp(1)
    positives = similarity.masked_fill(~positive, -torch.inf).logsumexp(1)
    return -(positives - others)[positive.any(1)].sum() / len(p)


def info_nce(z: Tensor, temperature: float) -> Tensor:
    """SimCLR's loss (Chen et al., 2020): supervised contrastive with one label per image.

    Args:
        z: float [2 B, d], the projections of B first views, then of the second views.
    """
    images = torch.arange(len(z) // 2, device=z.device).repeat(2)
    return supervised_contrastive(z, images, temperature)


def simsiam(z: Tensor, p: Tensor) -> Tensor:
    """SimSiam's loss (Chen and He, 2021): −½ mean cos(p¹, z²) − ½ mean cos(p², z¹), without gradient through z.

    Args:
        z: projections, float [2 B, d], as in ``info_nce``.
        p: predictions of the same shape.
    """
    first, second = z.detach().chunk(2)
    return -cosine_similarity(p, torch.cat([second, first]), dim=1).mean()


def prototype_contrastive(p: Tensor, labels: Tensor, prototypes: Tensor, temperature: float) -> Tensor:
    """Cross-entropy of the cosines between projections and class prototypes.

    −(1/|Q|) Σ_q log[ exp(cos(p_q, ξ^{y_q})/τ) / Σ_k exp(cos(p_q, ξ^k)/τ) ].

    Args:
        p: projections, float [Q, d].
        labels: int64 [Q].
        prototypes: ξ, float [K, d].
        temperature: τ.
    """
    cosines = normalize(p, dim=1) @ normalize(prototypes, dim=1).T
    return cross_entropy(cosines / temperature, labels)


def uniformity(prototypes: Tensor) -> Tensor:
    """(1/K) Σ_k Σ_{r≠k} cos(ξ^k, ξ^r) of prototypes [K, d]: small if the prototypes point in different directions."""
    unit = normalize(prototypes, dim=1)
    cosines = unit @ unit.T
    return (cosines.sum() - cosines.diagonal().sum()) / len(prototypes)


Supervision = Literal["wsm", "ace", "masked", "ce"]
"""How a loss treats classes without samples, so that a model does not forget them: ``supervision_loss``."""

ABSENT = -1e9
"""log β of a class without samples: e^-1e9 is 0 for any logit."""


class SupervisionLoss(Protocol):
    """The mean loss of logits z, float [B, K], for labels y, int64 [B]."""

    def __call__(self, logits: Tensor, labels: Tensor) -> Tensor: ...


def supervision_loss(form: Supervision, labels: np.ndarray, classes: int, device: torch.device) -> SupervisionLoss:
    """Return the loss of a peer.

    Args:
        form: ``wsm``: the softmax is weighted by the labels' frequencies (re-weighted softmax, Legate et al., 2023);
            ``ace``: it is over the classes of the batch (asymmetric cross-entropy, Caccia et al., 2021); ``masked``:
            over the classes of the training samples; ``ce``: over all.
        labels: of the training samples, int64 [N].
        classes: K.
        device: of the logits.
    """
    if form == "ace":
        return asymmetric_cross_entropy
    return partial(reweighted_cross_entropy, log_weights=softmax_log_weights(form, labels, classes).to(device))


def softmax_log_weights(form: Supervision, labels: np.ndarray, classes: int) -> Tensor:
    """Return log β for ``reweighted_cross_entropy``, float32 [classes].

    Args:
        form: ``wsm``: log frequency of each label; ``masked``: 0 for labels that occur; both ABSENT for the others;
            ``ce``: 0 for all.
        labels: of the training samples, int64 [N].
    """
    if form == "ce":
        return torch.zeros(classes)
    counts = torch.from_numpy(np.bincount(labels, minlength=classes)).double()
    frequencies = counts / counts.sum() if form == "wsm" else torch.ones(classes, dtype=torch.float64)
    return torch.where(counts > 0, frequencies.log(), ABSENT).float()


def reweighted_cross_entropy(logits: Tensor, labels: Tensor, log_weights: Tensor) -> Tensor:
    """−(1/B) Σ_x [ z_y − log Σ_c β_c e^{z_c} ]: the cross-entropy if all β are 1.

    A class with β = 0 gets no gradient, so the model does not forget it. The value is the cross-entropy of the
    weighted softmax plus the mean of log β_y, a constant: with β a frequency it is negative for a good model, down to
    minus the entropy of the labels.

    Args:
        logits: z, float [B, K].
        labels: y, int64 [B].
        log_weights: log β, float [K].
    """
    target = logits.gather(1, labels[:, None])[:, 0]
    return ((logits + log_weights).logsumexp(1) - target).mean()


def asymmetric_cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """ACE: the cross-entropy of a softmax over the classes that occur in ``labels``; the others get no gradient.

    Args:
        logits: z, float [B, K].
        labels: y, int64 [B].
    """
    occurs = (labels[:, None] == torch.arange(logits.shape[1], device=labels.device)).any(0)
    return reweighted_cross_entropy(logits, labels, torch.where(occurs, 0.0, ABSENT))


def proximal(model: nn.Module, center: Tensors, weight: float, mean: bool = False) -> Tensor:
    """weight / 2 · ‖θ − center‖² over the parameters θ of ``model`` in ``center``; no gradient flows into the latter.

    With ``mean``, each parameter tensor contributes the mean of its squared differences in place of their sum.
    """
    named = ((name, theta) for name, theta in model.named_parameters() if name in center)
    squares = [_difference(theta, center[name]).square() for name, theta in named]
    return weight / 2 * torch.stack([square.mean() if mean else square.sum() for square in squares]).sum()


def _difference(theta: Tensor, center: Tensor) -> Tensor:
    """Return θ − center, 0 where the center is infinite: a disabled entry, which stays as it is."""
    if not center.is_cuda and is_finite(center):  # on a GPU, asking would wait for it
        return theta - center
    return torch.where(center.isfinite(), theta - center, 0.0)


def unsupervised(z: Tensor, predictor: nn.Module | None, temperature: float) -> Tensor:
    """FedStyle's L_unsup of projections z [2 B, p], first views first: SimSiam's with a predictor, else SimCLR's."""
    return info_nce(z, temperature) if predictor is None else simsiam(z, predictor(z))
