"""How much strangers and neighbours can take: connections, time for a handshake, messages that do not end."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import socket
import struct
from collections.abc import Iterator
from typing import Any

import psutil
import pytest

from p2pfl.wire import Layout
from peers import sockets as world
from tests.bodies import PAIR, Word

LAYOUTS = [Layout.of(Word(""))]


def greeting(mechanism: bytes = b"NULL") -> bytes:
    """The first 64 bytes of ZMTP 3.1."""
    return b"\xff" + bytes(7) + b"\x01\x7f\x03\x01" + mechanism.ljust(20, b"\0") + bytes(32)


def ready(identity: bytes) -> bytes:
    """The whole of a handshake without keys."""
    metadata = b""
    for name, value in ((b"Socket-Type", b"DEALER"), (b"Identity", identity)):
        metadata += bytes([len(name)]) + name + struct.pack(">I", len(value)) + value
    command = b"\x05READY" + metadata
    return bytes([4, len(command)]) + command


@pytest.fixture
def connections() -> Iterator[list[socket.socket]]:
    made: list[socket.socket] = []
    yield made
    for connection in made:
        connection.close()


async def connect(address: str, connections: list[socket.socket], patience: float = 100.0) -> socket.socket:
    host, port = address.removeprefix("tcp://").split(":")
    connection = await asyncio.to_thread(socket.create_connection, (host, int(port)), patience)
    connections.append(connection)
    return connection


async def up(mesh: Any, peer: int, **options: Any) -> Any:
    endpoint = mesh.endpoint(peer, PAIR, LAYOUTS)
    await mesh.link(endpoint, **options).start()
    return endpoint


async def exchange(endpoints: list[Any], t: int) -> None:
    heard = await asyncio.gather(*(endpoint.begin(t).exchange(Word(f"{endpoint.me}")) for endpoint in endpoints))
    assert heard == [{1: Word("1")}, {0: Word("0")}]


@pytest.mark.parametrize("keyed", [False, True])
async def test_further_connections_are_ignored_until_some_have_gone(
    sockets: Any, encrypted: Any, keyed: bool, connections: list[socket.socket], monkeypatch: Any, caplog: Any,
    eventually: Any,
) -> None:  # fmt: skip
    mesh = encrypted if keyed else sockets
    monkeypatch.setattr(world, "STRANGERS", 6)
    monkeypatch.setattr(world, "HANDSHAKE", 1000.0)  # nobody goes before they are all here
    zero, one = await up(mesh, 0), await up(mesh, 1)
    await exchange([zero, one], 0)
    most = 6 + 4 * len(zero.neighbors)
    for _ in range(most - 1):  # and the neighbour
        await connect(zero.link.address, connections)
    await eventually(lambda: f"{most} connections: further ones are ignored until some have gone" in caplog.text)
    with pytest.raises(TimeoutError):
        await connect(zero.link.address, connections, patience=0.5)
    await exchange([zero, one], 1)  # over the connections that there are
    waiting = asyncio.create_task(connect(zero.link.address, connections))
    await asyncio.sleep(0)
    connections.pop().close()
    await waiting


@pytest.mark.parametrize("opening", [b"", b"\xff", greeting(b"CURVE")])
async def test_a_connection_that_does_not_say_who_it_is_is_cut_off(
    encrypted: Any, connections: list[socket.socket], monkeypatch: Any, caplog: Any, eventually: Any, opening: bytes
) -> None:
    monkeypatch.setattr(world, "HANDSHAKE", 0.5)
    zero = await up(encrypted, 0)
    connection = await connect(zero.link.address, connections)
    connection.sendall(opening)
    assert await asyncio.to_thread(read_to_the_end, connection) < 1000
    await eventually(lambda: "refused a connection: it left, or was cut off, in its handshake" in caplog.text)
    await exchange([zero, await up(encrypted, 1)], 0)


def read_to_the_end(connection: socket.socket) -> int:
    received = 0
    with contextlib.suppress(ConnectionResetError):
        while chunk := connection.recv(1 << 16):
            received += len(chunk)
    return received


def resident() -> int:
    """Bytes of this process in memory, without those that are free: malloc keeps them if others lie above them."""
    ctypes.CDLL(None).malloc_trim(0)
    return int(psutil.Process().memory_info().rss)


async def test_a_message_that_does_not_end_is_cut_off_and_its_memory_freed(
    sockets: Any, connections: list[socket.socket], monkeypatch: Any, caplog: Any, eventually: Any
) -> None:
    monkeypatch.setattr(world, "SLACK", 1 << 23)
    monkeypatch.setattr("peers.door.LOOK", 0.1)
    zero = await up(sockets, 0, queue=1)
    connection = await connect(zero.link.address, connections)
    connection.sendall(greeting() + ready(b"7>0"))
    frame = b"\x03" + struct.pack(">Q", 1 << 16) + bytes(1 << 16)  # long, and more to come
    other = await up(sockets, 1, queue=1)
    await exchange([zero, other], 0)
    before = resident()

    def pour() -> None:
        for _ in range(1 << 12):  # 256 MB
            connection.sendall(frame)
        while connection.recv(1 << 16):  # its greeting, and until it hangs up
            pass
        raise ConnectionError

    with pytest.raises(ConnectionError):
        await asyncio.to_thread(pour)
    await eventually(lambda: "bytes in messages that do not end" in caplog.text)
    await eventually(lambda: resident() < before + (1 << 26))
    await exchange([zero, other], 1)
    assert zero.refused == {}


async def test_a_frame_beyond_the_limit_ends_its_connection(
    sockets: Any, connections: list[socket.socket], eventually: Any
) -> None:
    zero = await up(sockets, 0, max_message=1 << 20)
    connection = await connect(zero.link.address, connections)
    connection.sendall(greeting() + ready(b"1>0") + b"\x02" + struct.pack(">Q", (1 << 20) + 1))
    assert await asyncio.to_thread(read_to_the_end, connection) < 1000
    await exchange([zero, await up(sockets, 1)], 0)


async def test_many_messages_do_not_look_like_one_that_does_not_end(sockets: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(world, "SLACK", 1 << 21)
    monkeypatch.setattr("peers.door.LOOK", 0.0)
    zero, one = await up(sockets, 0, queue=2), await up(sockets, 1, queue=2)
    text = "x" * 100_000
    for t in range(200):
        one.begin(t)
        await one.send([0], Word(text), t)
        zero.begin(t)
        assert (await zero.take("Word", [1], t))[1].body == Word(text)
    (connection,) = zero.link.world._router.bouncer.connections.values()
    assert connection.taken > 200 * 100_000
