"""Images of digits in other formats than MNIST's: scikit-learn's digits, USPS, SVHN."""

from __future__ import annotations

import bz2
import io
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np

from p2pfl.data.loaders.base import DatasetArrays, Images, Labels, Loader, dataset, read_mat, split_off_test, verify
from p2pfl.errors import DataError


@dataset("digits")
@dataclass(frozen=True)
class Digits(Loader):
    """scikit-learn's 1,797 handwritten digits, 1x8x8; installed with the library.

    There is no official split: every fifth sample of each class is a test sample.
    """

    def read(self, root: Path) -> DatasetArrays:
        from sklearn.datasets import load_digits

        bunch = load_digits()
        images = np.rint(bunch.images * (255 / 16)).astype(np.uint8)[:, np.newaxis]
        labels = bunch.target.astype(np.int64)
        test = split_off_test(labels, 1 / 5)
        return DatasetArrays(images[~test], labels[~test], images[test], labels[test], classes=10, mirror=False)


@dataset("usps")
@dataclass(frozen=True)
class Usps(Loader):
    """USPS: 7,291 + 2,007 handwritten digits from envelopes, 1x16x16, in ``usps.bz2`` and ``usps.t.bz2``.

    No MD5 is checked: bzip2 has its own checksum, and differently compressed copies of the files exist.
    """

    PUBLISHED: ClassVar[bool] = True

    def files(self, root: Path) -> tuple[Path, ...]:
        return root / "usps.bz2", root / "usps.t.bz2"

    def download(self, root: Path) -> None:
        from torchvision.datasets import USPS

        root.mkdir(parents=True, exist_ok=True)
        for train in (True, False):
            USPS(root, train=train, download=True)

    def read(self, root: Path) -> DatasetArrays:
        train, test = (_read_usps(path) for path in self.files(root))
        return DatasetArrays(*train, *test, classes=10, mirror=False)


def _read_usps(path: Path) -> tuple[Images, Labels]:
    """Read lines of a label from 1 to 10 and 256 times ``pixel:value``, pixel from 1 and value in [-1, 1]."""
    try:
        text = bz2.decompress(path.read_bytes())
    except (OSError, EOFError, ValueError) as error:
        raise DataError(f"{path}: unreadable or truncated: {error}; fetch it again") from error
    if not text.strip():
        raise DataError(f"{path}: not in the text format of USPS: the file is empty")
    try:
        table = np.loadtxt(io.BytesIO(text.replace(b":", b" ")), dtype=np.float32, ndmin=2)
    except ValueError as error:
        raise DataError(f"{path}: not in the text format of USPS: {error}") from error
    if table.shape[1] != 513 or (table[:, 1::2] != np.arange(1, 257)).any() or np.abs(table[:, 2::2]).max() > 1:
        raise DataError(
            f"{path}: not in the text format of USPS: expected a label and 256 pixels in [-1, 1] per line"
        )
    images = np.rint((table[:, 2::2] + 1) * 127.5).astype(np.uint8)
    return images.reshape(-1, 1, 16, 16), table[:, 0].astype(np.int64) - 1


@dataset("svhn")
@dataclass(frozen=True)
class Svhn(Loader):
    """SVHN: 73,257 + 26,032 house numbers, 3x32x32, in ``train_32x32.mat`` and ``test_32x32.mat``."""

    PUBLISHED: ClassVar[bool] = True
    checksums: ClassVar[Mapping[str, str]] = {
        "train_32x32.mat": "e26dedcc434d2e4c54c9b2d4a06d8373",
        "test_32x32.mat": "eb5a983be6a315427106f1b164d9cef3",
    }

    def files(self, root: Path) -> tuple[Path, ...]:
        return tuple(root / name for name in self.checksums)

    def download(self, root: Path) -> None:
        from torchvision.datasets import SVHN

        root.mkdir(parents=True, exist_ok=True)
        for split in ("train", "test"):
            SVHN(root, split=split, download=True)

    def read(self, root: Path) -> DatasetArrays:
        train, test = (self._read(path) for path in self.files(root))
        return DatasetArrays(*train, *test, classes=10, mirror=False)

    def _read(self, path: Path) -> tuple[Images, Labels]:
        verify(path, self.checksums[path.name])
        content = read_mat(path)
        try:
            images, labels = content["X"], content["y"]
        except KeyError as error:
            raise DataError(f"{path}: variable {error} is missing") from error
        # X is [H, W, C, N]; digit 0 has the label 10.
        return np.ascontiguousarray(images.transpose(3, 2, 0, 1)), labels.astype(np.int64) % 10
