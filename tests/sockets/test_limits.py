"""Limits on what a neighbor can make a peer keep, read or do: large bodies, neighbors far ahead, and hostile ones."""

from __future__ import annotations

import asyncio
import socket
import time
from contextlib import suppress
from typing import Any

import msgpack
import pytest
import torch

from p2pfl.messaging import edge, wire
from p2pfl.messaging.control import BEFORE, Entry, Hello, Id, Nothing, Start, Want
from p2pfl.messaging.directions import MAX_STATEMENTS, Begin
from p2pfl.messaging.schema import Layout
from p2pfl.messaging.topology import Topology
from p2pfl.session.body_files import FileStore, NeighborJournals
from peers import receiver, zmq_sockets
from peers.zmq_sockets import MAX_ANSWER
from tests.bodies import PAIR, Block, Word, round_of, star
from tests.mesh_fixtures import change_transport
from tests.sockets.raw_peer import HELLO, by_value, port_of, up, want

LAYOUTS = [Layout.of(Block(torch.zeros(250)))]
FORK = Topology.from_edges(3, [(0, 1), (0, 2)])
BUDGET = 50_000
LARGE = 1 << 50


async def limited(mesh: Any, peer: int, topology: Topology = FORK, *, prunes: bool = False, **options: Any) -> Any:
    """Start a peer whose neighbors may have BUDGET bytes on their way to it."""
    endpoint = mesh.endpoint(peer, topology, LAYOUTS, prunes=prunes)
    vars(mesh.link(endpoint, **options).context)["budget"] = BUDGET
    await endpoint.link.start()
    return endpoint


def block(t: int) -> Block:
    return Block(torch.full((250,), float(t)))


async def still_works(mesh: Any, zero: Any) -> None:
    """Peer 2 is not affected: five rounds, none of which is skipped."""
    two = await up(mesh, 2, zero.neighborhood.topology, LAYOUTS, prunes=zero.prunes)
    for t in range(5):
        assert zero.next_round(t) == t
        net, other = round_of(zero, t), round_of(two, t)
        await other.broadcast(block(t))
        await net.broadcast(block(t))
        assert torch.equal((await net.gather(Block, of=[2]))[2].x, block(t).x)
        assert torch.equal((await other.gather(Block))[0].x, block(t).x)
    assert zero.mailbox.failure is None


# ---- large bodies


@pytest.mark.parametrize(
    ("kind", "faults"),
    [
        *(("mapped", {fault: 0.3}) for fault in ("delay", "loss")),
        *(("tcp", faults) for faults in ({"delay": 0.0}, {"delay": 0.3}, {"bandwidth": 3e8}, {"loss": 0.3})),
        ("encrypted", {"loss": 0.3}),
    ],
    ids=str,
)
async def test_large_bodies_arrive_with_any_fault(sockets: Any, encrypted: Any, kind: str, faults: Any) -> None:
    mesh = encrypted if kind == "encrypted" else sockets
    large = Block(torch.linspace(0.0, 1.0, 11_500_000))  # 46 MB
    began = asyncio.get_running_loop().time()
    endpoints = await mesh.open(PAIR, [Layout.of(large)], faults=faults, same_host=kind == "mapped")
    for t in range(2):
        nets = [round_of(endpoint, t) for endpoint in endpoints]
        for received in await asyncio.gather(*(net.exchange(large) for net in nets)):
            (body,) = received.values()
            assert torch.equal(body.x, large.x)
            body.x.zero_()  # the receiver's own
    seconds = asyncio.get_running_loop().time() - began
    assert seconds >= 2 * faults.get("delay", 0.0) + (2 * large.x.nbytes) / faults.get("bandwidth", 1e18)


# ---- neighbors that are too far ahead


