"""Rate-limited warnings about unknown clients and invalid messages."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

LINES = 10
"""Maximum lines of one category within a PERIOD; further ones are only counted."""
PERIOD = 60.0
"""Seconds."""


@dataclass
class _Category:
    since: float
    count: int = 0


class LimitedLog:
    """Warnings with a rate limit per category, so that a million connections do not fill the disk.

    Args:
        log: the peer's log.
        now: the clock.
    """

    def __init__(self, log: logging.Logger, now: Callable[[], float]) -> None:
        self._log = log
        self._now = now
        self._categories: dict[str, _Category] = {}

    def warning(self, category: str, text: str) -> None:
        """Log a warning, or count it. Categories must be few; never derive one from unauthenticated input."""
        found = self._categories.setdefault(category, _Category(self._now()))
        found.count += 1
        if found.count <= LINES:
            self._log.warning("%s", text)

    def summarize(self, *, last: bool = False) -> None:
        """Log the counts of suppressed warnings. Call it periodically, and once at the end (``last``)."""
        due = [name for name, found in self._categories.items() if last or self._now() - found.since >= PERIOD]
        for name in due:
            found = self._categories.pop(name)
            if found.count > LINES:
                seconds = self._now() - found.since
                self._log.warning("warnings suppressed count=%d seconds=%.0f: %s", found.count - LINES, seconds, name)
