"""How images are varied before each step: one class per recipe, and the table of their names.

A recipe draws for every sample of a batch separately, from torch's global RNG on the CPU whatever device the
images are on: the caller puts the peer's own stream there. kornia does this; torchvision's transforms would
draw once per batch.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor, nn

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
    """MAPL's views: crops, colour, blur and mirror images, after SimCLR (arXiv 2002.05709, appendix A).

    Grey images (one channel) have no colour to change. A batch shares only the order of the colour changes.
    """

    def build(self, channels: int, size: tuple[int, int], mirror: bool) -> Augment:
        import kornia.augmentation as K

        # "resample" crops and resizes all samples at once; the default goes through them one by one.
        steps: list[nn.Module] = [K.RandomResizedCrop(size, scale=(0.2, 1.0), cropping_mode="resample")]
        if channels == 3:
            steps.append(K.ColorJitter(0.4, 0.4, 0.4, 0.1, p=0.8))
            steps.append(K.RandomGrayscale(p=0.2))
        # SimCLR's kernel: a tenth of the image, odd; at least 3 pixels, or nothing would be blurred.
        kernel = max(3, min(size) // 10 | 1)
        steps.append(K.RandomGaussianBlur((kernel, kernel), (0.1, 2.0), p=0.5))
        if mirror:
            steps.append(K.RandomHorizontalFlip(p=0.5))
        return nn.Sequential(*steps)


AUGMENTATIONS: Table[type[Augmentation]] = Table("augmentation", {"none": NoAugmentation, "mapl": Mapl})
