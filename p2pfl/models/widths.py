"""Backbones of any widths, named by them: ``mlp-3072-2944``, ``conv1d-32-64``, ``embedding-64-32``.

Their size is free, which the papers' networks are not: benchmarks use them for messages of a given size.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

from torch import Tensor, nn

from p2pfl.errors import ModelError
from p2pfl.inputs import Size, describe, kind_of
from p2pfl.models.backbone import Layers
from p2pfl.models.registration import family

KERNEL = 5


@family("mlp")
def mlp(widths: Sequence[int]) -> Layers:
    """Flatten the input, which is not tokens; then fully connected layers with these outputs and a ReLU each."""

    def layers(channels: int, size: Size) -> tuple[nn.Module, int]:
        if kind_of(size) == "tokens":
            raise ModelError(f"mlp takes numbers, but the dataset has {describe(channels, size)}")
        network: list[nn.Module] = [nn.Flatten()]
        for inputs, outputs in pairwise((channels * math.prod(size), *widths)):
            network += [nn.Linear(inputs, outputs), nn.ReLU()]
        return nn.Sequential(*network), widths[-1]

    return layers


@family("conv1d")
def conv1d(widths: Sequence[int]) -> Layers:
    """Convolutions of 5 with these output channels and a ReLU, halved by max pooling in between; then the mean over
    time."""

    def layers(channels: int, size: Size) -> tuple[nn.Module, int]:
        _require("series", "conv1d", channels, size)
        network: list[nn.Module] = []
        inputs = channels
        for depth, outputs in enumerate(widths):
            if depth:
                network.append(nn.MaxPool1d(2, ceil_mode=True))
            network += [nn.Conv1d(inputs, outputs, KERNEL, padding=KERNEL // 2), nn.ReLU()]
            inputs = outputs
        return nn.Sequential(*network, nn.AdaptiveAvgPool1d(1), nn.Flatten()), inputs

    return layers


class MeanEmbedding(nn.Module):
    """The mean of the embeddings of all tokens but 0, which is padding; int64 [B, L] to float [B, width]."""

    def __init__(self, vocabulary: int, width: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)

    def forward(self, tokens: Tensor) -> Tensor:
        given = (tokens != 0).unsqueeze(2)
        mean: Tensor = (self.embedding(tokens) * given).sum(1) / given.sum(1).clamp(min=1)
        return mean


@family("embedding")
def embedding(widths: Sequence[int]) -> Layers:
    """Embeddings of the first width, averaged over the sequence; then fully connected layers with a ReLU."""

    def layers(channels: int, size: Size) -> tuple[nn.Module, int]:
        _require("tokens", "embedding", channels, size)
        network: list[nn.Module] = [MeanEmbedding(channels, widths[0])]
        for inputs, outputs in pairwise(widths):
            network += [nn.Linear(inputs, outputs), nn.ReLU()]
        return nn.Sequential(*network), widths[-1]

    return layers


def _require(kind: str, name: str, channels: int, size: Size) -> None:
    if kind_of(size) != kind:
        raise ModelError(f"{name} takes {kind}, but the dataset has {describe(channels, size)}")