@pytest.mark.parametrize("kind", ["mapped", "tcp", "encrypted"])
async def test_fast_neighbor_waits_without_loss(sockets: Any, encrypted: Any, kind: str, eventually: Any) -> None:
    mesh = encrypted if kind == "encrypted" else sockets
    options: Any = {"same_host": kind == "mapped", "queue": 4}
    zero, one = [await limited(mesh, peer, PAIR, **options) for peer in range(2)]
    rounds = 100

    async def run_ahead() -> None:
        for t in range(rounds):
            await round_of(one, t).broadcast(block(t))

    ahead = asyncio.create_task(run_ahead())
    await eventually(lambda: one.link.behind([0]))
    assert not ahead.done()
    await eventually(lambda: zero.link.io.connections[1].pending() > BUDGET // 2)
    most = 0
    for t in range(rounds):
        net = round_of(zero, t)
        most = max(most, zero.link.io.connections[1].pending())
        assert torch.equal((await net.gather(Block))[1].x, block(t).x)
    await ahead
    assert BUDGET // 2 < most <= BUDGET
    assert zero.missing == {}
    assert zero.dropped == {}


async def test_send_waits_for_a_neighbor_far_behind_until_the_deadline(alone: Any, caplog: Any) -> None:
    alone.link.transport = alone.link.transport.model_copy(update={"deadline": 0.5})
    change_transport(alone.link, queue=4, deadline=1000.0)
    net = round_of(alone, 0)
    began = time.monotonic()
    for _ in range(3):
        await net.broadcast(Word("…"))
    assert "do not keep up" not in caplog.text
    await net.broadcast(Word("one too many"))
    assert time.monotonic() - began > 0.45
    assert "neighbors do not keep up peers=1" in caplog.text


async def test_memory_is_bounded_if_a_neighbor_ignores_the_window(sockets: Any, raw: Any, eventually: Any) -> None:
    """R7."""
    zero, other = await limited(sockets, 0), raw(1)
    await other.write(zero.link)
    for t in range(2_000):
        other.put(block(t), t + 10)
    other.send(Nothing(other.epoch, 7))
    await eventually(lambda: zero.mailbox._nothing.get(1) == 7, "all was read")
    assert BUDGET // 3 < zero.link.io.connections[1].pending() <= BUDGET
    assert zero.dropped[1] > 1_900
    await still_works(sockets, zero)


async def test_memory_is_bounded_if_a_neighbor_begins_rounds_without_end(
    sockets: Any, raw: Any, eventually: Any
) -> None:
    zero, other = await limited(sockets, 0, prunes=True), raw(1)
    await other.write(zero.link)
    for t in range(1, 2_000):
        other.put(Begin((0,)), t)
    other.send(Nothing(other.epoch, 7))
    await eventually(lambda: zero.mailbox._nothing.get(1) == 7, "all was read")
    assert 1 < len(zero._directions._stated[1]) <= MAX_STATEMENTS
    assert zero.link.io.connections[1].pending() == 0  # they take no window once they are noted
    await still_works(sockets, zero)


# ---- hostile numbers

ENTRIES: list[tuple[Any, ...]] = [  # (id, previous, size, offset, segment, at)
    (Id(LARGE, LARGE), BEFORE, 1000),
    (Id(0, 1), Id(LARGE, 0), 1000),
    (Id(0, 1), BEFORE, LARGE),
    (Id(0, 1), BEFORE, 0),
    (Id(0, 1), BEFORE, 0, 0, 1, 0),
    (Id(0, 1), BEFORE, 1000, 999),
    (Id(0, 1), BEFORE, 1000, LARGE),
    (BEFORE, BEFORE, 1000),
    (Id(0, 1), BEFORE, 1000, 0, LARGE),
    (Id(0, 1), BEFORE, 1000, 0, 1, LARGE),
    (Id(0, 1), BEFORE, 1000, 0, 1, 64),
    (Id(0, 1), BEFORE, 1000, 0, 1, 3),
    (Id(0, 1), BEFORE, 1000, 5, 1),
    (Id(1 << 40, 0), BEFORE, 1000),
]
WANTS = [
    want(7, Id(LARGE, 5)),
    want(7, BEFORE),
    want(7, durable=LARGE),
    want(7, window=(1 << 53) - 1, references=True),
    want(7, window=0, idle=False),
    want(7, Id(1 << 40, 1), durable=1 << 40),
]


@pytest.mark.parametrize("same_host", [True, False])
@pytest.mark.parametrize("numbers", ENTRIES, ids=str)
async def test_withstands_hostile_entries(sockets: Any, raw: Any, numbers: Any, same_host: bool) -> None:
    store = FileStore(sockets.journal(1))  # what the hostile neighbor has written: one short body
    store.write(wire.encode(Block(torch.zeros(16))))
    hello = Hello("d", *NeighborJournals(store.token, sockets.journal).own)
    zero, other = await limited(sockets, 0, same_host=same_host), raw(1)
    await other.write(zero.link, hello=hello)
    _, (header, body) = by_value(block(0), 0, Id(0, 1))
    bare, number = wire.encode(Begin(())).header, 0
    for _ in range(3):
        for frames in ((header, body), (header,), (), (header, body + body), (bare,), (bare, b"")):
            number += 1
            id = numbers[0]._replace(number=number) if numbers[0].t == 0 else numbers[0]
            other.send(Entry(other.epoch, id, *numbers[1:]), *frames)
        await other.begin_epoch(hello=hello)
    await still_works(sockets, zero)


@pytest.mark.parametrize("wanted", WANTS, ids=str)
async def test_withstands_hostile_wants(sockets: Any, raw: Any, wanted: Want) -> None:
    zero, other = await limited(sockets, 0), raw(1)
    round_of(zero, 0)
    other.connect(zero.link)
    for _ in range(3):
        other.send(wanted)
        other.send(want(8))
    await still_works(sockets, zero)


async def test_skips_no_rounds_because_of_one_neighbor(sockets: Any, raw: Any, eventually: Any) -> None:
    zero, other = await limited(sockets, 0, star(4)), raw(1)
    await other.write(zero.link, begins=LARGE, nothing=8)
    await eventually(lambda: (zero.mailbox.sender_round(1), zero.mailbox._nothing.get(1)) == (LARGE, 7))
    await still_works(sockets, zero)


async def test_opens_no_journal_unasked(sockets: Any, raw: Any, eventually: Any) -> None:
    store = FileStore(sockets.journal(1))
    encoded = wire.encode(block(7))
    place = store.write(encoded)
    zero, other = await limited(sockets, 0), raw(1)
    await other.write(zero.link)  # without the token
    other.send(Entry(other.epoch, Id(0, 1), BEFORE, encoded.size, 0, place.segment, place.at), encoded.header)
    await eventually(lambda: zero.dropped == {1: 1})
    await still_works(sockets, zero)


async def test_chunks_out_of_order_begin_a_new_epoch(sockets: Any, raw: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(edge, "CHUNK", 400)
    zero, other = await limited(sockets, 0, PAIR), raw(1)
    await other.write(zero.link)
    encoded = wire.encode(block(7))
    body = b"".join(encoded.parts())

    def chunk(offset: int, end: int) -> None:
        header = () if offset else (encoded.header,)
        other.send(Entry(other.epoch, Id(0, 1), BEFORE, len(body), offset), *header, body[offset:end])

    chunk(0, 400)
    chunk(800, 1000)
    epoch = other.epoch
    while (asked := await other.expect(Want)).epoch == epoch:
        pass
    other.epoch = asked.epoch
    other.send(Start(other.epoch, 0, 0))
    for offset in (0, 400, 800):
        chunk(offset, min(offset + 400, 1000))
    assert torch.equal((await round_of(zero, 0).gather(Block))[1].x, block(7).x)


# ---- useless messages


@pytest.mark.parametrize("kind", ["garbage", "duplicates", "bytes", "hellos", "wants", "epochs"])
async def test_reads_useless_messages_slowly_and_others_in_between(
    sockets: Any, raw: Any, kind: str, monkeypatch: Any, eventually: Any
) -> None:
    monkeypatch.setattr(receiver, "USELESS_RATE", 200.0)
    zero, other = await limited(sockets, 0), raw(1)
    read = 0
    receive = zero.link.io.receiver.receive

    def count(identity: bytes, *others: Any) -> None:
        nonlocal read
        read += identity == b"1>0"
        receive(identity, *others)

    zero.link.io.receiver.receive = count
    await other.write(zero.link)
    other.put(block(0), 0, 1)
    began = time.monotonic()
    for number in range(3_000):
        if kind == "garbage":
            other.dealer.send(b"\xc1")
        elif kind == "duplicates":
            other.put(block(0), 0, 1)
        elif kind == "bytes":  # of a body, one in a message
            chunk = [b"x"] if number else [wire.encode(block(0)).header, b"x"]
            other.send(Entry(other.epoch, Id(0, 2), BEFORE, 1000, number), *chunk)
        else:
            other.send({"hellos": HELLO, "wants": want(1), "epochs": want(number)}[kind])
    await still_works(sockets, zero)
    await eventually(lambda: read > 300)
    assert read <= 310 + 200 * (time.monotonic() - began)


@pytest.mark.parametrize("kind", ["of rounds that are over", "begins", "begins of a round"])
async def test_reads_slowly_what_takes_no_window(
    sockets: Any, raw: Any, kind: str, monkeypatch: Any, eventually: Any
) -> None:
    monkeypatch.setattr(receiver, "USELESS_RATE", 50.0)
    zero, other = await up(sockets, 0, PAIR, LAYOUTS), raw(1)
    round_of(zero, 5)
    await other.write(zero.link)
    for number in range(500):
        if kind == "begins":
            other.put(Begin(()), 5 + number)
        elif kind == "begins of a round":
            other.put(Begin(()), 6, number)
        else:
            other.put(block(0), 0, number)
    await eventually(lambda: zero.link.io.receiver.paused)
    assert zero.dropped == {}


async def test_begins_of_the_next_rounds_are_of_use(
    sockets: Any, raw: Any, monkeypatch: Any, eventually: Any
) -> None:
    zero, other = await up(sockets, 0, PAIR, LAYOUTS), raw(1)
    await other.write(zero.link)
    useless: list[Any] = []
    monkeypatch.setattr(zero.link.io.receiver, "_count_useless", lambda *message: useless.append(message))
    for t in range(50):
        round_of(zero, t)
        other.put(Begin(()), t + 1)
        await eventually(lambda t=t: zero.link.io.connections[1].reader.next == Id(t + 1, 1))
    assert len(useless) < 50, "all else is of the connection"


async def test_long_envelopes_are_read_more_slowly(sockets: Any, raw: Any, eventually: Any) -> None:
    zero, other = await limited(sockets, 0, PAIR), raw(1)
    other.connect(zero.link)
    began = time.monotonic()
    for _ in range(50):
        other.dealer.send(b"\x91" * (1 << 19))
    refused = zero.dropped
    await eventually(lambda: refused.get(1, 0) >= 4)
    assert refused[1] <= 4 + 2 * (time.monotonic() - began)


async def test_invalid_entries_with_long_headers_are_read_more_slowly(
    sockets: Any, raw: Any, monkeypatch: Any, eventually: Any
) -> None:
    monkeypatch.setattr(receiver, "USELESS_RATE", 50.0)
    zero, other = await up(sockets, 0, PAIR, LAYOUTS), raw(1)
    await other.write(zero.link)
    header = msgpack.packb(["Begin", 1, {"sources": [0] * 4096}, []])
    began = time.monotonic()
    for number in range(1, 101):
        other.send(Entry(other.epoch, Id(0, number), BEFORE if number == 1 else Id(0, number - 1), 0), header)
    refused = zero.dropped
    await eventually(lambda: zero.link.io.receiver.paused)
    assert refused[1] <= 12 + 10 * (time.monotonic() - began)


@pytest.mark.parametrize("answer", [[b"garbage"], [b"x" * (MAX_ANSWER + 1)], [b""] * 1000])
async def test_receives_from_others_whatever_a_neighbor_answers(sockets: Any, raw: Any, answer: list[bytes]) -> None:
    """The neighbor answers Hello with ten thousand frames."""
    zero, other = await limited(sockets, 0), raw(1)
    identity, *_ = await other.receive()
    for _ in range(10_000 // len(answer)):
        other.router.send_multipart([identity, *answer])
    await still_works(sockets, zero)


@pytest.mark.parametrize(
    "greeting", [b"\x04\x001>0", b"\xff" + bytes(8) + b"\x01\x7f\x01\x05\x00\x031>0"], ids=["ZMTP 1", "ZMTP 2"]
)
async def test_refuses_old_zmtp_versions(
    sockets: Any, caplog: Any, eventually: Any, greeting: bytes, monkeypatch: Any
) -> None:
    """libzmq accepts ZMTP 1 and 2 too, without user ids, which used to end the I/O thread. And their first message
    ended the process, in an assertion of libzmq, if it came while the socket was being closed."""
    monkeypatch.setattr(zmq_sockets, "HANDSHAKE_TIMEOUT", 0.5)
    zero = await limited(sockets, 0)
    with socket.create_connection(port_of(zero.link.address)) as old:
        old.sendall(greeting + b"\x02\x00x")
        await eventually(lambda: "connection refused: " in caplog.text)
        old.settimeout(100)
        with suppress(ConnectionResetError):
            while await asyncio.to_thread(old.recv, 1 << 10):  # its greeting, and nothing more
                pass
    await still_works(sockets, zero)
