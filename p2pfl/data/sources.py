"""Where images come from: one class per dataset, and the table of their names.

A source names the files that it is made of, can fetch them, and decodes them into plain arrays. It is asked
to decode once per host; ``p2pfl.data.datasets`` keeps the result. Hence the heavy imports inside the methods:
a peer that finds the dataset decoded never pays for them.
"""

from __future__ import annotations

import gzip
import math
import zlib
from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from p2pfl.errors import DataError
from p2pfl.options import Options, Table

Images = npt.NDArray[np.uint8]
Labels = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Decoded:
    """A dataset as plain arrays.

    Attributes:
        train_images, test_images: uint8 [N, C, H, W].
        train_labels, test_labels: int64 [N], each in [0, classes).
        classes: number of classes, whether or not all of them occur.
        mirror: whether a mirror image still has its label (clothes: yes; digits: no).
    """

    train_images: Images
    train_labels: Labels
    test_images: Images
    test_labels: Labels
    classes: int
    mirror: bool


@dataclass(frozen=True)
class Source(Options, ABC):
    """Base of all datasets: what stands behind ``dataset: {name: …}`` in a run file."""

    def files(self, root: Path) -> tuple[Path, ...]:
        """The files under ``root`` that this dataset is made of, whether or not they exist."""
        return ()

    def download(self, root: Path) -> None:
        """Put the files there. Raises OSError or RuntimeError when that fails."""

    @abstractmethod
    def read(self, root: Path) -> Decoded:
        """Decode the files, all of which exist. Raises DataError naming the file that is damaged."""


@dataclass(frozen=True)
class Digits(Source):
    """scikit-learn's 1,797 handwritten digits, 1x8x8; comes with the library, nothing to download.

    It has no official split: here every fifth sample of each class is a test sample.
    """

    def read(self, root: Path) -> Decoded:
        from sklearn.datasets import load_digits

        bunch = load_digits()
        images = np.rint(bunch.images * (255 / 16)).astype(np.uint8)[:, np.newaxis]
        labels = bunch.target.astype(np.int64)
        test = np.zeros(len(labels), dtype=bool)
        for label in range(10):
            test[np.flatnonzero(labels == label)[4::5]] = True
        return Decoded(images[~test], labels[~test], images[test], labels[test], classes=10, mirror=False)


@dataclass(frozen=True)
class Mnist(Source):
    """MNIST: 60,000 + 10,000 handwritten digits, 1x28x28, as ``MNIST/raw/*-ubyte`` or ``*-ubyte.gz``."""

    folder: ClassVar[str] = "MNIST"
    """The folder under the root, which is also the name of torchvision's class."""
    mirror: ClassVar[bool] = False

    def files(self, root: Path) -> tuple[Path, ...]:
        return tuple(
            _plain_or_gz(root / self.folder / "raw" / f"{split}-{what}-ubyte")
            for split in ("train", "t10k")
            for what in ("images-idx3", "labels-idx1")
        )

    def download(self, root: Path) -> None:
        import torchvision.datasets

        getattr(torchvision.datasets, self.folder)(root, download=True)

    def read(self, root: Path) -> Decoded:
        train_images, train_labels, test_images, test_labels = self.files(root)
        return Decoded(
            read_idx(train_images, 3)[:, np.newaxis],
            read_idx(train_labels, 1).astype(np.int64),
            read_idx(test_images, 3)[:, np.newaxis],
            read_idx(test_labels, 1).astype(np.int64),
            classes=10,
            mirror=self.mirror,
        )


@dataclass(frozen=True)
class FashionMnist(Mnist):
    """Fashion-MNIST: 60,000 + 10,000 photographs of clothes, 1x28x28, in ``FashionMNIST/raw``."""

    folder: ClassVar[str] = "FashionMNIST"
    mirror: ClassVar[bool] = True


DATASETS: Table[type[Source]] = Table("dataset", {"digits": Digits, "mnist": Mnist, "fashion-mnist": FashionMnist})


def read_idx(path: Path, dimensions: int) -> Images:
    """The array in an IDX file of unsigned bytes, gzipped if its name ends in ``.gz``.

    Raises DataError if the file is unreadable, truncated, or holds something else.
    """
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            data = file.read()
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path}: unreadable or truncated: {error}") from error
    # The magic number is 0, 0, the element type (8: unsigned byte) and the number of dimensions; then come
    # their sizes as big-endian uint32, then the elements, last dimension fastest.
    header = 4 + 4 * dimensions
    if len(data) >= header and data[:4] != bytes((0, 0, 8, dimensions)):
        raise DataError(f"{path}: not an IDX file of unsigned bytes with {dimensions} dimension(s)")
    shape = [int.from_bytes(data[at : at + 4], "big") for at in range(4, header, 4)]
    if len(data) < header or len(data) != header + math.prod(shape):
        raise DataError(
            f"{path}: truncated or damaged: {len(data)} bytes do not hold what the header announces; "
            "delete it and fetch it again"
        )
    return np.frombuffer(data, np.uint8, offset=header).reshape(shape)


def _plain_or_gz(path: Path) -> Path:
    packed = path.with_name(path.name + ".gz")
    return packed if not path.exists() and packed.exists() else path
