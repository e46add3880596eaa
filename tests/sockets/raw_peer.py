"""A neighbor made of bare sockets, and what tests of ZmqLink share."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import torch
import zmq

from p2pfl.messaging import control, wire
from p2pfl.messaging.control import BEFORE, FROM_WRITER, Control, Entry, Hello, Id, Refused, Start, Want
from p2pfl.messaging.schema import Body, Layout, MessageSchema
from p2pfl.messaging.topology import Topology
from peers.zmq_link import ZmqLink
from tests.bodies import PAIR, RUN_ID, Block, Word, round_of, texts

BLOCK = Block(torch.zeros(1000, 1000))
LAYOUTS = [Layout.of(Word("")), Layout.of(BLOCK)]
SCHEMA = MessageSchema(LAYOUTS)
HELLO = Hello("d", "", "")
REFUSED = re.compile(
    "connection refused: (the client has no key, expects another public key, or|handshake failed or timed out)"
)
"""What is logged of a handshake that fails. Which of the two depends on which side closes first."""


async def up(
    mesh: Any, peer: int, topology: Topology = PAIR, layouts: Any = LAYOUTS, *, prunes: bool = False, **options: Any
) -> Any:
    """Start one peer."""
    endpoint = mesh.endpoint(peer, topology, layouts, prunes=prunes)
    await mesh.link(endpoint, **options).start()
    return endpoint


async def exchange(endpoints: Sequence[Any], t: int = 0) -> list[dict[int, str]]:
    """Have each of some peers exchange its number."""
    received = await asyncio.gather(*(round_of(each, t).exchange(Word(f"{each.me}")) for each in endpoints))
    return [texts(each) for each in received]


async def die(link: ZmqLink, error: Exception | None = None) -> None:
    """End as after kill -9: close the sockets without sending anything."""

    def fail() -> None:
        raise error or ConnectionAbortedError("killed by the test")

    link.io.submit(fail)
    await asyncio.to_thread(link.world.thread.join)


async def revive(mesh: Any, dead: Any, t: int, **options: Any) -> Any:
    """Start another process of a peer, from a checkpoint of round ``t``."""
    endpoint = mesh.revived(dead, t)
    await mesh.link(endpoint, **options).start()
    return endpoint


def port_of(address: str) -> tuple[str, int]:
    host, port = address.removeprefix("tcp://").split(":")
    return host, int(port)


@asynccontextmanager
async def relay(addresses: Path, link: ZmqLink, change: Callable[[bytes, bool], bytes]) -> AsyncIterator[None]:
    """Have neighbors reach a peer through a relay. ``change(chunk, to the peer)`` returns what it passes on."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        async def pump(source: asyncio.StreamReader, sink: asyncio.StreamWriter, inward: bool) -> None:
            try:
                while chunk := await source.read(1 << 16):
                    sink.write(change(chunk, inward))
            finally:
                sink.close()

        try:
            source, sink = await asyncio.open_connection(*port_of(link.address))
        except OSError:  # the link is closed
            writer.close()
            return
        await asyncio.gather(pump(reader, sink, True), pump(source, writer, False), return_exceptions=True)

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    (addresses / f"{link.endpoint.me:02d}").write_text(f"tcp://127.0.0.1:{server.sockets[0].getsockname()[1]}")
    yield
    server.close()


def want(epoch: int, next: Id = Id(0, 0), durable: int = 0, window: int = 1 << 40, **others: bool) -> Want:
    return Want(epoch, next, durable, window, **{"idle": True, "references": False, **others})


def by_value(body: Body, epoch: int, id: Id, previous: Id = BEFORE) -> tuple[Entry, list[bytes]]:
    """Return an entry that fits into one chunk, and its frames."""
    encoded = wire.encode(body)
    stored = [b"".join(encoded.parts())] if encoded.size else []
    return Entry(epoch, id, previous, encoded.size), [encoded.header, *stored]


