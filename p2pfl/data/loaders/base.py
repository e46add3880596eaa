"""The interface of all loaders, and helpers to read and check files."""

from __future__ import annotations

import hashlib
import os
import zlib
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from p2pfl.data.columns import Columns
from p2pfl.data.loaders.fingerprint import fingerprint, unedited
from p2pfl.errors import DataError
from p2pfl.options import Options
from p2pfl.registry import Table, options_decorator

Images = npt.NDArray[np.uint8]
Inputs = npt.NDArray[Any]
"""uint8 [N, C, H, W], float32 [N, D] or [N, C, L], or int64 [N, L]."""
Labels = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class DatasetArrays:
    """A dataset as plain arrays.

    Attributes:
        train_images, test_images: the inputs: images uint8 [N, C, H, W], vectors float32 [N, D], series float32
            [N, C, L], or tokens int64 [N, L].
        train_labels, test_labels: int64 [N], each in [0, classes).
        classes: number of classes, including those without samples.
        mirror: whether mirroring an image keeps its label (true for clothes, false for digits).
        train_styles, test_styles: int64 [N], the style of each image, counted from 0; None without styles.
        columns: further properties of the samples, for the partition ``natural``.
        vocabulary: number of different tokens, each in [0, vocabulary); 0 for other inputs.
        class_names: a name of each class, for results by class; by default the labels themselves.
        notes: what users should know about how the files were read, such as columns or files that are not used.
    """

    train_images: Inputs
    train_labels: Labels
    test_images: Inputs
    test_labels: Labels
    classes: int
    mirror: bool
    train_styles: Labels | None = None
    test_styles: Labels | None = None
    columns: Columns = field(default_factory=dict)
    vocabulary: int = 0
    class_names: Sequence[str] = ()
    notes: Sequence[str] = ()


@dataclass(frozen=True)
class Loader(Options, ABC):
    """Base class of all datasets: the options of ``dataset: {name: …}`` in a run file."""

    code: ClassVar[str] = ""
    """Hash of the plug-in that defines the dataset: if it changes, the files are read again."""
    instructions: ClassVar[str] = ""
    """How to get the files of a dataset that ``download`` cannot fetch."""
    PUBLISHED: ClassVar[bool] = False
    """Whether the files belong to a published dataset, which users do not edit."""

    def files(self, root: Path) -> tuple[Path, ...]:
        """List the files of this dataset under ``root``, existing or not.

        A folder stands for all files below it, at any depth, but for hidden ones.
        """
        return ()

    def fingerprint(self, root: Path) -> list[Any]:
        """Return plain values that differ if a file has changed; all exist. Raises OSError and DataError."""
        return [unedited(path) if self.PUBLISHED else fingerprint(path) for path in self.files(root)]

    @property
    def codes(self) -> list[str]:
        """The hashes of all plug-ins that the arrays depend on."""
        return [self.code] if self.code else []

    def download(self, root: Path) -> None:
        """Download the files. Raises OSError or RuntimeError on failure."""
        raise OSError(self.instructions)

    @abstractmethod
    def read(self, root: Path) -> DatasetArrays:
        """Read the files, which all exist. Raises DataError naming a damaged file."""


DATASETS: Table[type[Loader]] = Table("dataset")


def _set_code(cls: type[Loader]) -> None:
    cls.code = os.urandom(8).hex()  # replaced by the plug-in's hash, if a file is loaded; a cell has none


dataset = options_decorator(DATASETS, Loader, _set_code)
"""Register a subclass of ``p2pfl.data.Loader``, which reads a dataset into arrays."""


def verify(path: Path, md5: str) -> None:
    """Check a file against the MD5 that its publisher or torchvision gives.

    This detects damaged files, not forged ones.

    Raises:
        DataError: the checksum differs, or the file is unreadable.
    """
    try:
        with path.open("rb") as file:
            actual = hashlib.file_digest(file, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()
    except OSError as error:
        raise DataError(f"{path}: unreadable: {error.strerror or error}") from error
    if actual != md5:
        raise DataError(f"{path}: wrong checksum: md5 {actual}, expected {md5}; delete the file and fetch it again")


def read_mat(path: Path) -> Mapping[str, Any]:
    """Read the variables of a MATLAB file, without dimensions of size 1. Raises DataError if it is damaged."""
    from scipy.io import loadmat  # noqa: TID251
    from scipy.io.matlab import MatReadError

    try:
        variables: Mapping[str, Any] = loadmat(path, squeeze_me=True)
    except (MatReadError, OSError, ValueError, TypeError, LookupError, NotImplementedError, zlib.error) as error:
        raise DataError(f"{path}: unreadable or truncated MATLAB file: {error}; fetch it again") from error
    return variables


def split_off_test(labels: Labels, fraction: float) -> npt.NDArray[np.bool_]:
    """Select test samples of a dataset without an official split: evenly spaced samples of each class.

    Args:
        labels: int64 [N].
        fraction: fraction of each class, in (0, 1).

    Returns:
        bool [N], true for test samples.
    """
    test = np.zeros(len(labels), dtype=bool)
    for label in np.unique(labels):
        of_class = np.flatnonzero(labels == label)
        count = np.floor((np.arange(len(of_class)) + 1) * fraction + 1e-9)
        test[of_class[np.diff(count, prepend=0) > 0]] = True
    return test
