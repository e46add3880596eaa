"""Small pictures in one or a few files each: digits, USPS, SVHN, CIFAR."""

from __future__ import annotations

import bz2
import io
import pickle
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from p2pfl.data.sources.base import Decoded, Images, Labels, Source, every_nth, read_mat, verify
from p2pfl.errors import DataError


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
        test = every_nth(labels, 1 / 5)
        return Decoded(images[~test], labels[~test], images[test], labels[test], classes=10, mirror=False)


@dataclass(frozen=True)
class Usps(Source):
    """USPS: 7,291 + 2,007 handwritten digits off envelopes, 1x16x16, as ``usps.bz2`` and ``usps.t.bz2``.

    No checksum is compared: bzip2 has its own, and the same numbers are also distributed packed otherwise.
    """

    def files(self, root: Path) -> tuple[Path, ...]:
        return root / "usps.bz2", root / "usps.t.bz2"

    def download(self, root: Path) -> None:
        from torchvision.datasets import USPS

        root.mkdir(parents=True, exist_ok=True)
        for train in (True, False):
            USPS(root, train=train, download=True)

    def read(self, root: Path) -> Decoded:
        train, test = (_read_usps(path) for path in self.files(root))
        return Decoded(*train, *test, classes=10, mirror=False)


def _read_usps(path: Path) -> tuple[Images, Labels]:
    """A line per image: its label from 1 to 10, then 256 times ``pixel:value``, pixel from 1, value in [−1, 1]."""
    try:
        text = bz2.decompress(path.read_bytes())
    except (OSError, EOFError, ValueError) as error:
        raise DataError(f"{path}: unreadable or truncated: {error}; fetch it again") from error
    if not text.strip():
        raise DataError(f"{path}: not in the text format of USPS: it is empty")
    try:
        table = np.loadtxt(io.BytesIO(text.replace(b":", b" ")), dtype=np.float32, ndmin=2)
    except ValueError as error:
        raise DataError(f"{path}: not in the text format of USPS: {error}") from error
    if table.shape[1] != 513 or (table[:, 1::2] != np.arange(1, 257)).any() or np.abs(table[:, 2::2]).max() > 1:
        raise DataError(f"{path}: not in the text format of USPS: a line is not a label and 256 pixels in [-1, 1]")
    images = np.rint((table[:, 2::2] + 1) * 127.5).astype(np.uint8)
    return images.reshape(-1, 1, 16, 16), table[:, 0].astype(np.int64) - 1


@dataclass(frozen=True)
class Svhn(Source):
    """SVHN: 73,257 + 26,032 house numbers, 3x32x32, as ``train_32x32.mat`` and ``test_32x32.mat``."""

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

    def read(self, root: Path) -> Decoded:
        train, test = (self._read(path) for path in self.files(root))
        return Decoded(*train, *test, classes=10, mirror=False)

    def _read(self, path: Path) -> tuple[Images, Labels]:
        verify(path, self.checksums[path.name])
        content = read_mat(path)
        try:
            images, labels = content["X"], content["y"]
        except KeyError as error:
            raise DataError(f"{path}: has no variable {error}") from error
        # X is [H, W, C, N]; digit 0 has the label 10.
        return np.ascontiguousarray(images.transpose(3, 2, 0, 1)), labels.astype(np.int64) % 10


@dataclass(frozen=True)
class Cifar10(Source):
    """CIFAR-10: 50,000 + 10,000 photographs, 3x32x32, in ``cifar-10-batches-py``."""

    folder: ClassVar[str] = "cifar-10-batches-py"
    downloader: ClassVar[str] = "CIFAR10"
    """The name of torchvision's class."""
    checksums: ClassVar[Mapping[str, str]] = {
        "data_batch_1": "c99cafc152244af753f735de768cd75f",
        "data_batch_2": "d4bba439e000b95fd0a9bffe97cbabec",
        "data_batch_3": "54ebc095f3ab1f0389bbae665268c751",
        "data_batch_4": "634d18415352ddfa80567beed471001a",
        "data_batch_5": "482c414d41f54cd18b22e5b47cb7c3cb",
        "test_batch": "40351d587109b95175f43aff81a1287e",
    }
    """Of the training batches, and last of the test batch."""
    labels_key: ClassVar[str] = "labels"
    classes: ClassVar[int] = 10

    def files(self, root: Path) -> tuple[Path, ...]:
        return tuple(root / self.folder / name for name in self.checksums)

    def download(self, root: Path) -> None:
        import torchvision.datasets
        from torchvision.datasets.utils import download_and_extract_archive

        # Not the class itself: it would unpickle what it has downloaded.
        known = getattr(torchvision.datasets, self.downloader)
        download_and_extract_archive(known.url, str(root), filename=known.filename, md5=known.tgz_md5)

    def read(self, root: Path) -> Decoded:
        batches = [self._read(path) for path in self.files(root)]
        images, labels = zip(*batches[:-1], strict=True)
        return Decoded(np.concatenate(images), np.concatenate(labels), *batches[-1], self.classes, mirror=True)

    def _read(self, path: Path) -> tuple[Images, Labels]:
        verify(path, self.checksums[path.name])
        batch = read_batch(path)
        try:
            images = np.asarray(batch["data"], np.uint8).reshape(-1, 3, 32, 32)
            return images, np.asarray(batch[self.labels_key], np.int64)
        except (KeyError, TypeError, ValueError) as error:
            raise DataError(f"{path}: not a batch of CIFAR images: {error}") from error


