"""Datasets in memory: images and other inputs, memory-mapped from a cache that all peers of a host share.

The first process to open a dataset converts it to .npy files, under a lock:

    $P2PFL_CACHE, or <user cache>/p2pfl/decoded
        fashion-mnist.lock                  held while downloading and converting
        fashion-mnist-1c0ffee5c0ffee55/     created atomically by a rename
            train_images.npy, train_labels.npy, test_images.npy, test_labels.npy
            train_styles.npy, test_styles.npy   if the dataset has styles
            train_columns.npy, test_columns.npy   if it has further columns
            metadata.json                   shapes, classes and their names, mean, std, mirror, vocabulary, values of
                                            the columns, notes

The name of an entry ends in a hash of the options and of path, size and times of change of every original file, also
of files below folders (loaders/fingerprint.py), so that changed files get a new entry. Damaged entries are replaced.
<user cache> is $XDG_CACHE_HOME or ~/.cache.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import os
import secrets
import shutil
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cached_property
from http.client import HTTPException
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from p2pfl.data.cache_folder import cache_folders, data_root, locked, unwritable, writable
from p2pfl.data.class_names import shown, without_samples
from p2pfl.data.columns import Column, Columns
from p2pfl.data.loaders import DatasetArrays, Inputs, Labels, Loader
from p2pfl.data.partitions import DatasetLabels
from p2pfl.errors import DataError
from p2pfl.inputs import Size, Tokens
from p2pfl.options import did_you_mean
from p2pfl.terminal import printable

_FORMAT = 3
"""Part of every cache key: increment it when the layout of an entry or the output of a loader changes."""

_ARRAYS = ("train_images", "train_labels", "test_images", "test_labels")
_STYLES = ("train_styles", "test_styles")
_DOWNLOAD_TIMEOUT = 60.0  # seconds without a byte


@dataclass(frozen=True, eq=False)
class Split:
    """Training or test samples of a dataset, mapped read-only.

    Attributes:
        images: the inputs: uint8 [N, C, H, W], float32 [N, D] or [N, C, L], or int64 [N, L].
        labels: int64 [N].
        styles: int64 [N], the style of each image; None in a dataset without styles.
    """

    images: Inputs
    labels: Labels
    styles: Labels | None = None

    def __len__(self) -> int:
        return len(self.labels)

    def take(self, indices: npt.NDArray[np.int64]) -> tuple[Tensor, Tensor]:
        """Copy the samples at ``indices`` [B], in that order.

        Returns:
            Inputs, [B, …], as they are stored, and labels, int64 [B], on the CPU.

        Raises:
            IndexError: an index is out of range.
        """
        images, labels = np.take(self.images, indices, axis=0), np.take(self.labels, indices)
        return torch.from_numpy(np.asarray(images)), torch.from_numpy(np.asarray(labels))

    def unmap(self) -> None:
        """Drop the pages read so far from this process; they stay in the system's file cache."""
        pages = getattr(self.images, "_mmap", None)
        if pages is not None:
            pages.madvise(mmap.MADV_DONTNEED)


