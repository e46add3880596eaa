"""Four small backbones of different architectures, for images from 8x8 to 32x32.

Each has 20k to 200k parameters and trains on 128 images of 8x8 in about 10 ms on one CPU core, so that a laptop can
run twenty peers. All end in a linear layer to the features.
"""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F

from p2pfl.inputs import Size
from p2pfl.models.registration import backbone, group


@backbone("tiny-cnn", features=64)
def cnn(channels: int, size: Size, features: int) -> nn.Module:
    """CNN of two 3x3 convolutions with 32 and 64 channels, BatchNorm."""
    return nn.Sequential(
        *_conv(channels, 32, 3, _first_stride(size)),
        nn.MaxPool2d(2),
        *_conv(32, 64, 3),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Linear(64 * 2 * 2, features),
    )


@backbone("tiny-wide", features=64)
def wide(channels: int, size: Size, features: int) -> nn.Module:
    """CNN of one 5x5 convolution with 64 channels, BatchNorm, max pooling to 4x4, a hidden layer of 128."""
    return nn.Sequential(
        *_conv(channels, 64, 5, _first_stride(size)),
        nn.AdaptiveMaxPool2d(4),
        nn.Flatten(),
        nn.Linear(64 * 4 * 4, 128),
        nn.ReLU(),
        nn.Linear(128, features),
    )


@backbone("tiny-residual", features=64)
def residual(channels: int, size: Size, features: int) -> nn.Module:
    """ResNet of five 3x3 convolutions in two blocks with 24 and 48 channels, GroupNorm."""
    return nn.Sequential(
        nn.Conv2d(channels, 24, 3, stride=2, padding=1),
        ResidualBlock(24, 24, stride=1),
        ResidualBlock(24, 48, stride=2),
        nn.GroupNorm(8, 48),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Linear(48 * 2 * 2, features),
    )


@backbone("tiny-mixer", features=64)
def mixer(channels: int, size: Size, features: int) -> nn.Module:
    """MLP-Mixer (arXiv 2105.01601) of two blocks on a 4x4 grid of patches, 48 channels, LayerNorm.

    Without the Mixer's final mean over tokens: with it, learning from 70 samples took five times as long.
    """
    return nn.Sequential(
        Patches(channels, size, grid=4, width=48),
        MixerBlock(tokens=16, width=48),
        MixerBlock(tokens=16, width=48),
        nn.LayerNorm(48),
        nn.Flatten(),
        nn.Linear(16 * 48, features),
    )


group("tiny4", ("tiny-cnn", "tiny-wide", "tiny-residual", "tiny-mixer"), features=64)


class ResidualBlock(nn.Module):
    """Residual block: two 3x3 convolutions, each after GroupNorm and ReLU; 1x1 shortcut where shapes differ."""

    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        self.branch = nn.Sequential(
            nn.GroupNorm(8, channels),
            nn.ReLU(),
            nn.Conv2d(channels, width, 3, stride=stride, padding=1, bias=False),
            nn.GroupNorm(8, width),
            nn.ReLU(),
            nn.Conv2d(width, width, 3, padding=1),
        )
        same = channels == width and stride == 1
        self.shortcut = nn.Identity() if same else nn.Conv2d(channels, width, 1, stride=stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        total: Tensor = self.shortcut(x) + self.branch(x)
        return total


class Patches(nn.Module):
    """Embed images [B, C, H, W] as tokens [B, grid², width], padded right and below to a multiple of the grid."""

    def __init__(self, channels: int, size: Size, grid: int, width: int) -> None:
        super().__init__()
        patch = -(-size[0] // grid), -(-size[1] // grid)
        self.padding = (0, grid * patch[1] - size[1], 0, grid * patch[0] - size[0])
        self.embed = nn.Conv2d(channels, width, patch, stride=patch)

    def forward(self, x: Tensor) -> Tensor:
        tokens: Tensor = self.embed(F.pad(x, self.padding))
        return tokens.flatten(2).transpose(1, 2)


class MixerBlock(nn.Module):
    """Two residual MLPs on [B, tokens, width]: the first mixes tokens, the second channels."""

    def __init__(self, tokens: int, width: int) -> None:
        super().__init__()
        self.token_norm = nn.LayerNorm(width)
        self.token_mlp = _mlp(tokens)
        self.channel_norm = nn.LayerNorm(width)
        self.channel_mlp = _mlp(width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.token_mlp(self.token_norm(x).transpose(1, 2)).transpose(1, 2)
        mixed: Tensor = x + self.channel_mlp(self.channel_norm(x))
        return mixed


def _first_stride(size: Size) -> int:
    """Stride 2 from 16x16 on: four times as fast."""
    return 2 if min(size) >= 16 else 1


def _conv(channels: int, width: int, kernel: int, stride: int = 1) -> tuple[nn.Module, ...]:
    convolution = nn.Conv2d(channels, width, kernel, stride, padding=kernel // 2, bias=False)
    return convolution, nn.BatchNorm2d(width), nn.ReLU()


def _mlp(width: int) -> nn.Module:
    return nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
