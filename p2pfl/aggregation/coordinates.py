"""Rules that combine each coordinate by itself: the median and the trimmed mean.

Dong Yin, Yudong Chen, Kannan Ramchandran, Peter Bartlett: "Byzantine-Robust Distributed Learning: Towards Optimal
Statistical Rates", ICML 2018. https://arxiv.org/abs/1803.01498
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from p2pfl.aggregation.attackers import Expecting, minority
from p2pfl.aggregation.rule import Contributions, PerTensor, aggregation
from p2pfl.aggregation.trimming_network import trimmed
from p2pfl.tensors import PART, flat_parts

MOST_IN_NETWORK = 32
"""Contributions from which sorting each coordinate is faster than a network, whose comparators grow as n log² n."""


def middle(tensors: Sequence[Tensor], dropped: int) -> Tensor:
    """Return the mean of each coordinate without its ``dropped`` lowest and highest values; NaN is the highest."""
    first = tensors[0]
    if first.is_complex():
        return torch.view_as_complex(middle([torch.view_as_real(tensor) for tensor in tensors], dropped))
    return torch.cat([_middle(rows, dropped) for rows in flat_parts(tensors, 4 * PART)]).view(first.shape)


def _middle(rows: tuple[Tensor, ...], dropped: int) -> Tensor:
    """Return the mean of each coordinate of rows [d] without its lowest and highest values."""
    if rows[0].device.type != "cpu":
        kept = _inner(torch.stack(rows).sort(0).values, dropped)
    elif len(rows) <= MOST_IN_NETWORK:
        kept = tuple(map(torch.from_numpy, trimmed([row.numpy() for row in rows], dropped)))
    else:  # NumPy sorts short rows several times as fast
        kept = _inner(torch.from_numpy(np.sort(torch.stack(rows, 1).numpy(), axis=1)).T, dropped)
    total = kept[0] if kept[0].is_floating_point() else kept[0].double()
    for row in kept[1:]:
        total = total + row
    # Equal values are their mean, to the bit, and infinities, as in a mask, too.
    return torch.where(kept[0] == kept[-1], kept[0], total / len(kept))


def _inner(ordered: Tensor, dropped: int) -> tuple[Tensor, ...]:
    return tuple(ordered[dropped : len(ordered) - dropped])


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
