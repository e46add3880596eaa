"""Networks of L2C (Li et al., CVPR 2022): FedAvg's CNN (``plain_cnn``) for CIFAR, MAML's for mini-ImageNet.

L2C replaces MAML's batch normalization by group normalization ("since batch-norm may have a detrimental effect").
"""

from __future__ import annotations

from torch import nn

from p2pfl.errors import ModelError
from p2pfl.inputs import Size
from p2pfl.models.backbone import plain_cnn
from p2pfl.models.registration import backbone

backbone("l2c-cnn")(plain_cnn)


@backbone("l2c-conv4")
def conv4(channels: int, size: Size) -> tuple[nn.Module, int]:
    """MAML's CNN (arXiv 1703.03400) with GroupNorm: four blocks of 3x3 convolution with 32 channels, GroupNorm in 4
    groups, ReLU and 2x2 max pooling. Images of 84x84 give 800 features.

    Raises:
        ModelError: images are smaller than 16x16.
    """
    if min(size) < 16:
        text = f"images of {size[0]}x{size[1]} are too small for four poolings"
        raise ModelError(f"{text}; use images of 16x16 or larger, or another model")
    layers: list[nn.Module] = []
    for block in range(4):
        layers += [
            nn.Conv2d(32 if block else channels, 32, 3, padding=1),
            nn.GroupNorm(4, 32),
            nn.ReLU(),
            nn.MaxPool2d(2),
        ]
    return nn.Sequential(*layers, nn.Flatten()), 32 * (size[0] // 16) * (size[1] // 16)
