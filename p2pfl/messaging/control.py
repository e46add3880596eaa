"""The messages between the two ends of an edge: entries of the writer's journal, and the reader's requests.

    writer ── Hello, Start, Entry, Nothing ──▶ reader          one ZeroMQ multipart message each
           ◀────── Want, Refused ──────────

    message  = envelope *frame
    envelope = msgpack([version, run, type, *fields])            the fields of one of the classes below, in order
    frames   = header and the first chunk of the body, or the next chunk, with an Entry; otherwise none

A message with another form, version or run raises WireError. Integers are 0 to 2^53 - 1, except in ``Id``, whose
round may also be BEFORE.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple, cast, get_type_hints

import msgpack

from p2pfl.errors import Malformed, WrongRun, WrongVersion
from p2pfl.messaging.schema import shown
from p2pfl.messaging.wire import Buffer, unpack_list

VERSION = 4
MAX_ENVELOPE = 1 << 12
"""Bytes."""
CHUNK = 1 << 20
"""Bytes of each chunk of a body but the last: a frame must not take longer than the heartbeat timeout."""
FOREVER = 1 << 40
"""The round of the last Begin of a peer that leaves for good: after every other round."""


class Id(NamedTuple):
    """Identity of an entry: its round, and its number in the round. Begin(t) is (t, 0)."""

    t: int
    number: int

    @property
    def next(self) -> Id:
        return Id(self.t, self.number + 1)


BEFORE = Id(-1, 0)
"""Before every entry."""


@dataclass(frozen=True)
class Hello:
    """Opens a connection; the reader answers with a Want of a new epoch, or with Refused.

    Attributes:
        config_hash: SHA-256 of the settings that determine the result, and of each plug-in; equal on both sides.
        boot: the boot id of the writer's host.
        token: name of a file in the writer's journal folder: a reader that can open it can read bodies there.
        number: drawn for each connection. Want repeats it, which shows that the connection leads to the reader.
    """

    config_hash: str
    boot: str
    token: str
    number: int = 0


@dataclass(frozen=True)
class Start:
    """The writer begins the epoch that the reader asked for.

    Attributes:
        begins: entries of rounds before this one were dropped, and can no longer be sent.
        nothing: the round of the last Nothing, plus 1; 0 if there was none.
    """

    epoch: int
    begins: int
    nothing: int


@dataclass(frozen=True)
class Entry:
    """A chunk of an entry's body, or a reference to all of it.

    Attributes:
        previous: the last entry before this one that the reader must have; BEFORE if there is none.
        size: bytes of the stored body.
        offset: where in the body the chunk begins; the header precedes the chunk at 0.
        segment: number of the journal's segment that holds the body; 0: the body follows in chunks.
        at: where in the segment the body begins.
    """

    epoch: int
    id: Id
    previous: Id
    size: int
    offset: int = 0
    segment: int = 0
    at: int = 0


@dataclass(frozen=True)
class Nothing:
    """In round ``t``, the writer sends the reader nothing: they disagree on whether the reader receives from it."""

    epoch: int
    t: int


@dataclass(frozen=True)
class Want:
    """What the reader asks for: a full statement, so that losing or repeating it is harmless.

    Attributes:
        epoch: a number that the reader has drawn; a new one asks the writer to begin at ``next``.
        next: the first entry that the reader does not have.
        durable: entries of rounds before this one will never be needed again: the reader's checkpoint before the
            last one contains them.
        window: the bytes (``wire.cost``) that the writer may send in this epoch.
        idle: the reader's algorithm has taken everything before ``next``: one entry of any size is allowed.
        references: the reader can open the writer's journal.
        hello: number of the writer's last Hello.
    """

    epoch: int
    next: Id
    durable: int
    window: int
    idle: bool
    references: bool
    hello: int = 0


@dataclass(frozen=True)
class Refused:
    """The reader rejects the connection."""

    reason: str


Control = Hello | Start | Entry | Nothing | Want | Refused

FROM_WRITER: tuple[type[Control], ...] = (Hello, Start, Entry, Nothing)
FROM_READER: tuple[type[Control], ...] = (Want, Refused)
_TYPES: dict[str, type[Control]] = {kind.__name__: kind for kind in (*FROM_WRITER, *FROM_READER)}


def pack(control: Control, run: str) -> bytes:
    """Return the envelope."""
    fields = [getattr(control, name) for name, _ in _fields(type(control).__name__)]
    envelope: bytes = msgpack.packb([VERSION, run, type(control).__name__, *fields])
    return envelope


def unpack(frames: Sequence[Buffer], run: str | None, allowed: tuple[type[Control], ...]) -> tuple[Control, str]:
    """Decode an envelope and return it with the run that it names.

    Args:
        frames: the whole message.
        run: the only run accepted; None accepts any.
        allowed: the types accepted.
    """
    if not frames:
        raise Malformed("message has no frames")
    envelope = unpack_list(frames[0], MAX_ENVELOPE, "envelope")
    version, found_run, name, *values = [*envelope, None, None, None][: max(3, len(envelope))]
    if type(version) is not int or version != VERSION:
        raise WrongVersion(
            f"protocol version {shown(version)}; this peer uses {VERSION}; install the same version of p2pfl"
        )
    if type(found_run) is not str:
        raise Malformed("run id is not a string")
    if run is not None and found_run != run:
        raise WrongRun(f"message of run {shown(found_run)}; this peer is in run {run!r}")
    kind = _TYPES.get(name) if type(name) is str else None
    if kind is None or kind not in allowed:
        raise Malformed(f"expected one of {', '.join(each.__name__ for each in allowed)}, got {shown(name)}")
    fields = _fields(name)
    if len(values) != len(fields):
        raise Malformed(f"{name} must have {len(fields)} fields, got {len(values)}")
    checked = []
    for (field, what), value in zip(fields, values, strict=True):
        try:
            checked.append(_read(what, value))
        except ValueError as error:
            raise Malformed(f"{name}.{field} {error}") from None
    frames_allowed = range(3) if kind is Entry else range(1)
    if len(frames) - 1 not in frames_allowed:
        raise Malformed(f"{len(frames) - 1} frames follow the envelope of {name}")
    return kind(*checked), found_run


@cache
def _fields(name: str) -> list[tuple[str, type]]:
    return list(get_type_hints(_TYPES[name]).items())


def _read(what: type, value: object) -> Any:
    """Return a field's value. Raises ValueError."""
    if what is Id:
        if type(value) is not list or len(value) != 2:
            raise ValueError(f"must be [round, number], got {shown(value)}")
        return BEFORE if value == [*BEFORE] else Id(_read(int, value[0]), _read(int, value[1]))
    if type(value) is not what:
        raise ValueError(f"must be {what.__name__}, got {shown(value)}")
    if what is int and not 0 <= cast(int, value) < 1 << 53:
        raise ValueError(f"must be from 0 to 2^53 - 1, got {shown(value)}")
    return value
