"""Bytes that nobody should send: at the decoder, and at the sockets of peers that are in the middle of a run.

    python -m benchmarks.fuzz decoder --frames 1000000     # guided by coverage (atheris, pip install '.[fuzz]')
    python -m benchmarks.fuzz live --seconds 240           # whole runs of four peers

``decoder`` decodes messages, most of them mutated from valid ones. Each must be refused with a WireError, or come
back bit for bit from being encoded again.

``live`` runs four peers as processes, without keys, whose graph has a fifth that never joins. The attacker takes its
place: it may speak to all four, and answers them. It sends mutated messages of every kind, valid ones of the link's
own, and lies about rounds and numbers. Strangers beside it open connections and send mutated ZMTP, from the greeting
on. All peers must end with exit code 0 and the bits of `p2pfl simulate`.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import os
import random
import re
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click
import msgpack
import psutil
import torch
import zmq
from torch import Tensor

from p2pfl import wire
from p2pfl.config import Run, from_dict
from p2pfl.errors import WireError
from p2pfl.net import Begun, Listening
from p2pfl.runfolder import RunFolder
from p2pfl.session import load_data
from p2pfl.simulate import simulate
from p2pfl.tensors import digest
from p2pfl.wire import Body, Layout, TensorSpec, Vocabulary
from peers.device import slots_on
from peers.runtime import run_peer
from peers.slots import HostSlot
from peers.zmqlink import FOREVER, Close, Closed, Durable, Hello, Hold, Welcome

RUN_ID = "0123456789abcdef"

# ---- messages


@dataclass(frozen=True)
class Words(Body):
    """Everything that a body may hold."""

    number: int = 3
    real: float = 0.5
    flag: bool = True
    text: str = "ä"
    ids: tuple[int, ...] = (1, 2)
    single: Tensor = field(default_factory=lambda: torch.arange(4.0))
    named: Mapping[str, Tensor] = field(default_factory=lambda: {"w": torch.ones(2, 3), "b": torch.zeros(2)})


@dataclass(frozen=True)
class Loose(Body):
    x: Tensor


CONTROL: list[Body] = [
    Hello("d", 0, 0, 0, 0, 0),
    Durable(3),
    Hold(True),
    Close(),
    Welcome(3, 2),
    Closed(),
    Begun(),
    Listening(),
]
WORDS = Words(named={"w": torch.ones(2, 3), "b": torch.zeros(2).bool()})
VALID = [WORDS, Loose(torch.ones(2, 0, 3)), Loose(torch.ones(1, 2, 3)), *CONTROL]
SPOKEN = Vocabulary(
    [*map(Layout.of, (WORDS, *CONTROL)), Layout(Loose, {("x", None): TensorSpec(torch.float32, (None,) * 3)}, {})]
)
ODD: list[Any] = [
    *(None, True, -1, 0, 1, 2, 255, 1 << 31, 1 << 47, (1 << 53) - 1, 1 << 53, (1 << 64) - 1, -(1 << 63), 0.5),
    *(
        float("nan"),
        "",
        "x",
        "\0",
        "Words",
        "float32",
        "bool",
        b"",
        b"x",
        [],
        [[]],
        [1 << 48],
        {},
        {"x": 1},
        {"": []},
    ),
    *([["x", None, "float32", [0, 1 << 47, 1 << 47]]], ["x", None, "bool", [3]], "é" * 300, [1] * 300),
]


def mutated(frames: Sequence[bytes], chance: random.Random) -> list[bytes]:
    """A message that is this one but for a few changes: of bytes, of the header's entries, of frames."""
    changed = list(frames)
    for _ in range(chance.choice((1, 1, 1, 2, 3, 5))):
        how = chance.randrange(8)
        at = chance.randrange(len(changed)) if changed else 0
        if how == 0:
            changed.insert(at, chance.choice((b"", b"x", chance.randbytes(chance.randrange(64)))))
        elif not changed:
            continue
        elif how == 1:
            del changed[at]
        elif how == 2:
            other = chance.randrange(len(changed))
            changed[at], changed[other] = changed[other], changed[at]
        elif how <= 5:
            changed[0] = _other_entry(changed[0], chance)
        else:
            frame = bytearray(changed[at])
            place = chance.randrange(len(frame) + 1)
            if how == 6:
                frame[place : place + chance.randrange(5)] = chance.randbytes(chance.randrange(5))
            elif frame:
                frame[place % len(frame)] ^= 1 << chance.randrange(8)
            changed[at] = bytes(frame)
    return changed or [b""]


