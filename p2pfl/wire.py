"""The wire: how a body becomes frames and frames become a body again.

    message  = header *tensor                     one ZeroMQ multipart message, or one list of buffers
    header   = msgpack([version, run, kind, t, sender, seq, flags, count, fields, tensors])
    version  = 1
    run      = str                                id of the run; a message of another run is refused
    kind     = str                                name of the Body class
    t        = uint                               round that the message belongs to
    sender   = uint                               peer id
    seq      = uint                               0, 1, 2, … on each directed edge
    flags    = uint                               bit 0: STOP, «I do not hear you after round t»;
                                                    bit 1: ANYWAY, sent whoever hears whom
    count    = uint >= 1                          peers summed up in this body (allreduce); otherwise 1
    fields   = map of str to (int | float | bool | str | [*int])       the body's plain fields
    tensors  = [*[field, key | nil, dtype, [*uint]]]                    one entry per frame that follows
    tensor   = raw little-endian bytes, C order, exactly numel * itemsize of them

Rules that both sides keep:

1. Nothing is ever unpickled or evaluated. A header that is not exactly of this form is Malformed.
2. A receiver has a *vocabulary*: for each kind that it takes, the layouts (fields, dtypes, shapes) it may have.
   Everything is checked against it and against the frame lengths *before* any memory is allocated for a tensor.
3. ``encode`` copies tensors once, so that training may go on while libzmq still reads the frames; one encoded
   body serves all neighbours. ``decode`` copies each frame once into memory of torch's own: frames arrive at
   odd addresses, and CPU kernels may round differently at different alignments.
4. Headers carry no clock, process id, host name or address: equal runs send equal bytes.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import reprlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import msgpack
import numpy as np
import torch
from torch import Tensor

from p2pfl.errors import Malformed, Unexpected, WireError, WrongRun, WrongVersion
from p2pfl.tensors import is_finite as all_finite

VERSION = 2
STOP = 1
ANYWAY = 2
"""Flag: the sender does not hear the receiver after round ``t``."""

MAX_HEADER = 1 << 20
"""Bytes; a model with ten thousand named tensors fits."""

Buffer = bytes | bytearray | memoryview
Plain = int | float | bool | str | tuple[int, ...]

DTYPES: dict[str, torch.dtype] = {
    name: getattr(torch, name)
    for name in (
        *("float16", "bfloat16", "float32", "float64", "complex64", "complex128"),
        *("uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64", "bool"),
        *("float8_e4m3fn", "float8_e5m2"),
    )
}
_DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True)
class Body:
    """What one peer says to another. A subclass is a frozen dataclass, and **the class is the kind**.

    A field holds a Tensor, a dict of named Tensors, an int, float, bool or str, or a tuple of ints.
    """

    @classmethod
    def kind(cls) -> str:
        return cls.__name__


B = TypeVar("B", bound=Body)


@dataclass(frozen=True)
class TensorSpec:
    """What a tensor may be: its dtype, and its shape, in which None stands for any length."""

    dtype: torch.dtype
    shape: tuple[int | None, ...]

    def admits(self, dtype: torch.dtype, shape: Sequence[int]) -> bool:
        return (
            dtype == self.dtype
            and len(shape) == len(self.shape)
            and all(want is None or want == have for want, have in zip(self.shape, shape, strict=True))
        )

    def largest(self, most: int) -> int:
        """Bytes of the largest tensor of this sort, up to ``most``."""
        if None in self.shape:
            return most
        return min(most, math.prod(length or 0 for length in self.shape) * self.dtype.itemsize)

    def __str__(self) -> str:
        return f"{_DTYPE_NAMES[self.dtype]}[{', '.join('*' if n is None else str(n) for n in self.shape)}]"


@dataclass(frozen=True)
class Layout:
    """What a body of one kind may look like: the tensors by (field, key), the plain fields by type."""

    body: type[Body]
    tensors: Mapping[tuple[str, str | None], TensorSpec]
    plain: Mapping[str, type]
    maps: frozenset[str] = frozenset()
    """Fields that hold a dict of tensors, which may be empty."""
    values: Mapping[str, Plain] = dataclasses.field(default_factory=dict)
    """Plain fields that must have exactly this value."""

    @classmethod
    def of(cls, body: Body, free: Mapping[str, tuple[int, ...]] | None = None, fixed: Iterable[str] = ()) -> Layout:
        """The layout of bodies like ``body``. ``free`` names the dimensions of a field that may differ, ``fixed``
        the plain fields that may not: a name, say, that decides the shapes."""
        tensors, plain = _take_apart(body)
        specs = {}
        for (field, key), tensor in tensors.items():
            loose = (free or {}).get(field, ())
            shape = tuple(None if axis in loose else length for axis, length in enumerate(tensor.shape))
            specs[field, key] = TensorSpec(tensor.dtype, shape)
        types = {name: type(value) for name, value in plain.items()}
        return cls(type(body), specs, types, _maps(body), {name: plain[name] for name in fixed})


class Vocabulary:
    """The kinds that a peer takes, each with the layouts that it may have."""

    def __init__(self, layouts: Iterable[Layout]) -> None:
        self._layouts: dict[str, list[Layout]] = {}
        for layout in layouts:
            self._layouts.setdefault(layout.body.kind(), []).append(layout)

    def __contains__(self, kind: object) -> bool:
        return kind in self._layouts

    def largest(self, most: int) -> int:
        """Bytes of the largest message that may come, if none of its frames has more than ``most``."""
        layouts = itertools.chain.from_iterable(self._layouts.values())
        bodies = [sum(tensor.largest(most) for tensor in layout.tensors.values()) for layout in layouts]
        return MAX_HEADER + max(bodies, default=0)

    def match(
        self, kind: str, tensors: Mapping[tuple[str, str | None], tuple[torch.dtype, tuple[int, ...]]],
        plain: Mapping[str, object],
    ) -> Layout:  # fmt: skip
        """The layout that such a body has. Raises Unexpected, saying what does not fit."""
        if kind not in self._layouts:
            raise Unexpected(f"kind {_shown(kind)} is not spoken here; known: {', '.join(self._layouts)}")
        layouts = self._layouts[kind]
        named = [layout for layout in layouts if all(plain.get(name) == it for name, it in layout.values.items())]
        if not named:
            fixed = [dict(layout.values) for layout in layouts]
            found = {name: plain.get(name) for name in fixed[0]}
            raise Unexpected(f"{kind}: {_shown(found)} is none of {', '.join(map(str, fixed))}")
        for layout in named:
            if (misfit := _misfit(layout, tensors, plain)) is None:
                return layout
        raise Unexpected(f"{kind}: {misfit}")


def _misfit(
    layout: Layout,
    tensors: Mapping[tuple[str, str | None], tuple[torch.dtype, tuple[int, ...]]],
    plain: Mapping[str, object],
) -> str | None:
    if plain.keys() != layout.plain.keys():
        return f"fields {_shown(sorted(plain))} instead of {sorted(layout.plain)}"
    for name, value in plain.items():
        if type(value) is not layout.plain[name]:
            return f"{name} is a {type(value).__name__} instead of a {layout.plain[name].__name__}"
    if tensors.keys() != layout.tensors.keys():
        surplus = [_path(path) for path in tensors if path not in layout.tensors]
        lacking = [_path(path) for path in layout.tensors if path not in tensors]
        return f"tensors {_shown(surplus)} are not expected, {_shown(lacking)} are missing"
    for path, (dtype, shape) in tensors.items():
        if not layout.tensors[path].admits(dtype, shape):
            found = TensorSpec(dtype, shape)
            return f"{_path(path)} is {found} instead of {layout.tensors[path]}"
    return None


def _path(path: tuple[str, str | None]) -> str:
    field = path[0] if path[0].isidentifier() and len(path[0]) <= _BRIEF.maxstring else _shown(path[0])
    return field if path[1] is None else f"{field}[{_shown(path[1])}]"


_BRIEF = reprlib.Repr()
_BRIEF.maxstring = _BRIEF.maxother = 60


def _shown(value: object) -> str:
    """What a neighbour sent, for a message: on one line, and not a megabyte of it."""
    return _BRIEF.repr(value)


@dataclass(frozen=True)
class Message:
    """A body with its envelope. ``payload`` and ``header`` are its sizes on the wire, in bytes; ``arrival`` its place
    among all that a peer has accepted, from 1 on."""

    body: Body
    run: str
    t: int
    sender: int
    seq: int
    flags: int
    count: int
    payload: int
    header: int
    arrival: int = 0

    @property
    def kind(self) -> str:
        return self.body.kind()


@dataclass(frozen=True)
class Encoded:
    """A body ready for any number of receivers: only the header differs between them."""

    kind: str
    fields: dict[str, Any]
    tensors: list[list[Any]]
    frames: list[memoryview]

    @property
    def payload(self) -> int:
        return sum(frame.nbytes for frame in self.frames)

    def to(self, run: str, t: int, sender: int, seq: int, flags: int = 0, count: int = 1) -> list[Buffer]:
        """The frames of one message: the header, then the shared tensor frames."""
        envelope = [VERSION, run, self.kind, t, sender, seq, flags, count, self.fields, self.tensors]
        header: bytes = msgpack.packb(envelope, use_bin_type=True)
        return [header, *self.frames]


def encode(body: Body) -> Encoded:
    """Take ``body`` apart. Dense tensors of any device and stride are copied to contiguous host memory.

    Raises TypeError, naming the field, if the body holds something that cannot travel.
    """
    tensors, plain = _take_apart(body)
    specs: list[list[Any]] = []
    frames: list[memoryview] = []
    for (field, key), tensor in tensors.items():
        specs.append([field, key, _DTYPE_NAMES[tensor.dtype], list(tensor.shape)])
        frames.append(_bytes_of(tensor))
    return Encoded(body.kind(), plain, specs, frames)


def _take_apart(body: Body) -> tuple[dict[tuple[str, str | None], Tensor], dict[str, Plain]]:
    tensors: dict[tuple[str, str | None], Tensor] = {}
    plain: dict[str, Plain] = {}
    for field in dataclasses.fields(body):
        value = getattr(body, field.name)
        if isinstance(value, Tensor):
            tensors[field.name, None] = value
        elif isinstance(value, Mapping):
            for key, tensor in value.items():
                tensors[field.name, key] = tensor
        elif isinstance(value, bool | int | float | str) or (
            isinstance(value, tuple) and all(type(item) is int for item in value)
        ):
            plain[field.name] = value
        else:
            raise TypeError(f"{body.kind()}.{field.name}: a {type(value).__name__} cannot travel; see Body")
    for (field_name, key), tensor in tensors.items():
        where = f"{body.kind()}.{field_name}"
        if not isinstance(tensor, Tensor) or not isinstance(key, str | None):
            raise TypeError(f"{where}: a dict that travels maps names to tensors")
        if tensor.dtype not in _DTYPE_NAMES or tensor.layout is not torch.strided:
            raise TypeError(f"{where}: a tensor of {tensor.dtype}, {tensor.layout} cannot travel")
    return tensors, plain


def _maps(body: Body) -> frozenset[str]:
    fields = dataclasses.fields(body)
    return frozenset(field.name for field in fields if isinstance(getattr(body, field.name), Mapping))


def _bytes_of(tensor: Tensor) -> memoryview:
    """A fresh copy of the tensor's bytes in C order (0-d and empty tensors too)."""
    if tensor.numel() == 0:
        return memoryview(b"")
    copy = tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
    return memoryview(copy.reshape(-1).view(torch.uint8).numpy().data)


