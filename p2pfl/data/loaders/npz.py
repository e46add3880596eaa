"""Datasets given as arrays in an .npz file."""

from __future__ import annotations

import zipfile
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np
from pydantic import PositiveInt

from p2pfl.data.loaders.arrays import as_column, as_inputs, as_labels, dataset
from p2pfl.data.loaders.base import DatasetArrays, Loader
from p2pfl.errors import DataError
from p2pfl.paths import DataPath

REQUIRED = ("x_train", "y_train", "x_test", "y_test")


@dataclass(frozen=True)
class Npz(Loader):
    """Arrays x_train, y_train, x_test, y_test in a file written by ``numpy.savez``.

    x are images uint8 [N, H, W] or [N, H, W, C] with C 1 or 3, vectors float [N, D], series float [N, C, L], or
    tokens as integers [N, L]; y are integers [N], counted from 0, or text [N]. Other pairs of arrays, such as
    writer_train and writer_test, are columns for the partition ``natural``: integers or text [N].
    """

    instructions: ClassVar[str] = "create it with numpy.savez(path, x_train=…, y_train=…, x_test=…, y_test=…)"

    path: DataPath
    """The file, relative to the run file or to the root."""
    classes: PositiveInt | None = None
    """Number of classes; by default the largest label plus one, or the number of different texts."""
    vocabulary: PositiveInt | None = None
    """Number of different tokens; by default the largest token plus one."""
    mirror: bool = False
    """Whether mirroring an image keeps its label."""

    def files(self, root: Path) -> tuple[Path, ...]:
        return (root / self.path,)

    def read(self, root: Path) -> DatasetArrays:
        path = root / self.path
        try:
            with path.open("rb") as file, np.load(file, allow_pickle=False) as content:  # noqa: TID251
                arrays = {name: content[name] for name in content.files}
        except (OSError, EOFError, ValueError, TypeError, AttributeError, zipfile.BadZipFile, zlib.error) as error:
            reason = str(error)
            if not isinstance(error, OSError) and not zipfile.is_zipfile(path):
                reason = "it is not a complete zip archive"
            elif "allow_pickle" in reason:
                reason = "it contains Python objects; convert these arrays to numbers or text"
            raise DataError(f"{path}: not a valid .npz file of plain arrays: {reason}") from error
        if missing := [name for name in REQUIRED if name not in arrays]:
            raise DataError(f"{path}: {missing[0]} is missing; it must contain {', '.join(REQUIRED)}")
        x_train, x_test = (as_inputs(f"{path}: x_{split}", arrays[f"x_{split}"]) for split in ("train", "test"))
        y_train, y_test, class_names = as_labels(f"{path}: y", arrays["y_train"], arrays["y_test"])
        names = [name.removesuffix("_train") for name in arrays if name.endswith("_train") and name not in REQUIRED]
        columns = {
            name: as_column(f"{path}: {name}", arrays[f"{name}_train"], arrays[f"{name}_test"])
            for name in names
            if f"{name}_test" in arrays
        }
        return dataset(
            str(path),
            (x_train, y_train),
            (x_test, y_test),
            classes=self.classes,
            vocabulary=self.vocabulary,
            mirror=self.mirror,
            columns=columns,
            class_names=class_names,
        )
