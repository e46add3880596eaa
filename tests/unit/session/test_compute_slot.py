"""HeldSlot: one slot for all tasks of a peer."""

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
    with slot.released():
        await event.wait()
    await slot.take_back()


async def test_the_slot_is_free_while_any_task_of_the_peer_waits_and_the_others_are_suspended() -> None:
    """The neighbors may need the only slot of the host to send what is waited for."""
    slot = HeldSlot(host := OnlySlot())
    events = [asyncio.Event(), asyncio.Event()]
    await slot.acquire()
    waits = [asyncio.create_task(wait_without(slot, event)) for event in events]
    free = []
    for event, wait in zip(events, waits, strict=True):
        await asyncio.sleep(0)
        free.append(host.free)
        event.set()
        await wait
        await asyncio.sleep(0)
    assert free == [True, True]
    assert not host.free
    slot.release()
    assert host.free


async def test_tasks_that_go_on_at_once_take_one_slot_together() -> None:
    slot = HeldSlot(host := OnlySlot())
    event = asyncio.Event()
    waits = asyncio.gather(*(wait_without(slot, event) for _ in range(3)))
    await asyncio.sleep(0)
    await host.acquire()  # another peer computes
    event.set()
    await asyncio.sleep(0)
    host.release()
    async with asyncio.timeout(10):
        await waits
    slot.release()
    assert host.free


async def test_next_round_and_the_end_of_the_session_inherit_the_slot() -> None:
    slot = HeldSlot(host := OnlySlot())
    for _ in range(2):
        await asyncio.create_task(slot.acquire())
        assert not host.free
    slot.release()
    assert host.free
