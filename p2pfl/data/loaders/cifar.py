"""CIFAR-10 and CIFAR-100, and a safe reader of their pickles."""

from __future__ import annotations

import pickle  # noqa: TID251  # CIFAR's files are pickles; see _SafeUnpickler
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from p2pfl.data.loaders.base import DatasetArrays, Images, Labels, Loader, dataset, verify
from p2pfl.errors import DataError


@dataset("cifar10")
@dataclass(frozen=True)
class Cifar10(Loader):
    """CIFAR-10: 50,000 + 10,000 photographs, 3x32x32, in ``cifar-10-batches-py``."""

    PUBLISHED: ClassVar[bool] = True
    folder: ClassVar[str] = "cifar-10-batches-py"
    downloader: ClassVar[str] = "CIFAR10"
    """Name of torchvision's class."""
    checksums: ClassVar[Mapping[str, str]] = {
        "data_batch_1": "c99cafc152244af753f735de768cd75f",
        "data_batch_2": "d4bba439e000b95fd0a9bffe97cbabec",
        "data_batch_3": "54ebc095f3ab1f0389bbae665268c751",
        "data_batch_4": "634d18415352ddfa80567beed471001a",
        "data_batch_5": "482c414d41f54cd18b22e5b47cb7c3cb",
        "test_batch": "40351d587109b95175f43aff81a1287e",
    }
    """MD5 of the training batches and, last, of the test batch."""
    labels_key: ClassVar[str] = "labels"
    names_file: ClassVar[str] = "batches.meta"
    names_key: ClassVar[str] = "label_names"
    """Where the archive has the names of the classes; they are optional."""
    classes: ClassVar[int] = 10

    def files(self, root: Path) -> tuple[Path, ...]:
        return tuple(root / self.folder / name for name in self.checksums)

    def download(self, root: Path) -> None:
        import torchvision.datasets
        from torchvision.datasets.utils import download_and_extract_archive

        # Only the archive: torchvision's class would unpickle what it has downloaded.
        source = getattr(torchvision.datasets, self.downloader)
        download_and_extract_archive(source.url, str(root), filename=source.filename, md5=source.tgz_md5)

    def read(self, root: Path) -> DatasetArrays:
        batches = [self._read(path) for path in self.files(root)]
        images, labels = zip(*batches[:-1], strict=True)
        return DatasetArrays(
            np.concatenate(images),
            np.concatenate(labels),
            *batches[-1],
            self.classes,
            mirror=True,
            class_names=self._class_names(root / self.folder / self.names_file),
        )

    def _class_names(self, path: Path) -> Sequence[str]:
        if not path.exists():
            return ()
        names = read_batch(path).get(self.names_key)
        if not isinstance(names, list) or len(names) != self.classes:
            raise DataError(f"{path}: expected {self.classes} names of classes; delete the file and fetch it again")
        return [str(name) for name in names]

    def _read(self, path: Path) -> tuple[Images, Labels]:
        verify(path, self.checksums[path.name])
        batch = read_batch(path)
        try:
            images = np.asarray(batch["data"], np.uint8).reshape(-1, 3, 32, 32)
            return images, np.asarray(batch[self.labels_key], np.int64)
        except (KeyError, TypeError, ValueError) as error:
            raise DataError(f"{path}: not a batch of CIFAR images: {error}") from error


@dataset("cifar100")
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
    names_file: ClassVar[str] = "meta"
    names_key: ClassVar[str] = "fine_label_names"
    classes: ClassVar[int] = 100


class _Dtype:
    """Replacement of numpy.dtype in a pickle: keeps its name only."""

    def __init__(self, name: str, align: object = 0, copy: object = 0) -> None:
        self.name = name

    def __setstate__(self, state: object) -> None:
        pass  # byte order and alignment, which single bytes do not have


class _Array:
    """Replacement of numpy.ndarray in a pickle: accepts bytes only."""

    array: Images = np.empty(0, np.uint8)

    def __setstate__(self, state: tuple[int, tuple[int, ...], _Dtype, bool, bytes | str]) -> None:
        _, shape, dtype, fortran, data = state
        if dtype.name not in ("u1", "|u1", "uint8") or fortran:
            raise pickle.UnpicklingError(f"array of type {dtype.name}; expected uint8")
        content = data.encode("latin1") if isinstance(data, str) else data
        self.array = np.frombuffer(content, np.uint8).reshape(shape)


def _reconstruct(kind: object, shape: object, code: object) -> _Array:
    return _Array()


class _SafeUnpickler(pickle.Unpickler):
    """Unpickler of containers, numbers, text and byte arrays; cannot run code.

    CIFAR's files are pickles written by Python 2 and numpy 1. A pickle may call any function by name, and MD5 does
    not protect against forged files. Only the three names below are allowed, and none of them resolves to numpy,
    whose arrays and dtypes trust the state that a pickle gives them.
    """

    REPLACEMENTS: ClassVar[Mapping[tuple[str, str], Callable[..., Any]]] = {
        ("numpy.core.multiarray", "_reconstruct"): _reconstruct,
        ("numpy", "ndarray"): _Array,
        ("numpy", "dtype"): _Dtype,
    }

    def find_class(self, module: str, name: str) -> Any:
        try:
            return self.REPLACEMENTS[module.replace("numpy._core", "numpy.core"), name]
        except KeyError:
            raise pickle.UnpicklingError(f"it uses {module}.{name}, which is not allowed") from None


def read_batch(path: Path) -> Mapping[str, Any]:
    """Read the mapping in one of CIFAR's files. Raises DataError if it is damaged or uses any other name."""
    try:
        with path.open("rb") as file:
            batch = _SafeUnpickler(file, encoding="latin1").load()
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
        raise DataError(f"{path}: not a batch of CIFAR images: expected a dict, found {type(batch).__name__}")
    return {key: value.array if isinstance(value, _Array) else value for key, value in batch.items()}
