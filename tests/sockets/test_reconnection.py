"""ZmqLink: neighbors that disconnect and reconnect."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Any

import pytest
import torch
import zmq

from p2pfl.errors import SpoolError
from p2pfl.messaging import control
from p2pfl.messaging.control import Refused
from tests.bodies import PAIR, Block, Word, complete, round_of
from tests.sockets.raw_peer import LAYOUTS, die, exchange, revive

pytestmark = pytest.mark.usefixtures("no_needless_waits")


async def test_waits_for_a_killed_neighbor_end(sockets: Any, caplog: Any, eventually: Any) -> None:
    caplog.set_level(logging.INFO)
    endpoints = await sockets.open(complete(4), LAYOUTS, give_up=0.5)

    async def exchange_rounds(endpoint: Any, first: int, last: int) -> list[int]:
        received = []
        for t in range(first, last):
            received.append(len(await round_of(endpoint, t).exchange(Word("…"))))
            endpoint.finish(t)
        return received

    assert await asyncio.gather(*(exchange_rounds(endpoint, 0, 2) for endpoint in endpoints)) == [[3, 3]] * 4
    await die(endpoints[3].link)
    assert await asyncio.gather(*(exchange_rounds(endpoint, 2, 12) for endpoint in endpoints[:3])) == [[2] * 10] * 3
    assert (
        caplog.text.count("neighbor declared dead peer=3: no connection for 0.5 s") == 3
    )  # once each, not in every round
    assert endpoints[0].missing == {"Word": [3]}
    # R8: only the last two rounds are kept for it, one of them open
    await eventually(lambda: endpoints[0].journal.floor(3) == 11)


async def test_reconnects_to_a_neighbor_that_restarts_elsewhere(sockets: Any, eventually: Any) -> None:
    zero, one = await sockets.open(PAIR, LAYOUTS, give_up=0.2)
    for t in range(3):
        assert await exchange([zero, one], t) == [{1: "1"}, {0: "0"}]
        await die(one.link)
        await eventually(lambda: zero.mailbox.is_disconnected(1))
        one = await revive(sockets, one, t + 1)
        await eventually(lambda: not zero.mailbox.is_disconnected(1))


async def test_reads_a_neighbor_that_had_failed_when_it_is_started_again(sockets: Any, eventually: Any) -> None:
    zero, one = await sockets.open(PAIR, LAYOUTS)
    await asyncio.gather(*(round_of(endpoint, 0).exchange(Word("…")) for endpoint in (zero, one)))
    await sockets.shut(one.link, "failed")
    assert await round_of(zero, 1).gather(Word) == {}
    again = sockets.revived(one, 1)
    await sockets.link(again).start()
    back = round_of(again, 1)
    await back.broadcast(Word("back"))
    await eventually(lambda: not zero.mailbox.is_disconnected(1))
    assert await round_of(zero, 1).gather(Word) == {1: Word("back")}
    zero.finish(1)
    again.finish(1)
    nets = [round_of(zero, 2), round_of(again, 2)]
    assert await asyncio.gather(*(net.exchange(Word(f"{net.me}")) for net in nets)) == [
        {1: Word("1")},
        {0: Word("0")},
    ]


async def test_a_neighbor_that_had_failed_catches_up_from_behind_the_others_checkpoints(
    sockets: Any, eventually: Any
) -> None:
    """None of its entries is asked for, and it must not wait for the rounds that are over."""
    zero, one = await sockets.open(PAIR, LAYOUTS)
    await exchange([zero, one])
    await sockets.shut(one.link, "failed")
    for t in range(1, 11):
        assert await round_of(zero, t).gather(Word) == {}
    zero.link.checkpointed({1: 10})
    again = await revive(sockets, one, 1)
    assert await round_of(again, 1).gather(Word) == {}
    assert again.next_round(1) == 11
    await eventually(lambda: not zero.mailbox.is_disconnected(1))
    assert await exchange([zero, again], 11) == [{1: "1"}, {0: "0"}]


async def test_forgets_delays_of_what_it_keeps_no_longer(sockets: Any, eventually: Any) -> None:
    endpoint = sockets.endpoint(0, PAIR, LAYOUTS, deadline=0.0)
    await sockets.link(endpoint, faults={"delay": 1.0}, deadline=0.1, queue=1000).start()
    connection = endpoint.link.io.connections[1]
    await eventually(lambda: connection.disconnected)
    for t in range(100):
        await round_of(endpoint, t).broadcast(Word("anyone?"))
        endpoint.finish(t)
    await eventually(lambda: (due := list(connection._delays._due)) and due[-1][0].t == 100)  # another thread's
    assert len(connection._delays._due) <= 10


async def test_declares_no_neighbor_dead_after_being_suspended(
    sockets: Any, eventually: Any, monkeypatch: Any
) -> None:
    zero, one = await sockets.open(PAIR, LAYOUTS)
    await exchange([zero, one])
    await die(one.link)
    waiting = asyncio.create_task(round_of(zero, 1).gather(Word))
    await eventually(lambda: not zero.link.io.connections[1].up)
    monkeypatch.setattr(zero.link.world, "now", lambda: time.monotonic() + 1000)
    await eventually(lambda: zero.link.io.stood_still > 999)
    assert not zero.link.io.connections[1].disconnected
    again = await revive(sockets, one, 1)
    await round_of(again, 1).broadcast(Word("back"))
    assert await waiting == {1: Word("back")}


def bound(socket: zmq.Socket[bytes], address: str) -> bool:
    """Bind ``socket`` unless the address is in use."""
    try:
        socket.bind(address)
    except zmq.ZMQError:
        return False
    return True


async def test_reconnects_after_another_process_had_the_port(
    alone: Any, raw: Any, caplog: Any, eventually: Any
) -> None:
    neighbor = raw(1)
    waiting = asyncio.create_task(round_of(alone, 0).gather(Word))
    await neighbor.read(alone.link)
    neighbor.router.close()
    context = zmq.Context()
    try:
        for attempt in range(3):  # two other processes, then the neighbor
            router = context.socket(zmq.ROUTER)
            router.set(zmq.RCVTIMEO, 100_000)
            router.set(zmq.LINGER, 1000)
            async with asyncio.timeout(100):
                while not bound(router, neighbor.address):
                    await asyncio.sleep(0)
            identity, *_ = await asyncio.to_thread(router.recv_multipart)
            if attempt < 2:
                router.send_multipart([identity, control.pack(Refused("wrong run"), "another")])
                router.close()  # lingers until the answer is sent
        assert identity == b"0>1"  # it connects to the neighbor again
    finally:
        waiting.cancel()
        context.destroy(linger=0)
    assert caplog.text.count("another process has the address peer=1") == 1
    assert alone.mailbox.failure is None


@pytest.mark.parametrize("delay", [0.0, 0.02])
async def test_replays_what_was_lost_with_tcp_connections(sockets: Any, delay: float, eventually: Any) -> None:
    """Connections break over and over, in the middle of bodies."""
    faults = {"loss": 0.2, "delay": delay}
    endpoints = await sockets.open(complete(3), LAYOUTS, faults=faults, same_host=False)
    nets = [round_of(endpoint, 0) for endpoint in endpoints]
    for number in range(8):
        for net in nets:
            await net.broadcast(Block(torch.full((1000, 1000), float(number))))
    for number in range(8):
        for net in nets:
            received = await net.gather(Block)
            assert [bool((body.x == number).all()) for body in received.values()] == [True] * 2


@pytest.mark.parametrize("error", [ConnectionAbortedError("a bug"), SpoolError("/tmp", OSError(28, "disk full"))])
async def test_failure_of_the_io_thread_ends_waits(alone: Any, error: Exception, caplog: Any) -> None:
    waiting = asyncio.create_task(round_of(alone, 0).gather(Word))
    await asyncio.sleep(0)
    await die(alone.link, error)
    with pytest.raises(type(error)):
        await waiting
    (record,) = caplog.records
    assert str(error) in record.getMessage()
    assert bool(record.exc_info) is not isinstance(error, SpoolError)  # the traceback of an expected one is of no use
