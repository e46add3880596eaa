"""Losses that several papers share, as pure functions."""

from __future__ import annotations

from typing import Literal

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import normalize


def supervised_contrastive(p: Tensor, labels: Tensor, temperature: float) -> Tensor:
    """Supervised contrastive loss (Khosla et al., 2020, L_out).

    −(1/|Q|) Σ_q 1/|X+(q)| Σ_{r∈X+(q)} log[ exp(cos(p_q, p_r)/τ) / Σ_{m≠q} exp(cos(p_q, p_m)/τ) ],
    where X+(q) are the other samples with q's label; a q without any contributes 0.

    Args:
        p: projections, float [Q, d]; normalised here.
        labels: int64 [Q].
        temperature: τ.
    """
    p = normalize(p, dim=1)
    similarity = p @ p.T / temperature
    itself = torch.eye(len(p), dtype=torch.bool, device=p.device)
    log_probability = similarity - similarity.masked_fill(itself, -torch.inf).logsumexp(1, keepdim=True)
    positive = (labels[:, None] == labels[None, :]) & ~itself
    per_sample = log_probability.masked_fill(~positive, 0.0).sum(1) / positive.sum(1).clamp(min=1)
    return -per_sample.mean()


def supervised_contrastive_inside(p: Tensor, labels: Tensor, temperature: float) -> Tensor:
    """The variant with the sum inside the logarithm (Khosla et al., 2020, L_in, without its 1/|X+|).

    −(1/|Q|) Σ_q log[ Σ_{r∈X+(q)} exp(cos/τ) / Σ_{m≠q} exp(cos/τ) ]; same arguments.
    """
    p = normalize(p, dim=1)
    similarity = p @ p.T / temperature
    itself = torch.eye(len(p), dtype=torch.bool, device=p.device)
    positive = (labels[:, None] == labels[None, :]) & ~itself
    everyone = similarity.masked_fill(itself, -torch.inf).logsumexp(1)
    friends = similarity.masked_fill(~positive, -torch.inf).logsumexp(1)
    has_friends = positive.any(1)
    return -(friends - everyone)[has_friends].sum() / len(p)


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
    return torch.nn.functional.cross_entropy(cosines / temperature, labels)


def uniformity(prototypes: Tensor) -> Tensor:
    """(1/K) Σ_k Σ_{r≠k} cos(ξ^k, ξ^r) of prototypes [K, d]: small when they point apart."""
    unit = normalize(prototypes, dim=1)
    cosines = unit @ unit.T
    return (cosines.sum() - cosines.diagonal().sum()) / len(prototypes)


Supervision = Literal["wsm", "ace", "ce"]
"""What keeps a model from forgetting the classes that the samples at hand lack; see ``softmax_log_weights``."""

ABSENT = -1e9
"""log β of a class without samples: e^-1e9 is 0, and no logit lifts it."""


def softmax_log_weights(form: Supervision, labels: np.ndarray, classes: int) -> Tensor:
    """log β of ``reweighted_cross_entropy``, float32 [classes], for samples with these labels (int64 [N]).

    ``wsm``: the logarithms of the labels' frequencies (re-weighted softmax, Legate et al., 2023). ``ace``: 0 for the
    classes that occur (asymmetric cross-entropy, Caccia et al., 2021). Both have ABSENT for the others. ``ce``: 0 for
    all.
    """
    if form == "ce":
        return torch.zeros(classes)
    counts = torch.from_numpy(np.bincount(labels, minlength=classes)).double()
    frequencies = counts / counts.sum() if form == "wsm" else torch.ones(classes, dtype=torch.float64)
    return torch.where(counts > 0, frequencies.log(), ABSENT).float()


def reweighted_cross_entropy(logits: Tensor, labels: Tensor, log_weights: Tensor) -> Tensor:
    """−(1/B) Σ_x [ z_y − log Σ_c β_c e^{z_c} ]: the cross-entropy if all β are 1.

    A class with β = 0 gets no gradient, so that what is known of it is kept.

    Args:
        logits: z, float [B, K].
        labels: y, int64 [B].
        log_weights: log β, float [K].
    """
    own = logits.gather(1, labels[:, None])[:, 0]
    return ((logits + log_weights).logsumexp(1) - own).mean()
