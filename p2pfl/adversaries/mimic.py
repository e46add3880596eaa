"""Copies of an honest neighbor."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pydantic import NonNegativeInt

from p2pfl import PeerId
from p2pfl.adversaries.base import Adversary, Attacker, adversary
from p2pfl.messaging.schema import Body


@adversary("mimic")
@dataclass(frozen=True)
class Mimic(Adversary):
    """Send what one honest neighbor sends, so that its data count more than others'.

    Karimireddy, He, Jaggi: "Byzantine-Robust Learning on Heterogeneous Datasets via Bucketing", ICLR 2022.
    https://arxiv.org/abs/2006.09365
    """

    target: NonNegativeInt | None = None
    """The neighbor; null, or where it sends nothing: the one with the lowest id."""

    rushing = True

    def attack(self, body: Body, to: Sequence[PeerId], t: int, attacker: Attacker) -> Body:
        others = attacker.others
        if self.target is not None and self.target in others:
            return others[self.target]
        return others[min(others)] if others else body
