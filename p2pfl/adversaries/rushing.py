"""Base of rushing attacks: they see what honest neighbors send at the same time, and then send.

A body counts as one vector, over all of its tensors; a body of prototypes as one vector for each class, over the
neighbors that have it. Neighbors whose tensors have other shapes are left out. Without any, the truth is sent.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from p2pfl import PeerId
from p2pfl.adversaries.altered import fitted, floats_of, is_float
from p2pfl.adversaries.base import Adversary, Attacker
from p2pfl.adversaries.class_rows import CLASSES
from p2pfl.messaging.schema import B, Body, Layout, TensorPath, tensors_of, with_tensors
from p2pfl.tensors import widened

Vector = Mapping[TensorPath, Tensor]
"""Tensors that are attacked as one vector, at least float32."""


@dataclass(frozen=True)
class Honest:
    """What honest neighbors send: x_j, and f, the number of attackers nearby.

    Attributes:
        vectors: by sender, ascending; at least one.
        attackers: f; this peer is one of them.
        before: what of this peer's own vector belongs to a model, as it was before training, if the attack uses it.
    """

    vectors: Mapping[PeerId, Vector]
    attackers: int = 1
    before: Vector = field(default_factory=dict)

    def stacked(self, path: TensorPath) -> Tensor:
        """Return one tensor of all vectors, [n − f, …]."""
        return torch.stack([vector[path] for vector in self.vectors.values()])

    def moments(self, path: TensorPath) -> tuple[Tensor, Tensor]:
        """Return mean and standard deviation of each coordinate of one tensor; the deviation is unbiased, or 0."""
        values = self.stacked(path)
        return values.mean(0), values.std(0) if len(values) > 1 else torch.zeros_like(values[0])


class Rushing(Adversary):
    """Base of attacks that send a vector made of those of honest neighbors."""

    rushing = True
    required = ("craft",)
    """The methods that a subclass must define."""

    @abstractmethod
    def craft(self, own: Vector, honest: Honest) -> Vector:
        """Return what to send in place of a vector; the tensors of both must not be modified."""

    def attack(self, body: Body, to: Sequence[PeerId], t: int, attacker: Attacker) -> Body | Mapping[PeerId, Body]:
        return self.crafted(body, attacker.others, attacker.attackers_nearby(t), attacker.before)

    def changes(self, layout: Layout) -> bool:
        """Return whether all peers have tensors of the same shapes, or rows of the same classes."""
        paths = floats_of(layout)
        return bool(paths) and (CLASSES in layout.plain or not any(layout.tensors[path].free for path in paths))

    def crafted(
        self, body: B, others: Mapping[PeerId, Body], attackers: int, before: Mapping[TensorPath, Tensor]
    ) -> B:
        """Return a body with other vectors, which are made of the ``others``."""
        lie = with_tensors(body, {path: x.clone() for path, x in tensors_of(body).items()})
        theirs = {j: vectors(other) for j, other in others.items()}
        for key, own in vectors(lie).items():
            found = {j: each[key] for j, each in theirs.items() if key in each and _alike(each[key], own)}
            if found:
                wide = {j: {path: widened(x.to(own[path].device)) for path, x in v.items()} for j, v in found.items()}
                earlier = {path: widened(before[path]) for path in own if path in before}
                crafted = self.craft({path: widened(x) for path, x in own.items()}, Honest(wide, attackers, earlier))
                for path, values in crafted.items():
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
