"""What rules derive of contributions: combinations of their vectors, which are computed where they are read.

Clipping and mixing make y_i = c + Σ_k w_ik (x_k − c) of contributions x_k and a center c. As long as rules only
measure distances, the weights tell them: ‖y_i − y_j‖² = (w_i − w_j)ᵀ P (w_i − w_j), P_kl = (x_k − c)·(x_l − c).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import cached_property
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from p2pfl import PeerId
from p2pfl.linear.sums import Floats, squared_distances
from p2pfl.tensors import PART, Tensors, flat_parts, is_finite, weighted_sum, widened

T = TypeVar("T")

Terms = Sequence[tuple[float, Tensors]]
"""Weights and models that are added up."""

ROUNDING = 1e-12
"""Of a sum of weights that is 1."""


class Span:
    """Vectors x_k of m models, and the center c; without one, weights sum to 1, so that it makes no difference.

    Args:
        squares: the squared distances between the models, float64 [m, m], if they are known. Only without a center.
    """

    def __init__(
        self, models: Sequence[Tensors], center: Tensors | None = None, squares: Floats | None = None
    ) -> None:
        self.models = models
        self.center = center
        self._squares = squares

    @cached_property
    def products(self) -> Floats:
        """P, float64 [m, m]."""
        if self.center is not None:
            squares, _ = squared_distances([self.center, *self.models])
            return _products(squares, 0)[1:, 1:]
        squares = squared_distances(self.models)[0] if self._squares is None else self._squares
        # One that is not far from most: so what is computed for those near one another is exact.
        return _products(squares, int(np.median(squares, axis=1).argmin()))

    def squares(self, weights: Floats) -> Floats:
        """Return the squared distances between some y_i, float64 [n, n]; NaN where they are infinite.

        Args:
            weights: w, float64 [n, m].
        """
        with np.errstate(invalid="ignore"):
            products = weights @ self.products @ weights.T
            sizes = products.diagonal()
            squares = np.maximum(sizes[:, None] + sizes - products - products.T, 0.0)
        squares[np.eye(len(squares), dtype=bool) & np.isfinite(squares)] = 0.0
        return squares

    def terms(self, weights: Floats) -> Terms:
        """Return what c + Σ_k w_k (x_k − c) adds up, w float64 [m]."""
        return _terms(weights, self.models, self.center)


def _terms(weights: Floats, models: Sequence[T], center: T | None) -> Sequence[tuple[float, T]]:
    found = [(float(w), model) for w, model in zip(weights, models, strict=True) if w]
    rest = 1.0 - float(weights.sum())
    if center is not None and abs(rest) > ROUNDING:
        found.append((rest, center))
    return found


def _products(squares: Floats, origin: int) -> Floats:
    """Return inner products of vectors relative to one of them, given their squared distances."""
    apart = squares[origin]
    products: Floats = 0.5 * (apart[:, None] + apart - squares)
    return products


class Combinations:
    """Vectors y_i. Their tensors of one name are computed together, and kept until those of another are read.

    Args:
        weights: w, float64 [n, m].
    """

    def __init__(self, span: Span, weights: Floats) -> None:
        self.span = span
        self.weights = weights
        self._name: str | None = None
        self._rows: Sequence[Tensor] | None = None

    def rows(self, name: str) -> Sequence[Tensor] | None:
        """Return a tensor of each, in the dtype of the models; None if that is one of integers."""
        if self._name != name:
            self._rows, self._name = self._computed(name), name
        return self._rows

    def _computed(self, name: str) -> Sequence[Tensor] | None:
        like = self.span.models[0][name]
        if not (like.is_floating_point() or like.is_complex()):
            return None
        rows, start = like.new_empty(len(self.weights), like.numel()), 0
        for part in self._parts(name, like):
            rows[:, start : start + part.shape[1]] = part
            start += part.shape[1]
        return [row.view(like.shape) for row in rows]

    def _parts(self, name: str, like: Tensor) -> Iterator[Tensor]:
        """Yield the parts of a tensor of each, [n, d], at least float32."""
        models = [widened(model[name].to(like.device)) for model in self.span.models]
        center = [] if self.span.center is None else [widened(self.span.center[name]).to(models[0])]
        weights = torch.from_numpy(self.weights).to(models[0])
        for part in flat_parts([*models, *center], 2 * PART):
            x = torch.stack(part[: len(models)])
            y = torch.addmm(part[-1], weights, x - part[-1]) if center else weights @ x
            if not is_finite(y):  # 0 · ∞ is NaN
                terms = [_terms(row, part[: len(models)], part[-1] if center else None) for row in self.weights]
                y = torch.stack([weighted_sum([(w, {"x": x}) for w, x in each])["x"] for each in terms])
            yield y


class Derived(Mapping[str, Tensor]):
    """Tensors of one of several combinations. Integers stay as they are. A combination that is one of the models is
    read as that.

    Args:
        source: what was received of the sender.
        number: i.
    """

    def __init__(self, source: Tensors, combinations: Combinations, number: int) -> None:
        self.source = source
        self.combinations = combinations
        self.number = number
        is_model = self.weights.max() == 1.0 and np.count_nonzero(self.weights) == 1
        self._model = combinations.span.models[int(self.weights.argmax())] if is_model else None

    @property
    def weights(self) -> Floats:
        """w_i, float64 [m]."""
        weights: Floats = self.combinations.weights[self.number]
        return weights

    def __getitem__(self, name: str) -> Tensor:
        if self._model is not None:
            return self._model[name]
        rows = self.combinations.rows(name)
        return self.source[name] if rows is None else rows[self.number]

    def __iter__(self) -> Iterator[str]:
        return iter(self.source)

    def __len__(self) -> int:
        return len(self.source)


def derive(tensors: Mapping[PeerId, Tensors], span: Span, weights: Floats) -> dict[PeerId, Tensors]:
    """Return what becomes of tensors by sender.

    Args:
        weights: float64 [n, m].
    """
    combinations = Combinations(span, weights)
    return {j: Derived(_source(x), combinations, i) for i, (j, x) in enumerate(tensors.items())}


def span_of(tensors: Collection[Tensors]) -> tuple[Span, Floats] | None:
    """Return the span that all of some tensors are combinations of, and their weights, float64 [n, m]; None without
    one."""
    derived = [x for x in tensors if isinstance(x, Derived)]
    spans = [x.combinations.span for x in derived]
    if len(derived) < len(tensors) or any(span is not spans[0] for span in spans):
        return None
    return spans[0], np.array([x.weights for x in derived])


def terms_of(terms: Terms) -> Terms:
    """Return terms with the same sum: those of a span in place of its combinations."""
    found = span_of([x for _, x in terms])
    if found is None:
        return terms
    span, weights = found
    if not all(x.is_floating_point() for x in _source(terms[0][1]).values()):
        return terms
    return span.terms(np.array([w for w, _ in terms]) @ weights)


def _source(tensors: Tensors) -> Tensors:
    return tensors.source if isinstance(tensors, Derived) else tensors
