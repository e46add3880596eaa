"""No attack: what others are compared with."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from p2pfl import PeerId
from p2pfl.adversaries.base import Adversary, Attacker, adversary
from p2pfl.messaging.schema import Body, Layout


@adversary("none")
@dataclass(frozen=True)
class Truth(Adversary):
    """Send the truth: the same peers count as attackers, so that results of the others can be compared."""

    def attack(self, body: Body, to: Sequence[PeerId], t: int, attacker: Attacker) -> Body:
        return body

    def has_effect(self, layouts: Iterable[Layout]) -> bool:
        return True
