"""Random changes of colour for whole batches, each sample by amounts of its own.

The formulas are those of torchvision and kornia; the passes over memory are fewer. Changing the hue of a batch of 64
images of 32x32 takes a quarter of the time that kornia 0.9 takes, and that was half of the whole input pipeline
(docs/benchmarks-pipeline.md).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

_RED, _GREEN, _BLUE = 0.299, 0.587, 0.114


class ColorJitter(nn.Module):
    """Brightness, contrast, saturation and hue of images [B, 3, H, W] in [0, 1], changed with probability ``p``.

    Factors are uniform in 1 ± ``brightness``, 1 ± ``contrast`` and 1 ± ``saturation``, the turn of the hue in
    ± ``hue`` of the whole circle. All is drawn per sample from torch's global RNG on the CPU, but for the order of
    the four, which a batch shares.
    """

    def __init__(self, brightness: float, contrast: float, saturation: float, hue: float, p: float) -> None:
        super().__init__()
        self.ranges = torch.tensor([brightness, contrast, saturation, hue])
        self.p = p

    def forward(self, images: Tensor) -> Tensor:
        chosen = torch.rand(len(images)) < self.p
        drawn = (2.0 * torch.rand(len(images), 4) - 1.0) * self.ranges
        order = torch.randperm(4).tolist()
        chosen, drawn = chosen.to(images.device), drawn.to(images.device)
        x, drawn = images[chosen], drawn[chosen].reshape(-1, 4, 1, 1, 1)
        for which in order:
            change = (scale_brightness, scale_contrast, scale_saturation, turn_hue)[which]
            x = change(x, drawn[:, which] if which == 3 else 1.0 + drawn[:, which])
        changed = images.clone()
        changed[chosen] = x
        return changed


def grey(images: Tensor) -> Tensor:
    """Luminance of images [B, 3, H, W], [B, 1, H, W] (ITU-R BT.601)."""
    return images[:, :1] * _RED + images[:, 1:2] * _GREEN + images[:, 2:] * _BLUE


def scale_brightness(images: Tensor, factor: Tensor) -> Tensor:
    """images * factor, in [0, 1]; the factor has the shape [B, 1, 1, 1], here and below."""
    return (images * factor).clamp_(0.0, 1.0)


def scale_contrast(images: Tensor, factor: Tensor) -> Tensor:
    """Away from the mean luminance of each image by the factor, in [0, 1]."""
    mean = grey(images).mean(dim=(2, 3), keepdim=True)
    return torch.lerp(mean, images, factor).clamp_(0.0, 1.0)


def scale_saturation(images: Tensor, factor: Tensor) -> Tensor:
    """Away from the luminance of each pixel by the factor, in [0, 1]."""
    return torch.lerp(grey(images), images, factor).clamp_(0.0, 1.0)


def turn_hue(images: Tensor, turn: Tensor) -> Tensor:
    """The hue turned by so much of the whole circle; value and saturation (HSV) stay.

    With V the largest and m the smallest channel, C = V − m and the hue h in sixths of the circle, the channels of
    a colour are V − C · clamp(min(k, 4 − k), 0, 1) with k = (n + h) mod 6 and n = 5, 3, 1 for red, green, blue.
    """
    red, green, blue = images.unbind(1)
    value = images.amax(1)
    chroma = value - images.amin(1)
    divisor = chroma.clamp(min=1e-12)
    hue = torch.where(
        red == value,
        (green - blue) / divisor,
        torch.where(green == value, (blue - red) / divisor + 2.0, (red - green) / divisor + 4.0),
    )
    hue = hue + 6.0 * turn.reshape(-1, 1, 1)
    k = (hue[:, None] + torch.tensor([5.0, 3.0, 1.0], device=images.device).reshape(1, 3, 1, 1)).remainder_(6.0)
    weight = torch.minimum(k, 4.0 - k).clamp_(0.0, 1.0)
    return torch.addcmul(value[:, None], chroma[:, None], weight, value=-1.0)
