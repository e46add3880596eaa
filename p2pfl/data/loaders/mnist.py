"""MNIST, Fashion-MNIST and EMNIST: arrays in IDX files, gzipped or not.

No MD5 is checked: an IDX file declares its size, and gzip has its own checksum.
"""

from __future__ import annotations

import gzip
import math
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

import numpy as np

from p2pfl.data.loaders.base import DatasetArrays, Images, Loader, dataset
from p2pfl.errors import DataError


@dataset("mnist")
@dataclass(frozen=True)
class Mnist(Loader):
    """MNIST: 60,000 + 10,000 handwritten digits, 1x28x28, in ``MNIST/raw/*-ubyte`` or ``*-ubyte.gz``."""

    folder: ClassVar[str] = "MNIST"
    """Folder under the root, and name of torchvision's class."""
    mirror: ClassVar[bool] = False
    PUBLISHED: ClassVar[bool] = True

    def files(self, root: Path) -> tuple[Path, ...]:
        return tuple(
            _plain_or_gz(root / self.folder / "raw" / f"{split}-{what}-ubyte")
            for split in ("train", "t10k")
            for what in ("images-idx3", "labels-idx1")
        )

    def download(self, root: Path) -> None:
        import torchvision.datasets

        getattr(torchvision.datasets, self.folder)(root, download=True)

    def read(self, root: Path) -> DatasetArrays:
        train_images, train_labels, test_images, test_labels = self.files(root)
        return DatasetArrays(
            read_idx(train_images, 3)[:, np.newaxis],
            read_idx(train_labels, 1).astype(np.int64),
            read_idx(test_images, 3)[:, np.newaxis],
            read_idx(test_labels, 1).astype(np.int64),
            classes=10,
            mirror=self.mirror,
            class_names=self._class_names(),
        )

    def _class_names(self) -> Sequence[str]:
        return ()  # the digits are the labels


@dataset("fashion-mnist")
@dataclass(frozen=True)
class FashionMnist(Mnist):
    """Fashion-MNIST: 60,000 + 10,000 photographs of clothes, 1x28x28, in ``FashionMNIST/raw``."""

    folder: ClassVar[str] = "FashionMNIST"
    mirror: ClassVar[bool] = True

    def _class_names(self) -> Sequence[str]:
        from torchvision.datasets.mnist import FashionMNIST

        return tuple(FashionMNIST.classes)


@dataset("emnist")
@dataclass(frozen=True)
class Emnist(Loader):
    """EMNIST: handwritten letters and digits, 1x28x28, in ``EMNIST/raw/emnist-SPLIT-*-ubyte`` or ``.gz``.

    Images are transposed to be upright.
    """

    PUBLISHED: ClassVar[bool] = True
    CLASSES: ClassVar[Mapping[str, int]] = {
        "balanced": 47,
        "byclass": 62,
        "bymerge": 47,
        "letters": 26,
        "digits": 10,
        "mnist": 10,
    }

    split: Literal["balanced", "byclass", "bymerge", "letters", "digits", "mnist"] = "balanced"
    """Official split: ``balanced`` has 47 classes and 112,800 + 18,800 images, ``letters`` 26 and
    124,800 + 20,800, ``digits`` 10 and 240,000 + 40,000."""

    def files(self, root: Path) -> tuple[Path, ...]:
        return tuple(
            _plain_or_gz(root / "EMNIST" / "raw" / f"emnist-{self.split}-{half}-{what}-ubyte")
            for half in ("train", "test")
            for what in ("images-idx3", "labels-idx1")
        )

    def download(self, root: Path) -> None:
        from torchvision.datasets import EMNIST

        EMNIST(root, split=self.split, download=True)

    def read(self, root: Path) -> DatasetArrays:
        from torchvision.datasets.mnist import EMNIST

        train_images, train_labels, test_images, test_labels = self.files(root)
        first = 1 if self.split == "letters" else 0
        return DatasetArrays(
            np.ascontiguousarray(read_idx(train_images, 3).transpose(0, 2, 1))[:, np.newaxis],
            read_idx(train_labels, 1).astype(np.int64) - first,
            np.ascontiguousarray(read_idx(test_images, 3).transpose(0, 2, 1))[:, np.newaxis],
            read_idx(test_labels, 1).astype(np.int64) - first,
            classes=self.CLASSES[self.split],
            mirror=False,
            class_names=EMNIST.classes_split_dict[self.split][first:],
        )


def read_idx(path: Path, dimensions: int) -> Images:
    """Read an IDX file of unsigned bytes, gzipped if its name ends in ``.gz``.

    Raises:
        DataError: the file is unreadable, truncated, or of another type.
    """
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            data = file.read()
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path}: unreadable or truncated: {error}") from error
    # Header: 0, 0, the element type (8: unsigned byte), the number of dimensions, then their sizes as big-endian
    # uint32. The elements follow in row-major order.
    header = 4 + 4 * dimensions
    if len(data) >= header and data[:4] != bytes((0, 0, 8, dimensions)):
        raise DataError(f"{path}: not an IDX file of unsigned bytes with {dimensions} dimensions")
    shape = [int.from_bytes(data[at : at + 4], "big") for at in range(4, header, 4)]
    if len(data) < header or len(data) != header + math.prod(shape):
        raise DataError(
            f"{path}: truncated or damaged: {len(data)} bytes do not match the header; "
            "delete the file and fetch it again"
        )
    return np.frombuffer(data, np.uint8, offset=header).reshape(shape)


def _plain_or_gz(path: Path) -> Path:
    compressed = path.with_name(path.name + ".gz")
    return compressed if not path.exists() and compressed.exists() else path
