"""Datasets as a peer sees them: uint8 images mapped from a file that all peers of the host share.

Each dataset is decoded once per host, under a lock, into a folder of .npy files:

    $P2PFL_CACHE, or <user cache>/p2pfl/decoded
        fashion-mnist.lock                  held while fetching and decoding
        fashion-mnist-1c0ffee5c0ffee55/     appears as a whole, by a rename
            train_images.npy, train_labels.npy, test_images.npy, test_labels.npy
            train_styles.npy, test_styles.npy   of a dataset that has styles
            about.json                      shapes, classes, mean, std, mirror

The digits at the end stand for the options and for path, size and time of change of every source file, so
that a changed source is decoded anew. An entry that cannot be read whole is replaced. <user cache> is
$XDG_CACHE_HOME or ~/.cache.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from http.client import HTTPException
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from p2pfl.data.partitions import Labelled
from p2pfl.data.sources import Decoded, Images, Labels, Source
from p2pfl.errors import DataError

_FORMAT = 2
"""Part of every cache key: count up when the files of an entry, or what a source decodes to, change."""

_ARRAYS = ("train_images", "train_labels", "test_images", "test_labels")
_STYLES = ("train_styles", "test_styles")
_DOWNLOAD_TIMEOUT = 60.0  # seconds without a byte


@dataclass(frozen=True, eq=False)
class Split:
    """The training or the test half of a dataset, mapped read-only.

    Attributes:
        images: uint8 [N, C, H, W].
        labels: int64 [N].
        styles: int64 [N], which style each image has; None in a dataset without styles.
    """

    images: Images
    labels: Labels
    styles: Labels | None = None

    def __len__(self) -> int:
        return len(self.labels)

    def take(self, indices: npt.NDArray[np.int64]) -> tuple[Tensor, Tensor]:
        """Copies of the samples at ``indices`` [B], in that order, on the CPU.

        Images are uint8 [B, C, H, W], labels int64 [B]. Raises IndexError for an index out of range.
        """
        images, labels = np.take(self.images, indices, axis=0), np.take(self.labels, indices)
        return torch.from_numpy(np.asarray(images)), torch.from_numpy(np.asarray(labels))


@dataclass(frozen=True, eq=False)
class Pool:
    """Both halves of a dataset as one: the training samples followed by the test samples. Nothing is copied.

    Attributes:
        train, test: the halves.
        labels: int64 [N].
    """

    train: Split
    test: Split

    @cached_property
    def labels(self) -> Labels:
        return np.concatenate((self.train.labels, self.test.labels))

    def __len__(self) -> int:
        return len(self.train) + len(self.test)

    def take(self, indices: npt.NDArray[np.int64]) -> tuple[Tensor, Tensor]:
        """As ``Split.take``."""
        late = indices >= len(self.train)
        images = np.empty((len(indices), *self.train.images.shape[1:]), np.uint8)
        images[~late] = self.train.images[indices[~late]]
        images[late] = self.test.images[indices[late] - len(self.train)]
        return torch.from_numpy(images), torch.from_numpy(self.labels[indices])


@dataclass(frozen=True, eq=False)
class Dataset:
    """A dataset, ready to train on.

    Attributes:
        name: as in the run file.
        train, test: the two halves.
        classes: number of classes; labels are in [0, classes).
        mean, std: per channel of the training images, in units where 1 is the brightest value. The std of a
            constant channel is given as 1, so that dividing by it is harmless.
        mirror: whether a mirror image still has its label.
    """

    name: str
    train: Split
    test: Split
    classes: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    mirror: bool

    @cached_property
    def pool(self) -> Pool:
        """Both halves as one."""
        return Pool(self.train, self.test)

    @property
    def labelled(self) -> Labelled:
        """What a partition is told."""
        return Labelled(self.train.labels, self.test.labels, self.classes, self.train.styles, self.test.styles)

    @property
    def channels(self) -> int:
        return int(self.train.images.shape[1])

    @property
    def size(self) -> tuple[int, int]:
        """Height and width in pixels."""
        height, width = self.train.images.shape[2:]
        return height, width


def open_dataset(name: str, source: Source, root: Path | None = None, download: bool = True) -> Dataset:
    """The dataset ``name``, from the host's cache, decoded into it first if need be.

    Args:
        name: as in the run file.
        source: the options of that dataset, an instance of ``DATASETS[name]``.
        root: the folder with the source files; by default $P2PFL_DATA, else <user cache>/p2pfl/data.
        download: fetch source files that are missing.

    Raises DataError if files are missing (and cannot be downloaded) or damaged, or if the cache cannot be
    written.
    """
    root = root or _from_environment("P2PFL_DATA", "data")
    cache = _from_environment("P2PFL_CACHE", "decoded")
    if not _missing(source, root) and (dataset := _load(name, cache / _key(name, source, root))):
        return dataset
    with _lock(cache / f"{name}.lock"):
        # Whoever held the lock before us may have done the work in the meantime: look again.
        if missing := _missing(source, root):
            _fetch(name, source, root, download, missing)
        entry = cache / _key(name, source, root)
        if dataset := _load(name, entry):
            return dataset
        decoded = source.read(root)
        _check(name, decoded)
        _store(decoded, entry)
        if dataset := _load(name, entry):
            return dataset
    raise DataError(f"{entry}: written, but cannot be read back; set $P2PFL_CACHE to another folder")


def _from_environment(variable: str, default: str) -> Path:
    if given := os.environ.get(variable):
        return Path(given)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "p2pfl" / default


def _missing(source: Source, root: Path) -> list[Path]:
    return [path for path in source.files(root) if not os.path.exists(path)]


def _fetch(name: str, source: Source, root: Path, download: bool, missing: list[Path]) -> None:
    """Download what is missing, or raise a DataError that says how to get it."""
    folder = missing[0].parent
    absent = f"{name}: missing {', '.join(path.name for path in missing)}; looked in {folder}. "
    if folder.is_relative_to(root):
        inside = folder.relative_to(root)
        held = missing[0].name if inside == Path() else f"{inside}/"
        absent += f"Set data.root or $P2PFL_DATA to the folder that holds {held}"
    else:
        absent += "Its path is absolute, so data.root has no say in it"
    if source.obtain:
        raise DataError(f"{absent}; {source.obtain}")
    if not download:
        raise DataError(f"{absent}, or set data.download: true")
    try:
        with _socket_timeout(_DOWNLOAD_TIMEOUT):
            source.download(root)
    except (OSError, RuntimeError, HTTPException) as error:
        raise DataError(f"{absent}; downloading it failed: {' '.join(str(error).split())}") from error
    if missing := _missing(source, root):
        raise DataError(f"{absent}; downloading did not bring {', '.join(path.name for path in missing)}")


def _key(name: str, source: Source, root: Path) -> str:
    """Name of the cache entry; see the top of this file."""
    identity = [(str(path.resolve()), path.stat()) for path in source.files(root)]
    files = [(path, stat.st_size, stat.st_mtime_ns) for path, stat in identity]
    described = json.dumps([_FORMAT, name, source.to_dict(), files])
    return f"{name}-{hashlib.sha256(described.encode()).hexdigest()[:16]}"


def _check(name: str, decoded: Decoded) -> None:
    if decoded.train_images.shape[1:] != decoded.test_images.shape[1:]:
        shapes = f"{decoded.train_images.shape[1:]} for training, {decoded.test_images.shape[1:]} for testing"
        raise DataError(f"{name}: images of several shapes: {shapes}")
    for split, images, labels in (
        ("training", decoded.train_images, decoded.train_labels),
        ("test", decoded.test_images, decoded.test_labels),
    ):
        if len(images) != len(labels) or len(labels) == 0:
            raise DataError(f"{name}: {len(images)} {split} images but {len(labels)} labels")
        if labels.min() < 0 or labels.max() >= decoded.classes:
            raise DataError(
                f"{name}: {split} labels from {labels.min()} to {labels.max()}, but {decoded.classes} classes"
            )


def _store(decoded: Decoded, entry: Path) -> None:
    """Write a cache entry as a whole, in place of a damaged one. The caller holds the lock."""
    building = entry.with_name(f".{entry.name}.building")
    arrays = {name: array for name in _ARRAYS + _STYLES if (array := getattr(decoded, name)) is not None}
    mean, std = _mean_and_std(decoded.train_images)
    about = {
        "shapes": {name: array.shape for name, array in arrays.items()},
        "classes": decoded.classes,
        "mean": mean,
        "std": std,
        "mirror": decoded.mirror,
    }
    try:
        for leftover in (building, entry):
            if leftover.exists():
                shutil.rmtree(leftover)
        building.mkdir()
        for name, array in arrays.items():
            np.save(building / f"{name}.npy", array)
        (building / "about.json").write_text(json.dumps(about))
        building.rename(entry)
    except OSError as error:
        raise _unwritable(entry, error) from error


def _load(name: str, entry: Path) -> Dataset | None:
    """The dataset in a cache entry, or None if there is no such entry or it is damaged."""
    try:
        about = json.loads((entry / "about.json").read_bytes())
        arrays = {array: np.load(entry / f"{array}.npy", mmap_mode="r") for array in about["shapes"]}
        if {array: list(values.shape) for array, values in arrays.items()} != about["shapes"]:
            return None
        return Dataset(
            name,
            train=Split(arrays["train_images"], arrays["train_labels"], arrays.get("train_styles")),
            test=Split(arrays["test_images"], arrays["test_labels"], arrays.get("test_styles")),
            classes=about["classes"],
            mean=tuple(about["mean"]),
            std=tuple(about["std"]),
            mirror=about["mirror"],
        )
    except (OSError, EOFError, ValueError, KeyError, TypeError, AttributeError):
        return None


def _mean_and_std(images: Images) -> tuple[list[float], list[float]]:
    """Per channel, in [0, 1] units; from the histogram: exact, and without a float copy of the images."""
    means, stds = [], []
    for channel in range(images.shape[1]):
        values, counts = np.unique(images[:, channel], return_counts=True)
        mean = np.average(values / 255, weights=counts)
        variance = np.average((values / 255 - mean) ** 2, weights=counts)
        means.append(float(mean))
        stds.append(float(np.sqrt(variance)) or 1.0)
    return means, stds


@contextmanager
def _lock(path: Path) -> Iterator[None]:
    """Hold an exclusive lock on ``path`` among the processes of this host; it ends with its holder."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("w")
    except OSError as error:
        raise _unwritable(path, error) from error
    with file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _unwritable(path: Path, error: OSError) -> DataError:
    return DataError(
        f"{path}: the cache of decoded datasets cannot be written: {error.strerror or error}; "
        "set $P2PFL_CACHE to a folder that can"
    )


@contextmanager
def _socket_timeout(seconds: float) -> Iterator[None]:
    """Make new sockets give up after ``seconds`` of silence: torchvision's downloads set no timeout."""
    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(seconds)
    try:
        yield
    finally:
        socket.setdefaulttimeout(before)