@dataclass(frozen=True)
class Cifar100(Cifar10):
    """CIFAR-100: 50,000 + 10,000 photographs of 100 classes, 3x32x32, in ``cifar-100-python``."""

    folder: ClassVar[str] = "cifar-100-python"
    downloader: ClassVar[str] = "CIFAR100"
    checksums: ClassVar[Mapping[str, str]] = {
        "train": "16019d7e3df5f24257cddd939b257f8d",
        "test": "f0ef6b0ae62326f3e7ffdfab6717acfc",
    }
    labels_key: ClassVar[str] = "fine_labels"
    classes: ClassVar[int] = 100


class _Dtype:
    """Stands for numpy.dtype in a pickle: a name."""

    def __init__(self, name: str, align: object = 0, copy: object = 0) -> None:
        self.name = name

    def __setstate__(self, state: object) -> None:
        pass  # byte order and the like: bytes have none


class _Array:
    """Stands for numpy.ndarray in a pickle: what its state says, taken for bytes and nothing else."""

    array: Images = np.empty(0, np.uint8)

    def __setstate__(self, state: tuple[int, tuple[int, ...], _Dtype, bool, bytes | str]) -> None:
        _, shape, dtype, fortran, data = state
        if dtype.name not in ("u1", "|u1", "uint8") or fortran:
            raise pickle.UnpicklingError(f"an array of {dtype.name}; image files have bytes")
        content = data.encode("latin1") if isinstance(data, str) else data
        self.array = np.frombuffer(content, np.uint8).reshape(shape)


def _reconstruct(kind: object, shape: object, code: object) -> _Array:
    return _Array()


class _Arrays(pickle.Unpickler):
    """Reads pickles of containers, numbers, text and arrays of bytes, and nothing that could run code.

    CIFAR's files are pickles, as Python 2 and numpy 1 wrote them, and a pickle may name any function to be
    called; their MD5 is no protection from a forged file. The names below are all that these files need, and none
    of them is numpy's own: its arrays and dtypes believe what a pickle says about their insides.
    """

    STAND_INS: ClassVar[Mapping[tuple[str, str], Callable[..., Any]]] = {
        ("numpy.core.multiarray", "_reconstruct"): _reconstruct,
        ("numpy", "ndarray"): _Array,
        ("numpy", "dtype"): _Dtype,
    }

    def find_class(self, module: str, name: str) -> Any:
        try:
            return self.STAND_INS[module.replace("numpy._core", "numpy.core"), name]
        except KeyError:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}, which image files have no need of") from None


def read_batch(path: Path) -> Mapping[str, Any]:
    """The mapping in one of CIFAR's files. Raises DataError if it is damaged or asks for anything else."""
    try:
        with path.open("rb") as file:
            batch = _Arrays(file, encoding="latin1").load()
    except (
        OSError,
        EOFError,
        pickle.UnpicklingError,
        ArithmeticError,
        AttributeError,
        LookupError,
        TypeError,
        ValueError,
    ) as error:
        raise DataError(f"{path}: unreadable, truncated or not a batch of CIFAR images: {error}") from error
    if not isinstance(batch, dict):
        raise DataError(f"{path}: not a batch of CIFAR images but a {type(batch).__name__}")
    return {key: value.array if isinstance(value, _Array) else value for key, value in batch.items()}
