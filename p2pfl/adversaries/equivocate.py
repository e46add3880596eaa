"""Different messages to different receivers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Annotated, Any

from pydantic import AfterValidator, Field

from p2pfl import PeerId
from p2pfl.adversaries.base import ADVERSARIES, Adversary, Attacker, Poisoning, adversary
from p2pfl.messaging.schema import Body, Layout
from p2pfl.registry import parse_section


def _parsed(section: str | dict[str, Any]) -> tuple[str, Adversary]:
    return parse_section(ADVERSARIES, "an attack", section)


def _checked(section: str | dict[str, Any]) -> dict[str, Any]:
    name, attack = _parsed(section)
    if not attack.trains or isinstance(attack, Poisoning):
        raise ValueError(f"{name!r} concerns all receivers; give it an entry of its own in adversaries")
    return {"name": name, **attack.to_dict()}


Section = Annotated[str | dict[str, Any], AfterValidator(_checked)]


@adversary("equivocate")
@dataclass(frozen=True)
class Equivocate(Adversary):
    """Send each receiver what one of several attacks makes of the body: receiver j gets attack j mod n of n."""

    attacks: Annotated[tuple[Section, ...], Field(min_length=2)]
    """Names, or mappings with a name and parameters; ``none`` is the truth."""

    @cached_property
    def members(self) -> list[Adversary]:
        """The attacks."""
        return [attack for _, attack in map(_parsed, self.attacks)]

    @property
    def uses_before(self) -> bool:  # type: ignore[override]
        return any(member.uses_before for member in self.members)

    @property
    def rushing(self) -> bool:  # type: ignore[override]
        return any(member.rushing for member in self.members)

    @property
    def uses_rule(self) -> bool:  # type: ignore[override]
        return any(member.uses_rule for member in self.members)

    def attack(self, body: Body, to: Sequence[PeerId], t: int, attacker: Attacker) -> Mapping[PeerId, Body]:
        sent: dict[PeerId, Body] = {}
        for number, member in enumerate(self.members):
            receivers = [j for j in to if j % len(self.members) == number]
            if receivers:
                own = replace(attacker, memory=attacker.memory.setdefault(str(number), {}))
                found = member.attack(body, receivers, t, own)
                sent |= dict.fromkeys(receivers, found) if isinstance(found, Body) else found
        return sent

    def changes(self, layout: Layout) -> bool:
        return any(member.changes(layout) for member in self.members)
