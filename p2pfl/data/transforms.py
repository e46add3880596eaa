"""Random changes of batches of images, drawn separately for each sample: crops, blur, flips.

The formulas are torchvision's, whose random transforms draw once per batch. As in ``colors.py``, random numbers come
from torch's global RNG on the CPU, so that images on any device get the same views.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn.functional import grid_sample, pad

from p2pfl.inputs import Size

_ATTEMPTS = 10
"""Boxes that are drawn for a crop, of which the first that fits is taken (torchvision's number)."""


class RandomResizedCrop(nn.Module):
    """Crop images [B, C, H, W] to random boxes and resize these to H x W, bilinearly.

    A box has ``smallest`` to 1 of the image's area and an aspect ratio from 3/4 to 4/3, log-uniform; its sides and
    position are whole pixels. Where none of ten fits, it is the largest centered box within these ratios.
    """

    narrowest, widest = 3 / 4, 4 / 3

    def __init__(self, smallest: float) -> None:
        super().__init__()
        self.smallest = smallest

    def forward(self, images: Tensor) -> Tensor:
        boxes = self.draw(len(images), (images.shape[2], images.shape[3]))
        return resize_crops(images, at_device(boxes, images))

    def draw(self, count: int, size: Size) -> Tensor:
        """Draw boxes (top, left, height, width) for images of ``size``, int64 [count, 4]."""
        sides = torch.tensor(size)
        area, ratio = torch.rand(2, _ATTEMPTS, count)
        area = (self.smallest + (1.0 - self.smallest) * area) * size[0] * size[1]
        low, high = math.log(self.narrowest), math.log(self.widest)
        root = torch.exp((low + (high - low) * ratio) / 2)
        drawn = (area.sqrt()[..., None] * torch.stack([1 / root, root], dim=-1)).round().long()
        drawn = torch.cat([drawn, self.largest(size).expand(1, count, 2)])
        fits = ((drawn > 0) & (drawn <= sides)).all(-1)
        first = fits.int().argmax(0)
        box = drawn[first, torch.arange(count)]
        corner = (torch.rand(count, 2) * (sides - box + 1)).long()
        fallback = (first == _ATTEMPTS)[:, None]
        corner = torch.where(fallback, (sides - box) // 2, corner)
        return torch.cat([corner, box], dim=1)

    def largest(self, size: Size) -> Tensor:
        """Return height and width of the largest box within the aspect ratios, int64 [2]."""
        height, width = size
        return torch.tensor([min(height, round(width / self.narrowest)), min(width, round(height * self.widest))])


def resize_crops(images: Tensor, boxes: Tensor) -> Tensor:
    """Resize the part ``boxes[b]`` (top, left, height, width) of image b to the size of the images, bilinearly.

    Args:
        images: float [B, C, H, W].
        boxes: int64 [B, 4].
    """
    (top, left), (height, width) = boxes[:, :2].T, boxes[:, 2:].T
    down = _centers(top, height, images.shape[2])
    right = _centers(left, width, images.shape[3])
    count, _, rows, columns = images.shape
    grid = torch.stack(
        [right[:, None, :].expand(count, rows, columns), down[:, :, None].expand(count, rows, columns)], dim=-1
    )
    return grid_sample(images, grid.to(images.dtype), mode="bilinear", padding_mode="border", align_corners=False)


def _centers(start: Tensor, length: Tensor, pixels: int) -> Tensor:
    """Return the sampling positions of ``pixels`` pixels in [start, start + length), half-pixel centers, [B, pixels].

    In the coordinates of ``grid_sample``: −1 and 1 are the edges of the image. They are clamped to the centers of the
    first and the last pixel of the crop, so that what lies beside the crop has no influence.
    """
    at = (torch.arange(pixels, device=start.device) + 0.5) * (length[:, None] / pixels) - 0.5
    at = torch.minimum(at.clamp(min=0.0), length[:, None] - 1.0) + start[:, None]
    return (2.0 * at + 1.0) / pixels - 1.0


class RandomBlur(nn.Module):
    """Blur images [B, C, H, W], each with probability 0.5, by a Gaussian with σ uniform in [0.1, 2.0] pixels.

    The kernel is ``size`` x ``size`` pixels; images have at least ``size // 2 + 1`` on each side.
    """

    smallest, largest = 0.1, 2.0

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = size

    def forward(self, images: Tensor) -> Tensor:
        chosen = chosen_samples(len(images), 0.5)
        sigmas = self.smallest + (self.largest - self.smallest) * torch.rand(len(images))[chosen]
        chosen, sigmas = at_device(chosen, images), at_device(sigmas, images)
        return images.index_copy(0, chosen, blur(images[chosen], sigmas, self.size))


def blur(images: Tensor, sigmas: Tensor, size: int) -> Tensor:
    """Convolve image b with a Gaussian of σ = ``sigmas[b]`` pixels, cut off at ``size`` (odd).

    Beyond its borders an image is reflected, without repeating the edge pixel.

    Args:
        images: float [B, C, H, W].
        sigmas: float [B].
    """
    half = size // 2
    offsets = torch.arange(-half, half + 1, device=images.device)
    weights = torch.exp(-0.5 * (offsets / sigmas[:, None]) ** 2)
    weights = (weights / weights.sum(dim=1, keepdim=True))[:, :, None, None, None]
    bordered = pad(images, [half] * 4, mode="reflect")
    return _convolve(_convolve(bordered, weights, dim=3), weights, dim=2)


def _convolve(images: Tensor, weights: Tensor, dim: int) -> Tensor:
    """Convolve along ``dim`` with ``weights`` [B, size, 1, 1, 1]; that side gets shorter by size − 1."""
    length = images.shape[dim] - weights.shape[1] + 1
    result = weights[:, 0] * images.narrow(dim, 0, length)
    for n in range(1, weights.shape[1]):
        result.addcmul_(weights[:, n], images.narrow(dim, n, length))
    return result


class RandomFlip(nn.Module):
    """Mirror images [B, C, H, W] left to right, each with probability 0.5."""

    def forward(self, images: Tensor) -> Tensor:
        flipped = at_device(torch.rand(len(images), 1, 1, 1) < 0.5, images)
        return torch.where(flipped, images.flip(3), images)


def chosen_samples(count: int, probability: float) -> Tensor:
    """Return the positions of the samples to change, each with ``probability``, int64 [chosen].

    Positions, on the CPU: a boolean mask on a GPU would make the host wait for it.
    """
    return (torch.rand(count) < probability).nonzero().flatten()


def at_device(drawn: Tensor, images: Tensor) -> Tensor:
    """Return what was drawn on the CPU on the device of the images, without waiting for the copy."""
    return drawn.to(images.device, non_blocking=True)
