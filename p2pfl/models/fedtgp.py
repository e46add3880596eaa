"""Model groups of FedTGP (arXiv 2401.03230): HtFE (heterogeneous feature extractors), HtC4 (heads) and HtCNN8.

HtFE networks are FedAvg's CNN (``plain_cnn``) and torchvision networks without their last layer and without
pretrained weights; images keep their native size. Where the paper leaves details open, they follow the authors' code.
One exception: batch normalization of the small ResNets tracks running statistics here, as in the large ones.
``htc4`` is the paper's Res34-HtC4, and ``htfe8-htc4`` its HtFE8-HtC4 (Table 2).
"""

from __future__ import annotations

from functools import partial

from torch import nn

from p2pfl.inputs import Size
from p2pfl.models import backbone as blocks
from p2pfl.models.backbone import Layers, plain_cnn, torchvision_network, with_input_channels
from p2pfl.models.registration import backbone, group

FEATURES = 512
DEPTHS = (4, 6, 8, 10, 18, 34, 50, 101, 152)

backbone("htfe-cnn", FEATURES, pooled=True)(plain_cnn)


@backbone("htfe-googlenet", FEATURES, pooled=True)
def googlenet(channels: int, size: Size) -> tuple[nn.Module, int]:
    """GoogLeNet (arXiv 1409.4842) without its auxiliary classifiers; 1024 features, after its dropout."""
    network = blocks.googlenet(channels, size)
    network.fc = nn.Identity()
    return network, 1024


@backbone("htfe-mobilenet", FEATURES, pooled=True)
def mobilenet(channels: int, size: Size) -> tuple[nn.Module, int]:
    """MobileNetV2 x1.0 (arXiv 1801.04381), 1280 features."""
    network = torchvision_network("mobilenet_v2", channels, "features.0.0")
    network.classifier = nn.Identity()
    return network, 1280


def resnet(depth: int) -> Layers:
    """ResNet (arXiv 1512.03385) with ``depth`` layers.

    Depths 18, 34, 50, 101 and 152 are torchvision's, with 512 or 2048 features. Depths 10, 8, 6 and 4 have one basic
    block in each of the first 4, 3, 2 or 1 stages, and 512, 256, 128 or 64 features.
    """

    def large(channels: int, size: Size) -> tuple[nn.Module, int]:
        network = torchvision_network(f"resnet{depth}", channels, "conv1")
        features = network.fc.in_features
        network.fc = nn.Identity()
        return network, features

    def small(channels: int, size: Size) -> tuple[nn.Module, int]:
        from torchvision.models.resnet import BasicBlock, ResNet

        stages = (depth - 2) // 2
        network = ResNet(BasicBlock, [1, 1, 1, 1])
        for unused in range(stages + 1, 5):
            setattr(network, f"layer{unused}", nn.Identity())
        network.fc = nn.Identity()
        return with_input_channels(channels, network, "conv1"), 2 ** (stages + 5)

    return large if depth >= 18 else small


for depth in DEPTHS:
    backbone(f"htfe-resnet{depth}", FEATURES, pooled=True)(resnet(depth))

HTCNN: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...] = tuple(
    (widths, (*hidden, 512)) for hidden in ((), (512,), (1024,), (1024, 512)) for widths in ((32,), (32, 64))
)
"""Widths of the convolutions and of the fully connected layers of CNN1 to CNN8 (Table 9); a ReLU after each layer."""

for number, (widths, hidden) in enumerate(HTCNN, start=1):
    backbone(f"htcnn-{number}", FEATURES, pooled=True)(partial(plain_cnn, widths=widths, hidden=hidden))

HTFE8 = (
    *("htfe-cnn", "htfe-googlenet", "htfe-mobilenet"),
    *("htfe-resnet18", "htfe-resnet34", "htfe-resnet50", "htfe-resnet101", "htfe-resnet152"),
)
HTC4 = ("", "+fc512", "+fc256", "+fc128")

group("htfe2", ("htfe-cnn", "htfe-resnet18"), FEATURES)
group("htfe3", ("htfe-resnet10", "htfe-resnet18", "htfe-resnet34"), FEATURES)
group("htfe4", ("htfe-cnn", "htfe-googlenet", "htfe-mobilenet", "htfe-resnet18"), FEATURES)
group("htfe8", HTFE8, FEATURES)
group("htfe9", [f"htfe-resnet{depth}" for depth in DEPTHS], FEATURES)
group("htc4", [f"htfe-resnet34{head}" for head in HTC4], FEATURES)
group("htfe8-htc4", [name + HTC4[m % 4] for m, name in enumerate(HTFE8)], FEATURES)
group("htcnn8", [f"htcnn-{number}" for number in range(1, 9)], FEATURES)
