"""Attacks that send a multiple of the true update."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pydantic import PositiveFloat

from p2pfl import PeerId
from p2pfl.adversaries.altered import rescaled
from p2pfl.adversaries.base import Adversary, Attacker, adversary
from p2pfl.messaging.schema import Body


@adversary("sign-flip")
@dataclass(frozen=True)
class SignFlip(Adversary):
    """Send b − scale · (x − b) in place of the model x, trained from b; −scale · x in place of another tensor x.

    Allen-Zhu, Ebrahimianghazani, Li, Alistarh: "Byzantine-Resilient Non-Convex Stochastic Gradient Descent", ICLR
    2021. https://arxiv.org/abs/2012.14368
    """

    scale: PositiveFloat = 1.0
    """Factor of the opposite update."""

    uses_before = True

    def attack(self, body: Body, to: Sequence[PeerId], t: int, attacker: Attacker) -> Body:
        return rescaled(body, attacker.before, -self.scale)


@adversary("scaled")
@dataclass(frozen=True)
class Scaled(Adversary):
    """Send b + factor · (x − b) in place of the model x, trained from b; factor · x in place of another tensor x.

    Model replacement: with n models of equal weight and factor n, the mean is the attacker's model, once the others
    have converged. Bagdasaryan, Veit, Hua, Estrin, Shmatikov: "How To Backdoor Federated Learning", AISTATS 2020.
    https://arxiv.org/abs/1807.00459
    """

    factor: PositiveFloat = 10.0
    """Factor of the update."""

    uses_before = True

    def attack(self, body: Body, to: Sequence[PeerId], t: int, attacker: Attacker) -> Body:
        return rescaled(body, attacker.before, self.factor)
