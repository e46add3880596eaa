"""Attackers on the sockets of a run: a malicious neighbor, and unknown clients."""

from __future__ import annotations

import random
import socket
import struct
from collections import Counter
from contextlib import suppress

import zmq

from benchmarks.fuzz.messages import RUN_ID, VALID, encode_valid, mutate
from p2pfl.errors import WireError
from p2pfl.messaging import control
from p2pfl.messaging.control import BEFORE, FOREVER, Entry, Hello, Id, Nothing, Start, Want
from p2pfl.run_file.run import Run
from p2pfl.run_folder.folder import RunFolder

PEERS = 4
ATTACKER = PEERS
"""The fifth peer of the graph."""
AS_NEIGHBOR, AS_ANSWER, AS_STRANGER = ATTACKS = ("as a neighbor", "as an answer", "as strangers")
"""Who sends frames, and how."""


class MaliciousNeighbor:
    """May send to all peers, and sends everything but a model that they would have to accept."""

    def __init__(self, folder: RunFolder, run: Run, chance: random.Random) -> None:
        self.folder = folder
        self.chance = chance
        self.context = zmq.Context()
        self.dealers: dict[int, zmq.Socket[bytes]] = {}
        self.router = self.context.socket(zmq.ROUTER)
        self.router.bind("tcp://127.0.0.1:*")
        (folder.addresses / f"{ATTACKER:02d}").write_text(self.router.get_string(zmq.LAST_ENDPOINT))
        self.known: set[bytes] = set()
        """Identities of the connections on which peers have begun an epoch: they ignore refusals from there."""
        self.epochs: dict[int, int] = {}
        """By peer: the epoch in which it reads."""
        self.numbers: dict[int, int] = {}
        """By peer: the number of its last Hello; it ignores a Want that names another one."""
        self.sent = 0
        self.hello = Hello(run.config_hash(), "", "")

    def attack(self, count: Counter[str]) -> None:
        for peer in range(PEERS):
            if peer not in self.dealers:
                with suppress(OSError):
                    self._connect(peer, (self.folder.addresses / f"{peer:02d}").read_text())
                continue
            with suppress(zmq.Again):
                for _ in range(20):
                    frames = self._message(self.epochs.get(peer, 0), self.numbers.get(peer, 0))
                    self.dealers[peer].send_multipart(frames, zmq.NOBLOCK)
                    count[AS_NEIGHBOR] += len(frames)
        with suppress(zmq.Again):
            for _ in range(20):
                identity, *frames = self.router.recv_multipart(zmq.NOBLOCK)
                self._note(identity, frames)
        for identity in self.known:
            with suppress(zmq.Again):
                frames = mutate(encode_valid(self.chance.choice(VALID)), self.chance)
                self.router.send_multipart([identity, *frames], zmq.NOBLOCK)
                count[AS_ANSWER] += len(frames)

    def _connect(self, peer: int, address: str) -> None:
        dealer = self.context.socket(zmq.DEALER)
        dealer.set(zmq.IDENTITY, f"{ATTACKER}>{peer}".encode())
        dealer.connect(address)
        self.dealers[peer] = dealer

    def _message(self, epoch: int, hello: int) -> list[bytes]:
        chance = self.chance
        self.sent += 1
        id = Id(self.sent // 1000, self.sent)  # mostly ascending: what is below an earlier one is ignored
        number = chance.choice((0, 1, 3, chance.randrange(100), FOREVER, chance.randrange(1 << 53)))
        if chance.random() < 0.3:  # valid, but false
            far = Id(number, chance.randrange(100)) if chance.random() < 0.02 else id
            yes, no = chance.random() < 0.5, chance.random() < 0.5
            lies: list[control.Control] = [
                *(self.hello, Hello("another", "", ""), Hello(self.hello.config_hash, "boot", "token-/../x")),
                *(Start(epoch, chance.choice((0, 0, number)), number), Start(number, 0, 0), Nothing(epoch, number)),
                Want(number, Id(number, 0), number, number, yes, no, hello),
                Want(1, Id(0, 0), 0, number, yes, no, hello),
                *(Entry(epoch, far, BEFORE, number, number), Entry(epoch, far, far, 24)),
                Entry(epoch, far, BEFORE, number, 0, number, chance.choice((0, 64, number))),
            ]
            return encode_valid(chance.choice(lies))
        return mutate(encode_valid(chance.choice(VALID), epoch, id), chance)

    def _note(self, identity: bytes, frames: list[bytes]) -> None:
        """Note a peer's Hello, and the epochs that it has begun to write or to read; begin the latter."""
        with suppress(WireError):
            message, _, _ = control.unpack(frames, None, (Hello, Start, Want))
            peer = int(identity.partition(b">")[0])
            if isinstance(message, Hello):
                self.numbers[peer] = message.number
            elif isinstance(message, Start):
                self.known.add(identity)
            elif isinstance(message, Want) and peer in self.dealers:
                self.epochs[peer] = message.epoch
                with suppress(zmq.Again):
                    self.dealers[peer].send(control.pack(Start(message.epoch, 0, 0), RUN_ID), zmq.NOBLOCK)

    def close(self) -> None:
        self.context.destroy(linger=0)


class Strangers:
    """Open connections and send something like ZMTP: mutated, truncated, or well-formed with invalid contents."""

    def __init__(self, folder: RunFolder, chance: random.Random) -> None:
        self.folder = folder
        self.chance = chance
        self.open: list[socket.socket] = []

    def attack(self, count: Counter[str]) -> None:
        peer = self.chance.randrange(PEERS)
        with suppress(OSError, ValueError):
            address = (self.folder.addresses / f"{peer:02d}").read_text()
            host, port = address.removeprefix("tcp://").split(":")
            connection = socket.create_connection((host, int(port)), timeout=0.05)
            self.open.append(connection)
            connection.setblocking(False)
            pieces = self._pieces()
            connection.sendall(b"".join(pieces))
            count[AS_STRANGER] += len(pieces)
        while len(self.open) > 20:
            self.open.pop(self.chance.randrange(len(self.open))).close()

    def _pieces(self) -> list[bytes]:
        chance = self.chance
        mechanism = chance.choice((b"NULL", b"NULL", b"NULL", b"CURVE", b"PLAIN", b"GSSAPI", chance.randbytes(20)))
        opening = [b"\xff" + bytes(7) + b"\x01\x7f\x03\x01" + mechanism.ljust(20, b"\0") + bytes(32), self._ready()]
        attack = chance.randrange(4)
        if attack == 0:
            return [chance.randbytes(chance.randrange(200))]
        if attack == 1:
            return [chance.randbytes(64) if chance.random() < 0.2 else piece for piece in mutate(opening, chance)]
        return opening + [self._frame() for _ in range(chance.randrange(100))]

    def _ready(self) -> bytes:
        identity = self.chance.choice((b"7>0", b"", b"0>0", b"x" * 255, b"\0bad", self.chance.randbytes(9)))
        metadata = b""
        for name, value in ((b"Socket-Type", self.chance.choice((b"DEALER", b"PUB"))), (b"Identity", identity)):
            metadata += bytes([len(name)]) + name + struct.pack(">I", len(value)) + value
        return bytes([4, 6 + len(metadata)]) + b"\x05READY" + metadata if len(metadata) < 250 else b"\x04\xff"

    def _frame(self) -> bytes:
        """Return a ZMTP frame or command whose length field may be wrong."""
        chance = self.chance
        content = chance.choice((b"", b"\x04PING\x00\x00x", b"\x04PONG", b"\x05ERROR\x03no!", chance.randbytes(30)))
        flags = chance.choice((0, 0, 1, 1, 4, chance.randrange(256)))
        if flags & 2:
            length = chance.choice((len(content), len(content), 1 << 22, 1 << 40, (1 << 63) - 1))
            return bytes([flags]) + struct.pack(">Q", length) + content
        return bytes([flags, len(content) if chance.random() < 0.9 else chance.randrange(256)]) + content

    def close(self) -> None:
        for connection in self.open:
            connection.close()
