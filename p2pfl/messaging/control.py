"""The messages between the two ends of an edge: entries of the writer's journal, and the reader's requests.

    writer ── Hello, Start, Entry, Nothing ──▶ reader          one ZeroMQ message each
           ◀────── Want, Refused ──────────

    message  = frame *chunk                                      chunk: with an Entry only, unless it is inline
    frame    = envelope [header [chunk]]                         header, inline chunk: with an Entry only
    envelope = "p2" version run type *number *text
    version  = uint8
    run      = 16 bytes of ASCII
    type     = uint8                                             position in ``TYPES``
    number   = uint64 little-endian                              each field of the class below that is not a text; an
                                                                 Id is two: its round plus 1, and its number
    text     = uint16 little-endian length, then UTF-8           each text field of the class

A message with another form, version or run raises WireError. Numbers are 0 to 2^53 - 1.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from struct import Struct
from typing import Any, NamedTuple, get_type_hints

from p2pfl.errors import Malformed, WrongRun, WrongVersion
from p2pfl.messaging.schema import shown
from p2pfl.messaging.wire import Buffer

MAGIC = b"p2"
VERSION = 6
CHUNK = 1 << 20
"""Bytes of each chunk of a body but the last: a frame must not take longer than the heartbeat timeout."""
INLINE = 1 << 14
"""Bytes up to which a chunk follows in the frame of its envelope: one frame costs less than two, a copy less yet."""
LIMIT = 1 << 53
"""Numbers are smaller: every language can represent them."""
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


class Hello(NamedTuple):
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


class Start(NamedTuple):
    """The writer begins the epoch that the reader asked for.

    Attributes:
        begins: entries of rounds before this one were dropped, and can no longer be sent.
        nothing: the round of the last Nothing, plus 1; 0 if there was none.
    """

    epoch: int
    begins: int
    nothing: int


class Entry(NamedTuple):
    """A chunk of an entry's body, or a reference to all of it.

    Attributes:
        previous: the last entry before this one that the reader must have; BEFORE if there is none.
        size: bytes of the stored body.
        offset: where in the body the chunk begins; the header precedes the chunk at 0.
        segment: number of the journal's segment that holds the body; 0: the body follows in chunks.
        at: where in the segment the body begins.
        header: bytes of the header that follows.
    """

    epoch: int
    id: Id
    previous: Id
    size: int
    offset: int = 0
    segment: int = 0
    at: int = 0
    header: int = 0


class Nothing(NamedTuple):
    """In round ``t``, the writer sends the reader nothing: they disagree on whether the reader receives from it."""

    epoch: int
    t: int


class Want(NamedTuple):
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
        used: the reader has used entries of rounds before this one, in this process or an earlier one, and must find
            them again until they are durable, even those from ``next`` on.
    """

    epoch: int
    next: Id
    durable: int
    window: int
    idle: bool
    references: bool
    hello: int = 0
    used: int = 0


class Refused(NamedTuple):
    """The reader rejects the connection."""

    reason: str


Control = Hello | Start | Entry | Nothing | Want | Refused

FROM_WRITER: tuple[type[Control], ...] = (Hello, Start, Entry, Nothing)
TYPES = (*FROM_WRITER, Want, Refused)

_START = Struct("<2sB16sB")
_LENGTH = Struct("<H")


class _Form(NamedTuple):
    """How the fields of a type are packed."""

    kind: type[Control]
    numbers: Struct
    """Of the start of the envelope and the numbers."""
    kinds: tuple[type, ...]

    @classmethod
    def of(cls, kind: type[Control]) -> _Form:
        kinds = tuple(get_type_hints(kind).values())
        return cls(kind, Struct(_START.format + "".join({Id: "QQ", str: ""}.get(each, "Q") for each in kinds)), kinds)


_FORMS = [_Form.of(kind) for kind in TYPES]
_CODES = {kind: code for code, kind in enumerate(TYPES)}