class RawPeer:
    """A neighbor that sends only what a test has it send."""

    def __init__(self, me: int, addresses: Path) -> None:
        self.me = me
        self.context = zmq.Context()
        self.router = self.context.socket(zmq.ROUTER)
        self.dealer = self.context.socket(zmq.DEALER)
        for end in (self.router, self.dealer):
            end.set(zmq.RCVTIMEO, 100_000)
            end.set(zmq.LINGER, 0)
            end.set(zmq.SNDHWM, 0)
        self.router.set(zmq.ROUTER_HANDOVER, 1)  # as a real peer, whose neighbors reconnect under one identity
        self.router.bind("tcp://127.0.0.1:*")
        self.address = self.router.get_string(zmq.LAST_ENDPOINT)
        (addresses / f"{me:02d}").write_text(self.address)
        self.epoch = -1
        """The link's, once ``write`` has begun it."""
        self.greeted = 0
        """Number of the last Hello received."""

    def connect(self, link: ZmqLink, identity: str | None = None) -> None:
        self.dealer.set(zmq.IDENTITY, (identity or f"{self.me}>{link.endpoint.me}").encode())
        self.dealer.connect(link.address)

    def send(self, message: Control, *frames: Any, run: str = RUN_ID) -> None:
        if isinstance(message, Want):
            message = message._replace(hello=self.greeted)
        if isinstance(message, Entry) and frames and not message.offset:
            message = message._replace(header=len(frames[0]))
        self.dealer.send_multipart([control.pack(message, run, *frames[:1]), *frames[1:]])

    async def answer(self) -> Control:
        """Receive an answer to what was sent."""
        frames = await asyncio.to_thread(self.dealer.recv_multipart)
        return control.unpack(frames, None, (Want, Refused))[0]

    async def receive(self) -> tuple[bytes, Control, list[bytes]]:
        """Receive what the link sends on its own connection: its identity, the message, and an entry's content."""
        identity, *frames = await asyncio.to_thread(self.router.recv_multipart)
        message, _, rest = control.unpack(frames, RUN_ID, (*FROM_WRITER, Want))
        if isinstance(message, Hello):
            self.greeted = message.number
        length = message.header if isinstance(message, Entry) else 0
        return identity, message, [each for each in (bytes(rest[:length]), bytes(rest[length:]), *frames[1:]) if each]

    async def expect(self, kind: type[Control]) -> Any:
        """Receive messages until one is of this kind, and return it."""
        while not isinstance(found := (await self.receive())[1], kind):
            pass
        return found

    # ---- as a reader

    async def read(self, link: ZmqLink, **wanted: Any) -> Start:
        """Connect, and have the link begin to send."""
        self.connect(link)
        while not isinstance(message := (await self.receive())[1], Start):
            if isinstance(message, Hello):  # of each connection, if the link connects anew meanwhile
                self.send(want(1, **wanted))
        return message

    async def body(self) -> Body:
        """Receive the body of the next entry that fits into one chunk, except Begin."""
        while True:
            _, message, frames = await self.receive()
            if isinstance(message, Entry) and b"Begin" not in frames[0][:10]:
                plan = wire.check(frames[0], SCHEMA)
                stored = torch.frombuffer(bytearray(frames[1]), dtype=torch.uint8) if plan.size else None
                return plan.message(message.id.t, 0, stored).body

    # ---- as a writer

    async def write(self, link: ZmqLink, *, begins: int = 0, nothing: int = 0, hello: Hello = HELLO) -> None:
        """Connect, and begin to send."""
        self.connect(link)
        await self.begin_epoch(begins=begins, nothing=nothing, hello=hello)

    async def begin_epoch(self, *, begins: int = 0, nothing: int = 0, hello: Hello = HELLO) -> Want:
        self.send(hello)
        asked: Want = await self.expect(Want)
        while asked.epoch == self.epoch:
            asked = await self.expect(Want)
        self.epoch = asked.epoch
        self.send(Start(self.epoch, begins, nothing))
        return asked

    def put(self, body: Body, t: int = 0, number: int = 0, previous: Id = BEFORE) -> None:
        """Send an entry of the current epoch."""
        message, frames = by_value(body, self.epoch, Id(t, number), previous)
        self.send(message, *frames)

    def close(self) -> None:
        self.context.destroy(linger=0)
