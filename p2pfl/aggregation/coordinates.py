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
from p2pfl.tensors import flat_parts


def middle(tensors: Sequence[Tensor], dropped: int) -> Tensor:
    """Return the mean of each coordinate without its ``dropped`` lowest and highest values; NaN is the highest."""
    first = tensors[0]
    if first.is_complex():
        return torch.view_as_complex(middle([torch.view_as_real(tensor) for tensor in tensors], dropped))
    parts = (torch.stack(part, 1) for part in flat_parts(tensors))
    return torch.cat([_middle(rows, dropped) for rows in parts]).view(first.shape)


def _middle(rows: Tensor, dropped: int) -> Tensor:
    """Return the mean of each row [d, n] without its lowest and highest entries."""
    on_cpu = rows.device.type == "cpu"  # where NumPy sorts short rows several times as fast
    ordered = torch.from_numpy(np.sort(rows.numpy(), axis=1)) if on_cpu else rows.sort(1).values
    kept = ordered[:, dropped : rows.shape[1] - dropped]
    mean = kept.mean(1) if kept.is_floating_point() else kept.double().mean(1)
    # Equal values are their mean, to the bit, and infinities, as in a mask, too.
    return torch.where(kept[:, 0] == kept[:, -1], kept[:, 0], mean)


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
