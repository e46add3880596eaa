"""Who is let in and who is not: keys, the allow-list, strangers of all sorts, and what the log says of them."""

from __future__ import annotations

import asyncio
import logging
import re
import socket
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import zmq

from p2pfl import wire
from p2pfl.errors import HandshakeError
from p2pfl.keys import Keys, write_new
from p2pfl.simulate import simulate
from p2pfl.topology import Topology
from p2pfl.wire import Body, Layout
from peers import refusals
from peers.keys import new_pair
from peers.zmqlink import Hello
from tests.bodies import PAIR, RUN_ID, Block, Word

LAYOUTS = [Layout.of(Word("")), Layout.of(Block(torch.zeros(1000)))]
LINE = Topology.from_edges(3, [(0, 1), (1, 2)])
"""0 and 2 are no neighbours."""
REFUSED = re.compile(
    "refused a connection: it (has no key, not our public key, or|left, or was cut off, in its handshake)"
)
"""Which of the two it is depends on who of the two sides notices first and hangs up."""


@dataclass
class Stranger:
    """A bare DEALER that connects to a link as whoever a test wants it to be."""

    context: zmq.Context[zmq.Socket[bytes]] = field(default_factory=zmq.Context)
    sockets: list[zmq.Socket[bytes]] = field(default_factory=list)

    def knock(
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


def frames(body: Body, sender: int, run: str = RUN_ID, seq: int = 0) -> list[Any]:
    return wire.encode(body).to(run, 0, sender, seq)


async def up(mesh: Any, topology: Topology, peer: int, **options: Any) -> Any:
    endpoint = mesh.endpoint(peer, topology, LAYOUTS)
    await mesh.link(endpoint, **options).start()
    return endpoint


async def still_works(mesh: Any, endpoint: Any, **options: Any) -> None:
    """Peer 1 comes up and is heard."""
    neighbor = await up(mesh, endpoint.topology, 1, **options)
    neighbor.begin(0)
    word = Word("it is me")
    await neighbor.send([endpoint.me], word, 0)
    assert (await endpoint.take("Word", [1], 0))[1].body == word
    assert endpoint.refused == {}


# ---- strangers


async def test_a_stranger_without_a_key(encrypted: Any, stranger: Any, caplog: Any, eventually: Any) -> None:
    endpoint = await up(encrypted, PAIR, 0)
    dealer = stranger.knock(endpoint.link.address, "1>0")
    dealer.send_multipart(frames(Word("let me in"), 1))
    await eventually(lambda: REFUSED.search(caplog.text))
    await still_works(encrypted, endpoint)


async def test_a_stranger_with_a_key_of_its_own(encrypted: Any, stranger: Any, caplog: Any, eventually: Any) -> None:
    endpoint = await up(encrypted, PAIR, 0)
    pair = new_pair()
    dealer = stranger.knock(endpoint.link.address, "1>0", pair, encrypted.pairs[0][0])
    dealer.send_multipart(frames(Word("let me in"), 1))
    text = f"refused a stranger at 127.0.0.1: its key {pair[0].hex()[:12]}… belongs to no peer of this run"
    await eventually(lambda: text in caplog.text)
    await still_works(encrypted, endpoint)


async def test_a_stranger_that_does_not_know_our_public_key(
    encrypted: Any, stranger: Any, caplog: Any, eventually: Any
) -> None:
    endpoint = await up(encrypted, PAIR, 0)
    stranger.knock(endpoint.link.address, "1>0", encrypted.pairs[1], new_pair()[0])
    await eventually(lambda: REFUSED.search(caplog.text))
    await still_works(encrypted, endpoint)


async def test_a_peer_of_the_run_that_is_no_neighbor(
    encrypted: Any, stranger: Any, caplog: Any, eventually: Any
) -> None:
    endpoint = await up(encrypted, LINE, 0)
    stranger.knock(endpoint.link.address, "2>0", encrypted.pairs[2], encrypted.pairs[0][0])
    await eventually(lambda: "refused peer 2 at 127.0.0.1: it is no neighbour" in caplog.text)
    await still_works(encrypted, endpoint)


async def test_a_neighbor_that_says_it_is_another(
    encrypted: Any, stranger: Any, caplog: Any, eventually: Any
) -> None:
    """It has a key of its own, and knows everything about peer 1 but what peer 1 keeps to itself."""
    endpoint = await up(encrypted, Topology.from_edges(3, [(0, 1), (0, 2)]), 0)
    for identity in ("1>0", "1>0.0123456789abcdef"):
        dealer = stranger.knock(endpoint.link.address, identity, encrypted.pairs[2], encrypted.pairs[0][0])
        dealer.send_multipart(frames(Word("I am peer 1"), 1))
    text = "refused a message: its sender says that it is b'1>0' and has the key of peer 2"
    await eventually(lambda: caplog.text.count(text) == 2)
    await still_works(encrypted, endpoint)
    dealer = stranger.knock(endpoint.link.address, "2>0", encrypted.pairs[2], encrypted.pairs[0][0])
    dealer.send_multipart(frames(Word("I am peer 1"), 1))  # in the header alone
    await eventually(lambda: "dropped a message of peer 2: a message of peer 1 over the link from" in caplog.text)
    await eventually(lambda: endpoint.refused == {2: 1})


async def test_a_neighbor_cannot_take_anothers_connection_away(
    encrypted: Any, stranger: Any, caplog: Any, eventually: Any
) -> None:
    caplog.set_level(logging.INFO)
    topology = Topology.from_edges(3, [(0, 1), (0, 2)])
    endpoint, neighbor = await up(encrypted, topology, 0), await up(encrypted, topology, 1)
    await eventually(lambda: neighbor.link._edges and neighbor.link._edges[0].up)
    dealer = stranger.knock(endpoint.link.address, "1>0", encrypted.pairs[2], encrypted.pairs[0][0])
    dealer.send_multipart(frames(Word("I am peer 1"), 1))
    await eventually(lambda: "refused a message" in caplog.text)
    neighbor.begin(0)
    await neighbor.send([0], Word("still here"), 0)
    assert (await endpoint.take("Word", [1], 0))[1].body == Word("still here")
    assert "connection lost" not in caplog.text


async def test_something_that_does_not_speak_zeromq(encrypted: Any, caplog: Any, eventually: Any) -> None:
    endpoint = await up(encrypted, PAIR, 0)
    host, port = endpoint.link.address.removeprefix("tcp://").split(":")
    with socket.create_connection((host, int(port))) as web:
        web.sendall(b"GET / HTTP/1.1\r\nHost: peer\r\n\r\n" * 10)
        await eventually(lambda: "refused a connection" in caplog.text)
    await still_works(encrypted, endpoint)


async def test_a_replay_from_another_run(encrypted: Any, stranger: Any, caplog: Any, eventually: Any) -> None:
    """By a neighbour, with its own key."""
    endpoint = await up(encrypted, PAIR, 0)
    dealer = stranger.knock(endpoint.link.address, "1>0.x", encrypted.pairs[1], encrypted.pairs[0][0])
    dealer.send_multipart(frames(Word("of yesterday"), 1, run="another run"))
    text = f"dropped a message of peer 1: a message of run 'another run'; this is run {RUN_ID!r}"
    await eventually(lambda: text in caplog.text)
    await eventually(lambda: endpoint.refused == {1: 1})


async def test_a_recorded_connection_played_again_gets_nowhere(encrypted: Any, caplog: Any, eventually: Any) -> None:
    """All that a neighbour has sent, byte for byte: the handshake is another one each time."""
    endpoint = await up(encrypted, PAIR, 0)
    host, port = endpoint.link.address.removeprefix("tcp://").split(":")
    recorded = bytearray()

    async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        inward, outward = await asyncio.open_connection(host, int(port))

        async def pump(source: Any, sink: Any, record: bytearray | None) -> None:
            while chunk := await source.read(1 << 16):
                if record is not None:
                    record += chunk
                sink.write(chunk)
                await sink.drain()
            sink.close()

        await asyncio.gather(pump(reader, outward, recorded), pump(inward, writer, None))

    server = await asyncio.start_server(relay, "127.0.0.1", 0)
    try:
        (encrypted.addresses / "00").write_text(f"tcp://127.0.0.1:{server.sockets[0].getsockname()[1]}")
        await still_works(encrypted, endpoint)
        await encrypted.shut(encrypted.links[-1])
    finally:
        server.close()
    received = endpoint.heard.copy(), endpoint.link._delivered.copy()
    with socket.create_connection((host, int(port))) as again:
        again.sendall(recorded)
        await eventually(lambda: "refused a connection" in caplog.text)
    assert (endpoint.heard, endpoint.link._delivered) == received


async def test_strangers_at_a_peer_without_keys(sockets: Any, stranger: Any, caplog: Any, eventually: Any) -> None:
    endpoint = await up(sockets, PAIR, 0)
    stranger.knock(endpoint.link.address, "1>0", new_pair(), new_pair()[0])
    await eventually(lambda: "refused a connection: it" in caplog.text)
    await still_works(sockets, endpoint)


# ---- peers of the run whose keys do not fit


async def test_a_neighbor_that_does_not_know_our_key_is_a_named_error(encrypted: Any) -> None:
    """The public keys at the other side are older than ours."""
    other = encrypted.keys(1)
    await up(encrypted, PAIR, 1, keys=replace(other, public=(new_pair()[0], *other.public[1:])))
    endpoint = await up(encrypted, PAIR, 0)
    with pytest.raises(
        HandshakeError, match=r"peer 1 at tcp://\S+ refuses peer 0: it does not know our key: its pub"
    ):
        await endpoint.begin(0).gather(Word)


@pytest.mark.parametrize("keyed", [0, 1])
async def test_a_neighbor_that_has_keys_where_we_have_none_is_named_in_the_log(
    encrypted: Any, caplog: Any, keyed: int, eventually: Any
) -> None:
    pairs = encrypted.pairs
    endpoints = []
    for me in range(2):
        encrypted.pairs = pairs if me == keyed else []
        endpoints.append(await up(encrypted, PAIR, me, give_up=3))
    waits = [endpoint.begin(0).gather(Word) for endpoint in endpoints]
    assert await asyncio.gather(*waits) == [{}, {}]  # after give_up
    named = [f"peer {peer}: who listens at tcp://127.0.0.1:" for peer in range(2)]
    await eventually(lambda: all(text in caplog.text for text in (*named, "refused a connection: it")))
    assert [caplog.text.count(text) for text in named] == [1, 1]


async def test_a_neighbor_whose_key_we_have_wrong_is_named_in_the_log(
    encrypted: Any, caplog: Any, eventually: Any
) -> None:
    """Whether it is the wrong key or the wrong listener cannot be told; it may come back at another address."""
    await up(encrypted, PAIR, 1)
    keys = encrypted.keys(0)
    wrong = Keys((keys.public[0], new_pair()[0]), keys.private)
    endpoint = await up(encrypted, PAIR, 0, keys=wrong, give_up=0.5)
    await eventually(lambda: "peer 1: who listens at tcp://127.0.0.1:" in caplog.text)
    assert await endpoint.begin(0).gather(Word) == {}  # after give_up
    assert caplog.text.count("does not prove to have its key") == 1


async def test_an_address_that_belongs_to_another_peer_by_now_is_not_mistaken(
    encrypted: Any, caplog: Any, eventually: Any
) -> None:
    topology = Topology.from_edges(3, [(0, 1), (0, 2), (1, 2)])
    two = await up(encrypted, topology, 2)
    (encrypted.addresses / "01").write_text(two.link.address)
    zero = await up(encrypted, topology, 0)
    zero.begin(0)
    await zero.send([1, 2], Word("from 0"), 0)
    assert (await two.take("Word", [0], 0))[0].body == Word("from 0")
    text = f"peer 1: who listens at {two.link.address} does not prove to have its key"
    await eventually(lambda: text in caplog.text)
    one = await up(encrypted, topology, 1)
    assert (await one.take("Word", [0], 0))[0].body == Word("from 0")


# ---- what keys do not change


async def test_the_largest_message_fits_with_keys_too(encrypted: Any) -> None:
    zero, one = await encrypted.open(PAIR, LAYOUTS, max_message=4000)
    block = Block(torch.arange(1000.0))
    zero.begin(0)
    await zero.send([1], block, 0)
    taken = await one.take("Block", [0], 0)
    assert torch.equal(taken[0].body.x, block.x)


async def test_a_damaged_byte_costs_a_connection_and_nothing_else(
    encrypted: Any, caplog: Any, eventually: Any
) -> None:
    """libzmq takes it for the other side's fault, and of itself would not connect again."""
    caplog.set_level(logging.INFO)
    zero = await up(encrypted, PAIR, 0)
    host, port = zero.link.address.removeprefix("tcp://").split(":")
    damage = asyncio.Event()

    async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        inward, outward = await asyncio.open_connection(host, int(port))

        async def forth() -> None:
            while chunk := await reader.read(1 << 16):
                outward.write(chunk)
            outward.close()

        async def back() -> None:
            while chunk := await inward.read(1 << 16):
                if damage.is_set():
                    chunk = bytes([*chunk[:-1], chunk[-1] ^ 1])
                    damage.clear()
                writer.write(chunk)
            writer.close()

        await asyncio.gather(forth(), back(), return_exceptions=True)

    server = await asyncio.start_server(relay, "127.0.0.1", 0)
    try:
        (encrypted.addresses / "00").write_text(f"tcp://127.0.0.1:{server.sockets[0].getsockname()[1]}")
        one = await up(encrypted, PAIR, 1)
        one.begin(0)
        await one.send([0], Word("before"), 0)
        assert (await zero.take("Word", [1], 0))[1].body == Word("before")
        damage.set()  # the answer to this:
        one.link._command(lambda: one.link._control(one.link._edges[0], Hello("d", 0, 0, 0, 0, 0)))
        await eventually(lambda: "peer 0: connection lost" in caplog.text)
        await one.send([0], Word("after"), 0)
        assert (await zero.take("Word", [1], 0))[1].body == Word("after")
        await encrypted.close()
    finally:
        server.close()


async def test_a_flood_of_strangers_is_counted_and_not_written_down(
    sockets: Any, stranger: Any, caplog: Any, eventually: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(refusals, "PERIOD", 1000.0)
    endpoint = await up(sockets, PAIR, 0)
    dealer = stranger.knock(endpoint.link.address, "7>0")
    for number in range(500):
        dealer.send_multipart(frames(Word(f"let me in {number}"), 1))
    other = stranger.knock(endpoint.link.address, "1>0")
    for _ in range(300):
        other.send_multipart([b"garbage"])
    await eventually(lambda: endpoint.refused == {1: 300})
    await eventually(lambda: endpoint.link.refusals._sorts["messages of strangers"].count == 500)
    await sockets.shut(endpoint.link)
    said = [record.getMessage() for record in caplog.records]
    assert said.count("dropped a message of a stranger: b'7>0'") == 10
    assert len([line for line in said if line.startswith("dropped a message of peer 1: the header is")]) == 10
    assert [line.split(" within")[0] for line in said if "more within" in line] == [
        "messages of strangers: 490 more",
        "messages of peer 1 that were dropped: 290 more",
    ]


# ---- runs of processes


def test_a_run_with_keys_ends_with_the_bits_of_one_without(
    make_run: Any, prepare: Any, warm: Any, tmp_path: Path
) -> None:
    write_new(tmp_path / "keys", {peer: new_pair() for peer in range(4)})
    run = make_run(transport={"keys": str(tmp_path / "keys")}, chaos={"link": {"jitter": 0.02}})
    folder = prepare(tmp_path / "run", run)
    assert set(warm.run(folder).values()) == {0}
    for place, expected in zip(folder.peers(), simulate(make_run()), strict=True):
        result = place.result()
        assert (result.digest, result.out, result.inn) == (expected.digest, expected.out, expected.inn)
        # A peer that gets no turn for long enough cuts off connections in their handshake; they are made again.
        said = [line for line in place.log.read_text().splitlines() if "cut off, in its handshake" not in line]
        assert not any("refused" in line for line in said)
        assert "encrypted (CURVE)" in place.log.read_text()
        assert "insecure" not in place.log.read_text()
    secrets = [(tmp_path / "keys" / f"0{peer}.key").read_text().strip() for peer in range(4)]
    for path in (path for path in folder.root.rglob("*") if path.is_file()):
        content = path.read_bytes()
        for secret in secrets:
            assert secret.encode() not in content, path
            assert bytes.fromhex(secret) not in content, path


def test_a_peer_that_cannot_use_its_key_says_so_and_ends(
    make_run: Any, prepare: Any, warm: Any, tmp_path: Path
) -> None:
    write_new(tmp_path / "keys", {peer: new_pair() for peer in range(2)})
    (tmp_path / "keys" / "01.key").chmod(0o644)
    folder = prepare(tmp_path / "run", make_run(peers=2, transport={"keys": str(tmp_path / "keys"), "give_up": 1}))
    pids = warm.start(folder, [1])
    assert warm.wait(pids) == {1: 1}
    assert folder.peer(1).status().phase == "failed"
    assert "01.key: mode 0644 lets others at this private key: chmod 600" in folder.peer(1).log.read_text()


def test_a_run_that_is_insecure_says_so(make_run: Any, prepare: Any, warm: Any, tmp_path: Path) -> None:
    run = make_run(peers=2, rounds=1, transport={"host": "0.0.0.0", "insecure": True})
    folder = prepare(tmp_path / "run", run)
    assert set(warm.run(folder).values()) == {0}
    for place in folder.peers():
        assert "insecure: whoever reaches tcp://0.0.0.0:" in place.log.read_text()
        assert "encrypted" not in place.log.read_text()


def test_a_private_key_is_in_no_log() -> None:
    """Nor anywhere else that Keys may end up in by mistake."""
    keys = Keys((b"\x02" * 32,), b"\x01" * 32)
    for text in (repr(keys), f"{keys}", f"{keys!r:>10}"):
        assert "01" * 32 not in text
        assert "\\x01" not in text
