"""Sums over vectors: squared lengths and distances, in float64.

A vector is all floating-point tensors of a model, one after the other. It is never built: a sum is over its parts,
in the order of the names. A vector that holds NaN or an infinity is *broken*. Entries at which all hold the same
infinity, such as a mask, are equal, and break none. Where a sum would not be finite, such entries count as 0.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from p2pfl.tensors import PART, Tensors, flat_parts, is_finite, widened

Floats = NDArray[np.float64]
Key = TypeVar("Key")

Summand = Callable[..., Tensor]
"""Returns float64 of the same part of several vectors, at least float32 [d] each."""

CANCELLED = 2.0**-20
"""‖a − b‖² = ‖a‖² + ‖b‖² − 2 a·b is exact to some 2⁻⁵⁰ of ‖a‖² + ‖b‖². Where it is less than this fraction of that,
as of vectors that are near one another and far from the first, they are subtracted instead."""


def sums(
    groups: Mapping[Key, Sequence[Tensors]], summand: Summand
) -> tuple[dict[Key, Floats], dict[Key, list[bool]]]:
    """Add up a function of all parts of each group of vectors, and say which of its vectors are broken.

    One tensor of each vector of a group is in memory at a time, those of the same name one group after the other.
    """
    totals = dict.fromkeys(groups, torch.zeros((), dtype=torch.float64))
    for name in next(iter(groups.values()))[0]:
        for key, models in groups.items():
            for part in _parts(models, name):
                found = summand(*part)
                totals[key] = totals[key].to(found.device) + found
    broken = {key: [False] * len(models) for key, models in groups.items()}
    for key, total in totals.items():
        if not is_finite(total):
            totals[key], broken[key] = _sum_of_finite(groups[key], summand)
    return {key: total.cpu().numpy() for key, total in totals.items()}, broken


def _sum_of_finite(models: Sequence[Tensors], summand: Summand) -> tuple[Tensor, list[bool]]:
    total, broken = torch.zeros((), dtype=torch.float64), torch.zeros(len(models), dtype=torch.bool)
    for name in models[0]:
        for part in _parts(models, name):
            rows, bad = _comparable(torch.stack(list(part)))
            total, broken = total.to(rows.device) + summand(*rows), broken.to(rows.device) | bad
    return total, broken.tolist()


def _parts(models: Sequence[Tensors], name: str) -> Iterator[Sequence[Tensor]]:
    """Yield the parts of one tensor of each model; none of an integer one."""
    first = models[0][name]
    if first.is_floating_point() or first.is_complex():
        rest = (model[name].to(first.device) for model in models[1:])
        yield from flat_parts([widened(real(tensor)) for tensor in (first, *rest)], 2 * PART)


def square(x: Tensor) -> Tensor:
    """Return ‖x‖² of a part, float64."""
    x = x.to(torch.float64, copy=True)  # the bits of a product may depend on where in memory its factors begin
    return torch.dot(x, x)


def squared_distances(models: Sequence[Tensors]) -> tuple[Floats, list[bool]]:
    """Return the squared distances between n models, float64 [n, n], and which are broken.

    One tensor of each is in memory at a time.
    """
    found, broken = sums({"all": models}, _products)
    products = np.broadcast_to(found["all"], (len(models), len(models)))  # 0 without tensors
    sizes = products.diagonal()
    with np.errstate(invalid="ignore"):  # of float64 vectors, squares may be infinite
        both = sizes[:, None] + sizes
        squares = np.triu(both - 2.0 * products, 1)
        pairs = np.argwhere(np.triu(~(squares >= CANCELLED * both), 1)).tolist()  # NaN is not either
    if pairs:
        near, _ = sums({"all": models}, lambda *rows: torch.stack([square(rows[i] - rows[j]) for i, j in pairs]))
        squares[tuple(np.transpose(pairs))] = near["all"]
    return squares + squares.T, broken["all"]


def _products(*rows: Tensor) -> Tensor:
    """Return the inner products of rows relative to the first one, [n, n]."""
    relative = torch.stack(rows).double()
    relative -= relative[0].clone()
    return relative @ relative.T


def real(tensor: Tensor) -> Tensor:
    """Return the real numbers that a tensor consists of."""
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


def _comparable(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return the rows with 0 for what is not finite, and which rows hold such entries that the others do not."""
    finite = rows.isfinite()
    common = (rows == rows[0]).all(0) & ~finite[0]
    return rows.masked_fill(~finite, 0.0), ~(finite | common).all(1)
