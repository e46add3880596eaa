"""What several families of backbones are made of."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from p2pfl.errors import ModelError

Size = tuple[int, int]
"""Height and width of the images."""

Build = Callable[[int, Size, int], nn.Module]
"""(channels, size, features) to a module from float [B, C, H, W] to float [B, features]."""


@dataclass(frozen=True)
class Own:
    """A backbone whose architecture fixes the number of its features.

    Another number is made of them by average pooling, as FedTGP does ("we add an average pooling layer after each
    feature extractor"); more features than there are come out as repetitions.

    Attributes:
        layers: (channels, size) to a module from float [B, C, H, W] to float [B, n], and n.
    """

    layers: Callable[[int, Size], tuple[nn.Module, int]]

    def __call__(self, channels: int, size: Size, features: int) -> nn.Module:
        network, own = self.layers(channels, size)
        return network if own == features else nn.Sequential(network, nn.AdaptiveAvgPool1d(features))


def taking(channels: int, network: nn.Module, first: str) -> nn.Module:
    """``network`` with its first convolution, the submodule ``first``, taking images of ``channels``."""
    convolution: Any = network.get_submodule(first)
    if convolution.in_channels != channels:
        place, _, name = first.rpartition(".")
        replacement = nn.Conv2d(
            channels,
            convolution.out_channels,
            convolution.kernel_size,
            convolution.stride,
            convolution.padding,
            bias=False,
        )
        setattr(network.get_submodule(place), name, replacement)
    return network


def plain_cnn(
    channels: int, size: Size, widths: Sequence[int] = (32, 64), hidden: Sequence[int] = (512,)
) -> tuple[nn.Module, int]:
    """FedAvg's CNN (arXiv 1602.05629) and its kin: 5x5 convolutions without padding, each before ReLU and 2x2
    max pooling, then fully connected layers with ReLU.

    Raises ModelError if nothing is left of the image after the convolutions.
    """
    layers: list[nn.Module] = []
    height, width, inputs = *size, channels
    for outputs in widths:
        layers += [nn.Conv2d(inputs, outputs, 5), nn.ReLU(), nn.MaxPool2d(2)]
        height, width, inputs = (height - 4) // 2, (width - 4) // 2, outputs
    if min(height, width) < 1:
        text = f"{len(widths)} convolutions of 5x5 without padding leave nothing of images of {size[0]}x{size[1]}"
        raise ModelError(f"{text}; take larger images or another model")
    layers.append(nn.Flatten())
    inputs *= height * width
    for outputs in hidden:
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
        inputs = outputs
    return nn.Sequential(*layers), inputs
