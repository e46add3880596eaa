"""Building blocks that several families of backbones share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from p2pfl.errors import ModelError

Size = tuple[int, int]
"""Height and width of the images."""

Build = Callable[[int, Size, int], nn.Module]
"""Maps (channels, size, features) to a module from float [B, C, H, W] to float [B, features]."""


@dataclass(frozen=True)
class FixedFeatures:
    """A backbone whose architecture determines its number of features, n.

    Adaptive average pooling converts it to any other number, as in FedTGP ("we add an average pooling layer after
    each feature extractor"); a number above n repeats features.

    Attributes:
        layers: maps (channels, size) to a module from float [B, C, H, W] to float [B, n], and n.
    """

    layers: Callable[[int, Size], tuple[nn.Module, int]]

    def __call__(self, channels: int, size: Size, features: int) -> nn.Module:
        network, width = self.layers(channels, size)
        return network if width == features else nn.Sequential(network, nn.AdaptiveAvgPool1d(features))


def with_input_channels(channels: int, network: nn.Module, first: str) -> nn.Module:
    """Replace the convolution ``first`` of ``network`` by one with ``channels`` inputs, if they differ."""
    convolution: Any = network.get_submodule(first)
    if convolution.in_channels != channels:
        parent, _, name = first.rpartition(".")
        replacement = nn.Conv2d(
            channels,
            convolution.out_channels,
            convolution.kernel_size,
            convolution.stride,
            convolution.padding,
            bias=False,
        )
        setattr(network.get_submodule(parent), name, replacement)
    return network


def plain_cnn(
    channels: int, size: Size, widths: Sequence[int] = (32, 64), hidden: Sequence[int] = (512,)
) -> tuple[nn.Module, int]:
    """Build a CNN like FedAvg's (arXiv 1602.05629).

    Convolutions are 5x5 without padding, each followed by ReLU and 2x2 max pooling; then come fully connected layers
    with ReLU.

    Args:
        channels, size: of the images.
        widths: output channels of the convolutions.
        hidden: outputs of the fully connected layers.

    Raises:
        ModelError: images are too small for the convolutions.
    """
    layers: list[nn.Module] = []
    height, width, inputs = *size, channels
    for outputs in widths:
        layers += [nn.Conv2d(inputs, outputs, 5), nn.ReLU(), nn.MaxPool2d(2)]
        height, width, inputs = (height - 4) // 2, (width - 4) // 2, outputs
    if min(height, width) < 1:
        text = f"images of {size[0]}x{size[1]} are too small for {len(widths)} unpadded 5x5 convolutions with pooling"
        raise ModelError(f"{text}; use larger images or another model")
    layers.append(nn.Flatten())
    inputs *= height * width
    for outputs in hidden:
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
        inputs = outputs
    return nn.Sequential(*layers), inputs
