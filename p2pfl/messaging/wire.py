"""The content of a message: its header and its body, to bytes and back.

    entry    = header body                        stored once in the sender's journal, however many peers read it
    header   = msgpack([kind, count, fields, tensors])
    kind     = str                                name of the Body class
    count    = uint >= 1                          number of peers summed up in this body (allreduce), otherwise 1
    fields   = map of str to (int | float | bool | str | [*int])       the body's plain fields
    tensors  = [*[field, key | nil, dtype, [*uint]]]                    in the order of the body
    body     = the tensors, raw little-endian bytes in C order, each at the next multiple of 64 bytes

How entries travel between two peers, as chunks or as references, is defined in ``control``; none of that is stored or
counted, so that equal runs count equal bytes on every transport.

Rules:

1. Nothing is ever unpickled or evaluated. A header of any other form is Malformed.
2. A receiver has a ``MessageSchema``: the kinds that it accepts, and the fields, dtypes and shapes of each. A header
   is checked against it *before* memory is allocated for the body.
3. Tensors are views of the received buffer: it starts at a multiple of 64 bytes, as torch's own memory does, because
   CPU kernels may round differently at different alignments. The buffer belongs to the receiver, or is a
   copy-on-write mapping, so that a method may modify what it received in place.
4. Headers carry no clock, process id, host name or address: equal runs send equal bytes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import msgpack
import torch
from torch import Tensor

from p2pfl.errors import Malformed
from p2pfl.messaging.schema import (
    DTYPE_NAMES,
    DTYPES,
    MAX_HEADER,
    Body,
    Layout,
    MessageSchema,
    Plain,
    TensorPath,
    assemble,
    is_finite,
    path_name,
    shown,
    take_apart,
)

ALIGNMENT = 64
"""Bytes."""
MAX_SHAPE = 1 << 48
OVERHEAD = 2048
"""Approximate memory of a message in bytes, in addition to its header and body."""

Buffer = bytes | bytearray | memoryview


@dataclass(frozen=True)
class Message:
    """A received body with what the receiver counts and checks.

    Attributes:
        t: round that the message belongs to.
        count: number of peers summed up in the body.
        payload: bytes of the tensors.
        header: bytes of the header.
        size: bytes of the stored body.
        finite: whether no number in the body is NaN or infinite.
    """

    body: Body
    t: int
    sender: int
    count: int
    payload: int
    header: int
    size: int
    finite: bool = True

    @property
    def kind(self) -> str:
        return self.body.kind()

    @property
    def cost(self) -> int:
        """Bytes of the window that it takes (``edge``)."""
        return cost(self.header, self.size)


def cost(header: int, size: int) -> int:
    """Return the approximate memory of an entry in bytes."""
    return header + size + OVERHEAD


@dataclass(frozen=True)
class Encoded:
    """A body ready to be stored. ``tensors`` share memory with the body wherever that is dense and on the CPU.

    Attributes:
        payload: bytes of the tensors.
        size: bytes of the body as stored, with the gaps between tensors.
    """

    kind: str
    header: bytes
    tensors: tuple[tuple[int, Tensor], ...]
    """(offset, uint8 [bytes])"""
    payload: int
    size: int

    def parts(self) -> Iterator[memoryview]:
        """Return the buffers that make up the stored body, gaps included."""
        at = 0
        for offset, tensor in self.tensors:
            if offset > at:
                yield memoryview(bytes(offset - at))
            yield memoryview(tensor.numpy().data)
            at = offset + len(tensor)


def encode(body: Body, count: int = 1) -> Encoded:
    """Encode ``body`` with dense tensors of any device and stride.

    Raises TypeError, naming the field, if the body holds something that cannot be sent.
    """
    tensors, plain = take_apart(body)
    entries: list[list[Any]] = []
    placed: list[tuple[int, Tensor]] = []
    payload = size = 0
    for (field, key), tensor in tensors.items():
        entries.append([field, key, DTYPE_NAMES[tensor.dtype], list(tensor.shape)])
        if tensor.numel():
            dense = tensor.detach().to("cpu").resolve_conj().resolve_neg().contiguous()
            # Not ``reshape``: a single element counts as contiguous with any stride.
            raw = dense.as_strided((dense.numel(),), (1,)).view(torch.uint8)
            offset = _aligned(size)
            placed.append((offset, raw))
            payload, size = payload + len(raw), offset + len(raw)
    header: bytes = msgpack.packb([body.kind(), count, plain, entries], use_bin_type=True)
    return Encoded(body.kind(), header, tuple(placed), payload, size)


@dataclass(frozen=True)
class Plan:
    """A checked header: what the body will be. No memory is allocated for it yet.

    Attributes:
        size: bytes of the stored body.
    """

    layout: Layout
    count: int
    plain: Mapping[str, Plain]
    tensors: Mapping[TensorPath, tuple[torch.dtype, tuple[int, ...], int]]
    """{path: (dtype, shape, offset)}"""
    payload: int
    size: int
    header: int

    def message(self, t: int, sender: int, buffer: Tensor | None) -> Message:
        """Return the message whose stored body is ``buffer``, uint8 [size]; its tensors are views of it.

        Raises Malformed if a bool tensor holds other bytes than 0 and 1.
        """
        tensors = {}
        for path, (dtype, shape, offset) in self.tensors.items():
            size = math.prod(shape) * dtype.itemsize
            if size == 0:
                tensors[path] = torch.empty(shape, dtype=dtype)
                continue
            assert buffer is not None
            raw = buffer[offset : offset + size]
            if dtype is torch.bool and int(raw.max()) > 1:
                raise Malformed("a bool tensor must hold bytes 0 and 1 only")
            tensors[path] = raw.view(dtype).reshape(shape)
        body = assemble(self.layout.body, tensors, self.plain, self.layout.maps)
        return Message(body, t, sender, self.count, self.payload, self.header, self.size, is_finite(body))


def check(header: Buffer, schema: MessageSchema) -> Plan:
    """Decode and check a header. Raises WireError, naming the first mismatch."""
    kind, count, fields, entries = _header(header)
    if type(kind) is not str or type(fields) is not dict or type(entries) is not list:
        raise Malformed("kind, fields or tensors have the wrong type")
    if type(count) is not int or not 1 <= count < 1 << 53:
        raise Malformed(f"count must be an integer from 1 to 2^53 - 1, got {shown(count)}")
    plain: dict[str, Plain] = {}
    for name, value in fields.items():
        plain[_text(name, "field name")] = _plain(value)
    found: dict[TensorPath, tuple[torch.dtype, tuple[int, ...]]] = {}
    for entry in entries:
        path, dtype, shape = _entry(entry)
        if path in found:
            raise Malformed(f"duplicate tensor {path_name(path)}")
        found[path] = (dtype, shape)
    layout = schema.match(kind, found, plain)
    placed = {}
    payload = size = 0
    for path, (dtype, shape) in found.items():
        length = math.prod(shape) * dtype.itemsize
        offset = _aligned(size) if length else 0
        placed[path] = (dtype, shape, offset)
        if length:
            payload, size = payload + length, offset + length
    return Plan(layout, count, plain, placed, payload, size, _length(header))


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def _header(frame: Buffer) -> list[Any]:
    if _length(frame) > MAX_HEADER:
        raise Malformed(f"the header is {_length(frame)} bytes long; at most {MAX_HEADER} are allowed")
    try:
        envelope = msgpack.unpackb(frame, raw=False, strict_map_key=True, use_list=True)
    except (ValueError, msgpack.exceptions.UnpackException, RecursionError) as error:
        raise Malformed(f"the header is not msgpack: {type(error).__name__}") from None
    if type(envelope) is not list or len(envelope) != 4:
        raise Malformed("the header must be a list of 4 entries")
    return envelope


def _entry(entry: object) -> tuple[TensorPath, torch.dtype, tuple[int, ...]]:
    if type(entry) is not list or len(entry) != 4:
        raise Malformed("tensor entry is not [field, key, dtype, shape]")
    field, key, dtype, shape = entry
    if type(dtype) is not str or dtype not in DTYPES:
        raise Malformed(f"unknown dtype {shown(dtype)}")
    if type(shape) is not list or not all(type(n) is int and 0 <= n < MAX_SHAPE for n in shape) or len(shape) > 16:
        raise Malformed(f"tensor shape must be a list of at most 16 lengths, got {shown(shape)}")
    if 0 in shape and math.prod(n for n in shape if n) >= MAX_SHAPE:  # its strides would overflow
        raise Malformed(f"shape of an empty tensor is too large: {shown(shape)}")
    path = (_text(field, "tensor field"), None if key is None else _text(key, "tensor key"))
    return path, DTYPES[dtype], tuple(shape)


def _text(value: object, what: str) -> str:
    if type(value) is not str:
        raise Malformed(f"{what} must be a string, got {type(value).__name__}")
    return value


def _plain(value: object) -> Plain:
    if type(value) is list:
        if not all(type(item) is int for item in value):
            raise Malformed("a list in a field must hold ints only")
        return tuple(value)
    if type(value) in (int, float, bool, str):
        return value  # type: ignore[return-value]
    raise Malformed(f"a field must hold an int, float, bool, str or list of ints, got {type(value).__name__}")


def _length(frame: Buffer) -> int:
    return frame.nbytes if isinstance(frame, memoryview) else len(frame)
