"""Valid messages, random mutations of them, and the check that the decoder must pass."""

from __future__ import annotations

import random
import struct
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import msgpack
import torch
from torch import Tensor

from p2pfl.errors import WireError
from p2pfl.messaging import control, wire
from p2pfl.messaging.control import BEFORE, TYPES, Entry, Hello, Id, Nothing, Refused, Start, Want
from p2pfl.messaging.directions import Begin
from p2pfl.messaging.schema import Body, Layout, MessageSchema
from p2pfl.tensors import digest

RUN_ID = "0123456789abcdef"


@dataclass(frozen=True)
class Words(Body):
    """A body with a field of every type."""

    number: int = 3
    real: float = 0.5
    flag: bool = True
    text: str = "ä"
    ids: tuple[int, ...] = (1, 2)
    single: Tensor = field(default_factory=lambda: torch.arange(4.0))
    named: Mapping[str, Tensor] = field(default_factory=lambda: {"w": torch.ones(2, 3), "b": torch.zeros(2)})


@dataclass(frozen=True)
class Loose(Body):
    """A body whose tensor may have almost any size."""

    x: Tensor


CONTROL: list[control.Control] = [
    Hello("d", "boot", "token-1"),
    Start(5, 0, 0),
    Nothing(5, 1),
    Want(5, Id(1, 2), 1, 1 << 20, True, True),
    Refused("no"),
    Entry(5, Id(1, 2), Id(1, 1), 1 << 20, 1 << 10),
    Entry(5, Id(1, 2), Id(1, 1), 1 << 20, 0, 3, 64),
]
WORDS = Words(named={"w": torch.ones(2, 3), "b": torch.zeros(2).bool()})
BODIES: list[Body] = [WORDS, Loose(torch.ones(2, 0, 3)), Loose(torch.ones(1, 2, 3)), Begin((0, 1))]
VALID: list[Body | control.Control] = [*BODIES, *CONTROL]
LOOSE = Layout.of(Loose(torch.ones(0, 0, 0)), free={"x": dict.fromkeys(range(3), 1 << 20)})
SCHEMA = MessageSchema([Layout.of(WORDS), Layout.of(BODIES[-1]), LOOSE])
ENVELOPE = len(control.pack(CONTROL[-1], RUN_ID))
"""Bytes of the envelope of an Entry."""
ODD_NUMBERS = [0, 1, 2, 255, 1 << 31, 1 << 47, (1 << 53) - 1, 1 << 53, (1 << 64) - 1]
ODD_VALUES: list[Any] = [
    *(*ODD_NUMBERS, None, True, -1, -(1 << 63), 0.5),
    *(float("nan"), "", "x", "\0", "Words", "float32", "bool", b"", b"x"),
    *([], [[]], [1 << 48], {}, {"x": 1}, {"": []}),
    *([["x", None, "float32", [0, 1 << 47, 1 << 47]]], ["x", None, "bool", [3]], "é" * 300, [1] * 300),
]


def encode_valid(message: Body | control.Control, epoch: int = 5, id: Id = Id(0, 1)) -> list[bytes]:
    if not isinstance(message, Body):
        return [control.pack(message, RUN_ID)]
    encoded = wire.encode(message)
    entry = Entry(epoch, id, BEFORE, encoded.size, header=len(encoded.header))
    frame = control.pack(entry, RUN_ID, encoded.header)
    return [frame, b"".join(encoded.parts())] if encoded.size else [frame]