def _other_entry(header: bytes, chance: random.Random) -> bytes:
    """The header with one value in it replaced, however deep it stands."""
    try:
        envelope = msgpack.unpackb(header, strict_map_key=False)
    except (ValueError, TypeError, msgpack.exceptions.UnpackException):
        return header
    inner = envelope
    while isinstance(inner, list | dict) and inner:
        key = chance.choice(list(inner) if isinstance(inner, dict) else range(len(inner)))
        if not isinstance(inner[key], list | dict) or not inner[key] or chance.random() < 0.3:
            inner[key] = chance.choice(ODD)
            break
        inner = inner[key]
    with suppress(ValueError, OverflowError, TypeError):
        packed: bytes = msgpack.packb(envelope, use_bin_type=True)
        return packed
    return header


def tried(frames: Sequence[bytes]) -> bool:
    """Whether the decoder takes it. Raises whatever is no WireError, and AssertionError if it comes back changed."""
    try:
        message = wire.decode(frames, RUN_ID, SPOKEN)
    except WireError:
        return False
    again = wire.encode(message.body).to(RUN_ID, message.t, message.sender, message.seq, message.flags, message.count)
    other = wire.decode(again, RUN_ID, SPOKEN)
    assert message.payload == other.payload == sum(map(len, frames[1:]))
    assert digest(vars(message.body)) == digest(vars(other.body)), frames
    wire.is_finite(message.body)
    return True


def packed(frames: Sequence[bytes]) -> bytes:
    """A message as one run of bytes, for tools that know no other form: each frame after its length."""
    return b"".join(struct.pack("<H", len(frame)) + frame for frame in frames if len(frame) < 1 << 16)


def unpacked(data: bytes) -> list[bytes]:
    frames = []
    while len(data) >= 2:
        (length,) = struct.unpack_from("<H", data)
        frames.append(data[2 : 2 + length])
        data = data[2 + length :]
    return frames


# ---- the decoder


@click.group(help=__doc__)
def main() -> None:
    return


