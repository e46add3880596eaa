"""Sums over vectors: squared lengths and distances, in float64.

A vector is all floating-point tensors of a model, one after the other. It is never built: a sum is over its parts, in
the order of the names. A vector that holds NaN or an infinity is *broken*. Entries at which all hold the same infinity,
such as a mask, are equal, and break none; in all sums, what is not finite counts as 0.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from p2pfl.tensors import Tensors, flat_parts, is_finite, widened

Floats = NDArray[np.float64]

Summand = Callable[..., Tensor]
"""Returns float64 of the same part of several vectors, at least float32 [d] each."""

CANCELLED = 2.0**-20
"""‖a − b‖² = ‖a‖² + ‖b‖² − 2 a·b is exact to some 2⁻⁵⁰ of ‖a‖² + ‖b‖². Where it is less than this fraction of that,
as of vectors that are near one another and far from the first, they are subtracted instead."""


class Sum:
    """A sum over the parts of n vectors, and which of these are broken, on the device of the first."""

    def __init__(self, n: int) -> None:
        self._total = torch.zeros((), dtype=torch.float64)
        self._broken = torch.zeros(n, dtype=torch.bool)

    def add(self, tensors: Sequence[Tensor], summand: Summand) -> None:
        """Add a function of all parts of one tensor of each vector."""
        if not (tensors[0].is_floating_point() or tensors[0].is_complex()):
            return
        device = tensors[0].device
        self._total, self._broken = self._total.to(device), self._broken.to(device)
        for part in flat_parts([widened(_real(tensor)).to(device) for tensor in tensors]):
            found = summand(*part)
            if not is_finite(found):
                rows, broken = _comparable(torch.stack(part))
                found, self._broken = summand(*rows), self._broken | broken
            self._total = self._total + found

    def result(self) -> tuple[Floats, list[bool]]:
        return self._total.cpu().numpy(), self._broken.tolist()


def square(x: Tensor) -> Tensor:
    """Return ‖x‖² of a part, float64."""
    x = x.double()
    return torch.dot(x, x)


def squared_distances(models: Sequence[Tensors]) -> tuple[Floats, list[bool]]:
    """Return the squared distances between n models, float64 [n, n], and which are broken.

    One tensor of each is in memory at a time.
    """
    products, broken = _sums(models, _products)
    sizes = products.diagonal()
    with np.errstate(invalid="ignore"):  # of float64 vectors, squares may be infinite
        both = sizes[:, None] + sizes
        squares = np.triu(both - 2.0 * products, 1)
        pairs = np.argwhere(np.triu(~(squares >= CANCELLED * both), 1)).tolist()  # NaN is not either
    if pairs:
        near, _ = _sums(models, lambda *rows: torch.stack([square(rows[i] - rows[j]) for i, j in pairs]))
        squares[tuple(np.transpose(pairs))] = near
    return squares + squares.T, broken


def _sums(models: Sequence[Tensors], summand: Summand) -> tuple[Floats, list[bool]]:
    found = Sum(len(models))
    for name in models[0]:
        found.add([model[name] for model in models], summand)
    return found.result()


def _products(*rows: Tensor) -> Tensor:
    """Return the inner products of rows relative to the first one, [n, n]."""
    relative = torch.stack(rows).double()
    relative -= relative[0].clone()
    return relative @ relative.T


def _real(tensor: Tensor) -> Tensor:
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


def _comparable(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return the rows with 0 for what is not finite, and which rows hold such entries that the others do not."""
    finite = rows.isfinite()
    common = (rows == rows[0]).all(0) & ~finite[0]
    return rows.masked_fill(~finite, 0.0), ~(finite | common).all(1)