def decode(frames: Sequence[Buffer], run: str | None, vocabulary: Vocabulary) -> Message:
    """Frames to message. Raises a WireError that says what is wrong; touches no tensor memory before that.

    ``run`` None takes messages of any run: only for the answer to a handshake.
    """
    if not frames:
        raise Malformed("a message without frames")
    envelope = _header(frames[0])
    version, theirs, kind, t, sender, seq, flags, count, fields, entries = envelope
    if type(version) is not int or version != VERSION:
        raise WrongVersion(f"protocol version {_shown(version)}; this peer speaks {VERSION}")
    if type(theirs) is not str:
        raise Malformed("the run id is no string")
    if run is not None and theirs != run:
        raise WrongRun(f"a message of run {_shown(theirs)}; this is run {run!r}")
    if type(kind) is not str or type(fields) is not dict or type(entries) is not list:
        raise Malformed("kind, fields or tensors of the wrong type")
    for name, value in (("t", t), ("sender", sender), ("seq", seq), ("flags", flags), ("count", count)):
        if type(value) is not int or not 0 <= value < 1 << 53:
            raise Malformed(f"{name} is {_shown(value)}")

    plain: dict[str, Plain] = {}
    for name, value in fields.items():
        plain[_text(name, "a field's name")] = _plain(value)
    if count < 1:
        raise Malformed("count is 0: a body of nobody")
    if len(entries) != len(frames) - 1:
        raise Malformed(f"{len(entries)} tensors announced, {len(frames) - 1} frames follow")
    found: dict[tuple[str, str | None], tuple[torch.dtype, tuple[int, ...]]] = {}
    for entry, frame in zip(entries, frames[1:], strict=True):
        path, dtype, shape = _entry(entry)
        if path in found:
            raise Malformed(f"tensor {_path(path)} comes twice")
        size = math.prod(shape) * dtype.itemsize
        if size != _length(frame):
            raise Malformed(f"tensor {_path(path)}: {size} bytes announced, {_length(frame)} came")
        found[path] = (dtype, shape)
    layout = vocabulary.match(kind, found, plain)

    tensors = {
        path: _tensor(frame, dtype, shape)
        for (path, (dtype, shape)), frame in zip(found.items(), frames[1:], strict=True)
    }
    body = _put_together(layout.body, tensors, plain, layout.maps)
    payload = sum(_length(frame) for frame in frames[1:])
    return Message(body, theirs, t, sender, seq, flags, count, payload, _length(frames[0]))