@main.command()
@click.option("--frames", default=0, help="Stop after so many frames, about.")
@click.option("--seconds", default=0, help="Stop after so many seconds.")
@click.option("--seed", default=1, show_default=True)
def decoder(frames: int, seconds: int, seed: int) -> None:
    """The decoder, guided by coverage."""
    runs = frames // 3 or -1  # a message has about so many frames
    with tempfile.TemporaryDirectory() as corpus:
        for number, body in enumerate(VALID):
            (Path(corpus) / f"valid{number}").write_bytes(packed(encoded(body)))
        limits = [
            f"-runs={runs}",
            f"-max_total_time={seconds}",
            f"-seed={seed}",
            "-max_len=4096",
            "-rss_limit_mb=4096",
        ]
        child = [
            sys.executable,
            "-m",
            "benchmarks.fuzz",
            "guided",
            "--",
            *limits,
            f"-artifact_prefix={corpus}/",
            corpus,
        ]
        done = subprocess.run(child, capture_output=True, text=True)
    if done.returncode:
        raise click.ClickException(f"a finding:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
    first, last = re.findall(r"#(\d+)\s+(?:INITED|DONE)\s+cov: (\d+) ft: (\d+).*?rss: (\d+)Mb", done.stderr)
    (count,) = re.findall(r"Done (\d+) runs in (\d+) second", done.stderr)
    decoded = re.findall(r"^messages (\d+) frames (\d+) taken (\d+)", done.stdout, re.MULTILINE)[-1]
    click.echo(f"messages {decoded[0]}, frames {decoded[1]}, of which {decoded[2]} messages were taken; no finding")
    click.echo(f"{int(decoded[1]) / max(1, int(count[1])):.0f} frames/s, {count[1]} s")
    click.echo(f"edges of p2pfl.wire and what it calls reached: {last[1]}, by the valid messages alone {first[1]}")
    click.echo(f"memory {first[3]} MB before, {last[3]} MB after")


def encoded(body: Body, sender: int = 1, t: int = 0, seq: int = 0) -> list[bytes]:
    return [bytes(frame) for frame in wire.encode(body).to(RUN_ID, t, sender, seq)]


@main.command(hidden=True, context_settings={"ignore_unknown_options": True})
@click.argument("arguments", nargs=-1)
def guided(arguments: Sequence[str]) -> None:
    """One process of libFuzzer, which does not return."""
    import atheris

    for name in (
        "decode",
        "_header",
        "_entry",
        "_text",
        "_plain",
        "_tensor",
        "_put_together",
        "_misfit",
        "_take_apart",
    ):
        setattr(wire, name, atheris.instrument_func(getattr(wire, name)))
    Vocabulary.match = atheris.instrument_func(Vocabulary.match)  # type: ignore[method-assign]
    count: Counter[str] = Counter()

    def one(data: bytes) -> None:
        frames = unpacked(data)
        count["messages"] += 1
        count["frames"] += len(frames)
        count["taken"] += tried(frames)
        if count["messages"] % 1000 == 0:  # libFuzzer does not return
            print(*(f"{name} {number}" for name, number in count.items()), flush=True)

    def mutate(data: bytes, most: int, seed: int) -> bytes:
        chance = random.Random(seed)
        if chance.random() < 0.2:
            raw: bytes = atheris.Mutate(data, most)
            return raw
        return packed(mutated(unpacked(data), chance))[:most]

    atheris.Setup([sys.argv[0], *arguments], one, custom_mutator=mutate)
    atheris.Fuzz()


# ---- peers in the middle of a run

PEERS = 4
ATTACKER = PEERS
"""The fifth peer of the graph."""
ATTACKS = ("as a neighbour", "as an answer", "as strangers")
"""Who sends frames, and how."""
NEVER = 1 << 40
LIVE: dict[str, Any] = {
    "name": "fuzzed",
    "seed": 3,
    "rounds": 40,
    "peers": PEERS + 1,
    "graph": "complete",
    "data": {
        "dataset": "digits",
        "partition": {"name": "clusters", "clusters": 2, "per_class": 8, "test_per_class": 5},
    },
    "models": "tiny-mixer",
    "algorithm": {"name": "mapl", "batch": 16, "warmup": 4},
    "joins_at": {ATTACKER: 1},
    "transport": {"deadline": 300, "give_up": 60, "max_message": 1 << 22},
    "device": "cpu",
}


@dataclass
class Outcome:
    """Of one run under attack."""

    frames: Counter[str] = field(default_factory=Counter)
    """Sent, by ATTACKS."""
    seconds: float = 0.0
    memory: dict[int, list[int]] = field(default_factory=dict)
    """Bytes (RSS) of each peer when the attack began, every half second, and last."""
    codes: list[int | None] = field(default_factory=list)
    differing: list[int] = field(default_factory=list)
    """Peers that ended with other bits than in the simulation."""
    refused: int = 0
    """Lines about refusals in the logs."""


def live_run(rounds: int = LIVE["rounds"]) -> Run:
    run = from_dict({**LIVE, "rounds": rounds})
    run.file.joins_at[ATTACKER] = NEVER  # which no run file may say
    return run


def expected_of(run: Run, root: Path) -> RunFolder:
    """What `p2pfl simulate` ends with; in a process of its own, since others are forked from this one."""
    folder = _prepared(run, root)
    process = multiprocessing.get_context("fork").Process(target=simulate, args=(run, folder))
    process.start()
    process.join()
    assert process.exitcode == 0
    return folder


def _prepared(run: Run, root: Path) -> RunFolder:
    folder = RunFolder.create(root, range(run.peers))
    folder.write_about({"id": RUN_ID})
    folder.run_file.write_text(run.to_yaml())
    return folder


def attacked(run: Run, root: Path, expected: RunFolder, seed: int) -> Outcome:
    """One run with attackers. No peer computes before all of them are at work."""
    folder, data = _prepared(run, root), load_data(run)
    count, place = slots_on(run.file, torch.device("cpu"))
    slots = [HostSlot(folder.slots, count, place) for _ in range(count)]
    for slot in slots:
        asyncio.run(slot.acquire())
    fork = multiprocessing.get_context("fork")
    processes = [fork.Process(target=_be_peer, args=(folder, me, run, data)) for me in range(PEERS)]
    outcome = Outcome()
    chance = random.Random(seed)
    began = time.monotonic()
    for process in processes:
        process.start()
    neighbor = Neighbor(folder, run, chance)
    strangers = Strangers(folder, chance)
    next_look = 0.0
    try:
        while any(process.is_alive() for process in processes):
            neighbor.attack(outcome.frames)
            strangers.attack(outcome.frames)
            if slots and all(outcome.frames[name] for name in ATTACKS):
                for slot in slots:
                    slot.release()
                slots.clear()
            if time.monotonic() > next_look:
                next_look = time.monotonic() + 0.5
                for me, process in enumerate(processes):
                    with suppress(psutil.Error):
                        memory = psutil.Process(process.pid).memory_info().rss
                        if memory:
                            outcome.memory.setdefault(me, []).append(memory)
    finally:
        neighbor.close()
        strangers.close()
        for process in processes:
            process.kill() if time.monotonic() - began > 600 else process.join()
    outcome.seconds = time.monotonic() - began
    outcome.codes = [process.exitcode for process in processes]
    for me in range(PEERS):
        mine, theirs = folder.peer(me).result(), expected.peer(me).result()
        assert theirs is not None
        if mine is None or (mine.digest, mine.rounds_done) != (theirs.digest, theirs.rounds_done):
            outcome.differing.append(me)
        log = folder.peer(me).log.read_text(encoding="utf-8")
        outcome.refused += len(re.findall(r"WARNING (?:dropped|refused)", log))
    return outcome


def _be_peer(folder: RunFolder, me: int, run: Run, data: Any) -> None:
    os._exit(run_peer(folder, me, run, data))


class Neighbor:
    """Has the right to speak to all peers, and says everything but a model that they would have to take."""

    def __init__(self, folder: RunFolder, run: Run, chance: random.Random) -> None:
        self.folder = folder
        self.chance = chance
        self.context = zmq.Context()
        self.dealers: dict[int, zmq.Socket[bytes]] = {}
        self.router = self.context.socket(zmq.ROUTER)
        self.router.bind("tcp://127.0.0.1:*")
        (folder.addresses / f"{ATTACKER:02d}").write_text(self.router.get_string(zmq.LAST_ENDPOINT))
        self.known: set[bytes] = set()
        self.digest = run.digest()

    def attack(self, count: Counter[str]) -> None:
        for peer in range(PEERS):
            if peer not in self.dealers:
                with suppress(OSError):
                    self._connect(peer, (self.folder.addresses / f"{peer:02d}").read_text())
                continue
            with suppress(zmq.Again):
                for _ in range(20):
                    frames = self._message()
                    self.dealers[peer].send_multipart(frames, zmq.NOBLOCK)
                    count["as a neighbour"] += len(frames)
        with suppress(zmq.Again):
            for _ in range(20):
                identity, header, *_ = self.router.recv_multipart(zmq.NOBLOCK)
                self._answer(identity, header, count)
        for identity in self.known:
            with suppress(zmq.Again):
                frames = mutated(encoded(self.chance.choice([Closed(), Welcome(3, 2)]), ATTACKER), self.chance)
                self.router.send_multipart([identity, *frames], zmq.NOBLOCK)
                count["as an answer"] += len(frames)

    def _connect(self, peer: int, address: str) -> None:
        dealer = self.context.socket(zmq.DEALER)
        dealer.set(zmq.IDENTITY, f"{ATTACKER}>{peer}".encode())
        dealer.connect(address)
        self.dealers[peer] = dealer

    def _message(self) -> list[bytes]:
        chance = self.chance
        number = chance.choice((0, 1, 3, chance.randrange(100), 1 << 40, chance.randrange(1 << 53)))
        if chance.random() < 0.2:  # valid, and a lie
            lies = [
                *(Hello(self.digest, *(number,) * 5), Hello(self.digest, 0, 0, 0, chance.randrange(100), number)),
                *(Hello("another", 0, 0, 0, 0, 0), Welcome(number, chance.randrange(100))),
                *(Durable(number), Durable(FOREVER), Hold(chance.random() < 0.5), Close(), Begun(), Listening()),
            ]
            return encoded(chance.choice(lies), ATTACKER, chance.randrange(60), number)
        return mutated(encoded(chance.choice(VALID), ATTACKER, chance.randrange(60), number), chance)

    def _answer(self, identity: bytes, header: bytes, count: Counter[str]) -> None:
        """Make its HELLO welcome: whom a peer has once known cannot end it with a refusal."""
        with suppress(ValueError, IndexError, msgpack.exceptions.UnpackException):
            _, _, kind, _, _, seq, *_ = msgpack.unpackb(header)
            if kind == "Hello":
                self.router.send_multipart([identity, *encoded(Welcome(0, -1), ATTACKER, 0, seq)])
                count["as an answer"] += 1
                self.known.add(identity)

    def close(self) -> None:
        self.context.destroy(linger=0)


class Strangers:
    """Open connections and send what may look like ZMTP: mutated, cut off, or well-formed with nonsense in it."""

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
            count["as strangers"] += len(pieces)
        while len(self.open) > 20:
            self.open.pop(self.chance.randrange(len(self.open))).close()

    def _pieces(self) -> list[bytes]:
        chance = self.chance
        mechanism = chance.choice((b"NULL", b"NULL", b"NULL", b"CURVE", b"PLAIN", b"GSSAPI", chance.randbytes(20)))
        opening = [b"\xff" + bytes(7) + b"\x01\x7f\x03\x01" + mechanism.ljust(20, b"\0") + bytes(32), self._ready()]
        how = chance.randrange(4)
        if how == 0:
            return [chance.randbytes(chance.randrange(200))]
        if how == 1:
            return [chance.randbytes(64) if chance.random() < 0.2 else piece for piece in mutated(opening, chance)]
        return opening + [self._frame() for _ in range(chance.randrange(100))]

    def _ready(self) -> bytes:
        identity = self.chance.choice((b"7>0", b"", b"0>0", b"x" * 255, b"\0bad", self.chance.randbytes(9)))
        metadata = b""
        for name, value in ((b"Socket-Type", self.chance.choice((b"DEALER", b"PUB"))), (b"Identity", identity)):
            metadata += bytes([len(name)]) + name + struct.pack(">I", len(value)) + value
        return bytes([4, 6 + len(metadata)]) + b"\x05READY" + metadata if len(metadata) < 250 else b"\x04\xff"

    def _frame(self) -> bytes:
        """A frame or command of ZMTP, its length true or not."""
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


@main.command()
@click.option("--seconds", default=60, show_default=True, help="Begin no further run after so many seconds.")
@click.option("--rounds", default=LIVE["rounds"], show_default=True, help="Of each run.")
@click.option(
    "--seed", default=1, show_default=True, help="Of the first run's attackers; the next one's is one more."
)
def live(seconds: int, rounds: int, seed: int) -> None:
    """Peers in the middle of a run."""
    torch.set_num_threads(1)
    run = live_run(rounds)
    click.echo("| seed | seconds | as a neighbour | as an answer | as strangers | frames/s | refusals in the logs |"
               " RSS at first, MB | at most | at last | same bits |")  # fmt: skip
    click.echo("|" + "---|" * 11)
    bad, total, took = 0, 0, 0.0
    with tempfile.TemporaryDirectory() as root:
        expected = expected_of(run, Path(root) / "simulated")
        while took < seconds:
            found = attacked(run, Path(root) / f"{seed}", expected, seed)
            total, took = total + sum(found.frames.values()), took + found.seconds
            good = not found.differing and found.codes == [0] * PEERS
            bad += not good
            counts = [found.frames[name] for name in ATTACKS]
            memory = [
                [of(values) for values in found.memory.values()] for of in (lambda v: v[0], max, lambda v: v[-1])
            ]
            numbers = [*counts, round(sum(counts) / found.seconds), found.refused, *(max(m) >> 20 for m in memory)]
            row = [seed, f"{found.seconds:.0f}", *numbers, "yes" if good else json.dumps(found.differing)]
            click.echo("| " + " | ".join(map(str, row)) + " |")
            if not good:
                click.echo("\n".join(_ends_of_logs(Path(root) / f"{seed}")))
            seed += 1
    click.echo(f"\n{total} frames, {took:.0f} s, {total / took:.0f} frames/s; {bad} runs with findings")
    if bad:
        raise click.ClickException(f"{bad} runs did not end as they should")


def _ends_of_logs(root: Path) -> list[str]:
    return [f"{log}: {line}" for log in root.glob("peers/*/peer.log") for line in log.read_text().splitlines()[-8:]]


if __name__ == "__main__":
    main()
