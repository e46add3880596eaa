"""Contributions as vectors: norms, distances, and vectors that are moved toward others.

The vector of a contribution is all of its floating-point tensors, one after the other. It is never built: squares are
summed part by part in the order of the names, those of a part in the dtype of the tensors, and parts in float64.

A contribution that holds NaN or an infinity is *broken*: what this module returns leaves it out. Entries at which all
hold the same infinity, such as a mask, are equal, and break none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from p2pfl import PeerId
from p2pfl.aggregation.coordinates import Median
from p2pfl.aggregation.rule import Contributions
from p2pfl.tensors import PART, Tensors, difference, is_finite, widened

Floats = NDArray[np.float64]


# ---- distances -----------------------------------------------------------------------------------------------


def norms(given: Contributions) -> tuple[Contributions, dict[PeerId, float]]:
    """Return the contributions that are not broken, and the norm of each."""
    squares, broken = _sums(list(given.tensors.values()), (len(given.tensors),), _squares)
    kept = _without(given, broken)
    found = dict(zip(given.tensors, np.sqrt(squares).tolist(), strict=True))
    return kept, {j: found[j] for j in kept.tensors}


def distances(given: Contributions, center: Tensors) -> tuple[Contributions, dict[PeerId, float]]:
    """Return the contributions that are not broken, and the distance of each from ``center``.

    Reads the contributions one by one.
    """
    found, broken = {}, []
    for j, tensors in given.tensors.items():
        squares, which = _sums([center, tensors], (1,), lambda rows: _squares(rows[1:] - rows[0]))
        found[j] = float(np.sqrt(squares[0]))
        broken.append(which.any())
    kept = _without(given, np.array(broken))
    return kept, {j: found[j] for j in kept.tensors}


def pairwise(given: Contributions) -> tuple[Contributions, Floats]:
    """Return the contributions that are not broken, and their squared distances.

    One tensor of each contribution is in memory at a time.

    Returns:
        float64 [n, n], symmetric, in the order of the contributions returned.
    """

    def squares_of(rows: Tensor) -> Tensor:
        return torch.stack([_squares(rows - row) for row in rows])

    n = len(given.tensors)
    squares, broken = _sums(list(given.tensors.values()), (n, n), squares_of)
    kept = _without(given, broken)
    rows = [row for row, j in enumerate(given.tensors) if j in kept.tensors]
    return kept, squares[np.ix_(rows, rows)]


def centered(squares: Floats, weights: Floats) -> Floats:
    """Return the inner products (x_i − μ)·(x_j − μ), μ = Σ_i w_i x_i, float64 [..., n, n].

    Args:
        squares: distances, float64 [..., n, n].
        weights: float64 [n], which sum to 1.
    """
    rows = squares @ weights
    products: Floats = -0.5 * (squares - rows[..., :, None] - rows[..., None, :] + (rows @ weights)[..., None, None])
    return products


def _squares(rows: Tensor) -> Tensor:
    return rows.square().sum(1, dtype=torch.float64)


def _sums(
    models: Sequence[Tensors], shape: tuple[int, ...], summand: Callable[[Tensor], Tensor]
) -> tuple[Floats, NDArray[np.bool_]]:
    """Add up a function of the rows [n, d] of all parts of n models, float64 of ``shape``; and say which are broken.

    Only the sums leave the device of the first model.
    """
    total = broken = None
    for rows in _parts(models):
        if not is_finite(rows):
            rows, bad = _comparable(rows)
            broken = bad if broken is None else broken | bad.to(broken.device)
        part = summand(rows)
        total = part if total is None else total + part.to(total.device)
    sums = np.zeros(shape) if total is None else total.cpu().numpy()
    return sums, np.zeros(len(models), dtype=bool) if broken is None else broken.cpu().numpy()


def _parts(models: Sequence[Tensors]) -> Iterator[Tensor]:
    """Yield the entries of models in rows [n, d]; on the CPU, a part of all of them fits into the cache."""
    for name, first in models[0].items():
        if not (first.is_floating_point() or first.is_complex()):
            continue
        device = first.device
        flat = [widened(_real(model[name])).to(device).reshape(-1) for model in models]
        size = max(1, PART // len(models)) if device.type == "cpu" else max(1, first.numel())
        for part in zip(*(tensor.split(size) for tensor in flat), strict=True):
            yield torch.stack(part)


def _real(tensor: Tensor) -> Tensor:
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


def _comparable(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return the rows with 0 for what is not finite, and which rows hold such entries that the others do not."""
    finite = rows.isfinite()
    common = (rows == rows[0]).all(0) & ~finite[0]
    return rows.masked_fill(~finite, 0.0), ~(finite | common).all(1)


def _without(given: Contributions, broken: NDArray[np.bool_]) -> Contributions:
    """Return the contributions that are not broken, unless all are."""
    if not broken.any() or broken.all():
        return given
    return given.only([j for j, bad in zip(given.tensors, broken, strict=True) if not bad])


# ---- vectors that are moved ----------------------------------------------------------------------------------


def center_of(given: Contributions) -> Tensors:
    """Return what a peer that trusts its own contribution measures the others by.

    That is its own; without one, as for a class that it has no samples of, or after a divergence, the median of each
    coordinate.
    """
    return Median().combine(given) if given.own is None else given.own


@dataclass(frozen=True, eq=False)
class Derived(Mapping[str, Tensor]):
    """Tensors that are computed at each access, so that one at a time is in memory. Integers stay as they are."""

    base: Tensors
    """With the names, and the dtypes of the results."""
    compute: Callable[[str], Tensor]
    """Returns the tensor of a name."""

    def __getitem__(self, name: str) -> Tensor:
        original = self.base[name]
        if not (original.is_floating_point() or original.is_complex()):
            return original
        return self.compute(name).to(original.dtype)

    def __iter__(self) -> Iterator[str]:
        return iter(self.base)

    def __len__(self) -> int:
        return len(self.base)


def toward(center: Tensors, tensors: Tensors, factor: float) -> Tensors:
    """Return c + factor · (x − c), 0 ≤ factor ≤ 1; x itself for 1."""

    def moved(name: str) -> Tensor:
        start = widened(center[name])
        return start + factor * difference(tensors[name].to(start.device), start)

    return tensors if factor == 1.0 else Derived(tensors, moved)


def scaled(tensors: Tensors, factor: float) -> Tensors:
    """Return factor · x, 0 ≤ factor ≤ 1; x itself for 1."""
    return tensors if factor == 1.0 else Derived(tensors, lambda name: widened(tensors[name]) * factor)


def replaced(given: Contributions, tensors: Mapping[PeerId, Tensors]) -> Contributions:
    """Return the contributions with other tensors; the peer's own are those that now stand for it, if any do."""
    return replace(given, tensors=tensors, own=tensors.get(given.me, given.own))


def clip_factor(length: float, limit: float) -> float:
    """Return min(1, limit / length)."""
    return 1.0 if length <= limit else limit / length
