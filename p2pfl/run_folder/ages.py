"""How old the messages are that rounds take if they do not wait for one another: docs/synchrony.md.

The age of a message is the round that takes it minus the round that sent it: negative if the sender was ahead.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple


class AgeRange(NamedTuple):
    """Median, lowest and highest age of some messages, in rounds."""

    median: float
    lowest: int
    highest: int

    @classmethod
    def of(cls, counts: Mapping[int, int]) -> AgeRange:
        """Return the range of at least one message, given the number of messages of each age."""
        ages = sorted(counts)
        total = sum(counts.values())
        middle = _at(counts, ages, (total - 1) // 2) + _at(counts, ages, total // 2)
        return cls(middle / 2, ages[0], ages[-1])

    def __str__(self) -> str:
        return f"{self.median:g} ({self.lowest} to {self.highest})"


def _at(counts: Mapping[int, int], ages: list[int], rank: int) -> int:
    """Return the age of the message with this rank, from 0, among all messages by ascending age."""
    for age in ages:
        rank -= counts[age]
        if rank < 0:
            break
    return age
