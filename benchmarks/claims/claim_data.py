"""A plug-in for run files: the part of CIFAR-10, and a dataset's training images divided for choosing learning rates.

plugins: [benchmarks/claims/claim_data.py]
data: {dataset: cifar10-part}                         # $P2PFL_DATA/cifar10-part/*.webp, labels.npz
data: {dataset: {name: held-out, of: cifar10-part}}   # tested on training images
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from p2pfl import plugins
from p2pfl.data.loaders.base import DatasetArrays, Images, Loader, split_off_test
from p2pfl.data.loaders.multi_style import CompositeLoader, DatasetOption, NamedLoader
from p2pfl.errors import DataError

MOSAICS = ("train0", "train1", "train2", "test")
SIDE, COLUMNS = 32, 25
"""Pixels of an image, and images in a row of a mosaic."""


@plugins.dataset("cifar10-part")
@dataclass(frozen=True)
class Cifar10Part(Loader):
    """The first 30,000 training and 5,000 test images of CIFAR-10, in lossless mosaics."""

    instructions = "a folder cifar10-part with train0.webp, train1.webp, train2.webp, test.webp and labels.npz"

    def files(self, root: Path) -> tuple[Path, ...]:
        folder = root / "cifar10-part"
        return (*(folder / f"{name}.webp" for name in MOSAICS), folder / "labels.npz")

    def read(self, root: Path) -> DatasetArrays:
        *mosaics, labels = self.files(root)
        try:
            images = [_images(path) for path in mosaics]
            with np.load(labels, allow_pickle=False) as content:  # noqa: TID251
                train, test = (content[name].astype(np.int64) for name in ("y_train", "y_test"))
        except (OSError, KeyError, ValueError) as error:
            raise DataError(f"{mosaics[0].parent}: damaged: {error}") from error
        return DatasetArrays(np.concatenate(images[:-1]), train, images[-1], test, 10, mirror=True)


def _images(path: Path) -> Images:
    """Read a mosaic into uint8 [N, 3, 32, 32]."""
    from PIL import Image

    with Image.open(path) as picture:
        mosaic = np.asarray(picture.convert("RGB"))
    tiles = mosaic.reshape(mosaic.shape[0] // SIDE, SIDE, COLUMNS, SIDE, 3)
    return np.ascontiguousarray(tiles.transpose(0, 2, 4, 1, 3).reshape(-1, 3, SIDE, SIDE))


@plugins.dataset("held-out")
@dataclass(frozen=True)
class HeldOut(CompositeLoader):
    """Another dataset's training images alone, a sixth of each class for testing; no test image is among them."""

    of: DatasetOption
    """The dataset, as a name or a mapping of a name and parameters."""

    def datasets(self) -> Sequence[NamedLoader]:
        return (self.of,)

    def read(self, root: Path) -> DatasetArrays:
        whole = self.of.loader.read(root)
        test = split_off_test(whole.train_labels, 1 / 6)
        styles = whole.train_styles
        divided = (None, None) if styles is None else (styles[~test], styles[test])
        images, labels = whole.train_images, whole.train_labels
        return DatasetArrays(
            images[~test], labels[~test], images[test], labels[test], whole.classes, whole.mirror, *divided
        )
