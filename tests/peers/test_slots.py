"""HostSlot: never more holders than slots, none lost with a process that dies, and everybody's turn comes."""

from __future__ import annotations

import asyncio
import fcntl
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from peers.slots import HostSlot


async def test_never_more_hold_than_there_are_slots(tmp_path: Path) -> None:
    holders, most = 0, 0

    async def worker(slot: HostSlot) -> None:
        nonlocal holders, most
        for _ in range(10):
            await slot.acquire()
            holders += 1
            most = max(most, holders)
            await asyncio.sleep(0)
            holders -= 1
            slot.release()

    await asyncio.gather(*(worker(HostSlot(tmp_path, 2)) for _ in range(5)))
    assert (holders, most) == (0, 2)


async def test_release_without_acquire_is_nothing(tmp_path: Path) -> None:
    one, two = HostSlot(tmp_path, 1), HostSlot(tmp_path, 1)
    await one.acquire()
    two.release()
    two.release()
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(two.acquire(), 0.1)


async def test_whoever_gives_up_queueing_blocks_nobody(tmp_path: Path) -> None:
    one, two, three = (HostSlot(tmp_path, 1) for _ in range(3))
    await one.acquire()
    for impatient in (two, two):
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(impatient.acquire(), 0.05)
    waiting = asyncio.create_task(three.acquire())
    await asyncio.sleep(0)
    one.release()
    await asyncio.wait_for(waiting, 200)


async def test_the_first_in_line_is_served_first(tmp_path: Path) -> None:
    one, two, three = (HostSlot(tmp_path, 1) for _ in range(3))
    await one.acquire()
    first = asyncio.create_task(two.acquire())
    await asyncio.sleep(0)  # it stands at the turnstile now
    second = asyncio.create_task(three.acquire())
    await asyncio.sleep(0)
    one.release()
    await asyncio.wait_for(first, 200)
    assert not second.done()
    two.release()
    await asyncio.wait_for(second, 200)


async def test_nobody_is_overtaken_for_ever(tmp_path: Path) -> None:
    """One that takes a slot again and again, and one that wants it once."""
    greedy, modest = HostSlot(tmp_path, 1), HostSlot(tmp_path, 1)
    await greedy.acquire()
    waiting = asyncio.create_task(modest.acquire())
    await asyncio.sleep(0)
    turns = 0
    while not waiting.done():
        greedy.release()
        again = asyncio.create_task(greedy.acquire())
        await asyncio.wait([again, waiting], return_when=asyncio.FIRST_COMPLETED)
        turns += 1
    again.cancel()
    assert turns == 1


async def test_places_are_apart(tmp_path: Path) -> None:
    await HostSlot(tmp_path, 1, "gpu0-").acquire()
    await asyncio.wait_for(HostSlot(tmp_path, 1, "gpu1-").acquire(), 200)


HOLDER = """
import asyncio, sys
from pathlib import Path
from peers.slots import HostSlot
slot = HostSlot(Path(sys.argv[1]), 1)
asyncio.run(slot.acquire())
print("held", flush=True)
sys.stdin.read()
"""


async def test_the_slot_of_a_process_that_is_killed_is_free_again(tmp_path: Path, eventually: Any) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as holder:
        assert holder.stdout is not None
        assert await asyncio.to_thread(holder.stdout.readline) == b"held\n"
        waiting = asyncio.create_task(HostSlot(tmp_path, 1).acquire())
        await asyncio.sleep(0.05)
        assert not waiting.done()
        os.kill(holder.pid, signal.SIGKILL)
    await asyncio.wait_for(waiting, 200)


async def test_a_first_in_line_that_stands_still_does_not_stop_the_others(tmp_path: Path) -> None:
    stands_still, other = HostSlot(tmp_path, 1), HostSlot(tmp_path, 1)
    fcntl.flock(stands_still._turnstile, fcntl.LOCK_EX)
    async with asyncio.timeout(200):
        await other.acquire()
    other.release()
