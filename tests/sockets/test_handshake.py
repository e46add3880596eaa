"""ZmqLink: handshakes, and messages that are refused."""

from __future__ import annotations

import asyncio
import os
import threading
from typing import Any

import msgpack
import pytest
import torch

from p2pfl.errors import HandshakeError, NetError
from p2pfl.messaging import control
from p2pfl.messaging.control import Entry, Hello, Id, Refused, Want
from peers import io_loop
from tests.bodies import PAIR, RUN_ID, Block, Word, line, round_of
from tests.sockets.raw_peer import BLOCK, HELLO, LAYOUTS, by_value, up

pytestmark = pytest.mark.usefixtures("no_needless_waits")


@pytest.mark.parametrize("together", [True, False])
async def test_refuses_a_different_run_file_on_both_sides(
    sockets: Any, together: bool, eventually: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(io_loop, "REFUSAL_PERIOD", 1000.0)  # until both have failed
    endpoints = [sockets.endpoint(me, PAIR, LAYOUTS, deadline=1000) for me in range(2)]
    links = [sockets.link(each, config_hash=f"{each.me}" * 64, deadline=1000) for each in endpoints]
    waits = []
    for link, endpoint in zip(links, endpoints, strict=True):
        await link.start()
        waits.append(asyncio.create_task(round_of(endpoint, 0).gather(Word)))
        if not together:
            await eventually(lambda: links[0].io.next_check > 0)
    first, second = await asyncio.gather(*waits, return_exceptions=True)
    closing = [asyncio.create_task(sockets.shut(link)) for link in links]
    await eventually(lambda: all(link.io.closing_since is not None for link in links))
    monkeypatch.setattr(io_loop, "REFUSAL_PERIOD", 0.0)
    await asyncio.gather(*closing)
    assert isinstance(first, HandshakeError)
    assert isinstance(second, HandshakeError)
    assert "refused peer 0: run file differs: its hash is 000000000000… at peer 0, 111111111111… at peer 1" in str(
        first
    )
    assert "peer 0 at tcp://127.0.0.1:" in str(second)


async def test_connects_at_once_to_a_neighbor_that_it_refuses(
    sockets: Any, raw: Any, eventually: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The neighbor must receive Refused before this peer exits."""
    monkeypatch.setattr(io_loop, "LONG", 0.0)
    monkeypatch.setattr(io_loop, "SLOW_TICK", 1000.0)
    await up(sockets, 0)
    (link,) = sockets.links
    await eventually(lambda: link.io.next_check > link.io.now() + 100)
    other = raw(1)
    other.connect(link)
    other.send(HELLO._replace(config_hash="another"))
    assert isinstance(await other.answer(), Refused)
    await other.expect(Hello)


async def test_refuses_another_run_and_another_protocol_version(alone: Any, raw: Any) -> None:
    other = raw(1)
    other.connect(alone.link)
    other.send(HELLO, run="another run")
    assert await other.answer() == Refused(f"message of run 'another run'; this peer is in run '{RUN_ID}'")
    other.dealer.send(b"p2\x03 whatever version 3 says")
    assert await other.answer() == Refused(
        f"protocol version 3; this peer uses {control.VERSION}; install the same version of p2pfl"
    )
    other.send(HELLO)
    await other.expect(Want)  # the refused messages had no effect


REASON = "no\n2026-11-21T10:00:00.000 INFO    finished" + "!" * 3000


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (control.pack(Refused(REASON), RUN_ID), r"no\?2026-11-21T10\S+ INFO    fin"),
        (b"p2\x07" + bytes(20), "protocol version 7; this peer uses"),
    ],
)
async def test_refusal_ends_waits_and_is_logged_in_one_line(
    alone: Any, raw: Any, caplog: Any, answer: bytes, why: str
) -> None:
    other = raw(1)
    waiting = asyncio.create_task(round_of(alone, 0).gather(Word))
    identity, message, _ = await other.receive()
    assert isinstance(message, Hello)
    assert identity == b"0>1"
    other.router.send_multipart([identity, answer])
    with pytest.raises(HandshakeError, match=rf"peer 1 at tcp://\S+ refused peer 0: {why}"):
        await waiting
    assert max(len(record.getMessage()) for record in caplog.records) < 500


@pytest.mark.parametrize("same_host", [False, True])
async def test_the_journals_token_is_sent_only_if_neighbors_may_read_it(
    sockets: Any, raw: Any, same_host: bool
) -> None:
    other = raw(1)
    endpoint = await up(sockets, 0, same_host=same_host)
    hello = await other.expect(Hello)
    assert (hello.boot, hello.token) == (endpoint.link.world.journals.own if same_host else ("", ""))


@pytest.mark.parametrize("settled", [False, True])
async def test_refusal_by_another_run_is_an_error_only_at_a_fixed_address(
    sockets: Any, raw: Any, settled: bool, caplog: Any, eventually: Any
) -> None:
    stranger = raw(1)
    endpoint = await up(sockets, 0, hosts={"1": stranger.address} if settled else {})
    waiting = asyncio.create_task(round_of(endpoint, 0).gather(Word))
    identity, *_ = await stranger.receive()
    stranger.router.send_multipart([identity, control.pack(Refused("this is another run"), "another run")])
    if settled:
        with pytest.raises(HandshakeError, match=r"peer 1 at tcp://\S+ refused peer 0: this is another run"):
            await waiting
        return
    await eventually(lambda: "another process has the address peer=1 address=" in caplog.text)
    stranger.close()
    neighbor = raw(1)  # it starts, and publishes its address
    await neighbor.read(endpoint.link)
    await eventually(lambda: endpoint.link.io.connections[1].up)
    assert endpoint.mailbox.failure is None
    waiting.cancel()


async def test_refusal_ends_a_blocked_send(sockets: Any, raw: Any) -> None:
    endpoint, other = await up(sockets, 0, queue=2), raw(1)
    net = round_of(endpoint, 0)

    async def send() -> None:
        for _ in range(4):
            await net.broadcast(Word("…"))

    sending = asyncio.create_task(send())
    await asyncio.sleep(0.05)
    assert not sending.done()
    identity, *_ = await other.receive()
    other.router.send_multipart([identity, control.pack(Refused("no"), RUN_ID)])
    await sending
    with pytest.raises(HandshakeError):
        await net.gather(Word)


@pytest.mark.parametrize("identity", ["2>0", "1>3", "x", "1", "01>0", "0>1"])
async def test_drops_messages_of_unknown_senders(
    sockets: Any, raw: Any, identity: str, caplog: Any, eventually: Any
) -> None:
    endpoint = await up(sockets, 0, line(3))
    stranger, neighbor = raw(2), raw(1)
    stranger.connect(endpoint.link, identity)
    stranger.send(HELLO)
    await eventually(lambda: f"message from unknown sender dropped identity={identity.encode()!r}" in caplog.text)
    await neighbor.write(endpoint.link)
    neighbor.put(Word("it is me"))
    assert await round_of(endpoint, 0).gather(Word) == {1: Word("it is me")}
    assert endpoint.dropped == {}


async def test_drops_and_counts_invalid_messages(alone: Any, raw: Any, caplog: Any, eventually: Any) -> None:
    other = raw(1)
    await other.write(alone.link)
    entry, good = by_value(Word("good"), other.epoch, Id(0, 99), Id(0, 50))  # which is dropped, and no gap
    envelope = control.pack(entry, RUN_ID)
    garbage: list[list[Any]] = [
        [b""],
        [b"\xc1garbage", b"more"],
        [os.urandom(100)],
        [control.pack(HELLO, RUN_ID) + b"x"],
        *([envelope[:length]] for length in (1, 19, 20, len(envelope) - 1)),
        [envelope + good[0], b"", b"a frame too many"],
        [envelope + good[0] + b"a chunk", b"and another"],
        [control.pack(Refused("not allowed here"), RUN_ID)],
        *([envelope[:at] + b"\xff" * 8 + envelope[at + 8 :] + good[0]] for at in range(20, len(envelope), 8)),
    ]
    for frames in garbage:
        other.dealer.send_multipart(frames)
    for number, body in enumerate([b"\xc1", b"", msgpack.packb(["Word", 1, {"text": 7}, []])]):  # passed over
        other.send(Entry(other.epoch, Id(0, number), Id(-1, 0), 0), body)
    wrong, frames = by_value(Block(torch.zeros(2)), other.epoch, Id(0, 50))
    other.send(wrong, *frames)
    other.send(entry, *good)
    assert await round_of(alone, 0).gather(Word) == {1: Word("good")}
    await eventually(lambda: alone.dropped == {1: len(garbage) + 4})
    assert alone.mailbox.failure is None


async def test_body_over_the_limit_raises_an_error_at_the_sender(sockets: Any) -> None:
    endpoints = await sockets.open(PAIR, LAYOUTS, max_message=1000)
    with pytest.raises(NetError, match=r"a body of 4000000 bytes cannot be sent: transport\.max_message is 1000"):
        await round_of(endpoints[0], 0).broadcast(BLOCK)
    assert all(path.stat().st_size < 1000 for path in sockets.journal(0).iterdir())


async def test_answers_while_the_event_loop_is_blocked(alone: Any, raw: Any) -> None:
    other = raw(1)
    other.connect(alone.link)
    other.send(HELLO)
    answers: list[Any] = []

    def wait_for_want() -> None:
        while not answers or not isinstance(control.unpack(answers[-1][1:], RUN_ID, control.TYPES)[0], Want):
            answers.append(other.router.recv_multipart())

    thread = threading.Thread(target=wait_for_want)
    thread.start()
    thread.join(100)  # meanwhile our event loop is blocked
    assert not thread.is_alive()
