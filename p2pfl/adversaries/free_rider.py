"""A peer that takes part without work."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from p2pfl import PeerId
from p2pfl.adversaries.base import Adversary, Attacker, adversary
from p2pfl.messaging.schema import Body, Layout, tensors_of, with_tensors
from p2pfl.tensors import digest


@adversary("free-rider")
@dataclass(frozen=True)
class FreeRider(Adversary):
    """Do not train, and send the first body again, or what is left of the last average of the others.

    Fraboni, Vidal, Lorenzi: "Free-rider Attacks on Model Aggregation in Federated Learning", AISTATS 2021.
    https://arxiv.org/abs/2006.11901
    """

    sends: Literal["first", "average"] = "first"
    """first: always what it sent first, in round 0 unless ``from`` is later; average: what the method makes of the
    last average without training, which for models is the average itself."""

    trains = False

    def attack(self, body: Body, to: Sequence[PeerId], t: int, attacker: Attacker) -> Body:
        if self.sends == "average":
            return body
        tensors = tensors_of(body)
        form = digest([(path, tuple(x.shape)) for path, x in tensors.items()])  # replies to others have other ones
        first: dict[str, Any] = attacker.memory.setdefault(f"{body.kind()} {form}", {})
        if not first:
            first.update({str(number): x.clone() for number, x in enumerate(tensors.values())})
        return with_tensors(body, dict(zip(tensors, first.values(), strict=True)))

    def has_effect(self, layouts: Iterable[Layout]) -> bool:
        return True
