"""What methods that average whole models exchange: parameters and, if asked, batch-normalization statistics."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from p2pfl.learning.optimizers import LocalTraining
from p2pfl.options import Options
from p2pfl.tensors import parameters_of, statistics_of


@dataclass(frozen=True)
class SharedModel(LocalTraining):
    share_statistics: bool = False
    """Send and average the running means and variances of batch normalization too, with the weights of the
    parameters; otherwise they stay local."""


def shares_statistics(hyper: Options) -> bool:
    return isinstance(hyper, SharedModel) and hyper.share_statistics


def shared_statistics(module: nn.Module, hyper: Options) -> dict[str, Tensor]:
    """Return the statistics that peers exchange, without a copy: {} unless ``share_statistics`` is set."""
    return statistics_of(module) if shares_statistics(hyper) else {}


def shared_tensors(module: nn.Module, hyper: Options) -> dict[str, Tensor]:
    """Return the parameters that train, and ``shared_statistics``, without a copy."""
    return parameters_of(module) | shared_statistics(module, hyper)
