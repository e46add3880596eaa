"""ZmqLink: closing."""

from __future__ import annotations

import asyncio
import os
import threading
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from p2pfl.messaging.control import FOREVER, Id
from p2pfl.messaging.directions import Begin
from peers import connection
from tests.bodies import PAIR, Block, Word, complete, round_of
from tests.mesh_fixtures import change_transport
from tests.sockets.raw_peer import BLOCK, LAYOUTS, die, exchange, revive, up, want

pytestmark = pytest.mark.usefixtures("no_needless_waits")


async def test_close_delivers_everything(sockets: Any) -> None:
    zero, one = await sockets.open(PAIR, LAYOUTS)
    net, other = round_of(zero, 0), round_of(one, 0)

    async def talk() -> None:
        for number in range(500):
            await net.broadcast(Word(str(number)))
            if number % 100 == 0:
                await net.broadcast(Block(torch.full((1000, 1000), float(number))))
        await sockets.shut(zero.link)

    talking = asyncio.create_task(talk())
    for number in range(0, 500, 100):
        assert bool(((await other.gather(Block))[0].x == number).all())
    await talking
    assert [(await other.gather(Word))[0].text for _ in range(500)] == list(map(str, range(500)))
    assert await other.gather(Word) == {}  # the wait for more ends at once


async def test_close_does_not_wait_for_a_neighbor_that_never_started(sockets: Any, alone: Any) -> None:
    await sockets.shut(alone.link)


async def test_a_fault_timer_writes_to_no_closed_descriptor(sockets: Any, alone: Any, monkeypatch: Any) -> None:
    """A partition may heal while the link is closing."""
    failed: list[BaseException] = []
    timers: list[threading.Thread] = []

    def heal() -> None:
        try:
            alone.link.world.wake()
        except OSError as error:
            failed.append(error)

    def close(descriptor: int) -> None:
        os_close(descriptor)
        if descriptor == wake:
            timers.append(threading.Thread(target=heal))
            timers[-1].start()
            timers[-1].join(0.2)

    os_close, wake = os.close, alone.link.world._wake
    monkeypatch.setattr("peers.sockets.os.close", close)
    await sockets.shut(alone.link)
    for timer in timers:
        timer.join()
    assert (len(timers), failed) == (1, [])


async def test_close_times_out_without_a_confirmation(sockets: Any, alone: Any, raw: Any, caplog: Any) -> None:
    other = raw(1)
    await round_of(alone, 0).broadcast(Word("last words"))
    await other.read(alone.link)
    assert await other.body() == Word("last words")
    change_transport(alone.link, deadline=0.3)
    await sockets.shut(alone.link)
    assert "final messages unacknowledged at the deadline peer=1" in caplog.text


async def test_close_does_not_wait_for_neighbors_that_have_finished(
    alone: Any, sockets: Any, raw: Any, monkeypatch: Any
) -> None:
    """They may end before they have confirmed."""
    monkeypatch.setattr(connection, "CLOSE_TIMEOUT", 0.3)
    other = raw(1)
    await round_of(alone, 0).broadcast(Word("last words"))
    await other.read(alone.link)
    closing = asyncio.create_task(sockets.shut(alone.link, "finished"))
    await other.begin_epoch()
    other.put(Begin(()), FOREVER)
    await closing


async def test_finished_peer_replays_after_a_restart_until_a_checkpoint_has_it(sockets: Any, raw: Any) -> None:
    endpoint = await up(sockets, 0)
    await round_of(endpoint, 0).broadcast(Word("last words"))
    endpoint.finish(0)
    await die(endpoint.link)
    link = (await revive(sockets, endpoint, 1)).link
    closing = asyncio.create_task(sockets.shut(link, "finished"))
    other = raw(1)
    await other.read(link)
    assert await other.body() == Word("last words")
    end = Id(FOREVER, 1)
    other.send(want(1, end))
    await asyncio.sleep(0.1)
    assert not closing.done()
    other.send(want(1, end, durable=1))
    await closing


async def test_finished_peer_waits_at_most_give_up_after_a_restart(sockets: Any) -> None:
    """The others may have finished while it was down."""
    endpoint = await up(sockets, 0)
    await round_of(endpoint, 0).broadcast(Word("last words"))
    endpoint.finish(0)
    await die(endpoint.link)
    endpoint = await revive(sockets, endpoint, 1, deadline=1000, give_up=0.5)
    await sockets.shut(endpoint.link, "finished")


@pytest.mark.parametrize("connected_first", [True, False])
async def test_finished_peer_does_not_wait_for_departed_neighbors_after_a_restart(
    sockets: Any, connected_first: bool, eventually: Any
) -> None:
    """They left while it was down, or while they were reconnecting."""
    zero, one = await sockets.open(PAIR, LAYOUTS, give_up=0.5)
    if connected_first:
        await exchange([zero, one])
    zero.finish(0)
    await die(zero.link)
    options = {"deadline": 1000, "give_up": 1000}
    if connected_first:
        await sockets.shut(one.link)
        again = await revive(sockets, zero, 1, **options)
    else:
        again = await revive(sockets, zero, 1, **options)
        await eventually(lambda: again.link.io.connections and again.link.io.connections[1].address)
        await sockets.shut(one.link)
    await sockets.shut(again.link, "finished")  # otherwise it would wait for 1000 s


async def test_finished_peer_waits_for_stopped_neighbors_after_a_restart(sockets: Any) -> None:
    zero, one = await sockets.open(PAIR, LAYOUTS)
    await exchange([zero, one])
    for endpoint in (zero, one):
        endpoint.finish(0)
    await round_of(zero, 1).broadcast(Word("last words"))
    zero.finish(1)
    await asyncio.gather(die(zero.link), sockets.shut(one.link, "stopped"))
    closing = asyncio.create_task(sockets.shut((await revive(sockets, zero, 2)).link, "finished"))
    again = await revive(sockets, one, 1)
    assert await round_of(again, 1).gather(Word) == {0: Word("last words")}
    assert not closing.done()
    await sockets.shut(again.link, "finished")
    await closing


async def test_closed_link_leaves_no_thread_and_no_open_file(tmp_path: Path, sockets: Any, eventually: Any) -> None:
    process = psutil.Process()

    async def life() -> None:
        endpoints = await sockets.open(complete(4), LAYOUTS)
        await asyncio.gather(*(round_of(endpoint, 0).exchange(BLOCK) for endpoint in endpoints))
        await sockets.close()

    await life()  # pyzmq starts a thread and a context of its own on the first send without copying

    def held() -> tuple[int, int]:
        """Open files, and threads except asyncio's workers."""
        waiting = sum(thread.name.startswith("asyncio_") for thread in threading.enumerate())
        return process.num_fds(), process.num_threads() - waiting

    before = held()
    for _ in range(3):
        await life()
    # Not equal: the garbage collector may free what earlier tests left.
    await eventually(lambda: all(now <= then for now, then in zip(held(), before, strict=True)), "all of it is freed")