@dataclass(frozen=True, eq=False)
class Pool:
    """The training samples of a dataset followed by its test samples, without a copy.

    Attributes:
        train, test: the two splits.
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
        from_test = indices >= len(self.train)
        images = np.empty((len(indices), *self.train.images.shape[1:]), self.train.images.dtype)
        images[~from_test] = self.train.images[indices[~from_test]]
        images[from_test] = self.test.images[indices[from_test] - len(self.train)]
        return torch.from_numpy(images), torch.from_numpy(self.labels[indices])

    def unmap(self) -> None:
        """As ``Split.unmap``."""
        self.train.unmap()
        self.test.unmap()


@dataclass(frozen=True, eq=False)
class Dataset:
    """A dataset, ready to train on.

    Attributes:
        name: as in the run file.
        train, test: the two splits.
        classes: number of classes; labels are in [0, classes).
        mean, std: of the training split, per channel of images and series and per number of vectors; 1 is the
            brightest value of an image. The std of a constant channel is 1, so that dividing by it is safe.
        mirror: whether mirroring an image keeps its label.
        columns: further properties of the samples, by name.
        vocabulary: number of different tokens; 0 for other inputs.
        sha256: of all that training and tests depend on; empty for one that was not opened from a cache.
        class_names: a different name for each class, which can be printed; empty if classes have only numbers.
        notes: what users should know about these data: columns that are not used, classes without samples.
    """

    name: str
    train: Split
    test: Split
    classes: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    mirror: bool
    columns: Columns = field(default_factory=dict)
    vocabulary: int = 0
    sha256: str = ""
    class_names: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @cached_property
    def pool(self) -> Pool:
        """Both splits as one."""
        return Pool(self.train, self.test)

    @property
    def labels(self) -> DatasetLabels:
        """Labels, styles and columns of all samples, as input of a partition."""
        train, test = self.train, self.test
        return DatasetLabels(train.labels, test.labels, self.classes, train.styles, test.styles, self.columns)

    @property
    def channels(self) -> int:
        """As in p2pfl/inputs.py."""
        return self.vocabulary or int(self.train.images.shape[1])

    @property
    def size(self) -> Size:
        """As in p2pfl/inputs.py."""
        shape = self.train.images.shape
        return Tokens(shape[1:]) if self.vocabulary else shape[2:]


def open_dataset(
    name: str, loader: Loader, root: Path | None = None, download: bool = True, base: Path | None = None
) -> Dataset:
    """Open a dataset from the host's cache; add it to the cache if needed.

    Args:
        name: as in the run file.
        loader: the options of that dataset, an instance of ``DATASETS[name]``.
        root: folder with the dataset's files; by default $P2PFL_DATA, or else <user cache>/p2pfl/data.
        download: download missing files.
        base: the folder of the run file, where the loader's paths were looked for first.

    Raises:
        DataError: files are missing and cannot be downloaded, files are damaged, or the cache is not writable.
    """
    root = data_root(root)
    caches = cache_folders()
    if not _missing(loader, root):
        for entry in (cache / _key(name, loader, root) for cache in caches):
            if dataset := _load(name, entry):
                return dataset
    cache = writable(caches)
    with locked(cache / f"{name}.lock") as alone:
        # Check again: the previous holder of the lock may have finished the work.
        if missing := _missing(loader, root):
            _fetch(name, loader, root, download, missing, base)
        entry = cache / _key(name, loader, root)
        if dataset := _load(name, entry):
            return dataset
        arrays = loader.read(root)
        _check(name, arrays)
        _store(name, arrays, entry, alone=alone)
        if dataset := _load(name, entry):
            return dataset
    raise DataError(f"{entry}: unreadable right after it was written; set $P2PFL_CACHE to another folder")


def _missing(loader: Loader, root: Path) -> list[Path]:
    return [path for path in loader.files(root) if not os.path.exists(path)]


def _fetch(name: str, loader: Loader, root: Path, download: bool, missing: list[Path], base: Path | None) -> None:
    """Download missing files, or raise a DataError with instructions to get them."""
    folder = missing[0].parent
    given = next(
        (path for path in vars(loader).values() if isinstance(path, Path) and root / path == missing[0]), None
    )
    folders = [folder]
    if given is not None and not given.is_absolute() and base is not None:
        folders.insert(0, (base / given).parent.absolute())
    there: list[str] = []
    for place in folders if given is not None else ():
        with suppress(OSError):
            there += os.listdir(place)
    problem = (
        f"{name}: missing {', '.join(path.name for path in missing)}; looked in {' and '.join(map(str, folders))}"
        f"{did_you_mean(missing[0].name, there) or '.'} "
    )
    if folder.is_relative_to(root):
        relative = folder.relative_to(root)
        content = missing[0].name if relative == Path() else f"{relative}/"
        problem += f"Set data.root or $P2PFL_DATA to the folder that contains {content}"
    else:
        problem += "The path is absolute and does not depend on data.root"
    if loader.instructions:
        raise DataError(f"{problem}; {loader.instructions}")
    if not download:
        raise DataError(f"{problem}, or set data.download: true")
    try:
        with _socket_timeout(_DOWNLOAD_TIMEOUT):
            loader.download(root)
    except (OSError, RuntimeError, HTTPException) as error:
        raise DataError(f"{problem}; the download failed: {' '.join(str(error).split())}") from error
    if missing := _missing(loader, root):
        raise DataError(f"{problem}; the download did not provide {', '.join(path.name for path in missing)}")


def _key(name: str, loader: Loader, root: Path) -> str:
    """Name of the cache entry; see the module docstring."""
    content = json.dumps([_FORMAT, name, loader.to_dict(), loader.fingerprint(root), *loader.codes])
    return f"{name}-{hashlib.sha256(content.encode()).hexdigest()[:16]}"


_KINDS = {(np.dtype(np.uint8), 4), (np.dtype(np.float32), 2), (np.dtype(np.float32), 3), (np.dtype(np.int64), 2)}
"""Type and number of dimensions of inputs."""


def _check(name: str, arrays: Any) -> None:
    """Raise DataError if a loader's arrays are not what ``DatasetArrays`` describes."""
    if not isinstance(arrays, DatasetArrays):
        raise DataError(f"{name}: read should return DatasetArrays, not {type(arrays).__name__}")
    splits = (
        ("training", arrays.train_images, arrays.train_labels),
        ("test", arrays.test_images, arrays.test_labels),
    )
    for split, images, labels in splits:
        for array in (images, labels):
            if not isinstance(array, np.ndarray):
                raise DataError(f"{name}: inputs and labels should be NumPy arrays, not {type(array).__name__}")
        _check_inputs(name, split, images, arrays.vocabulary)
    if arrays.train_images.shape[1:] != arrays.test_images.shape[1:]:
        shapes = f"{arrays.train_images.shape[1:]} for training, {arrays.test_images.shape[1:]} for testing"
        raise DataError(f"{name}: inputs have different shapes: {shapes}")
    for split, images, labels in splits:
        if len(images) != len(labels):
            raise DataError(f"{name}: {len(images)} {split} inputs but {len(labels)} labels")
        if labels.dtype != np.int64 or labels.ndim != 1:
            raise DataError(f"{name}: {split} labels are {labels.dtype} {list(labels.shape)}; expected int64 [N]")
        if labels.min() < 0 or labels.max() >= arrays.classes:
            found = f"{split} labels range from {labels.min()} to {labels.max()}, but classes is {arrays.classes}"
            raise DataError(f"{name}: {found}; labels count from 0" if labels.min() < 0 else f"{name}: {found}")
    names = arrays.class_names
    texts = isinstance(names, list | tuple | np.ndarray) and all(isinstance(each, str) for each in names)
    if not texts or len(names) not in (0, arrays.classes):
        raise DataError(f"{name}: class_names should be a list of {arrays.classes} texts, one for each class")


