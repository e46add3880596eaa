"""Backbones of MAPL (arXiv 2403.19792): three torchvision networks and a small AlexNet.

No pretrained weights; images keep their native size; the last linear layer outputs the features.
"""

from __future__ import annotations

from torch import nn

from p2pfl.inputs import Size
from p2pfl.models import backbone as blocks
from p2pfl.models.backbone import torchvision_network
from p2pfl.models.registration import backbone, group


@backbone("resnet18", features=512)
def resnet18(channels: int, size: Size, features: int) -> nn.Module:
    """ResNet-18 (arXiv 1512.03385)."""
    network: nn.Module = torchvision_network("resnet18", channels, "conv1", num_classes=features)
    return network


@backbone("shufflenet", features=512)
def shufflenet(channels: int, size: Size, features: int) -> nn.Module:
    """ShuffleNet V2 x1.0 (arXiv 1807.11164)."""
    network: nn.Module = torchvision_network("shufflenet_v2_x1_0", channels, "conv1.0", num_classes=features)
    return network


@backbone("googlenet", features=512)
def googlenet(channels: int, size: Size, features: int) -> nn.Module:
    """GoogLeNet (arXiv 1409.4842) without its auxiliary classifiers."""
    network: nn.Module = blocks.googlenet(channels, size, features)
    return network


@backbone("alexnet-small", features=512)
def alexnet_small(channels: int, size: Size, features: int) -> nn.Module:
    """FedClassAvg's AlexNet, as MAPL uses it: three convolutions with 64, 128 and 256 channels.

    The first pooling has stride 1 to keep the resolution of small images.
    """
    return nn.Sequential(
        nn.Conv2d(channels, 64, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2, stride=1, padding=1),
        nn.Conv2d(64, 128, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2, stride=2, padding=1),
        nn.Conv2d(128, 256, 3, padding=1),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(3),
        nn.Flatten(),
        nn.Dropout(0.5),
        nn.Linear(256 * 3 * 3, 512),
        nn.ReLU(),
        nn.Linear(512, features),
    )


group("mapl4", ("resnet18", "shufflenet", "googlenet", "alexnet-small"), features=512)
