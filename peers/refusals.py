"""Who was refused and why, said in the log; and of a flood, how much there was of it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

LINES = 10
"""Lines about one sort of refusal within a PERIOD; the others are counted."""
PERIOD = 60.0
"""Seconds."""


@dataclass
class _Sort:
    since: float
    count: int = 0


class Refusals:
    """A stranger who knocks a million times fills neither the disk nor the log.

    Args:
        log: the peer's log.
        now: the clock.
    """

    def __init__(self, log: logging.Logger, now: Callable[[], float]) -> None:
        self._log = log
        self._now = now
        self._sorts: dict[str, _Sort] = {}

    def say(self, sort: str, text: str) -> None:
        """Log one refusal, or count it. There must be few sorts: none may hold what a stranger has chosen."""
        found = self._sorts.setdefault(sort, _Sort(self._now()))
        found.count += 1
        if found.count <= LINES:
            self._log.warning("%s", text)

    def sum_up(self, *, last: bool = False) -> None:
        """Log what was only counted; to be called now and then, and once more at the end."""
        due = [sort for sort, found in self._sorts.items() if last or self._now() - found.since >= PERIOD]
        for sort in due:
            found = self._sorts.pop(sort)
            if found.count > LINES:
                seconds = self._now() - found.since
                self._log.warning("%s: %d more within %.0f s", sort, found.count - LINES, seconds)
