"""Rules that combine each coordinate by itself: the median and the trimmed mean.

Dong Yin, Yudong Chen, Kannan Ramchandran, Peter Bartlett: "Byzantine-Robust Distributed Learning: Towards Optimal
Statistical Rates", ICML 2018. https://arxiv.org/abs/1803.01498
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from p2pfl.aggregation.attackers import Expecting, minority
from p2pfl.aggregation.rule import Contributions, PerTensor, aggregation


def middle(tensors: Sequence[Tensor], dropped: int) -> Tensor:
    """Return the mean of each coordinate without its ``dropped`` lowest and highest values; NaN is the highest."""
    stacked = torch.stack(list(tensors))
    if stacked.is_complex():
        return torch.view_as_complex(middle(list(torch.view_as_real(stacked)), dropped))
    kept = stacked.sort(0).values[dropped : len(tensors) - dropped]
    # The mean of one infinity, as in a mask, is that: (∞ + ∞) / 2. Equal values are their mean, to the bit.
    mean = kept.mean(0) if kept.is_floating_point() else kept.double().mean(0)
    return torch.where(kept[0] == kept[-1], kept[0], mean)


@aggregation("median")
@dataclass(frozen=True)
class Median(PerTensor):
    """The median of each coordinate; of an even number of values, the mean of the middle two (Definition 1)."""

    weighted = False

    def tolerates(self, n: int) -> int:
        return minority(n)

    def combine_tensor(self, tensors: Sequence[Tensor], given: Contributions) -> Tensor:
        return middle(tensors, minority(len(tensors)))


@aggregation("trimmed-mean")
@dataclass(frozen=True)
class TrimmedMean(Expecting, PerTensor):
    """The mean of each coordinate without its f lowest and its f highest values (Definition 2)."""

    weighted = False

    def combine_tensor(self, tensors: Sequence[Tensor], given: Contributions) -> Tensor:
        return middle(tensors, self.expected(len(tensors)))
