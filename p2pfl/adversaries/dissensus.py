"""The attack on consensus over a sparse graph."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from pydantic import PositiveFloat

from p2pfl import PeerId
from p2pfl.adversaries.base import Attacker, adversary
from p2pfl.adversaries.rushing import Honest, Rushing, Vector
from p2pfl.messaging.schema import Body


@adversary("dissensus")
@dataclass(frozen=True)
class Dissensus(Rushing):
    """Send each receiver i another vector, x_i + ε Σ_j (x_i − x_j), against what its honest neighbors j do.

    The sum is over the honest neighbors of i that send to this peer too. He, Karimireddy, Jaggi: "Byzantine-Robust
    Decentralized Learning via ClippedGossip", 2022. https://arxiv.org/abs/2202.01545. They weight the terms by
    W_ij / Σ_a W_ia over the attackers a that send to i; with equal weights and b such attackers, that is ε = 1/b.
    """

    epsilon: PositiveFloat = 1.0
    """ε; with 1, one attacker cancels what the neighbors' average with equal weights would do."""

    def attack(self, body: Body, to: Sequence[PeerId], t: int, attacker: Attacker) -> Mapping[PeerId, Body]:
        sources, others = attacker.place.topology_at(t).sources, attacker.others

        def against(i: PeerId) -> Body:
            if i not in others:  # an attacker, or one that does not send to this peer
                return body
            return self.crafted(others[i], {j: others[j] for j in sources[i] if j in others}, t, attacker)

        return {i: against(i) for i in to}

    def craft(self, own: Vector, honest: Honest) -> Vector:
        count = len(honest.vectors)
        return {
            path: torch.add(x, count * x - honest.stacked(path).sum(0), alpha=self.epsilon) for path, x in own.items()
        }