def _check_inputs(name: str, split: str, images: Inputs, vocabulary: int) -> None:
    if len(images) == 0:
        raise DataError(f"{name}: no {split} samples; training and test samples are needed")
    if (images.dtype, images.ndim) not in _KINDS:
        expected = "uint8 [N, C, H, W], float32 [N, D] or [N, C, L], or int64 [N, L]"
        raise DataError(f"{name}: inputs are {images.dtype} {list(images.shape)}; expected {expected}")
    if images.dtype == np.float32 and not np.isfinite(images).all():
        sample, *place = map(int, np.argwhere(~np.isfinite(images))[0])
        where = f"{split} sample {sample} at {place} (both counted from 0)"
        raise DataError(f"{name}: inputs contain NaN or infinity, e.g. {where}; replace or remove these samples")
    if images.dtype == np.int64 and not 0 <= images.min(initial=0) <= images.max(initial=0) < vocabulary:
        found = f"from {images.min()} to {images.max()}"
        hint = "; integers are tokens, counted from 0: store other inputs as float" if images.min() < 0 else ""
        raise DataError(f"{name}: tokens range {found}, but the vocabulary is {vocabulary}{hint}")


def _store(name: str, arrays: DatasetArrays, entry: Path, *, alone: bool) -> None:
    """Write a cache entry atomically; replace a damaged one.

    Args:
        alone: the caller holds the lock. Otherwise another process may do the same, and be faster.
    """
    building = entry.with_name(f".{entry.name}.{secrets.token_hex(4)}.building")
    files = {name: array for name in _ARRAYS + _STYLES if (array := getattr(arrays, name)) is not None}
    if columns := arrays.columns.values():
        files["train_columns"] = np.stack([column.train for column in columns])
        files["test_columns"] = np.stack([column.test for column in columns])
    mean, std = _mean_and_std(arrays.train_images)
    metadata = {
        "shapes": {name: array.shape for name, array in files.items()},
        "classes": arrays.classes,
        "mean": mean,
        "std": std,
        "mirror": arrays.mirror,
        "vocabulary": arrays.vocabulary,
        "columns": {name: column.values for name, column in arrays.columns.items()},
    }
    derived = ("mean", "std")  # their last bits may differ between hosts
    sha = hashlib.sha256(json.dumps({key: metadata[key] for key in metadata if key not in derived}).encode())
    for array in files.values():
        sha.update(np.ascontiguousarray(array).data)
    names = shown(arrays.class_names)
    missing = without_samples(names, arrays.classes, arrays.train_labels, arrays.test_labels)
    metadata |= {
        "sha256": sha.hexdigest(),
        "class_names": names,
        "notes": [*map(printable, map(str, arrays.notes)), *missing],
    }
    try:
        for leftover in entry.parent.glob(f".{entry.name}.*building") if alone else ():
            shutil.rmtree(leftover)
        building.mkdir()
        for file, array in files.items():
            np.save(building / f"{file}.npy", array)
        (building / "metadata.json").write_text(json.dumps(metadata))
        try:
            building.rename(entry)
        except OSError:
            if not entry.exists():
                raise
            if _load(name, entry):
                shutil.rmtree(building)
            else:  # it is damaged
                shutil.rmtree(entry)
                building.rename(entry)
    except OSError as error:
        raise unwritable(entry, error) from error


