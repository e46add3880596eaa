"""Random color changes of batches, by a different amount for each sample.

The formulas are torchvision's, with fewer passes over memory.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from p2pfl.data.transforms import at_device, chosen_samples

_RED, _GREEN, _BLUE = 0.299, 0.587, 0.114


class ColorJitter(nn.Module):
    """Change brightness, contrast, saturation and hue of images [B, C, H, W] in [0, 1] with probability ``p``.

    Gray images (C = 1) have no saturation and no hue, as in torchvision: only brightness and contrast change.

    Factors are uniform in 1 ± ``brightness``, 1 ± ``contrast`` and 1 ± ``saturation``; the hue turns by up to ±
    ``hue`` of a full circle. Amounts are drawn per sample from torch's global RNG on the CPU; the order of the four
    changes is drawn per batch.
    """

    def __init__(self, brightness: float, contrast: float, saturation: float, hue: float, p: float) -> None:
        super().__init__()
        self.ranges = torch.tensor([brightness, contrast, saturation, hue])
        self.p = p

    def forward(self, images: Tensor) -> Tensor:
        chosen = chosen_samples(len(images), self.p)
        drawn = ((2.0 * torch.rand(len(images), 4) - 1.0) * self.ranges)[chosen]
        order = torch.randperm(4).tolist()
        chosen, drawn = at_device(chosen, images), at_device(drawn, images).reshape(-1, 4, 1, 1, 1)
        x = images[chosen]
        if images.shape[1] == 1:
            order = [index for index in order if index < 2]
        for index in order:
            change = (scale_brightness, scale_contrast, scale_saturation, turn_hue)[index]
            x = change(x, drawn[:, index] if index == 3 else 1.0 + drawn[:, index])
        return images.index_copy(0, chosen, x)


class RandomGrayscale(nn.Module):
    """Replace images [B, 3, H, W] by their luminance, each with probability 0.2."""

    def forward(self, images: Tensor) -> Tensor:
        chosen = at_device(chosen_samples(len(images), 0.2), images)
        return images.index_copy(0, chosen, gray(images[chosen]).expand(-1, 3, -1, -1))


def gray(images: Tensor) -> Tensor:
    """Luminance of images [B, 3, H, W] (ITU-R BT.601) or [B, 1, H, W], [B, 1, H, W]."""
    if images.shape[1] == 1:
        return images
    return images[:, :1] * _RED + images[:, 1:2] * _GREEN + images[:, 2:] * _BLUE


def scale_brightness(images: Tensor, factor: Tensor) -> Tensor:
    """Scale images by ``factor`` [B, 1, 1, 1], clamped to [0, 1]."""
    return (images * factor).clamp_(0.0, 1.0)


def scale_contrast(images: Tensor, factor: Tensor) -> Tensor:
    """Scale differences to the mean luminance of each image, clamped to [0, 1]."""
    mean = gray(images).mean(dim=(2, 3), keepdim=True)
    return torch.lerp(mean, images, factor).clamp_(0.0, 1.0)


def scale_saturation(images: Tensor, factor: Tensor) -> Tensor:
    """Scale differences to the luminance of each pixel, clamped to [0, 1]."""
    return torch.lerp(gray(images), images, factor).clamp_(0.0, 1.0)


def turn_hue(images: Tensor, turn: Tensor) -> Tensor:
    """Rotate the hue by ``turn`` [B, 1, 1, 1] full circles; keep value and saturation (HSV).

    With V the largest and m the smallest channel, C = V − m and the hue h in sixths of the circle, the channels of
    a color are V − C · clamp(min(k, 4 − k), 0, 1) with k = (n + h) mod 6 and n = 5, 3, 1 for red, green, blue.
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
    k = (hue[:, None] + torch.arange(5.0, 0.0, -2.0, device=images.device).reshape(1, 3, 1, 1)).remainder_(6.0)
    weight = torch.minimum(k, 4.0 - k).clamp_(0.0, 1.0)
    return torch.addcmul(value[:, None], chroma[:, None], weight, value=-1.0)
