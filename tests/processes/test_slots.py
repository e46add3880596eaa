"""HostSlot: never more holders than slots, none lost with a process that dies, no starvation."""

from __future__ import annotations

import asyncio
import fcntl
import math
import os
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch

from peers.device import slots_on
from peers.slots import HostSlot


async def test_never_more_holders_than_slots(tmp_path: Path) -> None:
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


async def test_release_without_acquire_does_nothing(tmp_path: Path) -> None:
    one, two = HostSlot(tmp_path, 1), HostSlot(tmp_path, 1)
    await one.acquire()
    two.release()
    two.release()
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(two.acquire(), 0.1)


async def test_cancelled_acquire_does_not_block_other_peers(tmp_path: Path) -> None:
    one, two, three = (HostSlot(tmp_path, 1) for _ in range(3))
    await one.acquire()
    for impatient in (two, two):
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(impatient.acquire(), 0.05)
    waiting = asyncio.create_task(three.acquire())
    await asyncio.sleep(0)
    one.release()
    await asyncio.wait_for(waiting, 200)


async def test_first_in_line_gets_the_slot(tmp_path: Path) -> None:
    one, two, three = (HostSlot(tmp_path, 1) for _ in range(3))
    await one.acquire()
    first = asyncio.create_task(two.acquire())
    await asyncio.sleep(0)  # it waits at the turnstile now
    second = asyncio.create_task(three.acquire())
    await asyncio.sleep(0)
    one.release()
    await asyncio.wait_for(first, 200)
    assert not second.done()
    two.release()
    await asyncio.wait_for(second, 200)


async def test_no_peer_is_starved(tmp_path: Path) -> None:
    """One peer takes the slot repeatedly, the other needs it once."""
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


async def test_prefixes_separate_slots(tmp_path: Path) -> None:
    await HostSlot(tmp_path, 1, "gpu0-").acquire()
    await asyncio.wait_for(HostSlot(tmp_path, 1, "gpu1-").acquire(), 200)


async def test_takes_whichever_slot_becomes_free(tmp_path: Path) -> None:
    holders = [HostSlot(tmp_path, 3) for _ in range(3)]
    for holder in holders:
        await holder.acquire()
    for holder in holders:
        other = HostSlot(tmp_path, 3)
        waiting = asyncio.create_task(other.acquire())
        await asyncio.sleep(0)
        assert not waiting.done()
        holder.release()
        await asyncio.wait_for(waiting, 200)
        other.release()
        await holder.acquire()


async def test_withdrawn_request_keeps_its_place(tmp_path: Path, eventually: Any) -> None:
    """Its thread stays in the kernel's queue; no second one joins it."""
    holder, first, second = (HostSlot(tmp_path, 1) for _ in range(3))
    await holder.acquire()
    waiting = asyncio.create_task(first.acquire())
    await asyncio.sleep(0)
    before = set(threading.enumerate())
    for _ in range(3):
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(second.acquire(), 0.02)
    (thread,) = set(threading.enumerate()) - before  # a thread of an earlier test may end meanwhile
    holder.release()
    await asyncio.wait_for(waiting, 200)
    await eventually(lambda: not thread.is_alive())  # it had its turn, and let it pass
    first.release()
    await asyncio.wait_for(second.acquire(), 200)


