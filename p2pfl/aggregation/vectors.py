"""Contributions as vectors: norms, distances, and vectors that are moved toward others.

The vector of a contribution is all of its floating-point tensors, one after the other. It is never built: squares, in
the dtype of the tensors or float32, are summed in float64, part by part in the order of the names.

A contribution that holds NaN or an infinity is *broken*: what this module returns leaves it out, unless all are.
Entries at which all hold the same infinity, such as a mask, are equal, and break none.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from p2pfl import PeerId, rng
from p2pfl.aggregation.coordinates import Median
from p2pfl.aggregation.rule import Contributions
from p2pfl.tensors import Tensors, difference, flat_parts, is_finite, widened

Floats = NDArray[np.float64]


# ---- distances -----------------------------------------------------------------------------------------------


def norms(given: Contributions) -> tuple[Contributions, dict[PeerId, float]]:
    """Return the contributions that are not broken, and the norm of each. Reads them one by one."""
    other = next(iter(given.tensors.values())) if given.own is None else given.own
    return _lengths(given, other, lambda rows: _squares(rows[1:]))


def distances(given: Contributions, center: Tensors) -> tuple[Contributions, dict[PeerId, float]]:
    """Return the contributions that are not broken, and the distance of each from a center. Reads them one by one."""
    return _lengths(given, center, lambda rows: _squares(rows[1:] - rows[0]))


def pairwise(given: Contributions) -> tuple[Contributions, Floats]:
    """Return the contributions that are not broken, and their squared distances.

    One tensor of each contribution is in memory at a time.

    Returns:
        float64 [n, n], symmetric, in the order of the contributions returned.
    """
    found, broken = _sums(
        list(given.tensors.values()),
        lambda rows: torch.cat([_squares(rows[i + 1 :] - row) for i, row in enumerate(rows)]),
    )
    n = len(given.tensors)
    squares = np.zeros((n, n))
    squares[np.triu_indices(n, 1)] = found
    kept = _without(given, broken)
    rows = [row for row, j in enumerate(given.tensors) if j in kept.tensors]
    return kept, (squares + squares.T)[np.ix_(rows, rows)]


def centered(squares: Floats, weights: Floats) -> Floats:
    """Return the inner products (x_i − μ)·(x_j − μ), μ = Σ_i w_i x_i, float64 [..., n, n].

    Args:
        squares: distances, float64 [..., n, n].
        weights: float64 [n], which sum to 1.
    """
    rows = squares @ weights
    products: Floats = -0.5 * (squares - rows[..., :, None] - rows[..., None, :] + (rows @ weights)[..., None, None])
    return products


def count_sketch(tensors: Tensors, size: int, seed: int) -> Tensor:
    """Return the Count-Sketch of a vector: entry b is the sum of σ(k) x_k over the k with h(k) = b.

    It is linear, and E ‖CS(x)‖² = ‖x‖². The places h(k) and the signs σ(k) come from a stream of the run, so they are
    the same on all peers. Sums are in float64, in the order of the names: the same bits on all devices. Entries that
    are not finite count as 0.

    Charikar, Chen, Farach-Colton: "Finding Frequent Items in Data Streams", ICALP 2002.

    Returns:
        float32 [size], on the CPU.
    """
    draw = rng.shared(seed, "aggregation.sketch")
    sums = np.zeros(2 * size)  # of the entries with the sign +, then of those with −
    for name in sorted(tensors):
        x = tensors[name]
        if x.is_floating_point() or x.is_complex():
            for (part,) in flat_parts([widened(_real(x.cpu()))]):
                values = part.nan_to_num(0.0, 0.0, 0.0).numpy()
                sums += np.bincount(draw.integers(2 * size, size=len(values)), values, 2 * size)
    return torch.from_numpy(sums[:size] - sums[size:]).float()


def _squares(rows: Tensor) -> Tensor:
    return rows.square().sum(1, dtype=torch.float64)


def _lengths(
    given: Contributions, center: Tensors, summand: Callable[[Tensor], Tensor]
) -> tuple[Contributions, dict[PeerId, float]]:
    """Return the contributions that are not broken, and the length of each: the root of a sum of squares [1].

    Args:
        summand: is given parts of two rows: ``center``, and a contribution.
    """
    found, broken = {}, []
    for j, tensors in given.tensors.items():
        squares, which = _sums([center, tensors], summand)
        found[j] = math.sqrt(squares[0])
        broken.append(which[1])
    kept = _without(given, np.array(broken))
    return kept, {j: found[j] for j in kept.tensors}


def _sums(models: Sequence[Tensors], summand: Callable[[Tensor], Tensor]) -> tuple[Floats, NDArray[np.bool_]]:
    """Add up a function, float64 [m], of the rows [n, d] of all parts of n models; and say which are broken, [n].

    Only the sums leave the device of the first model.
    """
    total, broken = torch.zeros((), dtype=torch.float64), torch.zeros(len(models), dtype=torch.bool)
    for rows in _parts(models):
        if not is_finite(rows):
            rows, bad = _comparable(rows)
            broken = broken.to(rows.device) | bad
        total = total.to(rows.device) + summand(rows)
    return np.atleast_1d(total.cpu().numpy()), broken.cpu().numpy()


def _parts(models: Sequence[Tensors]) -> Iterator[Tensor]:
    """Yield the entries of models in rows [n, d], part by part."""
    for name, first in models[0].items():
        if first.is_floating_point() or first.is_complex():
            for part in flat_parts([widened(_real(model[name])).to(first.device) for model in models]):
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

    That is its own; without one, as for a class that it has no samples of, or if it holds NaN after a divergence, the
    median of each coordinate.
    """
    own = given.own
    if own is None or any(not is_finite(x) and bool(x.isnan().any()) for x in own.values()):
        return Median().combine(given)
    return own


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
