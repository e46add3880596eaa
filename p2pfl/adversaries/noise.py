"""Noise on what is sent."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from pydantic import PositiveFloat
from torch import Tensor

from p2pfl import PeerId
from p2pfl.adversaries.altered import altered
from p2pfl.adversaries.base import Adversary, Attacker, adversary
from p2pfl.messaging.schema import Body, TensorPath


@adversary("noise")
@dataclass(frozen=True)
class Noise(Adversary):
    """Send x + N(0, std²) in place of each tensor x, or only noise."""

    std: PositiveFloat
    """Standard deviation of the noise."""
    replace: bool = False
    """Send only noise."""

    def attack(self, body: Body, to: Sequence[PeerId], t: int, attacker: Attacker) -> Body:
        def noisy(path: TensorPath, x: Tensor) -> Tensor:
            noise = (self.std * torch.randn(x.shape)).to(x)  # from the CPU's generator, on every device
            return noise if self.replace else x + noise

        return altered(body, noisy)
