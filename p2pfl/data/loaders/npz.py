"""Datasets given as arrays in an .npz file."""

from __future__ import annotations

import zipfile
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np
from pydantic import PositiveInt

from p2pfl.data.loaders.base import DatasetArrays, Images, Labels, Loader
from p2pfl.errors import DataError


@dataclass(frozen=True)
class Npz(Loader):
    """Arrays x_train, y_train, x_test, y_test in a file written by ``numpy.savez``.

    x are uint8 [N, H, W] or [N, H, W, C] with C 1 or 3; y are integers [N], counted from 0.
    """

    instructions: ClassVar[str] = "create it with numpy.savez(path, x_train=…, y_train=…, x_test=…, y_test=…)"

    path: Path
    """The file, absolute or relative to the root."""
    classes: PositiveInt | None = None
    """Number of classes; by default the largest label plus one."""
    mirror: bool = False
    """Whether mirroring an image keeps its label."""

    def files(self, root: Path) -> tuple[Path, ...]:
        return (root / self.path,)

    def read(self, root: Path) -> DatasetArrays:
        path = root / self.path
        try:
            with path.open("rb") as file, np.load(file, allow_pickle=False) as content:  # noqa: TID251
                arrays = {name: content[name] for name in ("x_train", "y_train", "x_test", "y_test")}
        except KeyError as error:
            raise DataError(f"{path}: {error.args[0]}; it must contain x_train, y_train, x_test, y_test") from error
        except (OSError, EOFError, ValueError, TypeError, AttributeError, zipfile.BadZipFile, zlib.error) as error:
            raise DataError(f"{path}: not a valid .npz file of plain arrays: {error}") from error
        train, test = (
            (_images(path, f"x_{split}", arrays[f"x_{split}"]), _labels(path, f"y_{split}", arrays[f"y_{split}"]))
            for split in ("train", "test")
        )
        classes = self.classes or int(max(labels.max(initial=0) for _, labels in (train, test))) + 1
        return DatasetArrays(*train, *test, classes, self.mirror)


def _images(path: Path, name: str, array: np.ndarray) -> Images:
    if array.dtype != np.uint8 or array.ndim not in (3, 4) or (array.ndim == 4 and array.shape[3] not in (1, 3)):
        raise DataError(
            f"{path}: {name} is {array.dtype} {list(array.shape)}; expected uint8 [N, H, W] or [N, H, W, 1 or 3]"
        )
    channels_last = array[..., np.newaxis] if array.ndim == 3 else array
    return np.ascontiguousarray(channels_last.transpose(0, 3, 1, 2))


def _labels(path: Path, name: str, array: np.ndarray) -> Labels:
    if array.dtype.kind not in "iu" or array.ndim != 1:
        raise DataError(f"{path}: {name} is {array.dtype} {list(array.shape)}; expected integers [N]")
    return array.astype(np.int64)
