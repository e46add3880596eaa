"""Networks of DFML (arXiv 2402.01863, Table 10 and appendix A.2).

Its groups: H0 is homogeneous, H1 differs in width, H2 in depth and width. The number of features differs within a
group, since DFML sends whole models. Choices where the paper leaves details open:

- Convolutions are padded: four of them with poolings need it at 32x32.
- Layer normalization of images has one gain and bias per channel, which is independent of the image size and can be
  sliced by channels.
- Transformers have max(1, dim / 64) heads, and MLPs twice as wide as the tokens (as in arXiv 2112.13492).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from p2pfl.errors import ModelError
from p2pfl.inputs import Size
from p2pfl.models.backbone import Layers, torchvision_network
from p2pfl.models.registration import backbone, group

EFFICIENTNET = {0: 1280, 1: 1280, 2: 1408, 3: 1536, 4: 1792}
"""Features of EfficientNet B0 to B4."""

PATCH = 4
HEAD = 64
"""Channels per attention head."""


def cnn(widths: Sequence[int]) -> Layers:
    """CNN of 5x5 convolutions, each followed by ReLU, 2x2 max pooling and layer normalization."""

    def layers(channels: int, size: Size) -> tuple[nn.Module, int]:
        height, width = (side // 2 ** len(widths) for side in size)
        if min(height, width) < 1:
            text = f"images of {size[0]}x{size[1]} are too small for {len(widths)} poolings"
            raise ModelError(f"{text}; use larger images or another model")
        stack: list[nn.Module] = []
        inputs = channels
        for outputs in widths:
            stack += [
                nn.Conv2d(inputs, outputs, 5, padding=2),
                nn.ReLU(),
                nn.MaxPool2d(2),
                nn.GroupNorm(1, outputs),
            ]
            inputs = outputs
        return nn.Sequential(*stack, nn.Flatten()), inputs * height * width

    return layers


def resnet(width: int) -> Layers:
    """Pre-activation ResNet-18 (arXiv 1603.05027) with stages of 1, 2, 4 and 8 times ``width``; 64 is the original.

    The first convolution is 3x3 without stride or pooling, as usual for images of 32x32.
    """

    def layers(channels: int, size: Size) -> tuple[nn.Module, int]:
        stack: list[nn.Module] = [nn.Conv2d(channels, width, 3, padding=1, bias=False)]
        inputs = width
        for stage in range(4):
            outputs = width * 2**stage
            stride = 2 if stage else 1
            stack += [PreActivationBlock(inputs, outputs, stride), PreActivationBlock(outputs, outputs)]
            inputs = outputs
        stack += [nn.BatchNorm2d(inputs), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
        return nn.Sequential(*stack), inputs

    return layers


def vit(dim: int) -> Layers:
    """Vision transformer for small datasets (arXiv 2112.13492).

    Shifted patch tokenization (SPT) with patches of 4x4, two layers of locality self-attention (LSA) with heads of 64
    channels, dropout 0.1; the class token is the feature vector.
    """

    def layers(channels: int, size: Size) -> tuple[nn.Module, int]:
        tokens = -(-size[0] // PATCH) * -(-size[1] // PATCH)
        network = nn.Sequential(
            ShiftedPatches(channels, size, dim),
            Positions(tokens, dim, dropout=0.1),
            TransformerLayer(dim, tokens + 1, dropout=0.1),
            TransformerLayer(dim, tokens + 1, dropout=0.1),
            ClassToken(),
            nn.LayerNorm(dim),
        )
        return network, dim

    return layers


def efficientnet(number: int) -> Layers:
    """torchvision's EfficientNet B0 to B4 (arXiv 1905.11946), with the dropout before its last layer."""

    def layers(channels: int, size: Size) -> tuple[nn.Module, int]:
        network = torchvision_network(f"efficientnet_b{number}", channels, "features.0.0")
        network.classifier[1] = nn.Identity()
        return network, EFFICIENTNET[number]

    return layers


WIDE_CNNS = ((128, 256), (64, 128), (32, 64), (16, 32), (8, 16))
DEEP_CNNS = ((32, 64, 128, 256), (32, 64, 128), (32, 64), (16, 32, 64), (8, 16, 32, 64))
"""Channels of the convolutions of the CNNs of H1 and H2."""


def cnn_name(widths: Sequence[int]) -> str:
    return "-".join(["dfml-cnn", *map(str, widths)])


for widths in dict.fromkeys(WIDE_CNNS + DEEP_CNNS):
    backbone(cnn_name(widths))(cnn(widths))
for width in (64, 32, 16, 8, 4):
    backbone(f"dfml-resnet-{width}")(resnet(width))
for dim in (512, 256, 128, 64, 32):
    backbone(f"dfml-vit-{dim}")(vit(dim))
for number in EFFICIENTNET:
    backbone(f"dfml-efficientnet-b{number}")(efficientnet(number))

