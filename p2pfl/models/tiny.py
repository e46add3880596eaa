"""Four small backbones that differ in depth, width and kind, for images from 8x8 to 32x32.

Each has 20k to 200k parameters at any of those sizes and takes about 10 ms to train on 128 images of 8x8
on one CPU core: what a laptop that plays twenty peers can bear. All end in a linear layer to the features.
"""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F


def cnn(channels: int, size: tuple[int, int], features: int) -> nn.Module:
    """Two 3x3 convolutions, 32 and 64 wide, BatchNorm."""
    return nn.Sequential(
        *_conv(channels, 32, 3, _first_stride(size)),
        nn.MaxPool2d(2),
        *_conv(32, 64, 3),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Linear(64 * 2 * 2, features),
    )


def wide(channels: int, size: tuple[int, int], features: int) -> nn.Module:
    """One 5x5 convolution, 64 wide, BatchNorm; the maxima of a 4x4 grid into a hidden layer of 128."""
    return nn.Sequential(
        *_conv(channels, 64, 5, _first_stride(size)),
        nn.AdaptiveMaxPool2d(4),
        nn.Flatten(),
        nn.Linear(64 * 4 * 4, 128),
        nn.ReLU(),
        nn.Linear(128, features),
    )


def residual(channels: int, size: tuple[int, int], features: int) -> nn.Module:
    """Five 3x3 convolutions in two residual blocks, 24 and 48 wide, GroupNorm."""
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


def mixer(channels: int, size: tuple[int, int], features: int) -> nn.Module:
    """A 4x4 grid of patches through two blocks of an MLP-Mixer, 48 wide (arXiv 2105.01601), LayerNorm.

    The mean over tokens that ends a Mixer is left out: with 70 samples it took five times as long to learn.
    """
    return nn.Sequential(
        Patches(channels, size, grid=4, width=48),
        MixerBlock(tokens=16, width=48),
        MixerBlock(tokens=16, width=48),
        nn.LayerNorm(48),
        nn.Flatten(),
        nn.Linear(16 * 48, features),
    )


class ResidualBlock(nn.Module):
    """x plus two 3x3 convolutions of it, each after GroupNorm and ReLU; 1x1 shortcut where shapes differ."""

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
    """Images [B, C, H, W] to tokens [B, grid², width]; pads right and below to a multiple of the grid."""

    def __init__(self, channels: int, size: tuple[int, int], grid: int, width: int) -> None:
        super().__init__()
        patch = -(-size[0] // grid), -(-size[1] // grid)
        self.padding = (0, grid * patch[1] - size[1], 0, grid * patch[0] - size[0])
        self.embed = nn.Conv2d(channels, width, patch, stride=patch)

    def forward(self, x: Tensor) -> Tensor:
        tokens: Tensor = self.embed(F.pad(x, self.padding))
        return tokens.flatten(2).transpose(1, 2)


class MixerBlock(nn.Module):
    """Two residual MLPs on [B, tokens, width]: one mixes tokens, the next one channels."""

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


def _first_stride(size: tuple[int, int]) -> int:
    """2 for images that can afford it, which makes them four times as fast."""
    return 2 if min(size) >= 16 else 1


def _conv(channels: int, width: int, kernel: int, stride: int = 1) -> tuple[nn.Module, ...]:
    convolution = nn.Conv2d(channels, width, kernel, stride, padding=kernel // 2, bias=False)
    return convolution, nn.BatchNorm2d(width), nn.ReLU()


def _mlp(width: int) -> nn.Module:
    return nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
