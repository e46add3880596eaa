"""The time that passes for a peer: real, or simulated."""

from __future__ import annotations

from time import perf_counter


class Clock:
    """Real time: computing takes as long as it takes."""

    simulated = False
    """Whether the seconds are those of a simulation: then nothing real may be awaited, such as a disk."""

    def now(self) -> float:
        """Return seconds since some moment."""
        return perf_counter()

    async def settle(self) -> None:
        """Wait until the time of all that this peer has computed has passed, before others see that it has."""

    def evaluated(self) -> None:
        """Note that the peer has evaluated its models."""
