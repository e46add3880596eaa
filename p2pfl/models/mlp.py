"""Multilayer perceptrons of any widths, named by them: ``mlp-3072-2944`` has hidden layers of 3072 and 2944 units.

They take all inputs but tokens. Their size is free, which the papers' networks are not: benchmarks use them for
messages of a given size.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from torch import nn

from p2pfl.errors import ModelError
from p2pfl.inputs import Size, describe, kind_of

MLP = "mlp-WIDTH-…"
"""The pattern of the names, as shown in errors and lists."""


def mlp(widths: Sequence[int]) -> Callable[[int, Size], tuple[nn.Module, int]]:
    """Flatten the input; then fully connected layers with these outputs, each followed by a ReLU."""

    def layers(channels: int, size: Size) -> tuple[nn.Module, int]:
        if kind_of(size) == "tokens":
            raise ModelError(f"mlp takes numbers, but the dataset has {describe(channels, size)}")
        network: list[nn.Module] = [nn.Flatten()]
        inputs = channels * math.prod(size)
        for outputs in widths:
            network += [nn.Linear(inputs, outputs), nn.ReLU()]
            inputs = outputs
        return nn.Sequential(*network), inputs

    return layers
