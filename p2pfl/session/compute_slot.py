"""Compute slots: each host lets a limited number of peers compute at a time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import perf_counter
from typing import Protocol

from p2pfl.session.cost import CostMeter


class Slot(Protocol):
    """One peer's access to the compute slots of its host."""

    async def acquire(self) -> object: ...

    def release(self) -> None: ...


class FreeSlot:
    """Always granted: in a single process only one peer computes at a time anyway."""

    async def acquire(self) -> None:
        return

    def release(self) -> None:
        return


class HeldSlot:
    """The slot of one session: tracks whether it is held, and the time spent in the queue for it.

    A method may wait in several tasks. Any wait releases the slot, because the tasks that do not wait for neighbors
    usually wait for the task that does. When a wait ends, its task takes the slot again. If others still wait, it
    keeps the slot only until it suspends: the neighbors may need it to send what they wait for.
    """

    def __init__(self, slot: Slot, meter: CostMeter | None = None, clock: Callable[[], float] | None = None) -> None:
        self.slot = slot
        self._clock = clock or perf_counter
        self.meter = meter or CostMeter()
        """Told when the session computes."""
        self.queued = 0.0
        """Seconds; the session resets it in every round."""
        self._held = False
        self._waits = 0
        self._queue = asyncio.Lock()
        """Orders the tasks of this session: one queues for the slot, the others for the lock."""

    async def acquire(self) -> None:
        async with self._queue:
            if not self._held:
                began = self._clock()
                await self.slot.acquire()
                self._held = True
                self.queued += self._clock() - began
            self.meter.begin()

    @contextmanager
    def released(self) -> Iterator[None]:
        """Release the slot for a wait of the calling task, which then calls ``take_back``."""
        self._waits += 1
        self.release()
        try:
            yield
        finally:
            self._waits -= 1

    async def take_back(self) -> None:
        """Queue for the slot again after a wait."""
        await self.acquire()
        asyncio.get_running_loop().call_soon(self._release_for_others)

    def _release_for_others(self) -> None:
        if self._waits:
            self.release()

    def release(self) -> None:
        if self._held:
            self.meter.end()
            self.slot.release()
            self._held = False
