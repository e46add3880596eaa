"""Model groups of FedTGP (arXiv 2401.03230): HtFE (heterogeneous feature extractors) and HtCNN8.

HtFE networks are FedAvg's CNN (``plain_cnn``) and torchvision networks without their last layer and without
pretrained weights; images keep their native size. Where the paper leaves details open, they follow the authors' code.
One exception: batch normalization of the small ResNets tracks running statistics here, as in the large ones.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import nn

from p2pfl.inputs import Size
from p2pfl.models.backbone import plain_cnn, with_input_channels

HTCNN: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...] = tuple(
    (widths, (*hidden, 512)) for hidden in ((), (512,), (1024,), (1024, 512)) for widths in ((32,), (32, 64))
)
"""Widths of the convolutions and of the fully connected layers of CNN1 to CNN8 (Table 9)."""


def htcnn(number: int) -> Callable[[int, Size], tuple[nn.Module, int]]:
    """CNN1 to CNN8 of Table 9, with a ReLU after every layer."""
    widths, hidden = HTCNN[number - 1]
    return partial(plain_cnn, widths=widths, hidden=hidden)


def googlenet(channels: int, size: Size) -> tuple[nn.Module, int]:
    """GoogLeNet (arXiv 1409.4842) without its auxiliary classifiers; 1024 features, after its dropout."""
    import torchvision.models

    # init_weights=True is the stock initialization; torchvision warns if the argument is missing.
    network = torchvision.models.googlenet(weights=None, aux_logits=False, init_weights=True)
    if min(size) < 15:  # the third pooling would get a single pixel
        network.maxpool3 = nn.Identity()
    network.fc = nn.Identity()
    return with_input_channels(channels, network, "conv1.conv"), 1024


def mobilenet(channels: int, size: Size) -> tuple[nn.Module, int]:
    """MobileNetV2 x1.0 (arXiv 1801.04381), 1280 features."""
    import torchvision.models

    network = torchvision.models.mobilenet_v2(weights=None)
    network.classifier = nn.Identity()
    return with_input_channels(channels, network, "features.0.0"), 1280


def resnet(depth: int) -> Callable[[int, Size], tuple[nn.Module, int]]:
    """ResNet (arXiv 1512.03385) with ``depth`` layers.

    Depths 18, 34, 50, 101 and 152 are torchvision's, with 512 or 2048 features. Depths 10, 8, 6 and 4 have one basic
    block in each of the first 4, 3, 2 or 1 stages, and 512, 256, 128 or 64 features.
    """

    def layers(channels: int, size: Size) -> tuple[nn.Module, int]:
        import torchvision.models
        from torchvision.models.resnet import BasicBlock, ResNet

        if depth >= 18:
            network: Any = getattr(torchvision.models, f"resnet{depth}")(weights=None)
        else:
            network = ResNet(BasicBlock, [1, 1, 1, 1])
            for unused in range((depth - 2) // 2 + 1, 5):
                setattr(network, f"layer{unused}", nn.Identity())
        features = network.fc.in_features if depth >= 10 else 2 ** ((depth - 2) // 2 + 5)
        network.fc = nn.Identity()
        return with_input_channels(channels, network, "conv1"), features

    return layers