def mutate(frames: Sequence[bytes], chance: random.Random) -> list[bytes]:
    """Return the message with a few changes to bytes, header entries or frames."""
    mutated = list(frames)
    for _ in range(chance.choice((1, 1, 1, 2, 3, 5))):
        mutation = chance.randrange(8)
        at = chance.randrange(len(mutated)) if mutated else 0
        if mutation == 0:
            mutated.insert(at, chance.choice((b"", b"x", chance.randbytes(chance.randrange(64)))))
        elif not mutated:
            continue
        elif mutation == 1:
            del mutated[at]
        elif mutation == 2:
            other = chance.randrange(len(mutated))
            mutated[at], mutated[other] = mutated[other], mutated[at]
        elif mutation <= 5:
            envelope, header = mutated[0][:ENVELOPE], mutated[0][ENVELOPE:]
            if header and chance.random() < 0.7:
                mutated[0] = envelope + _replace_entry(header, chance)
            else:
                mutated[0] = _replace_number(envelope, chance) + header
        else:
            frame = bytearray(mutated[at])
            offset = chance.randrange(len(frame) + 1)
            if mutation == 6:
                frame[offset : offset + chance.randrange(5)] = chance.randbytes(chance.randrange(5))
            elif frame:
                frame[offset % len(frame)] ^= 1 << chance.randrange(8)
            mutated[at] = bytes(frame)
    return mutated or [b""]


def _replace_number(envelope: bytes, chance: random.Random) -> bytes:
    """Replace one number of an envelope, or its type."""
    if chance.random() < 0.1:
        return envelope[:19] + bytes([chance.randrange(8)]) + envelope[20:]
    at = 20 + 8 * chance.randrange(max(1, (len(envelope) - 20) // 8))
    return envelope[:at] + struct.pack("<Q", chance.choice(ODD_NUMBERS)) + envelope[at + 8 :]


def _replace_entry(header: bytes, chance: random.Random) -> bytes:
    """Replace one value in a header, at any depth."""
    try:
        content = msgpack.unpackb(header, strict_map_key=False)
    except (ValueError, TypeError, msgpack.exceptions.UnpackException):
        return header
    inner = content
    while isinstance(inner, list | dict) and inner:
        key = chance.choice(list(inner) if isinstance(inner, dict) else range(len(inner)))
        if not isinstance(inner[key], list | dict) or not inner[key] or chance.random() < 0.3:
            inner[key] = chance.choice(ODD_VALUES)
            break
        inner = inner[key]
    with suppress(ValueError, OverflowError, TypeError):
        packed: bytes = msgpack.packb(content, use_bin_type=True)
        return packed
    return header


def is_accepted(frames: Sequence[bytes]) -> bool:
    """Return whether the decoder accepts the message.

    Raises:
        AssertionError: the message is not bit-identical after encoding and decoding it again.
        Exception: the decoder raised anything but a WireError.
    """
    try:
        message, _, rest = control.unpack(frames, RUN_ID, TYPES)
        assert control.unpack([control.pack(message, RUN_ID)], RUN_ID, (type(message),))[0] == message
        if not isinstance(message, Entry) or message.offset or message.segment:
            return True
        plan = wire.check(rest[: message.header], SCHEMA)
        stored = b"".join([rest[message.header :], *frames[1:]])
        if len(stored) != plan.size:
            return False
        found = _message(plan, stored)
    except WireError:
        return False
    again = wire.encode(found.body, found.plan.count)
    other = _message(wire.check(again.header, SCHEMA), b"".join(again.parts()))
    assert (found.plan.payload, found.plan.size, found.finite) == (other.plan.payload, other.plan.size, other.finite)
    assert digest(vars(found.body)) == digest(vars(other.body)), frames
    return True


def _message(plan: wire.Plan, stored: bytes) -> wire.Message:
    return plan.message(0, 1, torch.frombuffer(bytearray(stored), dtype=torch.uint8) if stored else None)


def pack(frames: Sequence[bytes]) -> bytes:
    """Join a message into one byte string, each frame after its length, as libFuzzer needs it."""
    return b"".join(struct.pack("<H", len(frame)) + frame for frame in frames if len(frame) < 1 << 16)


def unpack(data: bytes) -> list[bytes]:
    """Invert ``pack``, for any bytes."""
    frames = []
    while len(data) >= 2:
        (length,) = struct.unpack_from("<H", data)
        frames.append(data[2 : 2 + length])
        data = data[2 + length :]
    return frames