def _header(frame: Buffer) -> list[Any]:
    if _length(frame) > MAX_HEADER:
        raise Malformed(f"a header of {_length(frame)} bytes; at most {MAX_HEADER}")
    try:
        envelope = msgpack.unpackb(frame, raw=False, strict_map_key=True, use_list=True)
    except (ValueError, msgpack.exceptions.UnpackException, RecursionError) as error:
        raise Malformed(f"the header is not msgpack: {type(error).__name__}") from None
    if type(envelope) is not list or not envelope:
        raise Malformed("the header is no list")
    if envelope[0] == VERSION and len(envelope) != 10:
        raise Malformed(f"the header has {len(envelope)} entries instead of 10")
    # Another version may have another form: pad, so that the version is what gets reported.
    return envelope if len(envelope) == 10 else [envelope[0], *[None] * 9]


def _entry(entry: object) -> tuple[tuple[str, str | None], torch.dtype, tuple[int, ...]]:
    if type(entry) is not list or len(entry) != 4:
        raise Malformed("a tensor's entry is not [field, key, dtype, shape]")
    field, key, dtype, shape = entry
    if type(dtype) is not str or dtype not in DTYPES:
        raise Malformed(f"unknown dtype {_shown(dtype)}")
    if type(shape) is not list or not all(type(n) is int and 0 <= n < 1 << 48 for n in shape) or len(shape) > 16:
        raise Malformed("a tensor's shape is not a short list of lengths")
    if 0 in shape and math.prod(n for n in shape if n) >= 1 << 48:  # its strides would overflow
        raise Malformed("an empty tensor with lengths that no tensor has")
    path = (_text(field, "a tensor's field"), None if key is None else _text(key, "a tensor's key"))
    return path, DTYPES[dtype], tuple(shape)


