"""How much of a peer's memory and time a neighbour can take up: with messages for later rounds, with useless ones."""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections.abc import Iterator
from contextlib import suppress
from itertools import count
from typing import Any

import pytest
import torch
import zmq

from p2pfl import wire
from p2pfl.errors import HandshakeError
from p2pfl.net import START
from p2pfl.topology import Topology
from p2pfl.wire import Body, Layout
from peers import zmqlink
from peers.sockets import ANSWER
from peers.zmqlink import Durable, Hello, Refused
from tests.bodies import PAIR, RUN_ID, Block

LAYOUTS = [Layout.of(Block(torch.zeros(250)))]
FORK = Topology.from_edges(3, [(0, 1), (0, 2)])


class Liar:
    """A neighbour of peer 0 that has the right to speak, and says what a test wants it to."""

    def __init__(self, endpoint: Any, me: int = 1) -> None:
        self.me = me
        self.context = zmq.Context()
        self.dealer = self.context.socket(zmq.DEALER)
        self.dealer.set(zmq.IDENTITY, f"{me}>0".encode())
        self.dealer.set(zmq.SNDHWM, 0)
        self.dealer.connect(endpoint.link.address)

    def say(self, body: Body, t: int = 0, seq: int = 0) -> None:
        self.dealer.send_multipart(wire.encode(body).to(RUN_ID, t, self.me, seq))


@pytest.fixture
def liars() -> Iterator[Any]:
    made: list[Liar] = []

    def make(endpoint: Any, me: int = 1) -> Liar:
        made.append(Liar(endpoint, me))
        return made[-1]

    yield make
    for one in made:
        one.context.destroy(linger=0)


async def up(mesh: Any, topology: Topology, peer: int, most_held: int | None = None, **options: Any) -> Any:
    endpoint = mesh.endpoint(peer, topology, LAYOUTS)
    link = mesh.link(endpoint, **options)
    link.most_held = most_held or link.most_held
    await link.start()
    return endpoint


def block(t: int) -> Block:
    return Block(torch.full((250,), float(t)))


# ---- far ahead


@pytest.mark.parametrize("keyed", [False, True])
async def test_a_neighbor_that_is_far_ahead_waits_and_nothing_is_lost(
    sockets: Any, encrypted: Any, keyed: bool, caplog: Any, eventually: Any
) -> None:
    caplog.set_level(logging.INFO)
    mesh = encrypted if keyed else sockets
    zero, one = await up(mesh, PAIR, 0, 50_000, queue=4), await up(mesh, PAIR, 1, queue=4)

    has_stopped = False

    async def run_ahead() -> int:
        """Goes on until it has been stopped, and 200 rounds at least. Returns how many."""
        for t in count():
            if t >= 200 and has_stopped:
                return t
            one.begin(t)
            await one.send([0], block(t), t)
        raise AssertionError("count() ends")

    ahead = asyncio.create_task(run_ahead())
    await eventually(lambda: "peer 1 is far ahead: asked to wait" in caplog.text)
    await eventually(lambda: one.link.full(0))  # it has come to a stop
    has_stopped = True
    most = t = 0
    while not ahead.done() or t < ahead.result():
        zero.begin(t)
        most = max(most, zero.mailbox.held[1])
        assert torch.equal((await zero.take("Block", [1], t))[1].body.x, block(t).x)
        t += 1
    assert most <= 50_000 + 2 * 4 * 5_000  # besides what was being handed over
    assert zero.missing == {}
    assert zero.refused == one.refused == {}
    assert one.undelivered == 0
    assert zero.mailbox.held[1] == 0


async def test_a_neighbor_that_does_not_wait_is_not_heard_and_takes_no_memory(
    sockets: Any, liars: Any, eventually: Any
) -> None:
    zero = await up(sockets, FORK, 0, 50_000, queue=4)
    liar = liars(zero)
    for t in range(2_000):
        liar.say(block(t), t + 1, seq=t)
    await eventually(lambda: zero.mailbox.held[1] >= 50_000)
    two = await up(sockets, FORK, 2)
    for t in range(10):
        two.begin(t)
        await two.send([0], block(t), t)
        zero.begin(t)
        assert torch.equal((await zero.take("Block", [2], t))[2].body.x, block(t).x)
        assert zero.mailbox.held[1] <= 50_000 + 2 * 4 * 5_000


async def test_messages_for_rounds_that_are_over_leave_nothing_behind(
    sockets: Any, liars: Any, eventually: Any
) -> None:
    zero = await up(sockets, PAIR, 0)
    liar = liars(zero)
    zero.begin(5)
    liar.say(block(0), t=1 << 50, seq=0)
    for seq in range(1, 1000):
        liar.say(block(0), t=seq % 5, seq=seq)
    await eventually(lambda: zero.mailbox.late == 999)
    assert len(zero._arrived[1]) == 1
    zero.begin(6)
    assert zero.heard[1] == START  # the first of them may be of use yet, and after it comes everything again
    assert list(zero.mailbox._queues) == [(1 << 50, "Block", 1)]


# ---- such as bring nothing