def pack(control: Control, run: str, *content: Buffer) -> bytes:
    """Return the first frame of a message: the envelope, and what follows it in this frame."""
    code = _CODES[type(control)]
    texts: list[bytes] = []
    if isinstance(control, Entry):  # not in the loop below: most messages are one
        epoch, (t, number), (before, last), *others = control
        numbers = [epoch, t + 1, number, before + 1, last, *others]
    else:
        numbers = []
        for value in control:
            if isinstance(value, Id):
                numbers += (value.t + 1, value.number)
            elif isinstance(value, str):
                text = value.encode()
                texts += (_LENGTH.pack(len(text)), text)
            else:
                numbers.append(value)
    return b"".join((_FORMS[code].numbers.pack(MAGIC, VERSION, run.encode(), code, *numbers), *texts, *content))


def unpack(
    frames: Sequence[Buffer], run: str | None, allowed: tuple[type[Control], ...]
) -> tuple[Control, str, memoryview]:
    """Decode the envelope of a message. Return it, the run that it names, and what follows it in its frame.

    Args:
        frames: the whole message.
        run: the only run accepted; None accepts any.
        allowed: the types accepted.
    """
    if not frames:
        raise Malformed("message has no frames")
    frame = memoryview(frames[0])
    if len(frame) < _START.size or frame[: len(MAGIC)] != MAGIC:
        raise Malformed(f"{len(frame)} bytes that do not begin with an envelope")
    _, version, found, code = _START.unpack_from(frame)
    if version != VERSION:
        raise WrongVersion(f"protocol version {version}; this peer uses {VERSION}; install the same version of p2pfl")
    found_run = found.rstrip(b"\0").decode("ascii", errors="replace")
    if run is not None and found_run != run:
        raise WrongRun(f"message of run {shown(found_run)}; this peer is in run {run!r}")
    form = _FORMS[code] if code < len(_FORMS) else None
    if form is None or form.kind not in allowed:
        name = form.kind.__name__ if form else f"type {code}"
        raise Malformed(f"expected one of {', '.join(each.__name__ for each in allowed)}, got {name}")
    kind, size = form.kind, form.numbers.size
    if len(frame) < size:
        raise Malformed(f"the envelope of {kind.__name__} has {len(frame)} bytes; expected {size}")
    numbers = form.numbers.unpack_from(frame)[4:]
    if max(numbers, default=0) >= LIMIT:
        raise Malformed(f"numbers in {kind.__name__} must be less than 2^53, got {max(numbers)}")
    rest = frame[size:]
    if kind is Entry:
        epoch, t, number, before, last, *others = numbers
        control: Control = Entry(epoch, Id(t - 1, number), Id(before - 1, last), *others)
    else:
        control, rest = _read(form, iter(numbers), rest)
        if rest:
            raise Malformed(f"{len(rest)} bytes follow the envelope of {kind.__name__}")
    if len(frames) > (2 if kind is Entry else 1):
        raise Malformed(f"{len(frames) - 1} frames follow the envelope of {kind.__name__}")
    return control, found_run, rest


def _read(form: _Form, numbers: Iterator[int], rest: memoryview) -> tuple[Control, memoryview]:
    """Decode the fields of an envelope, and return them with the rest of the frame."""
    values: list[Any] = []
    for what in form.kinds:
        if what is Id:
            values.append(Id(next(numbers) - 1, next(numbers)))
        elif what is not str:
            values.append(what(next(numbers)))
        else:
            ends = _LENGTH.size
            ends += _LENGTH.unpack_from(rest)[0] if len(rest) >= ends else 0
            if len(rest) < ends:
                raise Malformed(f"a text in {form.kind.__name__} is cut off")
            try:
                values.append(str(rest[_LENGTH.size : ends], "utf-8"))
            except UnicodeDecodeError:
                raise Malformed(f"a text in {form.kind.__name__} is not UTF-8") from None
            rest = rest[ends:]
    return form.kind(*values), rest
