"""Augmentations: one class each, and the table of their names.

An augmentation draws separately for every sample of a batch, from torch's global RNG on the CPU for images of any
device; the caller swaps in the peer's stream.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from pydantic import Field, PositiveInt
from torch import Tensor, nn
from torch.nn.functional import pad

from p2pfl.data.colors import ColorJitter, RandomGrayscale
from p2pfl.data.transforms import RandomBlur, RandomFlip, RandomResizedCrop, at_device
from p2pfl.inputs import Kind, Size
from p2pfl.options import Options
from p2pfl.registry import Table, options_decorator

Augment = Callable[[Tensor], Tensor]
"""Maps float images [B, C, H, W] in [0, 1] to random variations of the same shape, dtype, device and range."""


@dataclass(frozen=True)
class Augmentation(Options, ABC):
    """Base class of all augmentations: the options of ``augment: {name: …}`` in a run file."""

    takes: ClassVar[tuple[Kind, ...]] = ("images",)
    """The kinds of inputs that it varies; with others it is refused."""
    varies_colors: ClassVar[bool] = False
    """Whether images must be grayscale or RGB."""

    @abstractmethod
    def build(self, channels: int, size: Size, mirror: bool) -> Augment:
        """Build the augmentation.

        Args:
            channels, size: of the inputs, as in p2pfl/inputs.py: of images 1 or 3, and height and width.
            mirror: whether mirroring an image keeps its label; if not, images are never flipped.
        """


AUGMENTATIONS: Table[type[Augmentation]] = Table("augmentation")

augmentation = options_decorator(AUGMENTATIONS, Augmentation)
"""Register a subclass of ``p2pfl.data.Augmentation``."""


@augmentation("none")
@dataclass(frozen=True)
class NoAugmentation(Augmentation):
    """Inputs unchanged."""

    takes: ClassVar[tuple[Kind, ...]] = ("images", "series", "vectors", "tokens")

    def build(self, channels: int, size: Size, mirror: bool) -> Augment:
        return lambda images: images


@augmentation("mapl")
@dataclass(frozen=True)
class Mapl(Augmentation):
    """MAPL's views (Table 8): crops of at least 20 %, color changes, blur, flips.

    Brightness and contrast of grayscale images change too. All samples of a batch have the same order of changes.
    """

    varies_colors: ClassVar[bool] = True

    no_blur: bool = False
    """Leave out the blur, as the released code does."""

    def build(self, channels: int, size: Size, mirror: bool) -> Augment:
        return _views(channels, size, mirror, smallest=0.2, strength=0.5, blur=not self.no_blur)


@augmentation("simclr")
@dataclass(frozen=True)
class Simclr(Augmentation):
    """SimCLR's views (arXiv 2002.05709, appendix A; defaults for CIFAR-10, appendix B.9).

    Like ``mapl``, with crops of at least 8 %.
    """

    varies_colors: ClassVar[bool] = True

    strength: Annotated[float, Field(gt=0.0, le=1.0)] = 0.5
    """Strength s of the color changes: brightness, contrast and saturation by up to 0.8 s, hue by up to 0.2 s."""
    blur: bool = False
    """Blur half of the images, as SimCLR does for large ones."""

    def build(self, channels: int, size: Size, mirror: bool) -> Augment:
        return _views(channels, size, mirror, smallest=0.08, strength=self.strength, blur=self.blur)


@augmentation("crop-flip")
@dataclass(frozen=True)
class CropFlip(Augmentation):
    """Shifts by up to 4 pixels, black where there was no image, and flips: usual for supervised training on CIFAR."""

    margin: PositiveInt = 4
    """Largest shift, in pixels."""

    def build(self, channels: int, size: Size, mirror: bool) -> Augment:
        height, width = size
        flip = RandomFlip()

        def vary(images: Tensor) -> Tensor:
            count, shifts = len(images), 2 * self.margin + 1
            crops = pad(images, [self.margin] * 4).unfold(2, height, 1).unfold(3, width, 1)
            down, right = at_device(torch.randint(shifts, (2, count)), images)
            shifted = crops[torch.arange(count, device=images.device), :, down, right]
            return flip(shifted) if mirror else shifted

        return vary


def _views(channels: int, size: Size, mirror: bool, *, smallest: float, strength: float, blur: bool) -> Augment:
    """SimCLR's augmentation, with the parameters of its variants."""
    steps: list[nn.Module] = [RandomResizedCrop(smallest)]
    steps.append(ColorJitter(0.8 * strength, 0.8 * strength, 0.8 * strength, 0.2 * strength, p=0.8))
    if channels == 3:
        steps.append(RandomGrayscale())
    if blur and min(size) > 1:
        # SimCLR's kernel: a tenth of the image, odd; at least 3 pixels, since a kernel of 1 has no effect. Images of
        # one row or column have no pixels to reflect at their borders.
        steps.append(RandomBlur(max(3, min(size) // 10 | 1)))
    if mirror:
        steps.append(RandomFlip())
    return nn.Sequential(*steps)
