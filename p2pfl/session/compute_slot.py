"""Compute slots: permission to compute, of which each host grants a limited number at a time."""

from __future__ import annotations

import asyncio
from time import perf_counter
from typing import Any, Protocol

from p2pfl.session.cost import CostMeter


class Slot(Protocol):
    """One peer's access to the compute slots of its host."""

    async def acquire(self) -> None: ...

    def release(self) -> None: ...


class FreeSlot:
    """Always granted: in a single process only one peer computes at a time anyway."""

    async def acquire(self) -> None:
        return

    def release(self) -> None:
        return


class HeldSlot:
    """The slot of one session: tracks whether it is held, and the time spent in the queue for it.

    It belongs to the task that computes the round. Other tasks answer neighbors: they neither queue for the slot,
    which that task might be waiting without, nor release it.
    """

    def __init__(self, slot: Slot, meter: CostMeter | None = None) -> None:
        self.slot = slot
        self.meter = meter or CostMeter()
        """Is told when the session computes."""
        self.queued = 0.0
        """Seconds; the session resets it in every round."""
        self._held = False
        self._owner: asyncio.Task[Any] | None = None

    async def acquire(self) -> None:
        """Wait for the slot. The calling task becomes its owner if there is none, or if that one has ended."""
        if self._foreign():
            return
        self._owner = asyncio.current_task()
        if not self._held:
            began = perf_counter()
            await self.slot.acquire()
            self._held = True
            self.queued += perf_counter() - began
        self.meter.begin()

    def release(self) -> None:
        if self._held and not self._foreign():
            self.meter.end()
            self.slot.release()
            self._held = False

    def _foreign(self) -> bool:
        """Return whether the slot belongs to another task than the current one."""
        return self._owner not in (None, asyncio.current_task()) and not self._owner.done()
