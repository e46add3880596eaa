"""An event loop in which waiting takes no time."""

from __future__ import annotations

import asyncio
from typing import Any

from p2pfl.errors import P2pflError


class Stuck(P2pflError):
    """Nothing is ready and nothing is due, or too much happens in no time: it will never end."""


class VirtualLoop(asyncio.BaseEventLoop):
    """Its clock stands still while callbacks run, and jumps to the next timer when none is ready.

    Callbacks run in an order that follows from the program alone: nothing here looks at the world.

    Args:
        most_turns: turns of the loop after which it raises Stuck: somebody calls himself again and again.
    """

    def __init__(self, most_turns: int = 3_000_000) -> None:
        super().__init__()
        self._now = 0.0
        self._turns_left = most_turns
        self._selector = self  # where BaseEventLoop waits
        self._clock_resolution = 1e-9

    def time(self) -> float:
        return self._now

    def select(self, timeout: float | None) -> list[Any]:
        """What a selector does, with nothing to select from: let ``timeout`` seconds pass."""
        self._turns_left -= 1
        if timeout is None or self._turns_left < 0:
            raise Stuck("nothing is due any more" if timeout is None else "it goes round in circles")
        self._now += timeout
        return []

    def _process_events(self, event_list: list[Any]) -> None:
        return

    def _write_to_self(self) -> None:
        return
