"""Bodies with other tensors, in the form that receivers accept."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from p2pfl.messaging.schema import B, Layout, TensorPath, tensors_of, with_tensors
from p2pfl.tensors import difference, widened


def altered(body: B, change: Callable[[TensorPath, Tensor], Tensor]) -> B:
    """Return a body whose floating-point tensors are the results of ``change``; all else stays.

    Args:
        change: maps a path and a tensor, at least float32, to a new tensor of this shape.
    """
    lies = {path: fitted(path, change(path, widened(x)), x) for path, x in tensors_of(body).items() if is_float(x)}
    return with_tensors(body, tensors_of(body) | lies)


def fitted(path: TensorPath, values: Tensor, like: Tensor) -> Tensor:
    """Return the values in the dtype of ``like``, limited to its range: nothing overflows to infinity.

    A running variance stays positive: its square root would be NaN.
    """
    if like.dtype.itemsize < values.dtype.itemsize:
        limits = torch.finfo(like.dtype)
        values = values.clamp(limits.min, limits.max)
    if (path[1] or path[0]).endswith("running_var"):
        values = values.clamp(min=0.0)
    return values.to(like.dtype)


def is_float(tensor: Tensor) -> bool:
    return tensor.is_floating_point() and tensor.numel() > 0


def floats_of(layout: Layout) -> list[TensorPath]:
    """Return the paths of the floating-point tensors."""
    return [path for path, spec in layout.tensors.items() if spec.dtype.is_floating_point]


def rescaled(body: B, before: Mapping[TensorPath, Tensor], factor: float) -> B:
    """Return b + factor · (x − b) for each tensor x, with its value b before training; factor · x if it has none."""

    def change(path: TensorPath, x: Tensor) -> Tensor:
        if path not in before:
            return factor * x
        return widened(before[path]) + factor * difference(x, before[path])

    return altered(body, change)
