"""An event loop in which waiting takes no time."""

from __future__ import annotations

import asyncio
import math
from typing import Any

from p2pfl.errors import P2pflError


class Stuck(P2pflError):
    """The event loop can make no progress: no timer is pending, or callbacks reschedule each other endlessly."""


class VirtualLoop(asyncio.BaseEventLoop):
    """An event loop whose clock stops while callbacks run and jumps to the next timer when none is ready.

    The order of callbacks depends on the program alone, never on the real clock.

    Args:
        max_turns: turns of the loop after which it raises Stuck; seeded runs that end take fewer than 10,000.
        stall: seconds by which a timer must be late for the process to count as suspended (``Deadline``). Infinite
            if no callback ever advances the clock, so that a wait needs one timer and not one a second.
    """

    def __init__(self, max_turns: float = 50_000, stall: float | None = None) -> None:
        super().__init__()
        self._now = 0.0
        self._max_turns = self._turns_left = max_turns
        self._selector = self  # BaseEventLoop waits in its selector
        self._clock_resolution = 1e-9
        if stall is not None:
            self.stall = stall

    def time(self) -> float:
        return self._now

    def select(self, timeout: float | None) -> list[Any]:
        """Implement the selector interface: advance the clock by ``timeout`` seconds."""
        self._turns_left -= 1
        if timeout is None or self._turns_left < 0:
            self._turns_left = self._max_turns  # so that the caller can cancel its tasks
            raise Stuck("no timer is pending" if timeout is None else "callbacks reschedule each other endlessly")
        self._now += timeout
        self._clock_resolution = max(1e-9, 2.0 * math.ulp(self._now))  # or timers would never be due
        return []

    def _process_events(self, event_list: list[Any]) -> None:
        return

    def _write_to_self(self) -> None:
        return
