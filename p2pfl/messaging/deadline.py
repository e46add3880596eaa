"""How long a wait may last."""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Awaitable
from dataclasses import dataclass
from statistics import median
from typing import Any

STALL = 1.0
"""Seconds by which a timer must be late for this process to count as suspended (SIGSTOP, or no CPU time)."""
CHECKS = 60
"""A wait checks for a suspension when this part of what is left of it is over, at most every ``STALL`` seconds: each
wake-up of a waiting peer takes 0.3 ms of CPU, and a thousand peers may wait on a host."""
RECENT = 10
"""Rounds whose duration an adaptive deadline follows. It applies once a third of them are over."""
SHORTEST = 1.0
"""Seconds of the shortest adaptive deadline: a host may be busy with something else for a moment."""


class Deadline:
    """When a wait ends: ``at`` on the event loop's clock, which may be infinite.

    Time in which this process was suspended does not count: the neighbors' messages have arrived, but have not
    been read yet.
    """

    def __init__(self, at: float) -> None:
        self.at = at
        loop = asyncio.get_running_loop()
        self._clock = loop.time
        self._stall: float = getattr(loop, "stall", STALL)  # a loop in virtual time is never suspended

    async def allows(self, awaitable: Awaitable[Any]) -> bool:
        """Wait for ``awaitable`` and raise what it raises. Past the deadline, cancel it and return False."""
        awaited = asyncio.ensure_future(awaitable)
        try:
            while True:
                now = self._clock()
                wake_at = min(self.at, now + max(self._stall, (self.at - now) / CHECKS))
                timeout = None if self.at == math.inf else max(0.0, wake_at - now)
                await asyncio.wait([awaited], timeout=timeout)
                if awaited.done():
                    awaited.result()
                    return True
                lateness = self._clock() - wake_at
                if lateness > self._stall:
                    self.at = max(self.at + lateness, self._clock() + STALL)  # leave time to read what has arrived
                elif wake_at == self.at:
                    return False
        finally:
            awaited.cancel()


@dataclass
class WaitPolicy:
    """How long to wait for the neighbors.

    Args:
        deadline: seconds; infinite in one process, where no message gets lost.
        adaptive: a wait also ends after this many times the median duration of the recent rounds.
        quorum: the deadline ends a wait only if this fraction of the awaited neighbors has sent (disconnected ones do
            not count); otherwise the wait continues for up to ``give_up`` more seconds.
        give_up: seconds.
    """

    deadline: float = math.inf
    adaptive: float | None = None
    quorum: float = 0.0
    give_up: float = 0.0

    def __post_init__(self) -> None:
        self._recent: deque[float] = deque(maxlen=RECENT)

    def took(self, seconds: float) -> None:
        """Record the duration of a round, less the time spent waiting for neighbors that did not send."""
        self._recent.append(seconds)

    def after(self, when: float, seconds: float) -> float:
        """Return when ``seconds`` have passed for this peer since ``when``, on the event loop's clock."""
        return when + seconds

    @property
    def seconds(self) -> float:
        """The duration of a wait that begins now."""
        if self.adaptive is None or 3 * len(self._recent) < RECENT:
            return self.deadline
        return min(self.deadline, max(SHORTEST, self.adaptive * median(self._recent)))
