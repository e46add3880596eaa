"""Attacks on tensors with a row for each class: prototypes, class means of logits, and weights of heads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from p2pfl import PeerId
from p2pfl.adversaries.altered import altered, floats_of
from p2pfl.adversaries.base import Adversary, Attacker, adversary
from p2pfl.messaging.schema import Body, Layout, TensorPath, tensors_of

CLASSES = "classes"
"""The field of a body of prototypes that lists the classes of its rows, or of those that count."""


def has_prototypes(layout: Layout) -> bool:
    return CLASSES in layout.plain and bool(floats_of(layout))


def head_paths(shapes: Mapping[TensorPath, Sequence[int]]) -> list[TensorPath]:
    """Return the tensors of a head that have a row for each class: as many rows as the last one of them.

    A head is a field ``head``, the parameters of a model below ``head``, or a linear layer on its own.
    """
    heads = []
    for field, key in shapes:
        name = field if key is None else key
        if shapes[field, key] and (field == "head" or name in ("weight", "bias") or name.startswith("head.")):
            heads.append((field, key))
    return [path for path in heads if shapes[path][0] == shapes[heads[-1]][0]]


def _swapped(path: TensorPath, rows: Tensor) -> Tensor:
    """Return the rows, each one the next class's, and the last one the first class's."""
    return rows.roll(-1, 0)


@adversary("prototype-swap")
@dataclass(frozen=True)
class PrototypeSwap(Adversary):
    """Send the next class's prototype in place of each class's prototype: class k gets row π(k), a cyclic shift."""

    def attack(self, body: Body, to: Sequence[PeerId], t: int, attacker: Attacker) -> Body:
        return altered(body, _swapped) if hasattr(body, CLASSES) else body

    def changes(self, layout: Layout) -> bool:
        return has_prototypes(layout)


@adversary("random-prototypes")
@dataclass(frozen=True)
class RandomPrototypes(Adversary):
    """Send uniform noise, U(−1, 1) scaled to the norm of the prototype, in place of each class's prototype."""

    def attack(self, body: Body, to: Sequence[PeerId], t: int, attacker: Attacker) -> Body:
        def noise(path: TensorPath, rows: Tensor) -> Tensor:
            found = (2.0 * torch.rand(rows.shape) - 1.0).to(rows)
            return found * (_norms(rows) / _norms(found))

        return altered(body, noise) if hasattr(body, CLASSES) else body

    def changes(self, layout: Layout) -> bool:
        return has_prototypes(layout)


def _norms(rows: Tensor) -> Tensor:
    """Return the Euclidean norm of each row, [K, 1]."""
    norms: Tensor = torch.linalg.vector_norm(rows, dim=-1, keepdim=True)
    return norms


@adversary("head-swap")
@dataclass(frozen=True)
class HeadSwap(Adversary):
    """Send the weights and bias of the next class in place of each class's: class k gets row π(k), a cyclic shift."""

    def attack(self, body: Body, to: Sequence[PeerId], t: int, attacker: Attacker) -> Body:
        heads = head_paths({path: x.shape for path, x in tensors_of(body).items()})

        def swapped(path: TensorPath, rows: Tensor) -> Tensor:
            return _swapped(path, rows) if path in heads else rows

        return altered(body, swapped) if heads else body

    def changes(self, layout: Layout) -> bool:
        return bool(head_paths({path: spec.shape for path, spec in layout.tensors.items()}))
