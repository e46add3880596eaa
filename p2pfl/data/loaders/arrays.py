"""Turn arrays of users' files into inputs, labels and columns, with errors that name the file and the array."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from p2pfl.data.columns import Column, first_missing, lookalikes
from p2pfl.data.loaders.base import DatasetArrays, Inputs, Labels
from p2pfl.errors import DataError

Array = npt.NDArray[Any]

EXPECTED = (
    "images uint8 [N, H, W] or [N, H, W, 1 or 3], vectors float [N, D], series float [N, C, L], or tokens as "
    "integers [N, L]"
)

MOST_TOKENS = 1_000_000
"""Words of a vocabulary that is not given: more are hashes or mistakes."""


def as_inputs(where: str, array: Array) -> Inputs:
    """Convert to uint8 [N, C, H, W], float32 [N, D] or [N, C, L], or int64 [N, L]. Raises DataError."""
    if array.dtype == np.uint8 and (array.ndim == 3 or (array.ndim == 4 and array.shape[3] in (1, 3))):
        channels_last = array[..., np.newaxis] if array.ndim == 3 else array
        return np.ascontiguousarray(channels_last.transpose(0, 3, 1, 2))
    if array.dtype.kind == "f" and array.ndim in (2, 3):
        return np.ascontiguousarray(array, dtype=np.float32)
    if array.dtype.kind in "iu" and array.dtype != np.uint8 and array.ndim == 2:
        return np.ascontiguousarray(array, dtype=np.int64)
    raise DataError(f"{where} is {array.dtype} {list(array.shape)}; expected {EXPECTED}{_looks_like(array)}")


def _looks_like(array: Array) -> str:
    """What to do with inputs that are not read, by what they look like; docs/limits.md lists them."""
    kind, shape = array.dtype.kind, array.shape
    match kind, array.ndim:
        case (("U" | "S" | "O" | "T"), _):
            text = "text or lists: turn them into tokens, integers [N, L], or embeddings, float [N, D]"
        case "c", _:
            text = "complex numbers: pass real and imaginary parts as separate numbers"
        case (("M" | "m" | "V"), _):
            text = "dates or records: turn them into numbers"
        case "b", 2:
            text = "booleans: pass them as float, array.astype('float32')"
        case _, 0 | 1:
            text = "one number per sample: reshape it, array.reshape(-1, 1).astype('float32')"
        case "u", 2 if array.dtype == np.uint8:
            text = "vectors or tokens as bytes: pass numbers as float32, or tokens as int64"
        case _, n if n > 4:
            text = "volumes or video: choose slices or frames, each as a separate image, or compute features"
        case _, 4 if array.dtype == np.uint8 and shape[1] in (1, 3):
            text = "images with channels first: put them last, array.transpose(0, 2, 3, 1)"
        case _, 4 if shape[3] in (2, 4) and array.dtype == np.uint8:
            text = "images with transparency or more channels: keep 1 or 3 of them"
        case _, 4 if not {1, 3, 4} & {shape[1], shape[3]}:
            text = "volumes or video: choose slices or frames, each as a separate image, or compute features"
        case "f", 4:
            text = "images of floating-point numbers: scale them to 0 … 255 by limits common to all, as uint8"
        case (("i" | "u"), 3 | 4) if array.dtype != np.uint8:
            text = "images of more than 8 bits: scale them to 0 … 255 by limits common to all, as uint8"
        case _:
            return ""
    return f". These look like {text}"


def as_labels(where: str, train: Array, test: Array) -> tuple[Labels, Labels, tuple[str, ...]]:
    """Convert the labels [N] of both splits: integers are classes; text and booleans are numbered.

    Returns:
        int64 [N] each, and the names of the classes, empty for integers.

    Raises:
        DataError: they are of another type or shape, or missing.
    """
    for split, labels in (("train", train), ("test", test)):
        if labels.dtype.kind not in "iuUb" or labels.ndim != 1:
            found = f"{where}_{split} is {labels.dtype} {list(labels.shape)}"
            raise DataError(f"{found}; expected integers [N] or text [N]{_remedy(labels)}")
        if labels.dtype.kind == "u" and labels.max(initial=0) > np.iinfo(np.int64).max:
            raise DataError(f"{where}_{split}: {labels.max()} is too large for a label; number the classes from 0")
    if {train.dtype.kind, test.dtype.kind} <= set("iu"):
        return train.astype(np.int64), test.astype(np.int64), ()
    column = as_column(where, train, test)
    return column.train, column.test, column.values


def _remedy(labels: Array) -> str:
    """Say how to make integers [N] of labels of another type or shape."""
    if labels.ndim == 2 and labels.shape[1] == 1:
        return ": use y.ravel()"
    if labels.ndim == 2 and labels.dtype.kind in "iufb" and bool(((labels != 0).sum(axis=1) == 1).all()):
        return ": one-hot labels become integers by y.argmax(axis=1)"
    if labels.ndim > 1:
        return "; a sample has one class, not one per tag, token or pixel"
    if labels.dtype.kind == "f":
        whole = bool(np.isfinite(labels).all()) and np.array_equal(labels, np.rint(labels))
        return ": use y.astype(int)" if whole else "; measurements and NaN are not classes"
    return ": use y.astype(str)" if labels.dtype.kind == "S" else ""


def as_column(where: str, train: Array, test: Array) -> Column:
    """Encode values [N] of both splits: integers or text. Raises DataError, also if one is missing."""
    for split, array in (("training", train), ("test", test)):
        if array.dtype.kind not in "iuUb" or array.ndim != 1:
            one = "; a sample has one input: concatenate several to one array" if array.ndim > 1 else ""
            raise DataError(f"{where} is {array.dtype} {list(array.shape)}; expected integers or text [N]{one}")
        sample = first_missing(array)
        if sample is not None:
            found = repr(str(array[sample]))
            text = f"{split} sample {sample}, counted from 0, is {found}, which marks a missing value"
            raise DataError(f"{where}: {text}; remove the sample, or rename it")
    return Column.of(train, test)


def number_of_classes(where: str, labels: Iterable[Labels], remedy: str = "") -> int:
    """Return the largest label plus one, for labels that count from 0.

    Args:
        where: the file, for errors.
        remedy: what else helps, besides numbering the classes.

    Raises:
        DataError: less than a tenth of the classes would have samples.
    """
    distinct = np.unique(np.concatenate(list(labels)))
    classes = int(distinct.max(initial=0)) + 1
    if classes > 10 * max(len(distinct), 1):
        some = ", ".join(map(str, distinct[:3])) + (", …" if len(distinct) > 3 else "")
        raise DataError(
            f"{where}: {len(distinct)} distinct labels ({some}) would make {classes} classes, from 0 to "
            f"{classes - 1}; number them from 0 to {len(distinct) - 1}{remedy}"
        )
    return classes


def dataset_arrays(
    where: str,
    train: tuple[Inputs, Labels],
    test: tuple[Inputs, Labels],
    *,
    classes: int | None = None,
    vocabulary: int | None = None,
    mirror: bool = False,
    columns: Mapping[str, Column] | None = None,
    class_names: Sequence[str] = (),
    notes: Sequence[str] = (),
) -> DatasetArrays:
    """Put the splits together.

    Args:
        where: the file, for errors.
        classes: by default the largest label plus one, or as many as there are names.
        vocabulary: by default the largest token plus one.

    Raises:
        DataError: columns and inputs differ in length, the splits in the kind of inputs, or they have no class in
            common; labels or tokens would make far more classes or words than there are.
    """
    for name, column in (columns or {}).items():
        found, expected = (len(column.train), len(column.test)), (len(train[1]), len(test[1]))
        if found != expected:
            raise DataError(f"{where}: {name} has {found} values in the splits, which have {expected} samples")
    if train[0].dtype != test[0].dtype:
        raise DataError(f"{where}: training inputs are {train[0].dtype}, but test inputs {test[0].dtype}")
    if not len(np.intersect1d(train[1], test[1])) and len(train[1]) and len(test[1]):
        one, other = (class_names[labels[0]] if class_names else int(labels[0]) for _, labels in (train, test))
        raise DataError(
            f"{where}: training and test samples have no class in common, e.g. {one!r} and {other!r}; write the "
            "labels of both in the same way"
        )
    if class_names and classes not in (None, len(class_names)):
        raise DataError(
            f"{where}: classes is {classes}, but the labels are text of {len(class_names)} classes; remove it"
        )
    if classes is None:
        most = int(max(labels.max(initial=0) for _, labels in (train, test))) + 1
        remedy = f", store them as text, y.astype(str), or set classes: {most}"
        classes = len(class_names) or number_of_classes(where, (train[1], test[1]), remedy)
    tokens = 0
    if train[0].dtype == np.int64:
        tokens = vocabulary or int(max(inputs.max(initial=0) for inputs, _ in (train, test))) + 1
        if vocabulary is None and tokens > MOST_TOKENS:
            raise DataError(
                f"{where}: the largest token is {tokens - 1}; number the tokens from 0, or set vocabulary: {tokens}"
            )
    texts = {"labels": class_names} | {f"values of {name}": each.values for name, each in (columns or {}).items()}
    alike = [(what, *pair) for what, values in texts.items() if (pair := lookalikes(values)) is not None]
    return DatasetArrays(
        *train,
        *test,
        classes,
        mirror,
        columns=columns or {},
        vocabulary=tokens,
        class_names=class_names,
        notes=[*notes, *(f"the {what} {a!r} and {b!r} are different ones: text counts" for what, a, b in alike)],
    )
