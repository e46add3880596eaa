"""Apply a rule to the sketches of models, before the models are sent (p2pfl/messaging/screening.py)."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from p2pfl import PeerId
from p2pfl.aggregation.aggregator import Aggregator
from p2pfl.aggregation.rule import Screening
from p2pfl.messaging.schema import Body, tensors_of
from p2pfl.tensors import has_diverged

TOLERANCE = 1e-5
"""Largest distance of a model's sketch from the one announced, as a fraction of its norm: what a codec unpacks on
another device may be rounded otherwise."""


class RuleScreen:
    """What a peer wants of its neighbors in one round, by their sketches and its rule.

    Args:
        rule: the rule, or the first one of several.
        aggregator: combines what was fetched; it knows the round, and notes for the records who is rejected.
        kind: class of the bodies that hold models.
        seed: the run's.
    """

    def __init__(self, rule: Screening, aggregator: Aggregator, kind: type[Body], seed: int) -> None:
        self.rule = rule
        self.aggregator = aggregator
        self.kind = kind
        self.seed = seed
        self._center = torch.zeros(rule.size)

    def sketch(self, body: Body) -> Tensor:
        named = {f"{field}.{key}": tensor for (field, key), tensor in tensors_of(body).items()}
        return self.rule.sketch(named, self.seed)

    def accepted(self, own: Body | None, sketches: Mapping[PeerId, Tensor]) -> list[PeerId]:
        """Return the neighbors to fetch models of.

        Without an own model, or if it has diverged, the median of each number of the sketches stands for its sketch.
        """
        if own is not None and not any(map(has_diverged, tensors_of(own).values())):
            self._center = self.sketch(own)
        elif sketches:
            self._center = torch.stack(list(sketches.values())).quantile(0.5, dim=0)
        accepted = self.rule.accepted(self._center, sketches, self.aggregator.t, self.aggregator.rounds)
        for j, sketch in sketches.items():
            if j not in accepted:
                self._note_rejected(j, sketch)
        return accepted

    def fits(self, sender: PeerId, body: Body, announced: Tensor) -> bool:
        found = self.sketch(body)
        fits = float((found - announced).norm()) <= TOLERANCE * float(found.norm())
        if not fits:
            self._note_rejected(sender, announced)
        return fits

    def _note_rejected(self, j: PeerId, sketch: Tensor) -> None:
        if self.aggregator.distances is not None:
            apart, own = float((sketch - self._center).norm()), float(self._center.norm())
            self.aggregator.distances.note_screened(self.kind.kind(), j, apart, own)
