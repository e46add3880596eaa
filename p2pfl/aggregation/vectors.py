"""Contributions as vectors: norms, distances, and vectors that are moved toward others.

The vector of a contribution is all of its floating-point tensors, one after the other (`p2pfl/linear/`). What this
module returns leaves out broken ones, which hold NaN or an infinity, unless all do.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from p2pfl import PeerId, rng
from p2pfl.aggregation.coordinates import Median
from p2pfl.aggregation.rule import Contributions
from p2pfl.linear.combinations import Span, derive, span_of
from p2pfl.linear.sums import Floats, Summand, real, square, squared_distances, sums
from p2pfl.tensors import Tensors, flat_parts, is_finite, widened

# ---- distances -----------------------------------------------------------------------------------------------


def norms(given: Contributions) -> tuple[Contributions, dict[PeerId, float]]:
    """Return the contributions that are not broken, and the norm of each. Reads one tensor at a time."""
    other = next(iter(given.tensors.values())) if given.own is None else given.own
    return _lengths(given, other, lambda _, x: square(x))


def distances(given: Contributions, center: Tensors) -> tuple[Contributions, dict[PeerId, float]]:
    """Return the contributions that are not broken, and the distance of each from a center. Reads one tensor at a
    time."""
    if (found := span_of([center, *given.tensors.values()])) is not None:
        span, weights = found
        if np.isfinite(squares := span.squares(weights)[0, 1:]).all():
            return given, dict(zip(given.tensors, np.sqrt(squares).tolist(), strict=True))
    return _lengths(given, center, lambda start, x: square(x - start))


def pairwise(given: Contributions) -> tuple[Contributions, Floats]:
    """Return the contributions that are not broken, and their squared distances.

    One tensor of each contribution is in memory at a time.

    Returns:
        float64 [n, n], symmetric, in the order of the contributions returned.
    """
    if (found := span_of(given.tensors.values())) is not None:
        span, weights = found
        if np.isfinite(squares := span.squares(weights)).all():
            return given, squares
    squares, broken = squared_distances(list(given.tensors.values()))
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
            for (part,) in flat_parts([widened(real(x.cpu()))]):
                values = part.nan_to_num(0.0, 0.0, 0.0).numpy()
                sums += np.bincount(draw.integers(2 * size, size=len(values)), values, 2 * size)
    return torch.from_numpy(sums[:size] - sums[size:]).float()


def _lengths(given: Contributions, center: Tensors, summand: Summand) -> tuple[Contributions, dict[PeerId, float]]:
    """Return the contributions that are not broken, and the length of each: the root of a sum.

    Args:
        summand: is given parts of ``center`` and of a contribution.
    """
    squares, broken = sums({j: (center, x) for j, x in given.tensors.items()}, summand)
    kept = _without(given, [broken[j][1] for j in given.tensors])
    return kept, {j: math.sqrt(squares[j]) for j in kept.tensors}


def _without(given: Contributions, broken: Sequence[bool]) -> Contributions:
    """Return the contributions that are not broken, unless all are."""
    if not any(broken) or all(broken):
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


def toward(
    tensors: Mapping[PeerId, Tensors], center: Tensors, factors: Mapping[PeerId, float]
) -> dict[PeerId, Tensors]:
    """Return c + factor · (x − c) of each, 0 ≤ factor ≤ 1; x itself for 1."""
    shrunk = np.array([factors[j] for j in tensors])
    if all(shrunk == 1.0):
        return dict(tensors)
    if (found := span_of([center, *tensors.values()])) is None:
        return derive(tensors, Span(list(tensors.values()), center), np.diag(shrunk))
    span, weights = found
    return derive(tensors, span, weights[0] + shrunk[:, None] * (weights[1:] - weights[0]))


def mixed(tensors: Mapping[PeerId, Tensors], weights: Floats, squares: Floats) -> dict[PeerId, Tensors]:
    """Return Σ_j w_ij x_j for each i.

    Args:
        weights: float64 [n, n]; each row sums to 1.
        squares: the squared distances of the x_j, float64 [n, n].
    """
    if (found := span_of(tensors.values())) is None:
        return derive(tensors, Span(list(tensors.values()), squares=squares), weights)
    span, before = found
    return derive(tensors, span, weights @ before)


def replaced(given: Contributions, tensors: Mapping[PeerId, Tensors]) -> Contributions:
    """Return the contributions with other tensors; the peer's own are those that now stand for it, if any do."""
    return replace(given, tensors=tensors, own=tensors.get(given.me, given.own))


def clip_factor(length: float, limit: float) -> float:
    """Return min(1, limit / length)."""
    return 1.0 if length <= limit else limit / length
