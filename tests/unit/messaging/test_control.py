"""Envelopes: what the two ends of an edge say to each other survives a round trip, and nothing else is accepted."""

from __future__ import annotations

from typing import Any

import msgpack
import pytest

from p2pfl.errors import Malformed, WireError, WrongRun, WrongVersion
from p2pfl.messaging.control import (
    BEFORE,
    FOREVER,
    FROM_READER,
    FROM_WRITER,
    MAX_ENVELOPE,
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

ALL = (*FROM_WRITER, *FROM_READER)
ENTRY = Entry(7, Id(4, 2), BEFORE, 1 << 40, 1 << 20, 3, 128)
EXAMPLES: list[Control] = [
    Hello("digest", "boot", "token-1"),
    Start(0, (1 << 53) - 1, 3),
    ENTRY,
    Nothing(1, 0),
    Want(7, Id(FOREVER, 0), 3, 1 << 30, True, False),
    Refused("another run file\n"),
]


def rejected(envelope: Any, frames: int = 0) -> WireError:
    raw = envelope if isinstance(envelope, bytes) else msgpack.packb(envelope)
    with pytest.raises(WireError) as info:
        unpack([raw, *[b""] * frames], RUN_ID, ALL)
    return info.value


def envelope_of(control: Control) -> list[Any]:
    values: list[Any] = msgpack.unpackb(pack(control, RUN_ID))
    return values


@pytest.mark.parametrize("control", EXAMPLES, ids=lambda control: type(control).__name__)
def test_every_type_survives_a_round_trip_and_is_accepted_from_one_side_only(control: Control) -> None:
    frames = [pack(control, RUN_ID)]
    assert unpack(frames, RUN_ID, ALL) == (control, RUN_ID)
    assert type(unpack(frames, RUN_ID, ALL)[0]) is type(control)
    assert (type(control) in FROM_WRITER) != (type(control) in FROM_READER)
    with pytest.raises(Malformed, match=f"^expected one of .*, got '{type(control).__name__}'$"):
        unpack(frames, RUN_ID, tuple(other for other in ALL if other is not type(control)))


def test_an_entry_may_have_a_header_and_a_chunk_and_nothing_else_has_frames() -> None:
    for frames in range(3):
        unpack([pack(ENTRY, RUN_ID), *[b"x"] * frames], RUN_ID, ALL)
    assert str(rejected(pack(ENTRY, RUN_ID), frames=3)) == "3 frames follow the envelope of Entry"
    assert str(rejected(pack(EXAMPLES[0], RUN_ID), frames=1)) == "1 frames follow the envelope of Hello"
    with pytest.raises(Malformed, match="no frames"):
        unpack([], RUN_ID, ALL)


def test_another_version_is_recognized_in_an_envelope_of_another_form() -> None:
    for envelope in ([VERSION + 1], [VERSION - 1, RUN_ID, "Hello", 1, 2, 3, 4], [], [None], [True, RUN_ID], ["4"]):
        assert type(rejected(envelope)) is WrongVersion
    assert str(rejected([3])) == f"protocol version 3; this peer uses {VERSION}; install the same version of p2pfl"


def test_another_run_is_rejected_unless_any_run_is_accepted() -> None:
    frames = [pack(Refused("no"), "fedcba9876543210")]
    with pytest.raises(WrongRun, match="message of run 'fedcba9876543210'; this peer is in run"):
        unpack(frames, RUN_ID, ALL)
    assert unpack(frames, None, ALL) == (Refused("no"), "fedcba9876543210")


@pytest.mark.parametrize("position", range(3, 10))
@pytest.mark.parametrize("value", [-1, 1 << 53, 1.0, "1", True, None, b"", [1], [1, -1], [1, 2, 3], [-1, 1], {}])
def test_a_field_of_another_type_is_malformed_and_named(position: int, value: Any) -> None:
    envelope = envelope_of(ENTRY)
    envelope[position] = value
    error = rejected(envelope)
    assert type(error) is Malformed
    assert str(error).startswith("Entry.")


@pytest.mark.parametrize(
    "envelope",
    [
        *(b"", b"\xc1", {}, None, [VERSION], [VERSION, RUN_ID], [VERSION, None, "Hello", "", "", ""]),
        *([VERSION, RUN_ID, name, "", "", ""] for name in (None, ["Hello"], "Gossip")),
        *([VERSION, RUN_ID, "Hello", *fields] for fields in (["", ""], [""] * 4)),
    ],
    ids=repr,
)
def test_an_envelope_of_another_form_is_malformed(envelope: Any) -> None:
    assert type(rejected(envelope)) is Malformed


def test_a_long_envelope_is_not_parsed_and_errors_are_short(monkeypatch: pytest.MonkeyPatch) -> None:
    long = "x\n" * 1000
    for position in range(4):
        envelope = envelope_of(EXAMPLES[-1])
        envelope[position] = [long] if position == 3 else long
        text = str(rejected(envelope))
        assert len(text) < 300
        assert text.isprintable()
    monkeypatch.setattr(msgpack, "unpackb", lambda *args, **kwargs: pytest.fail("parsed"))
    assert "at most 4096 are allowed" in str(rejected(bytes(MAX_ENVELOPE + 1)))
