"""The networks of L2C (Li et al., CVPR 2022): FedAvg's for CIFAR, MAML's for mini-ImageNet.

Where MAML's has batch normalisation, L2C has group normalisation ("since batch-norm may have a detrimental effect").
"""

from __future__ import annotations

from torch import nn

from p2pfl.errors import ModelError
from p2pfl.models.parts import Size, plain_cnn


def cnn(channels: int, size: Size) -> tuple[nn.Module, int]:
    """FedAvg's two-layer CNN: 5x5 convolutions without padding, 32 and 64 wide, and a hidden layer of 512."""
    return plain_cnn(channels, size)


def conv4(channels: int, size: Size) -> tuple[nn.Module, int]:
    """MAML's four-layer CNN (arXiv 1703.03400): four times a 3x3 convolution, 32 wide, normalisation in 4 groups,
    ReLU and 2x2 max pooling; 800 features of images of 84x84. Raises ModelError for images below 16x16.
    """
    if min(size) < 16:
        text = f"four poolings leave nothing of images of {size[0]}x{size[1]}"
        raise ModelError(f"{text}; take images of 16x16 or more, or another model")
    layers: list[nn.Module] = []
    for block in range(4):
        layers += [
            nn.Conv2d(32 if block else channels, 32, 3, padding=1),
            nn.GroupNorm(4, 32),
            nn.ReLU(),
            nn.MaxPool2d(2),
        ]
    return nn.Sequential(*layers, nn.Flatten()), 32 * (size[0] // 16) * (size[1] // 16)
