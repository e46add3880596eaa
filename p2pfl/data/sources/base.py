"""What all sources have in common, and how downloaded files are checked."""

from __future__ import annotations

import hashlib
import zlib
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from p2pfl.errors import DataError
from p2pfl.options import Options

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
        train_styles, test_styles: int64 [N], from 0 on: which style an image has; None without styles.
    """

    train_images: Images
    train_labels: Labels
    test_images: Images
    test_labels: Labels
    classes: int
    mirror: bool
    train_styles: Labels | None = None
    test_styles: Labels | None = None


@dataclass(frozen=True)
class Source(Options, ABC):
    """Base of all datasets: what stands behind ``dataset: {name: …}`` in a run file."""

    obtain: ClassVar[str] = ""
    """How to come by the files; only where ``download`` cannot."""

    def files(self, root: Path) -> tuple[Path, ...]:
        """What this dataset is made of under ``root``, whether or not it exists.

        Where that is very many files, their folders stand for them; these change when a file comes or goes.
        """
        return ()

    def download(self, root: Path) -> None:
        """Put the files there. Raises OSError or RuntimeError when that fails."""
        raise OSError(self.obtain)

    @abstractmethod
    def read(self, root: Path) -> Decoded:
        """Decode the files, all of which exist. Raises DataError naming the file that is damaged."""


def verify(path: Path, md5: str) -> None:
    """Raises DataError unless the file has this checksum, which its publisher or torchvision gives.

    MD5 tells a damaged file from a sound one, not an honest one from a forged one.
    """
    try:
        with path.open("rb") as file:
            found = hashlib.file_digest(file, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()
    except OSError as error:
        raise DataError(f"{path}: unreadable: {error.strerror or error}") from error
    if found != md5:
        raise DataError(f"{path}: wrong checksum: md5 {found}, not {md5}; delete it and fetch it again")


def read_mat(path: Path) -> Mapping[str, Any]:
    """The variables in a MATLAB file, without superfluous dimensions. Raises DataError if it is damaged."""
    from scipy.io import loadmat
    from scipy.io.matlab import MatReadError

    try:
        found: Mapping[str, Any] = loadmat(path, squeeze_me=True)
    except (MatReadError, OSError, ValueError, TypeError, LookupError, NotImplementedError, zlib.error) as error:
        raise DataError(f"{path}: unreadable or truncated MATLAB file: {error}; fetch it again") from error
    return found


def every_nth(labels: Labels, fraction: float) -> npt.NDArray[np.bool_]:
    """Which samples are for testing, where there is no official split: of each class evenly spread ones.

    Args:
        labels: int64 [N].
        fraction: of each class, in (0, 1).
    """
    test = np.zeros(len(labels), dtype=bool)
    for label in np.unique(labels):
        of_class = np.flatnonzero(labels == label)
        count = np.floor((np.arange(len(of_class)) + 1) * fraction + 1e-9)
        test[of_class[np.diff(count, prepend=0) > 0]] = True
    return test
