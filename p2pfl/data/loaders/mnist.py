"""MNIST, Fashion-MNIST and EMNIST: arrays in IDX files, gzipped or not.

No MD5 is checked: an IDX file declares its size, and gzip has its own checksum.
"""

from __future__ import annotations

import gzip
import math
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

import numpy as np

from p2pfl.data.loaders.base import DatasetArrays, Images, Labels, Loader, dataset
from p2pfl.errors import DataError


@dataclass(frozen=True)
class IdxFiles(Loader):
    """Base class of these datasets: images and labels of each split in ``FOLDER/raw``."""

    PUBLISHED: ClassVar[bool] = True
    folder: ClassVar[str]
    """Folder under the root, and name of torchvision's class."""

    @property
    def stems(self) -> tuple[str, str]:
        """The first parts of the names of training and test files."""
        return "train", "t10k"

    def files(self, root: Path) -> tuple[Path, ...]:
        raw = root / self.folder / "raw"
        return tuple(
            _plain_or_gz(raw / f"{stem}-{what}-ubyte")
            for stem in self.stems
            for what in ("images-idx3", "labels-idx1")
        )

    def download(self, root: Path) -> None:
        import torchvision.datasets

        getattr(torchvision.datasets, self.folder)(root, download=True)

    def splits(self, root: Path) -> list[tuple[Images, Labels]]:
        """Return images, uint8 [N, 1, 28, 28], and labels of the training and the test split."""
        paths = self.files(root)
        return [
            (read_idx(images, 3)[:, np.newaxis], read_idx(labels, 1).astype(np.int64))
            for images, labels in (paths[:2], paths[2:])
        ]


@dataset("mnist")
@dataclass(frozen=True)
class Mnist(IdxFiles):
    """MNIST: 60,000 + 10,000 handwritten digits, 1x28x28, in ``MNIST/raw/*-ubyte`` or ``*-ubyte.gz``."""

    folder: ClassVar[str] = "MNIST"

    def read(self, root: Path) -> DatasetArrays:
        train, test = self.splits(root)
        return DatasetArrays(*train, *test, classes=10, mirror=False)


@dataset("fashion-mnist")
@dataclass(frozen=True)
class FashionMnist(IdxFiles):
    """Fashion-MNIST: 60,000 + 10,000 photographs of clothes, 1x28x28, in ``FashionMNIST/raw``."""

    folder: ClassVar[str] = "FashionMNIST"

    def read(self, root: Path) -> DatasetArrays:
        from torchvision.datasets.mnist import FashionMNIST

        train, test = self.splits(root)
        return DatasetArrays(*train, *test, classes=10, mirror=True, class_names=tuple(FashionMNIST.classes))


@dataset("emnist")
@dataclass(frozen=True)
class Emnist(IdxFiles):
    """EMNIST: handwritten letters and digits, 1x28x28, in ``EMNIST/raw/emnist-SPLIT-*-ubyte`` or ``.gz``.

    Images are transposed to be upright.
    """

    folder: ClassVar[str] = "EMNIST"

    split: Literal["balanced", "byclass", "bymerge", "letters", "digits", "mnist"] = "balanced"
    """Official split: ``balanced`` has 47 classes and 112,800 + 18,800 images, ``letters`` 26 and
    124,800 + 20,800, ``digits`` 10 and 240,000 + 40,000."""

    @property
    def stems(self) -> tuple[str, str]:
        return f"emnist-{self.split}-train", f"emnist-{self.split}-test"

    def download(self, root: Path) -> None:
        from torchvision.datasets import EMNIST

        EMNIST(root, split=self.split, download=True)

    def read(self, root: Path) -> DatasetArrays:
        from torchvision.datasets.mnist import EMNIST

        first = 1 if self.split == "letters" else 0
        names = EMNIST.classes_split_dict[self.split][first:]
        train, test = (
            (np.ascontiguousarray(images.transpose(0, 1, 3, 2)), labels - first)
            for images, labels in self.splits(root)
        )
        return DatasetArrays(*train, *test, classes=len(names), mirror=False, class_names=names)


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