@pytest.mark.parametrize("sort", ["garbage", "duplicates", "greetings", "durable"])
async def test_what_brings_nothing_is_read_slowly_and_others_in_between(
    sockets: Any, liars: Any, sort: str, monkeypatch: Any, eventually: Any
) -> None:
    monkeypatch.setattr(zmqlink, "USELESS", 200.0)
    zero = await up(sockets, FORK, 0)
    read = 0
    heard = zero.link._heard

    def count(identity: bytes, frames: Any) -> None:
        nonlocal read
        read += identity == b"1>0"
        heard(identity, frames)

    zero.link._heard = count
    two = await up(sockets, FORK, 2)
    liar = liars(zero)
    began = time.monotonic()
    for _ in range(20_000):
        if sort == "garbage":
            liar.dealer.send(b"\xc1")
        else:
            liar.say({"duplicates": block(0), "greetings": Hello("d", 0, 0, 0, 0, 0), "durable": Durable(0)}[sort])
    for t in range(20):
        two.begin(t)
        await two.send([0], block(t), t)
        zero.begin(t)
        assert torch.equal((await zero.take("Block", [2], t))[2].body.x, block(t).x)
    await eventually(lambda: read > 300)
    assert read <= 300 + 200 * (time.monotonic() - began)


async def test_a_long_header_counts_more(sockets: Any, liars: Any, eventually: Any) -> None:
    zero = await up(sockets, PAIR, 0)
    liar = liars(zero)
    began = time.monotonic()
    for _ in range(50):
        liar.dealer.send(b"\x91" * (1 << 19))
    await eventually(lambda: zero.refused.get(1, 0) >= 4)
    assert zero.refused[1] <= 4 + 2 * (time.monotonic() - began)


# ---- answers of who listens


@pytest.mark.parametrize("answer", [[b"garbage"], [b"x" * (ANSWER + 1)], [b""] * 1000])
async def test_whatever_a_neighbor_answers_the_others_are_heard(
    sockets: Any, answer: list[bytes], eventually: Any
) -> None:
    """It answers HELLO with ten thousand frames."""
    context = zmq.Context()
    router = context.socket(zmq.ROUTER)
    router.set(zmq.SNDHWM, 0)
    router.bind("tcp://127.0.0.1:*")
    try:
        (sockets.addresses / "01").write_text(router.get_string(zmq.LAST_ENDPOINT))
        zero, two = await up(sockets, FORK, 0), await up(sockets, FORK, 2)
        identity, *_ = await asyncio.to_thread(router.recv_multipart)
        for _ in range(10_000 // len(answer)):
            router.send_multipart([identity, *answer])
        two.begin(0)
        await two.send([0], block(0), 0)
        zero.begin(0)
        assert torch.equal((await zero.take("Block", [2], 0))[2].body.x, block(0).x)
        assert zero.failure is None
    finally:
        context.destroy(linger=0)


async def test_a_refusal_is_one_line_of_the_log(sockets: Any, caplog: Any, eventually: Any) -> None:
    context = zmq.Context()
    router = context.socket(zmq.ROUTER)
    router.bind("tcp://127.0.0.1:*")
    try:
        (sockets.addresses / "01").write_text(router.get_string(zmq.LAST_ENDPOINT))
        zero = await up(sockets, PAIR, 0)
        identity, *_ = await asyncio.to_thread(router.recv_multipart)
        reason = "no\n2026-11-21T10:00:00.000 INFO    finished" + "!" * 10_000
        router.send_multipart([identity, *wire.encode(Refused(reason)).to(RUN_ID, 0, 1, 0)])
        with pytest.raises(HandshakeError, match=r"refuses peer 0: no\?2026-11-21T10:00:00\.000 INFO    finished!+$"):
            await zero.begin(0).gather(Block)
        assert max(len(record.getMessage()) for record in caplog.records) < 500
    finally:
        context.destroy(linger=0)


# ---- what fuzzing has found


@pytest.mark.parametrize(
    "greeting", [b"\x04\x001>0", b"\xff" + bytes(8) + b"\x01\x7f\x01\x05\x00\x031>0"], ids=["ZMTP 1", "ZMTP 2"]
)
async def test_a_stranger_with_an_old_zmtp_is_refused_and_the_peer_lives_on(
    sockets: Any, caplog: Any, eventually: Any, greeting: bytes
) -> None:
    """libzmq speaks versions 1 and 2 too, and knows less of such connections: that used to end the I/O thread. And
    their first message ended the process, in an assertion of libzmq, if it came while the socket was being closed."""
    zero = await up(sockets, PAIR, 0)
    host, port = zero.link.address.removeprefix("tcp://").split(":")
    with socket.create_connection((host, int(port))) as old:
        old.sendall(greeting + b"\x02\x00x")
        await eventually(lambda: "refused a connection: it " in caplog.text)
        old.settimeout(100)
        with suppress(ConnectionResetError):
            while await asyncio.to_thread(old.recv, 1 << 10):  # its greeting, and then nothing more
                pass
    one = await up(sockets, PAIR, 1)
    one.begin(0)
    await one.send([0], block(0), 0)
    zero.begin(0)
    assert torch.equal((await zero.take("Block", [1], 0))[1].body.x, block(0).x)
