"""Backbones of MAPL (arXiv 2403.19792): three torchvision networks and a small AlexNet.

No pretrained weights; images keep their native size; the last linear layer outputs the features. torchvision is
imported only when one of its networks is built.
"""

from __future__ import annotations

from torch import nn

from p2pfl.inputs import Size
from p2pfl.models.backbone import with_input_channels


def resnet18(channels: int, size: Size, features: int) -> nn.Module:
    """ResNet-18 (arXiv 1512.03385)."""
    import torchvision.models

    network = torchvision.models.resnet18(weights=None, num_classes=features)
    return with_input_channels(channels, network, "conv1")


def shufflenet(channels: int, size: Size, features: int) -> nn.Module:
    """ShuffleNet V2 x1.0 (arXiv 1807.11164)."""
    import torchvision.models

    network = torchvision.models.shufflenet_v2_x1_0(weights=None, num_classes=features)
    return with_input_channels(channels, network, "conv1.0")


def googlenet(channels: int, size: Size, features: int) -> nn.Module:
    """GoogLeNet (arXiv 1409.4842) without its auxiliary classifiers.

    Images smaller than 15x15 skip the third pooling: they are a single pixel by then.
    """
    import torchvision.models

    # init_weights=True is the stock initialization; torchvision warns if the argument is missing.
    network = torchvision.models.googlenet(weights=None, num_classes=features, aux_logits=False, init_weights=True)
    if min(size) < 15:
        network.maxpool3 = nn.Identity()
    return with_input_channels(channels, network, "conv1.conv")


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
