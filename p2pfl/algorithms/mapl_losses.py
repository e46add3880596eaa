"""MAPL's local losses besides the cross-entropy: l_cont, l_proto and l_uni of Algorithm 1. See mapl.py.

Notation: projections p [2B, d_p] of both views of a batch ([B, d_p] of a single one), prototypes ξ [K, d_p],
temperature τ.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Self

import torch
from pydantic import PositiveFloat, model_validator
from torch import Tensor
from torch.nn.functional import cross_entropy, normalize

from p2pfl.learning import losses
from p2pfl.learning.optimizers import LocalTraining
from p2pfl.options import OptionErrors


@dataclass(frozen=True)
class Losses(LocalTraining):
    temperature: PositiveFloat = 0.2
    """τ of l_cont and l_proto (the paper prints 100)."""
    losses: Literal["paper", "official"] = "paper"
    """Form of l_cont, l_proto and l_uni; official: sum inside the log, raw ξ at temperature 1, exp(<ξ,ξ>/100)."""
    contrastive: bool = True
    """Use l_cont (Table 2)."""
    prototype: bool = True
    """Use l_proto (Fig. 3)."""
    uniformity: bool = True
    """Use l_uni (Table 2)."""
    single_view: bool = False
    """Train on one augmented view of each image instead of two; needs contrastive: false."""

    @model_validator(mode="after")
    def _contrastive_has_two_views(self) -> Self:
        if self.single_view and self.contrastive:
            raise ValueError(
                "single_view: true leaves l_cont no second view; set contrastive: false, or remove single_view"
            )
        return self

    def views(self, samples: int) -> int:
        """Return how many views of each image a peer with so many samples trains on. Raises OptionErrors."""
        if self.single_view and 1 in (self.batch, samples):
            problem = "the projector's batch normalization needs batches of two images or more"
            raise OptionErrors(
                [(("single_view",), f"{problem}; a peer has {samples} samples and batch is {self.batch}")]
            )
        return 1 if self.single_view else 2


def contrastive(p: Tensor, labels: Tensor, h: Losses) -> Tensor:
    """l_cont: supervised contrastive loss; the official code has the sum over positives inside the logarithm."""
    form = losses.supervised_contrastive if h.losses == "paper" else losses.supervised_contrastive_inside
    return form(p, labels, h.temperature)


def prototype_contrastive(p: Tensor, labels: Tensor, xi: Tensor, h: Losses) -> Tensor:
    """l_proto: cross-entropy of cos(p, ξ) / τ; the official code does not normalize ξ and has no temperature."""
    if h.losses == "paper":
        return losses.prototype_contrastive(p, labels, xi, h.temperature)
    return cross_entropy(normalize(p, dim=1) @ xi.T, labels)


def uniformity(xi: Tensor, h: Losses) -> Tensor:
    """l_uni: (1/K) Σ_k Σ_{r≠k} of cos(ξ^k, ξ^r); in the official code of exp(<ξ^k, ξ^r> / 100)."""
    if h.losses == "paper":
        return losses.uniformity(xi)
    inner = torch.exp(xi @ xi.T / 100.0)
    return (inner.sum() - inner.diagonal().sum()) / len(inner)
