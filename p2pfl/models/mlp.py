"""Multilayer perceptrons of any widths, named by them: ``mlp-3072-2944`` has hidden layers of 3072 and 2944 units.

Their size is free, which the papers' networks are not: benchmarks use them for messages of a given size.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from torch import nn

from p2pfl.models.backbone import Size

MLP = "mlp-WIDTH-…"
"""The pattern of the names, as shown in errors and lists."""


def mlp(widths: Sequence[int]) -> Callable[[int, Size], tuple[nn.Module, int]]:
    """Flatten the image; then fully connected layers with these outputs, each followed by a ReLU."""

    def layers(channels: int, size: Size) -> tuple[nn.Module, int]:
        network: list[nn.Module] = [nn.Flatten()]
        inputs = channels * size[0] * size[1]
        for outputs in widths:
            network += [nn.Linear(inputs, outputs), nn.ReLU()]
            inputs = outputs
        return nn.Sequential(*network), inputs

    return layers


def parse_name(name: str) -> tuple[int, ...] | None:
    """The widths in a name like ``mlp-64-32``; None if it is none: each has one to five digits, without leading 0."""
    if not re.fullmatch(r"mlp(-[1-9][0-9]{0,4})+", name):
        return None
    return tuple(int(width) for width in name.split("-")[1:])
