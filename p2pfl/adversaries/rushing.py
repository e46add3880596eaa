"""Base of rushing attacks: they see what honest neighbors send at the same time, and then send.

A body counts as one vector, over all of its tensors; a body of prototypes as one vector for each class, over the
neighbors that have it. Neighbors whose tensors have other shapes are left out. Without any, the truth is sent.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from p2pfl import PeerId
from p2pfl.adversaries.altered import fitted, floats_of, is_float
from p2pfl.adversaries.base import Adversary, Attacker
from p2pfl.adversaries.class_rows import CLASSES
from p2pfl.linear.combinations import Span, derive
from p2pfl.messaging.schema import B, Body, Layout, TensorPath, tensors_of, with_tensors
from p2pfl.tensors import Tensors, has_diverged, widened

Vector = Mapping[TensorPath, Tensor]
"""Tensors that are attacked as one vector, at least float32."""


@dataclass(frozen=True)
class Honest:
    """What honest neighbors send: x_j, and f, the number of attackers nearby.

    Attributes:
        vectors: by sender, ascending; at least one.
        attackers: their ids, ascending; this peer is one of them.
        before: what of this peer's own vector belongs to a model, as it was before training, if the attack uses it.
        combine: applies the run's rule to what peers send, tensors by path, as the peer that is named.
    """

    vectors: Mapping[PeerId, Vector]
    attackers: Sequence[PeerId]
    before: Vector
    combine: Callable[[Mapping[PeerId, Tensors], PeerId], Tensors]
    _means: dict[TensorPath, Tensor] = field(default_factory=dict, init=False)
    _deviations: dict[TensorPath, Tensor] = field(default_factory=dict, init=False)

    @property
    def paths(self) -> Collection[TensorPath]:
        """The tensors of a vector."""
        return next(iter(self.vectors.values())).keys()

    def stacked(self, path: TensorPath) -> Tensor:
        """Return one tensor of all vectors, [n − f, …]."""
        return torch.stack([vector[path] for vector in self.vectors.values()])

    def mean(self, path: TensorPath) -> Tensor:
        """Return the mean of each coordinate of one tensor."""
        if path not in self._means:
            self._means[path] = self.stacked(path).mean(0)
        return self._means[path]

    def deviation(self, path: TensorPath) -> Tensor:
        """Return the unbiased standard deviation of each coordinate of one tensor; 0 of a single vector."""
        if path not in self._deviations:
            single = len(self.vectors) == 1
            self._deviations[path] = torch.zeros_like(self.mean(path)) if single else self.stacked(path).std(0)
        return self._deviations[path]


class Line:
    """Lies on a line through two vectors, so that what the rule measures of one tells what it measures of all.

    Args:
        honest: what others send.
        start: the lie at 0.
        end: the lie at 1.
    """

    def __init__(self, honest: Honest, start: Vector, end: Vector) -> None:
        self._honest, self._start, self._end = honest, start, end
        vectors = [*honest.vectors.values(), end]
        self._span = Span(list(map(_named, vectors)), _named(start))

    def damage(self, number: float) -> float:
        """Return how far the rule's result is from the honest mean if all attackers nearby send a lie.

        The rule is applied as the honest neighbor with the lowest id would, if it received all of them. −1 of a
        vector that receivers would drop, since it has diverged.
        """
        honest, units = self._honest, np.eye(len(self._span.models))
        if any(has_diverged(torch.lerp(x, self._end[path], number)) for path, x in self._start.items()):
            return -1.0
        weights = {j: units[i] for i, j in enumerate(honest.vectors)}
        weights |= dict.fromkeys(honest.attackers, number * units[-1])
        peers = sorted(weights)
        like = dict.fromkeys(peers, self._span.models[-1])
        sent = derive(like, self._span, np.array([weights[j] for j in peers]))
        combined = honest.combine(sent, min(honest.vectors))
        apart = (combined[str(path)] - honest.mean(path) for path in honest.paths)
        return math.sqrt(sum(float(x.double().square().sum()) for x in apart))


def _named(vector: Vector) -> Tensors:
    return {str(path): x for path, x in vector.items()}


class Rushing(Adversary):
    """Base of attacks that send a vector made of those of honest neighbors."""

    rushing = True
    required: ClassVar[tuple[str, ...]] = ("craft",)
    """The methods that a subclass must define."""

    @abstractmethod
    def craft(self, own: Vector, honest: Honest) -> Vector:
        """Return what to send in place of a vector; the tensors of both must not be modified."""

    def attack(self, body: Body, to: Sequence[PeerId], t: int, attacker: Attacker) -> Body | Mapping[PeerId, Body]:
        return self.crafted(body, attacker.others, t, attacker)

    def changes(self, layout: Layout) -> bool:
        """Return whether all peers have tensors of the same shapes, or rows of the same classes."""
        paths = floats_of(layout)
        return bool(paths) and (CLASSES in layout.plain or not any(layout.tensors[path].free for path in paths))

    def crafted(self, body: B, others: Mapping[PeerId, Body], t: int, attacker: Attacker) -> B:
        """Return a body with other vectors, which are made of the ``others``."""
        lie = with_tensors(body, {path: x.clone() for path, x in tensors_of(body).items()})
        theirs = {j: vectors(other) for j, other in others.items()}
        attackers, before = attacker.attackers_nearby(t), attacker.before

        def combine(sent: Mapping[PeerId, Tensors], me: PeerId) -> Tensors:
            assert attacker.combine is not None
            return attacker.combine(sent, me, body.kind(), t)

        for key, own in vectors(lie).items():
            found = {j: each[key] for j, each in theirs.items() if key in each and _alike(each[key], own)}
            if found:
                wide = {j: {path: widened(x.to(own[path].device)) for path, x in v.items()} for j, v in found.items()}
                earlier = {path: widened(before[path]) for path in own if path in before}
                honest = Honest(wide, attackers, earlier, combine)
                for path, values in self.craft({path: widened(x) for path, x in own.items()}, honest).items():
                    own[path].copy_(fitted(path, values, own[path]))
        return lie


def vectors(body: Body) -> dict[int | None, Vector]:
    """Return the vectors of a body, without a copy: {class: the row of each tensor}, or {None: all tensors}."""
    tensors = {path: x for path, x in tensors_of(body).items() if is_float(x)}
    classes: Sequence[int] | None = getattr(body, CLASSES, None)
    if classes is None:
        return {None: tensors}

    def row(x: Tensor, number: int, k: int) -> Tensor:
        return x[number if len(x) == len(classes) else k]  # a row for each of the classes, or for all K

    return {k: {path: row(x, number, k) for path, x in tensors.items()} for number, k in enumerate(classes)}


def _alike(one: Vector, other: Vector) -> bool:
    return {path: x.shape for path, x in one.items()} == {path: x.shape for path, x in other.items()}