group("dfml-h0", ["dfml-cnn-32-64"], None)
group("dfml-h1-cnn", [cnn_name(widths) for widths in WIDE_CNNS], None)
group("dfml-h1-resnet", [f"dfml-resnet-{width}" for width in (64, 32, 16, 8, 4)], None)
group("dfml-h1-vit", [f"dfml-vit-{dim}" for dim in (512, 256, 128, 64, 32)], None)
group("dfml-h2-cnn", [cnn_name(widths) for widths in DEEP_CNNS], None)
group("dfml-h2-efficientnet", [f"dfml-efficientnet-b{number}" for number in EFFICIENTNET], None)


class PreActivationBlock(nn.Module):
    """Residual block: two 3x3 convolutions, each after BatchNorm and ReLU.

    Where shapes differ, the shortcut is a 1x1 convolution of the activated input.
    """

    def __init__(self, channels: int, width: int, stride: int = 1) -> None:
        super().__init__()
        self.activate = nn.Sequential(nn.BatchNorm2d(channels), nn.ReLU())
        self.branch = nn.Sequential(
            nn.Conv2d(channels, width, 3, stride=stride, padding=1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.Conv2d(width, width, 3, padding=1, bias=False),
        )
        same = channels == width and stride == 1
        self.shortcut = None if same else nn.Conv2d(channels, width, 1, stride=stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        active = self.activate(x)
        total: Tensor = (x if self.shortcut is None else self.shortcut(active)) + self.branch(active)
        return total


class ShiftedPatches(nn.Module):
    """SPT: embed patches of the image and of four diagonally shifted copies as tokens [B, patches, dim].

    Shifts are half a patch. Images are padded right and below to a multiple of the patch.
    """

    SHIFTS = tuple((a, -a, b, -b) for a in (-PATCH // 2, PATCH // 2) for b in (-PATCH // 2, PATCH // 2))

    def __init__(self, channels: int, size: Size, dim: int) -> None:
        super().__init__()
        self.padding = (0, -size[1] % PATCH, 0, -size[0] % PATCH)
        inputs = channels * (1 + len(self.SHIFTS)) * PATCH**2
        self.embed = nn.Sequential(nn.LayerNorm(inputs), nn.Linear(inputs, dim))

    def forward(self, x: Tensor) -> Tensor:
        x = F.pad(x, self.padding)
        shifted = torch.cat([x, *(F.pad(x, shift) for shift in self.SHIFTS)], dim=1)
        tokens: Tensor = self.embed(F.unfold(shifted, PATCH, stride=PATCH).transpose(1, 2))
        return tokens


class Positions(nn.Module):
    """Prepend a class token and add learned positions: [B, n, dim] to [B, 1 + n, dim]."""

    def __init__(self, tokens: int, dim: int, dropout: float) -> None:
        super().__init__()
        self.token = nn.Parameter(torch.randn(1, 1, dim) * 0.02)
        self.position = nn.Parameter(torch.randn(1, 1 + tokens, dim) * 0.02)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.cat([self.token.expand(len(x), -1, -1), x], dim=1)
        embedded: Tensor = self.dropout(x + self.position)
        return embedded


class TransformerLayer(nn.Module):
    """Residual attention and MLP on tokens [B, n, dim], each after LayerNorm."""

    def __init__(self, dim: int, tokens: int, dropout: float) -> None:
        super().__init__()
        self.attention = nn.Sequential(nn.LayerNorm(dim), LocalSelfAttention(dim, tokens, dropout))
        self.mlp = nn.Sequential(
            nn.LayerNorm(dim),
            nn.Linear(dim, 2 * dim),
            nn.GELU(),
            nn.Dropout(dropout),
            nn.Linear(2 * dim, dim),
            nn.Dropout(dropout),
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(x)
        total: Tensor = x + self.mlp(x)
        return total


class LocalSelfAttention(nn.Module):
    """LSA: attention with a learned temperature in which no token attends to itself."""

    diagonal: Tensor

    def __init__(self, dim: int, tokens: int, dropout: float) -> None:
        super().__init__()
        self.heads = max(1, dim // HEAD)
        self.temperature = nn.Parameter(torch.tensor(HEAD**0.5))
        self.register_buffer("diagonal", torch.eye(tokens, dtype=torch.bool), persistent=False)
        self.qkv = nn.Linear(dim, 3 * self.heads * HEAD, bias=False)
        self.dropout = nn.Dropout(dropout)
        self.out = nn.Sequential(nn.Linear(self.heads * HEAD, dim), nn.Dropout(dropout))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(2, (3, self.heads, HEAD)).permute(2, 0, 3, 1, 4)  # each [B, heads, n, 64]
        scores = (q @ k.transpose(2, 3) / self.temperature).masked_fill(self.diagonal, -torch.inf)
        mixed: Tensor = self.out((self.dropout(scores.softmax(dim=3)) @ v).transpose(1, 2).flatten(2))
        return mixed


class ClassToken(nn.Module):
    """Select the first token: [B, n, dim] to [B, dim]."""

    def forward(self, x: Tensor) -> Tensor:
        return x[:, 0]
