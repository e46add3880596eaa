"""Which clients may connect: keys, identities, and the log lines about refused clients."""

from __future__ import annotations

import asyncio
import logging
import re
import socket
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import zmq

from p2pfl.errors import HandshakeError
from p2pfl.messaging import control
from p2pfl.messaging.topology import Topology
from p2pfl.run_folder.key_files import Keys
from peers import limited_log, zmq_sockets
from peers.keys import new_pair
from tests.bodies import RUN_ID, Word, round_of
from tests.sockets.raw_peer import HELLO, REFUSED, exchange, port_of, relay, up

LINE = Topology.from_edges(3, [(0, 1), (1, 2)])
"""0 and 2 are not neighbors."""
FORK = Topology.from_edges(3, [(0, 1), (0, 2)])


@dataclass
class Stranger:
    """Bare DEALERs that connect under any identity and key."""

    context: zmq.Context[zmq.Socket[bytes]] = field(default_factory=zmq.Context)
    sockets: list[zmq.Socket[bytes]] = field(default_factory=list)

    def connect(
        self, address: str, identity: str, pair: tuple[bytes, bytes] | None = None, server: bytes | None = None
    ) -> zmq.Socket[bytes]:
        dealer = self.context.socket(zmq.DEALER)
        dealer.set(zmq.IDENTITY, identity.encode())
        dealer.set(zmq.LINGER, 0)
        if pair is not None and server is not None:
            dealer.set(zmq.CURVE_PUBLICKEY, pair[0])
            dealer.set(zmq.CURVE_SECRETKEY, pair[1])
            dealer.set(zmq.CURVE_SERVERKEY, server)
        dealer.connect(address)
        self.sockets.append(dealer)
        return dealer


@pytest.fixture
def stranger() -> Iterator[Stranger]:
    made = Stranger()
    yield made
    made.context.destroy(linger=0)


def hello() -> list[bytes]:
    return [control.pack(HELLO, RUN_ID)]


async def still_works(mesh: Any, endpoint: Any, **options: Any) -> None:
    """Peer 1 starts, and its message arrives."""
    neighbor = await up(mesh, 1, endpoint.neighborhood.topology, **options)
    await round_of(neighbor, 0).broadcast(Word("it is me"))
    assert await round_of(endpoint, 0).gather(Word, of=[1]) == {1: Word("it is me")}
    assert endpoint.dropped == {}


# ---- clients that are not neighbors


@pytest.mark.parametrize("client", ["without a key", "with an unknown key", "for another server", "not a neighbor"])
async def test_refuses_a_client(client: str, encrypted: Any, stranger: Any, caplog: Any, eventually: Any) -> None:
    endpoint = await up(encrypted, 0, LINE)
    pairs, new = encrypted.pairs, new_pair()
    unknown = f"connection refused from=127.0.0.1: key {new[0].hex()[:12]}… belongs to no peer of this run"
    identity, pair, server, text = {
        "without a key": ("1>0", None, None, REFUSED),
        "with an unknown key": ("1>0", new, pairs[0][0], re.compile(re.escape(unknown))),
        "for another server": ("1>0", pairs[1], new[0], REFUSED),
        "not a neighbor": ("2>0", pairs[2], pairs[0][0], re.compile("peer 2 is not a neighbor")),
    }[client]
    with suppress(zmq.Again):  # the refusal may be faster, and ends the connection for good
        stranger.connect(endpoint.link.address, identity, pair, server).send_multipart(hello(), zmq.NOBLOCK)
    await eventually(lambda: text.search(caplog.text))
    await still_works(encrypted, endpoint)


async def test_refuses_a_neighbor_that_claims_another_identity(
    encrypted: Any, stranger: Any, caplog: Any, eventually: Any
) -> None:
    """It has its own key, and knows all of peer 1 but its private key."""
    endpoint = await up(encrypted, 0, FORK)
    for identity in ("1>0", "1>0.0123456789abcdef"):
        dealer = stranger.connect(endpoint.link.address, identity, encrypted.pairs[2], encrypted.pairs[0][0])
        dealer.send_multipart(hello(), zmq.NOBLOCK)
    text = "message refused identity=b'1>0': the connection has the key of peer 2"
    await eventually(lambda: caplog.text.count(text) == 2)
    await still_works(encrypted, endpoint)


async def test_neighbor_cannot_take_over_anothers_connection(
    encrypted: Any, stranger: Any, caplog: Any, eventually: Any
) -> None:
    caplog.set_level(logging.INFO)
    endpoint, neighbor = await up(encrypted, 0, FORK), await up(encrypted, 1, FORK)
    await eventually(lambda: neighbor.link.io.connections and neighbor.link.io.connections[0].up)
    dealer = stranger.connect(endpoint.link.address, "1>0", encrypted.pairs[2], encrypted.pairs[0][0])
    dealer.send_multipart(hello(), zmq.NOBLOCK)
    await eventually(lambda: "message refused" in caplog.text)
    await round_of(neighbor, 0).broadcast(Word("still here"))
    assert await round_of(endpoint, 0).gather(Word, of=[1]) == {1: Word("still here")}
    assert "connection lost" not in caplog.text


async def test_refuses_other_protocols(encrypted: Any, caplog: Any, eventually: Any) -> None:
    endpoint = await up(encrypted, 0)
    with socket.create_connection(port_of(endpoint.link.address)) as web:
        web.sendall(b"GET / HTTP/1.1\r\nHost: peer\r\n\r\n" * 10)
        await eventually(lambda: "connection refused" in caplog.text)
    await still_works(encrypted, endpoint)


