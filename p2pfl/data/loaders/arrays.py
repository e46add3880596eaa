"""Turn arrays of users' files into inputs, labels and columns, with errors that name the file and the array."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from p2pfl.data.columns import Column
from p2pfl.data.loaders.base import DatasetArrays, Inputs, Labels
from p2pfl.errors import DataError

Array = npt.NDArray[Any]

EXPECTED = (
    "images uint8 [N, H, W] or [N, H, W, 1 or 3], vectors float [N, D], series float [N, C, L], or tokens as "
    "integers [N, L]"
)


def as_inputs(where: str, array: Array) -> Inputs:
    """Convert to uint8 [N, C, H, W], float32 [N, D] or [N, C, L], or int64 [N, L]. Raises DataError."""
    if array.dtype == np.uint8 and (array.ndim == 3 or (array.ndim == 4 and array.shape[3] in (1, 3))):
        channels_last = array[..., np.newaxis] if array.ndim == 3 else array
        return np.ascontiguousarray(channels_last.transpose(0, 3, 1, 2))
    if array.dtype.kind == "f" and array.ndim in (2, 3):
        return np.ascontiguousarray(array, dtype=np.float32)
    if array.dtype.kind in "iu" and array.dtype != np.uint8 and array.ndim == 2:
        return np.ascontiguousarray(array, dtype=np.int64)
    raise DataError(f"{where} is {array.dtype} {list(array.shape)}; expected {EXPECTED}{_remedy(array)}")


def _remedy(array: Array) -> str:
    """What to do with inputs that are not read, by what they look like; docs/limits.md lists them."""
    kind, shape = array.dtype.kind, array.shape
    match kind, array.ndim:
        case (("U" | "S" | "O" | "T"), _):
            text = "text or lists: turn them into tokens, integers [N, L], or embeddings, float [N, D]"
        case "c", _:
            text = "complex numbers: pass real and imaginary parts as numbers of their own"
        case (("M" | "m" | "V"), _):
            text = "dates or records: turn them into numbers"
        case "b", 2:
            text = "booleans: pass them as float, array.astype('float32')"
        case _, 0 | 1:
            text = "one number per sample: reshape it, array.reshape(-1, 1).astype('float32')"
        case "u", 2 if array.dtype == np.uint8:
            text = "vectors or tokens as bytes: pass numbers as float32, or tokens as int64"
        case _, n if n > 4:
            text = "volumes or video: choose slices or frames, each an image of its own, or compute features"
        case _, 4 if array.dtype == np.uint8 and shape[1] in (1, 3):
            text = "images with channels first: put them last, array.transpose(0, 2, 3, 1)"
        case _, 4 if shape[3] in (2, 4) and array.dtype == np.uint8:
            text = "images with transparency or more channels: keep 1 or 3 of them"
        case _, 4 if not {1, 3, 4} & {shape[1], shape[3]}:
            text = "volumes or video: choose slices or frames, each an image of its own, or compute features"
        case "f", 4:
            text = "images of floating-point numbers: scale them to 0 … 255 by limits common to all, as uint8"
        case (("i" | "u"), 3 | 4) if array.dtype != np.uint8:
            text = "images of more than 8 bits: scale them to 0 … 255 by limits common to all, as uint8"
        case _:
            return ""
    return f". These look like {text}"


def as_labels(where: str, array: Array) -> Labels:
    """Convert integers [N] to int64. Raises DataError."""
    if array.dtype.kind not in "iu" or array.ndim != 1:
        raise DataError(f"{where} is {array.dtype} {list(array.shape)}; expected integers [N]")
    return array.astype(np.int64)


def as_column(where: str, train: Array, test: Array) -> Column:
    """Encode values [N] of both splits: integers or text. Raises DataError."""
    for array in (train, test):
        if array.dtype.kind not in "iuUb" or array.ndim != 1:
            raise DataError(f"{where} is {array.dtype} {list(array.shape)}; expected integers or text [N]")
    return Column.of(train, test)


def dataset(
    where: str,
    train: tuple[Inputs, Labels],
    test: tuple[Inputs, Labels],
    *,
    classes: int | None = None,
    vocabulary: int | None = None,
    mirror: bool = False,
    columns: Mapping[str, Column] | None = None,
) -> DatasetArrays:
    """Put the splits together.

    Args:
        where: the file, for errors.
        classes: by default the largest label plus one.
        vocabulary: by default the largest token plus one.

    Raises:
        DataError: columns and inputs differ in length, or the splits in the kind of inputs.
    """
    for name, column in (columns or {}).items():
        found, expected = (len(column.train), len(column.test)), (len(train[1]), len(test[1]))
        if found != expected:
            raise DataError(f"{where}: {name} has {found} values in the splits, which have {expected} samples")
    if train[0].dtype != test[0].dtype:
        raise DataError(f"{where}: training inputs are {train[0].dtype}, but test inputs {test[0].dtype}")
    if classes is None:
        classes = int(max(labels.max(initial=0) for _, labels in (train, test))) + 1
    tokens = 0
    if train[0].dtype == np.int64:
        tokens = vocabulary or int(max(inputs.max(initial=0) for inputs, _ in (train, test))) + 1
    return DatasetArrays(*train, *test, classes, mirror, columns=columns or {}, vocabulary=tokens)
