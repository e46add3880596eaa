"""HeldSlot: only the task that computes takes the slot."""

from __future__ import annotations

import asyncio

from p2pfl.session.compute_slot import HeldSlot


class OnlySlot:
    """The only slot of a host."""

    def __init__(self) -> None:
        self._free = asyncio.Semaphore(1)

    async def acquire(self) -> None:
        await self._free.acquire()

    def release(self) -> None:
        self._free.release()

    @property
    def free(self) -> bool:
        return not self._free.locked()


async def wait_without(slot: HeldSlot, event: asyncio.Event) -> None:
    """Wait as a session does."""
    slot.release()
    await event.wait()
    await slot.acquire()


async def test_answer_that_had_to_wait_leaves_the_slot_to_others() -> None:
    """The computing task still waits, so the peer must not hold the only slot of the host."""
    slot = HeldSlot(host := OnlySlot())
    sent, received = asyncio.Event(), asyncio.Event()

    async def round() -> None:
        await slot.acquire()
        await wait_without(slot, received)

    computing = asyncio.create_task(round())
    await asyncio.sleep(0)
    answering = asyncio.create_task(wait_without(slot, sent))
    await asyncio.sleep(0)
    sent.set()
    await answering
    assert host.free
    received.set()
    await computing
    assert not host.free


async def test_answer_does_not_release_the_slot_of_the_computing_task() -> None:
    slot = HeldSlot(host := OnlySlot())
    await slot.acquire()
    answering = asyncio.create_task(wait_without(slot, asyncio.Event()))
    await asyncio.sleep(0)
    assert not host.free
    answering.cancel()


async def test_next_round_and_the_end_of_the_session_inherit_the_slot() -> None:
    slot = HeldSlot(host := OnlySlot())
    for _ in range(2):
        await asyncio.create_task(slot.acquire())
        assert not host.free
    slot.release()
    assert host.free
