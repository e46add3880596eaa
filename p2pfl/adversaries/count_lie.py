"""Lies about the number of samples, by which methods weight what they average."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from pydantic import PositiveFloat

from p2pfl import PeerId
from p2pfl.adversaries.base import Adversary, Attacker, adversary
from p2pfl.messaging.schema import Body, Layout

COUNTS = "samples"
"""The field of a body with the sender's number of samples, or with its numbers of samples of each class."""


@adversary("count-lie")
@dataclass(frozen=True)
class CountLie(Adversary):
    """Claim more training samples: at most the largest number that any peer of the run has, or receivers refuse."""

    factor: PositiveFloat | None = None
    """Factor of the true numbers; null: claim the largest number that receivers accept."""

    def attack(self, body: Body, to: Sequence[PeerId], t: int, attacker: Attacker) -> Body:
        counts = getattr(body, COUNTS, None)
        allowed = [found for each in attacker.layouts if each.body is type(body) and (found := _range(each))]
        if counts is None or not allowed:
            return body
        limits = allowed[0]

        def claimed(count: int) -> int:
            wanted = limits[-1] if self.factor is None else round(self.factor * count)
            return min(max(wanted, limits[0]), limits[-1])

        lie: Any = tuple(map(claimed, counts)) if isinstance(counts, tuple) else claimed(counts)
        return replace(body, **{COUNTS: lie})

    def changes(self, layout: Layout) -> bool:
        return len(_range(layout)) > 1


def _range(layout: Layout) -> range:
    """Return the counts that receivers accept; empty if there are none."""
    spec = layout.plain.get(COUNTS)
    return range(0) if spec is None or spec.range is None else spec.range