def _load(name: str, entry: Path) -> Dataset | None:
    """Load a cache entry; None if it does not exist or is damaged."""
    try:
        metadata = json.loads((entry / "metadata.json").read_bytes())
        arrays = {array: np.load(entry / f"{array}.npy", mmap_mode="r") for array in metadata["shapes"]}  # noqa: TID251  # maps hold no pickles
        if {array: list(values.shape) for array, values in arrays.items()} != metadata["shapes"]:
            return None
        columns = {
            column: Column(tuple(values), arrays["train_columns"][row], arrays["test_columns"][row])
            for row, (column, values) in enumerate(metadata["columns"].items())
        }
        return Dataset(
            name,
            train=Split(arrays["train_images"], arrays["train_labels"], arrays.get("train_styles")),
            test=Split(arrays["test_images"], arrays["test_labels"], arrays.get("test_styles")),
            classes=metadata["classes"],
            mean=tuple(metadata["mean"]),
            std=tuple(metadata["std"]),
            mirror=metadata["mirror"],
            columns=columns,
            vocabulary=metadata["vocabulary"],
            sha256=metadata["sha256"],
            class_names=tuple(metadata["class_names"]),
            notes=tuple(metadata["notes"]),
        )
    except (OSError, EOFError, ValueError, KeyError, TypeError, AttributeError):
        return None


def _mean_and_std(images: Inputs) -> tuple[list[float], list[float]]:
    """Mean and std per channel of the training inputs: of pixels in [0, 1], of other numbers as they are.

    Those of pixels come from histograms, which is exact and copies no images. Tokens have none.
    """
    means, stds = [], []
    if images.dtype == np.int64:
        return [], []
    if images.dtype == np.float32:
        for channel in range(images.shape[1]):
            numbers = images[:, channel].astype(np.float64)
            mean, std = float(numbers.mean()), float(numbers.std())
            means.append(mean)
            stds.append(std if std > 1e-6 * abs(mean) else 1.0)  # below, it is the rounding error of a constant
        return means, stds
    for channel in range(images.shape[1]):
        values, counts = np.unique(images[:, channel], return_counts=True)
        mean = np.average(values / 255, weights=counts)
        variance = np.average((values / 255 - mean) ** 2, weights=counts)
        means.append(float(mean))
        stds.append(float(np.sqrt(variance)) or 1.0)
    return means, stds


@contextmanager
def _socket_timeout(seconds: float) -> Iterator[None]:
    """Set the default timeout of new sockets: torchvision's downloads set none."""
    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(seconds)
    try:
        yield
    finally:
        socket.setdefaulttimeout(before)
