"""Envelopes: what the two ends of an edge say to each other survives a round trip, and nothing else is accepted."""

from __future__ import annotations

import struct

import msgpack
import pytest

from p2pfl.errors import Malformed, WireError, WrongRun, WrongVersion
from p2pfl.messaging.control import (
    BEFORE,
    FOREVER,
    FROM_WRITER,
    LIMIT,
    TYPES,
    VERSION,
    Control,
    Entry,
    Hello,
    Id,
    Nothing,
    Refused,
    Start,
    Want,
    pack,
    unpack,
)
from tests.bodies import RUN_ID

ENTRY = Entry(7, Id(4, 2), BEFORE, 1 << 40, 1 << 20, 3, 128, 2)
EXAMPLES: list[Control] = [
    Hello("digest", "boot", "token-1"),
    Start(0, (1 << 53) - 1, 3),
    ENTRY,
    Nothing(1, 0),
    Want(7, Id(FOREVER, 0), 3, 1 << 30, True, False),
    Refused("another run file\n"),
]


def unpacked(frames: list[bytes], run: str | None = RUN_ID) -> tuple[Control, str, bytes]:
    control, found, rest = unpack(frames, run, TYPES)
    return control, found, bytes(rest)


def rejected(envelope: bytes, frames: int = 0) -> WireError:
    with pytest.raises(WireError) as info:
        unpack([envelope, *[b""] * frames], RUN_ID, TYPES)
    return info.value


@pytest.mark.parametrize("control", EXAMPLES, ids=lambda control: type(control).__name__)
def test_every_type_survives_a_round_trip_and_is_accepted_from_one_side_only(control: Control) -> None:
    frames = [pack(control, RUN_ID)]
    assert unpacked(frames) == (control, RUN_ID, b"")
    assert type(unpack(frames, RUN_ID, TYPES)[0]) is type(control)
    assert (type(control) in FROM_WRITER) != isinstance(control, Want | Refused)
    with pytest.raises(Malformed, match=f"^expected one of .*, got {type(control).__name__}$"):
        unpack(frames, RUN_ID, tuple(other for other in TYPES if other is not type(control)))


def test_an_envelope_is_laid_out_as_the_page_on_the_wire_says() -> None:
    start = b"p2" + bytes([VERSION]) + RUN_ID.encode()
    numbers = (7, 4 + 1, 2, 0, 0, 1 << 40, 1 << 20, 3, 128, 2)
    assert pack(ENTRY, RUN_ID, b"hd", b"body") == start + b"\x02" + struct.pack("<10Q", *numbers) + b"hdbody"
    assert pack(Hello("d", "bö", "", 9), RUN_ID) == (
        start + b"\x00" + struct.pack("<Q", 9) + b"\x01\x00d" + b"\x03\x00b\xc3\xb6" + b"\x00\x00"
    )


def test_only_an_entry_is_followed_by_its_content_in_its_frame_and_at_most_one_more() -> None:
    assert unpacked([pack(ENTRY, RUN_ID, b"hd", b"body")]) == (ENTRY, RUN_ID, b"hdbody")
    unpack([pack(ENTRY, RUN_ID, b"hd"), b"chunk"], RUN_ID, TYPES)
    assert str(rejected(pack(ENTRY, RUN_ID), frames=2)) == "2 frames follow the envelope of Entry"
    assert str(rejected(pack(EXAMPLES[0], RUN_ID), frames=1)) == "1 frames follow the envelope of Hello"
    assert str(rejected(pack(EXAMPLES[4], RUN_ID, b"x"))) == "1 bytes follow the envelope of Want"
    with pytest.raises(Malformed, match="no frames"):
        unpack([], RUN_ID, TYPES)


def test_another_version_is_recognized_whatever_follows() -> None:
    for version in (VERSION + 1, VERSION - 1):
        assert type(rejected(b"p2" + bytes([version]) + bytes(17))) is WrongVersion
    text = f"protocol version 3; this peer uses {VERSION}; install the same version of p2pfl"
    assert str(rejected(b"p2\x03" + b"x" * 100)) == text
    for other in (b"", b"p2", b"P2" + bytes(100), msgpack.packb([4, RUN_ID, "Hello", "", "", "", 0])):
        assert str(rejected(other)) == f"{len(other)} bytes that do not begin with an envelope"


def test_another_run_is_rejected_unless_any_run_is_accepted() -> None:
    frames = [pack(Refused("no"), "fedcba9876543210")]
    with pytest.raises(WrongRun, match="message of run 'fedcba9876543210'; this peer is in run"):
        unpack(frames, RUN_ID, TYPES)
    assert unpacked(frames, None) == (Refused("no"), "fedcba9876543210", b"")


@pytest.mark.parametrize("control", EXAMPLES, ids=lambda control: type(control).__name__)
def test_an_envelope_that_is_cut_off_is_malformed(control: Control) -> None:
    envelope = pack(control, RUN_ID)
    for length in range(1, len(envelope)):
        assert type(rejected(envelope[:length])) is Malformed


@pytest.mark.parametrize("number", range(10))
def test_a_number_that_some_languages_cannot_represent_is_malformed(number: int) -> None:
    at = 20 + 8 * number
    for value in (LIMIT, (1 << 64) - 1):
        envelope = pack(ENTRY, RUN_ID)
        error = rejected(envelope[:at] + struct.pack("<Q", value) + envelope[at + 8 :])
        assert type(error) is Malformed
        assert str(error) == f"numbers in Entry must be less than 2^53, got {value}"


def test_an_unknown_type_and_a_text_that_is_not_utf8_are_malformed_and_errors_are_short() -> None:
    start = b"p2" + bytes([VERSION]) + RUN_ID.encode()
    assert str(rejected(start + bytes([len(TYPES)]) + bytes(100))).endswith(f"Refused, got type {len(TYPES)}")
    assert str(rejected(start + b"\x05" + b"\x02\x00\xff\xff")) == "a text in Refused is not UTF-8"
    for envelope in (b"\xff" * 5000, start[:3] + b"\n" * 16 + b"\x05" * 5000):
        text = str(rejected(envelope))
        assert len(text) < 300
        assert text.isprintable()