def _text(value: object, what: str) -> str:
    if type(value) is not str:
        raise Malformed(f"{what} is no string")
    return value


def _plain(value: object) -> Plain:
    if type(value) is list:
        if not all(type(item) is int for item in value):
            raise Malformed("a field holds a list of something else than ints")
        return tuple(value)
    if type(value) in (int, float, bool, str):
        return value  # type: ignore[return-value]
    raise Malformed(f"a field holds a {type(value).__name__}")


def _length(frame: Buffer) -> int:
    return frame.nbytes if isinstance(frame, memoryview) else len(frame)


def _tensor(frame: Buffer, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    tensor = torch.empty(shape, dtype=dtype)
    if tensor.numel():
        raw = np.frombuffer(frame, dtype=np.uint8)
        if dtype is torch.bool and raw.max() > 1:
            raise Malformed("a bool tensor with bytes other than 0 and 1")
        tensor.reshape(-1).view(torch.uint8).numpy()[:] = raw
    return tensor


def _put_together(
    kind: type[B],
    tensors: Mapping[tuple[str, str | None], Tensor],
    plain: Mapping[str, Plain],
    maps: Iterable[str],
) -> B:
    values: dict[str, Any] = {**plain, **{name: {} for name in maps}}
    for (field, key), tensor in tensors.items():
        if key is None:
            values[field] = tensor
        else:
            values[field][key] = tensor
    return kind(**values)


def tensors_of(body: Body) -> dict[tuple[str, str | None], Tensor]:
    """The tensors in a body by (field, key), in the order in which they travel."""
    return _take_apart(body)[0]


def is_finite(body: Body) -> bool:
    """Whether no number in the body is NaN or infinite."""
    tensors, plain = _take_apart(body)
    numbers = (value for value in plain.values() if isinstance(value, float))
    return all(map(math.isfinite, numbers)) and all(map(all_finite, tensors.values()))


def with_tensors(body: B, tensors: Mapping[tuple[str, str | None], Tensor]) -> B:
    """The same body with other tensors."""
    return _put_together(type(body), tensors, _take_apart(body)[1], _maps(body))


__all__ = [
    "ANYWAY", "DTYPES", "STOP", "VERSION", "Body", "Buffer", "Encoded", "Layout", "Message", "TensorSpec",
    "Vocabulary", "WireError", "decode", "encode", "is_finite", "tensors_of", "with_tensors",
]  # fmt: skip
