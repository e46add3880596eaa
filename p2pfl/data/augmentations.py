"""How images are varied before each step: one class per recipe, and the table of their names.

A recipe draws for every sample of a batch separately, from torch's global RNG on the CPU whatever device the
images are on: the caller puts the peer's own stream there. kornia does this, and so do our own changes of colour,
which are faster; torchvision's transforms would draw once per batch.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated

from pydantic import Field
from torch import Tensor, nn

from p2pfl.data.colors import ColorJitter
from p2pfl.options import Options, Table

Augment = Callable[[Tensor], Tensor]
"""Float images in [0, 1], [B, C, H, W], to a variation of each; same shape, dtype, device and range."""


@dataclass(frozen=True)
class Augmentation(Options, ABC):
    """Base of all recipes: what stands behind ``augmentation: {name: …}`` in a run file."""

    @abstractmethod
    def build(self, channels: int, size: tuple[int, int], mirror: bool) -> Augment:
        """The recipe for images of ``channels`` x ``size`` (height, width).

        Args:
            mirror: whether a mirror image still has its label; without it nothing is flipped.
        """


@dataclass(frozen=True)
class NoAugmentation(Augmentation):
    """Images as they are."""

    def build(self, channels: int, size: tuple[int, int], mirror: bool) -> Augment:
        return lambda images: images


@dataclass(frozen=True)
class Mapl(Augmentation):
    """MAPL's views: crops of a fifth or more, colour, blur and mirror images.

    Grey images (one channel) have no colour to change. A batch shares only the order of the colour changes.
    """

    def build(self, channels: int, size: tuple[int, int], mirror: bool) -> Augment:
        return _views(channels, size, mirror, smallest=0.2, strength=0.5, blur=True)


@dataclass(frozen=True)
class Simclr(Augmentation):
    """SimCLR's views (arXiv 2002.05709, appendix A; the defaults are those for CIFAR-10, appendix B.9).

    As ``mapl``, but crops begin at 8 % of the image.
    """

    strength: Annotated[float, Field(gt=0.0, le=1.0)] = 0.5
    """s of the colour changes: brightness, contrast and saturation by up to 0.8 s, hue by up to 0.2 s."""
    blur: bool = False
    """Blur half of the images, as is done for large ones."""

    def build(self, channels: int, size: tuple[int, int], mirror: bool) -> Augment:
        return _views(channels, size, mirror, smallest=0.08, strength=self.strength, blur=self.blur)


def _views(
    channels: int, size: tuple[int, int], mirror: bool, *, smallest: float, strength: float, blur: bool
) -> Augment:
    """The recipe that SimCLR and its heirs share."""
    import kornia.augmentation as K

    # "resample" crops and resizes all samples at once; the default goes through them one by one.
    steps: list[nn.Module] = [K.RandomResizedCrop(size, scale=(smallest, 1.0), cropping_mode="resample")]
    if channels == 3:
        steps.append(ColorJitter(0.8 * strength, 0.8 * strength, 0.8 * strength, 0.2 * strength, p=0.8))
        steps.append(K.RandomGrayscale(p=0.2))
    if blur:
        # SimCLR's kernel: a tenth of the image, odd; at least 3 pixels, or nothing would be blurred.
        kernel = max(3, min(size) // 10 | 1)
        steps.append(K.RandomGaussianBlur((kernel, kernel), (0.1, 2.0), p=0.5))
    if mirror:
        steps.append(K.RandomHorizontalFlip(p=0.5))
    return nn.Sequential(*steps)


AUGMENTATIONS: Table[type[Augmentation]] = Table(
    "augmentation", {"none": NoAugmentation, "mapl": Mapl, "simclr": Simclr}
)
