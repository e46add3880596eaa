"""When a peer of a simulated clock is up."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Iterator

import numpy as np

from p2pfl import PeerId
from p2pfl.run_file.time import Availability, Churn, Interval
from p2pfl.seeds import PEER, sequence


class Uptime:
    """The seconds for which one peer is up, since the start of the run.

    Args:
        down: when it is down, ascending; may be endless. It is read as far as needed.
    """

    def __init__(self, down: Iterable[Interval] = ()) -> None:
        self._rest: Iterator[Interval] = iter(down)
        self._changes: list[float] = []
        """When it goes down and is back, in turn."""

    def is_up(self, when: float) -> bool:
        return self._before(when) % 2 == 0

    def next_change(self, when: float) -> float:
        """Return when the peer next goes down or comes back after ``when``; infinite if it never does."""
        position = self._before(when)
        return self._changes[position] if position < len(self._changes) else math.inf

    def after(self, when: float, seconds: float) -> float:
        """Return the first moment from ``when`` on at which the peer is up and has been for ``seconds``."""
        while seconds < math.inf:
            change = self.next_change(when)
            if self.is_up(when):
                if when + seconds < change:
                    return when + seconds
                seconds -= change - when
            when = change
        return math.inf

    def _before(self, when: float) -> int:
        """Return the number of changes until ``when``, and read one more interval if there is one."""
        while not self._changes or self._changes[-1] <= when:
            if (interval := next(self._rest, None)) is None:
                break
            self._changes += interval
        return bisect_right(self._changes, when)


def uptimes(availability: Availability | None, peers: int, seed: int) -> list[Uptime]:
    """Return when each peer is up."""
    if availability is None:
        return [Uptime() for _ in range(peers)]
    if availability.churn is None:
        return [Uptime(down) for down in availability.intervals(peers)]
    return [Uptime(_churned(availability.churn, seed, peer)) for peer in range(peers)]


def _churned(churn: Churn, seed: int, peer: PeerId) -> Iterator[Interval]:
    """Yield when a peer is down: a stationary process, which has been going on for long at second 0."""
    draw = np.random.default_rng(sequence(seed, PEER, peer, "time.churn"))
    back = 0.0
    if draw.random() < churn.down / (churn.up + churn.down):
        back = float(draw.exponential(churn.down))
        yield 0.0, back
    while True:
        down = back + float(draw.exponential(churn.up))
        back = down + float(draw.exponential(churn.down))
        yield down, back
