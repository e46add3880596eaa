"""How far what neighbors send is from the peer's own, and how much of it the rule takes: for the records."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping

import torch
from torch import Tensor

from p2pfl import PeerId
from p2pfl.tensors import Tensors, is_finite, widened

Key = tuple[str, PeerId]
"""Kind of a message, and its sender."""


class Distances:
    """Of one round, the distance ‖x_j − x_i‖ / ‖x_i‖ of each neighbor j, and the fraction of x_j that was taken.

    Norms are over all floating-point tensors of a kind of message that were combined, where peer i has something to
    compare with: not over classes that it has no samples of, nor over values that are infinite in x_i, as in masks.
    """

    def __init__(self) -> None:
        self._apart: dict[Key, Tensor] = {}
        """‖x_j − x_i‖² so far, a float64 scalar on the device of x_i: it is read once, at the end of the round."""
        self._own: dict[Key, Tensor] = {}
        """‖x_i‖², likewise."""
        self._sizes: dict[Key, int] = defaultdict(int)
        """Elements that were combined."""
        self._taken: dict[Key, float] = defaultdict(float)
        """Elements that were taken; of clipped ones the factor counts."""

    @torch.no_grad()
    def measure(self, kind: str, tensors: Mapping[PeerId, Tensors], me: PeerId, own: Tensors) -> None:
        """Measure how far the tensors of others are from the peer's own, before these change."""
        parts = {name: x for name, x in own.items() if x.is_floating_point()}
        finite = {name: None if is_finite(x) else x.isfinite() for name, x in parts.items()}
        squares = [_square(widened(x), finite[name]) for name, x in parts.items()]
        for j, found in tensors.items():  # one after the other: they may be on disk
            if j == me:
                continue
            for (name, mine), square in zip(parts.items(), squares, strict=True):
                apart = _square(widened(found[name].to(mine.device)) - widened(mine), finite[name])
                _add(self._apart, (kind, j), apart)
                _add(self._own, (kind, j), square)

    def note(self, kind: str, taken: Mapping[PeerId, float], size: int) -> None:
        """Note what fraction of ``size`` elements of each sender was taken: 0 if they were left out."""
        for j, fraction in taken.items():
            self._sizes[kind, j] += size
            self._taken[kind, j] += fraction * size

    def note_screened(self, kind: str, j: PeerId, apart: float, own: float) -> None:
        """Note a neighbor of which nothing was fetched, by the distance and the norm that sketches tell."""
        self._apart[kind, j] = torch.tensor(apart, dtype=torch.float64).square()
        self._own[kind, j] = torch.tensor(own, dtype=torch.float64).square()
        self.note(kind, {j: 0.0}, 1)

    def drain(self) -> dict[str, dict[PeerId, tuple[float, float]]]:
        """Return distance and taken fraction by kind and neighbor, and start anew; the distance from 0 is NaN."""
        found: dict[str, dict[PeerId, tuple[float, float]]] = defaultdict(dict)
        for key, apart in sorted(self._apart.items()):
            own, size = float(self._own[key]), self._sizes[key]
            distance = math.sqrt(float(apart) / own) if own else math.nan
            found[key[0]][key[1]] = distance, self._taken[key] / size if size else 1.0
        for sums in (self._apart, self._own, self._sizes, self._taken):
            sums.clear()
        return dict(found)


def _add(sums: dict[Key, Tensor], key: Key, more: Tensor) -> None:
    sums[key] = sums[key] + more.to(sums[key].device) if key in sums else more


def _square(x: Tensor, where: Tensor | None) -> Tensor:
    """Return the sum of the squares of x, or of some of its values, a float64 scalar."""
    norm: Tensor = torch.linalg.vector_norm(x if where is None else x.where(where, 0.0), dtype=torch.float64)
    return norm.square()