PEER = """
import asyncio, os, sys
from pathlib import Path
from peers import slots

slots.FIRST_TIMEOUT = float(sys.argv[4])  # inf: nothing but the kernel wakes a peer

async def main():
    slot = slots.HostSlot(Path(sys.argv[1]), int(sys.argv[2]))
    action = sys.argv[3]
    if action == "give up":
        try:
            await asyncio.wait_for(slot.acquire(), 0.1)
        except TimeoutError:
            print("gave up", flush=True)
        return
    while True:
        await slot.acquire()
        print("held", flush=True)
        if action == "hold":
            sys.stdin.read()
        await asyncio.sleep(0.001)
        slot.release()

asyncio.run(main())
"""


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[bytes]]]:
    """Start a process that uses slots in ``tmp_path``. It prints a line each time that it gets one."""
    with ExitStack() as processes:

        def start(action: str, slots: int = 1, timeout: float = math.inf) -> subprocess.Popen[bytes]:
            process = subprocess.Popen(
                [sys.executable, "-c", PEER, str(tmp_path), str(slots), action, str(timeout)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                bufsize=0,
            )
            processes.enter_context(process)
            processes.callback(process.kill)
            return process

        yield start


def line(process: subprocess.Popen[bytes]) -> bytes:
    """Wait for a line of the process."""
    assert process.stdout is not None
    assert select.select([process.stdout], [], [], 200)[0], "the process prints nothing"
    return process.stdout.readline()


def someone_is_first(folder: Path) -> bool:
    """Return whether a process holds the turnstile."""
    with (folder / "turnstile").open() as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


@pytest.mark.parametrize("slots", [1, 2])
async def test_killed_process_frees_its_slot(tmp_path: Path, start: Any, slots: int) -> None:
    holders = [start("hold", slots) for _ in range(slots)]
    for holder in holders:
        assert line(holder) == b"held\n"
    waiting = asyncio.create_task(HostSlot(tmp_path, slots).acquire())
    await asyncio.sleep(0.05)
    assert not waiting.done()
    holders[-1].kill()
    await asyncio.wait_for(waiting, 200)


async def test_killed_first_in_line_lets_the_next_pass(tmp_path: Path, start: Any, eventually: Any) -> None:
    slot = HostSlot(tmp_path, 1)
    await slot.acquire()
    first = start("hold")
    await eventually(lambda: someone_is_first(tmp_path))
    second = start("hold")
    first.kill()
    slot.release()
    assert await asyncio.to_thread(line, second) == b"held\n"


async def test_suspended_first_in_line_does_not_block_the_others(tmp_path: Path, start: Any, eventually: Any) -> None:
    slot = HostSlot(tmp_path, 1)
    await slot.acquire()
    first = start("hold")
    await eventually(lambda: someone_is_first(tmp_path))
    first.send_signal(signal.SIGSTOP)
    second = start("hold", timeout=0.1)
    slot.release()
    assert await asyncio.to_thread(line, second) == b"held\n"
    first.send_signal(signal.SIGCONT)
    second.kill()
    assert await asyncio.to_thread(line, first) == b"held\n"


async def test_request_in_the_queue_does_not_delay_the_exit(tmp_path: Path, start: Any) -> None:
    slot, first = HostSlot(tmp_path, 1), HostSlot(tmp_path, 1)
    await slot.acquire()
    waiting = asyncio.create_task(first.acquire())
    await asyncio.sleep(0)
    second = start("give up")
    assert await asyncio.to_thread(line, second) == b"gave up\n"
    assert await asyncio.to_thread(second.wait, 200) == 0
    assert not waiting.done()
    slot.release()
    await asyncio.wait_for(waiting, 200)


def test_no_release_goes_unnoticed_while_processes_die(start: Any) -> None:
    """The survivors are woken by the kernel alone: a missed release would block them forever."""
    processes = [start("use", slots=2) for _ in range(5)]
    for process in processes:
        line(process)
    while len(processes) > 2:
        processes.pop().kill()  # at some point of its loop
        for process in processes:
            for _ in range(30):
                assert line(process) == b"held\n"


def test_queued_peer_stops_at_once(make_run: Any, prepare: Any, warm: Any, until: Any, tmp_path: Path) -> None:
    run = make_run(peers=3, slots=1)
    folder = prepare(tmp_path / "run", run)
    slot = HostSlot(folder.slots, *slots_on(run.file, torch.device("cpu")))
    asyncio.run(slot.acquire())
    pids = warm.start(folder)
    until(lambda: all((status := files.status()) and status.phase == "queued" for files in folder.peers()))
    for pid in pids.values():
        os.kill(pid, signal.SIGTERM)
    assert warm.wait(pids) == dict.fromkeys(range(3), 0)
    assert {files.result().phase for files in folder.peers()} == {"stopped"}
    slot.release()
