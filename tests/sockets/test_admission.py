"""Limits on connections, handshakes, and incomplete messages."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import errno
import multiprocessing
import os
import socket
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from peers import admission, zmq_sockets
from tests.bodies import Word, round_of
from tests.sockets.raw_peer import exchange, port_of, up


def greeting(mechanism: bytes = b"NULL") -> bytes:
    """The first 64 bytes of ZMTP 3.1."""
    return b"\xff" + bytes(7) + b"\x01\x7f\x03\x01" + mechanism.ljust(20, b"\0") + bytes(32)


def ready(identity: bytes) -> bytes:
    """A complete handshake without keys."""
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


async def connect(address: str, connections: list[socket.socket], timeout: float = 100.0) -> socket.socket:
    connection = await asyncio.to_thread(socket.create_connection, port_of(address), timeout)
    connections.append(connection)
    return connection


async def still_works(endpoints: list[Any], t: int = 0) -> None:
    assert await exchange(endpoints, t) == [{1: "1"}, {0: "0"}]


@pytest.mark.parametrize("with_keys", [False, True])
async def test_ignores_connections_beyond_the_limit_until_some_end(
    sockets: Any, encrypted: Any, with_keys: bool, connections: list[socket.socket], monkeypatch: Any, caplog: Any,
    eventually: Any,
) -> None:  # fmt: skip
    mesh = encrypted if with_keys else sockets
    monkeypatch.setattr(zmq_sockets, "EXTRA_CONNECTIONS", 6)
    monkeypatch.setattr(zmq_sockets, "HANDSHAKE_TIMEOUT", 1000.0)  # no connection ends before all are open
    zero, one = await up(mesh, 0), await up(mesh, 1)
    await still_works([zero, one], 0)
    most = 6 + 4 * len(zero.neighbors)
    for _ in range(most - 1):  # besides the neighbor
        await connect(zero.link.address, connections)
    await eventually(lambda: f"connection limit reached connections={most}: dropping new ones" in caplog.text)
    with pytest.raises(TimeoutError):
        await connect(zero.link.address, connections, timeout=0.5)
    await still_works([zero, one], 1)  # over the connections that exist
    waiting = asyncio.create_task(connect(zero.link.address, connections))
    await asyncio.sleep(0)
    connections.pop().close()
    await waiting


@pytest.mark.parametrize("opening", [b"", b"\xff", greeting(b"CURVE")])
async def test_cuts_off_unfinished_handshakes(
    encrypted: Any, connections: list[socket.socket], monkeypatch: Any, caplog: Any, eventually: Any, opening: bytes
) -> None:
    monkeypatch.setattr(zmq_sockets, "HANDSHAKE_TIMEOUT", 0.5)
    zero = await up(encrypted, 0)
    connection = await connect(zero.link.address, connections)
    connection.sendall(opening)
    assert await asyncio.to_thread(read_to_the_end, connection) < 1000
    await eventually(lambda: "connection refused: handshake failed or timed out" in caplog.text)
    await still_works([zero, await up(encrypted, 1)], 0)


async def test_an_error_between_the_turns_of_the_io_loop_fails_the_peer(
    sockets: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def check(guard: admission.ConnectionGuard, log: Any, *, events: bool) -> None:
        raise OSError(107, "Transport endpoint is not connected")

    zero, one = await up(sockets, 0), await up(sockets, 1)
    await still_works([zero, one], 0)
    monkeypatch.setattr(admission.ConnectionGuard, "check", check)
    with pytest.raises(OSError, match="Transport endpoint is not connected"):
        await round_of(zero, 1).exchange(Word("x"))
    await asyncio.to_thread(zero.link.world.thread.join)


async def test_duplicates_of_other_files_are_closed(sockets: Any, tmp_path: Path) -> None:
    """The number of a connection that libzmq has closed may belong to another file by now."""
    guard = (await up(sockets, 0)).link.io.router.guard
    with (tmp_path / "slot").open("w") as file:
        with guard._duplicate(file.fileno()) as connection:
            assert connection is None
        assert [each.path for each in psutil.Process().open_files()].count(file.name) == 1


def read_to_the_end(connection: socket.socket) -> int:
    received = 0
    with contextlib.suppress(ConnectionResetError):
        while chunk := connection.recv(1 << 16):
            received += len(chunk)
    return received


def resident() -> int:
    """Return the bytes that this process has in memory, after malloc returned what is free."""
    ctypes.CDLL(None).malloc_trim(0)
    return int(psutil.Process().memory_info().rss)


async def test_cuts_off_oversized_incomplete_messages_and_frees_their_memory(
    sockets: Any, connections: list[socket.socket], monkeypatch: Any, caplog: Any, eventually: Any
) -> None:
    monkeypatch.setattr(zmq_sockets, "MAX_FRAME", 1 << 17)
    monkeypatch.setattr(zmq_sockets, "UNREAD_ALLOWANCE", 1 << 23)
    monkeypatch.setattr(admission, "COUNT_INTERVAL", 0.1)
    zero = await up(sockets, 0)
    connection = await connect(zero.link.address, connections)
    connection.sendall(greeting() + ready(b"7>0"))
    frame = b"\x03" + struct.pack(">Q", 1 << 16) + bytes(1 << 16)  # a long frame, and more to come
    other = await up(sockets, 1)
    await still_works([zero, other], 0)
    before = resident()

    def pour() -> None:
        for _ in range(1 << 12):  # 256 MB
            connection.sendall(frame)
        while connection.recv(1 << 16):  # its greeting, until it closes
            pass
        raise ConnectionError

    with pytest.raises(ConnectionError):
        await asyncio.to_thread(pour)
    await eventually(lambda: "incomplete message exceeds" in caplog.text)
    await eventually(lambda: resident() < before + (1 << 26))
    await still_works([zero, other], 1)
    assert zero.dropped == {}


async def test_survives_a_client_that_closes_while_it_is_cut_off(
    sockets: Any, connections: list[socket.socket], monkeypatch: Any, eventually: Any
) -> None:
    shut: list[int] = []
    shutdown = socket.socket.shutdown

    def too_late(connection: socket.socket, how: int) -> None:
        shutdown(connection, how)
        shut.append(how)
        raise OSError(errno.ENOTCONN, os.strerror(errno.ENOTCONN))

    monkeypatch.setattr(zmq_sockets, "MAX_FRAME", 1 << 14)
    monkeypatch.setattr(zmq_sockets, "UNREAD_ALLOWANCE", 1 << 16)
    monkeypatch.setattr(admission, "COUNT_INTERVAL", 0.1)
    monkeypatch.setattr(socket.socket, "shutdown", too_late)
    zero = await up(sockets, 0)
    connection = await connect(zero.link.address, connections)
    connection.sendall(greeting() + ready(b"7>0"))
    frame = b"\x03" + struct.pack(">Q", 1 << 12) + bytes(1 << 12)  # a long frame, and more to come

    def pour() -> None:
        received = b""
        while b"READY" not in received:  # a message before the end of the handshake is an error
            received += connection.recv(1 << 10)
        with contextlib.suppress(OSError):  # it is cut off
            while not shut:
                connection.sendall(frame)

    await asyncio.to_thread(pour)
    await eventually(lambda: bool(shut))
    await still_works([zero, await up(sockets, 1)], 0)


async def test_closes_connections_with_oversized_frames(
    sockets: Any, connections: list[socket.socket], eventually: Any
) -> None:
    zero = await up(sockets, 0)
    connection = await connect(zero.link.address, connections)
    connection.sendall(greeting() + ready(b"1>0") + b"\x02" + struct.pack(">Q", zmq_sockets.MAX_FRAME + 1))
    assert await asyncio.to_thread(read_to_the_end, connection) < 1000
    await still_works([zero, await up(sockets, 1)], 0)


async def test_many_messages_do_not_count_as_an_oversized_one(sockets: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(zmq_sockets, "MAX_FRAME", 1 << 17)
    monkeypatch.setattr(zmq_sockets, "UNREAD_ALLOWANCE", 1 << 21)
    monkeypatch.setattr(admission, "COUNT_INTERVAL", 0.0)
    zero, one = await up(sockets, 0), await up(sockets, 1)
    text = "x" * 100_000
    for t in range(200):
        await round_of(one, t).broadcast(Word(text))
        assert await round_of(zero, t).gather(Word) == {1: Word(text)}
    (connection,) = zero.link.world._router.guard.connections.values()
    assert connection.bytes_read > 200 * 100_000


def flood(address: tuple[str, int]) -> None:
    """Connect and disconnect until no more connections are accepted."""
    for _ in range(1 << 14):
        socket.create_connection(address, timeout=0.2).close()


def test_closes_while_clients_connect_and_nobody_reads_the_events() -> None:
    def close() -> None:
        context = zmq_sockets.SocketContext(0, (1,), None, None, time.monotonic)  # type: ignore[arg-type]
        router = zmq_sockets.ZmqRouter(context, "127.0.0.1", "tcp://127.0.0.1:*")
        with pytest.raises(TimeoutError):  # libzmq waits until there is room for its events
            flood(port_of(router.bound))
        router.close()
        context.destroy()

    process = multiprocessing.get_context("fork").Process(target=close)  # libzmq would block every thread
    process.start()
    process.join(60)
    process.kill()
    assert process.exitcode == 0