async def test_refuses_a_replayed_connection(encrypted: Any, caplog: Any, eventually: Any) -> None:
    """All that a neighbor has sent, byte for byte: every handshake is different."""
    endpoint = await up(encrypted, 0)
    recorded = bytearray()

    def record(chunk: bytes, inward: bool) -> bytes:
        recorded.extend(chunk if inward else b"")
        return chunk

    async with relay(encrypted.addresses, endpoint.link, record):
        await still_works(encrypted, endpoint)
        await encrypted.shut(encrypted.links[-1])
    reader = endpoint.link.io.connections[1].reader
    received = reader.next, endpoint.link.io.connections[1]._delivered
    with socket.create_connection(port_of(endpoint.link.address)) as again:
        again.sendall(recorded)
        await eventually(lambda: "connection refused" in caplog.text)
    assert (reader.next, endpoint.link.io.connections[1]._delivered) == received


async def test_peer_without_keys_refuses_curve(sockets: Any, stranger: Any, caplog: Any, eventually: Any) -> None:
    endpoint = await up(sockets, 0)
    stranger.connect(endpoint.link.address, "1>0", new_pair(), new_pair()[0])
    await eventually(lambda: "connection refused: " in caplog.text)
    await still_works(sockets, endpoint)


# ---- peers of the run with wrong keys


async def test_neighbor_that_rejects_our_key_is_a_named_error(encrypted: Any) -> None:
    """The other side has an outdated public key of this peer."""
    other = encrypted.keys(1)
    await up(encrypted, 1, keys=replace(other, public=(new_pair()[0], *other.public[1:])))
    endpoint = await up(encrypted, 0)
    with pytest.raises(
        HandshakeError,
        match=r"peer 1 at tcp://\S+ refused peer 0: it does not accept this peer's key; compare",
    ):
        await round_of(endpoint, 0).gather(Word)


@pytest.mark.parametrize("with_keys", [0, 1])
async def test_logs_a_neighbor_when_only_one_side_has_keys(
    encrypted: Any, caplog: Any, with_keys: int, eventually: Any
) -> None:
    pairs = encrypted.pairs
    endpoints = []
    for me in range(2):
        encrypted.pairs = pairs if me == with_keys else []
        endpoints.append(await up(encrypted, me, deadline=1))
    waits = [round_of(endpoint, 0).gather(Word) for endpoint in endpoints]
    assert await asyncio.gather(*waits) == [{}, {}]  # after the deadline
    named = [rf"CURVE handshake failed peer={peer} address=tcp://\S+: wrong key" for peer in range(2)]
    await eventually(lambda: all(re.search(text, caplog.text) for text in (*named, "connection refused: ")))
    assert [len(re.findall(text, caplog.text)) for text in named] == [1, 1]


async def test_logs_a_neighbor_whose_public_key_is_wrong(encrypted: Any, caplog: Any, eventually: Any) -> None:
    """A wrong key and a wrong listener look the same; the neighbor may return at another address."""
    await up(encrypted, 1)
    keys = encrypted.keys(0)
    wrong = Keys((keys.public[0], new_pair()[0]), keys.private)
    endpoint = await up(encrypted, 0, keys=wrong, deadline=0.5)
    await eventually(lambda: "CURVE handshake failed peer=1 address=tcp://127.0.0.1:" in caplog.text)
    assert await round_of(endpoint, 0).gather(Word) == {}  # after the deadline
    assert caplog.text.count("CURVE handshake failed") == 1


# ---- keys change nothing else


async def test_damaged_byte_costs_only_a_connection(
    encrypted: Any, caplog: Any, eventually: Any, monkeypatch: Any
) -> None:
    """libzmq takes it for the other side's fault, and would not reconnect by itself."""
    monkeypatch.setattr(zmq_sockets, "HEARTBEAT_INTERVAL", 0.1)
    caplog.set_level(logging.INFO)
    zero = await up(encrypted, 0)
    damage = asyncio.Event()

    def damaged(chunk: bytes, inward: bool) -> bytes:
        if inward or not damage.is_set():
            return chunk
        damage.clear()
        return bytes([*chunk[:-1], chunk[-1] ^ 1])

    async with relay(encrypted.addresses, zero.link, damaged):
        one = await up(encrypted, 1)
        assert await exchange([zero, one]) == [{1: "1"}, {0: "0"}]
        damage.set()  # the next heartbeat's answer
        await eventually(lambda: "connection lost peer=0" in caplog.text)
        assert await exchange([zero, one], 1) == [{1: "1"}, {0: "0"}]
        await encrypted.close()


async def test_counts_a_flood_of_unknown_clients_instead_of_logging_it(
    sockets: Any, stranger: Any, caplog: Any, eventually: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limited_log, "PERIOD", 1000.0)
    endpoint = await up(sockets, 0)
    dealer = stranger.connect(endpoint.link.address, "7>0")
    for _ in range(500):
        dealer.send_multipart(hello(), zmq.NOBLOCK)
    other = stranger.connect(endpoint.link.address, "1>0")
    for _ in range(300):
        other.send_multipart([b"garbage"], zmq.NOBLOCK)
    await eventually(lambda: endpoint.dropped == {1: 300})
    categories = endpoint.link.context.limited_log._categories
    await eventually(lambda: (of := categories.get("messages from unknown senders")) and of.count == 500)
    await sockets.shut(endpoint.link)
    messages = [record.getMessage() for record in caplog.records]
    assert messages.count("message from unknown sender dropped identity=b'7>0'") == 10
    assert len([line for line in messages if line.startswith("message dropped peer=1: 7 bytes")]) == 10
    # Which of the two connections is read first is not fixed, so neither is the order of these lines.
    assert sorted(re.sub(r"seconds=\d+", "", line) for line in messages if "suppressed" in line) == [
        "warnings suppressed count=290 : dropped messages of peer 1",
        "warnings suppressed count=490 : messages from unknown senders",
    ]
