"""Rules that are told how many attackers to expect."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import count
from typing import Literal

from pydantic import NonNegativeInt

from p2pfl.aggregation.rule import Rule


def minority(n: int) -> int:
    """Return the most attackers of which there are fewer than honest peers, among ``n`` in all."""
    return max(0, (n - 1) // 2)


@dataclass(frozen=True)
class Expecting(Rule):
    """Base of the rules that are told f, the number of attackers. By default, they tolerate any minority."""

    f: NonNegativeInt | Literal["auto"] = "auto"
    """Attackers among the n contributions that a peer combines, its own included; auto: ⌊(n − 1)/3⌋. Where fewer
    arrive, as many as the rule tolerates among these."""

    def largest(self, n: int) -> int:
        """Return the largest f that the rule can be set to for ``n`` contributions."""
        return minority(n)

    def tolerates(self, n: int) -> int:
        return self.largest(n)

    def expected(self, n: int) -> int:
        """Return f for ``n`` contributions."""
        return min((n - 1) // 3 if self.f == "auto" else self.f, self.largest(n))

    def withstands(self, n: int) -> int:
        return self.expected(n)

    def assumed(self, n: int) -> dict[str, int]:
        return {"f": self.expected(n)} if self.f == "auto" else {}

    def refusal(self, n: int) -> str | None:
        if self.f == "auto" or self.f <= (most := self.largest(n)):
            return None
        least = next(more for more in count(n) if self.largest(more) >= self.f)
        return (
            f"tolerates {most} attacker{'' if most == 1 else 's'} among {n} contributions, not f = {self.f}; set f "
            f"to auto or to {most} at most, or give the peer {least - 1} neighbors"
        )
