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
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
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
    TensorPath,
    TensorSpec,
    assemble,
    path_name,
    shown,
    take_apart,
)
from p2pfl.tensors import has_diverged, raw

ALIGNMENT = 64
"""Bytes."""
MAX_DIMENSIONS = 16
OVERHEAD = 2048
"""Approximate memory of a message in bytes, in addition to its header and body."""

Buffer = bytes | bytearray | memoryview


def cost(header: int, size: int) -> int:
    """Return the approximate memory of an entry in bytes: what it takes of the window (``edge``)."""
    return header + size + OVERHEAD


# ---- writing


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
    entries = [[field, key, DTYPE_NAMES[x.dtype], list(x.shape)] for (field, key), x in tensors.items()]
    header: bytes = msgpack.packb([body.kind(), count, plain, entries], use_bin_type=True)
    stored = [raw(tensor) for tensor in tensors.values() if tensor.numel()]
    offsets, size = _placed(map(len, stored))
    return Encoded(body.kind(), header, tuple(zip(offsets, stored, strict=True)), sum(map(len, stored)), size)


def _placed(lengths: Iterable[int]) -> tuple[list[int], int]:
    """Return where each of some tensors begins, and the size of the body."""
    offsets, size = [], 0
    for length in lengths:
        offsets.append(-(-size // ALIGNMENT) * ALIGNMENT if length else size)
        size = offsets[-1] + length
    return offsets, size


# ---- reading


@dataclass(frozen=True)
class Plan:
    """A checked header: what the body will be. No memory is allocated for it yet.

    Attributes:
        count: number of peers summed up in the body.
        payload: bytes of the tensors.
        size: bytes of the stored body.
        header: bytes of the header.
    """

    layout: Layout
    count: int
    plain: Mapping[str, Any]
    tensors: Mapping[TensorPath, tuple[TensorSpec, int]]
    """{path: (dtype and shape, offset)}"""
    payload: int
    size: int
    header: int

    def message(self, t: int, sender: int, buffer: Tensor | None, *, ordinary: bool | None = None) -> Message:
        """Return the message whose stored body is ``buffer``, uint8 [size]; its tensors are views of it.

        Args:
            ordinary: ``is_ordinary`` of the same body, if known.

        Raises Malformed if a bool tensor holds other bytes than 0 and 1.
        """
        if buffer is not None and self._dtype is not None:
            # A model, whose tensors have one dtype: far fewer operations than tensor by tensor. The gaps between
            # tensors are zero; a sender that fills them spoils only its message.
            whole = buffer.view(self._dtype)
            start = whole.storage_offset()
            tensors = {
                path: whole.as_strided(shape, strides, start + at)
                for path, (shape, strides, at) in self._strided.items()
            }
        else:
            tensors = {}
            for path, (spec, offset) in self.tensors.items():
                if spec.bytes == 0:
                    tensors[path] = torch.empty(spec.shape, dtype=spec.dtype)
                    continue
                assert buffer is not None
                raw = buffer[offset : offset + spec.bytes]
                if spec.dtype is torch.bool and int(raw.max()) > 1:
                    raise Malformed("a bool tensor must hold bytes 0 and 1 only")
                tensors[path] = raw.view(spec.dtype).reshape(spec.shape)
        body = assemble(self.layout.body, tensors, self.plain, self.layout.maps)
        ordinary = self.is_ordinary(buffer) if ordinary is None else ordinary
        diverged = "" if ordinary else self.layout.what_diverged(tensors, self.plain)
        if diverged:
            diverged += f" in {body.kind()} of peer {sender}"
        return Message(body, t, sender, self, diverged, buffer)

    def is_ordinary(self, buffer: Tensor | None) -> bool:
        """Return whether a single check of the whole body finds no diverged value; the same for every receiver."""
        if buffer is None or self._dtype is None:
            return False
        return self._plain_is_finite and not has_diverged(buffer.view(self._dtype))

    @cached_property
    def _dtype(self) -> torch.dtype | None:
        """The dtype of all tensors, if there is one and any of its values is allowed."""
        dtypes = {spec.dtype for spec, _ in self.tensors.values()}
        return dtypes.pop() if len(dtypes) == 1 and torch.bool not in dtypes else None

    @cached_property
    def _strided(self) -> Mapping[TensorPath, tuple[tuple[int, ...], tuple[int, ...], int]]:
        """{path: (shape, strides, offset)}, in elements"""
        return {
            path: (spec.shape, torch.empty(spec.shape, device="meta").stride(), offset // spec.dtype.itemsize)
            for path, (spec, offset) in self.tensors.items()
        }

    @cached_property
    def _plain_is_finite(self) -> bool:
        return all(math.isfinite(value) for value in self.plain.values() if isinstance(value, float))


@dataclass(frozen=True)
class Message:
    """A received body of round ``t``.

    Attributes:
        plan: its header, for what the receiver counts and checks.
        diverged: which number in the body is NaN or infinite, or which tensor has diverged; empty if none.
        stored: the body as on the wire, uint8 [size], of which its tensors are views; None if it is empty.
    """

    body: Body
    t: int
    sender: int
    plan: Plan
    diverged: str
    stored: Tensor | None = None

    @property
    def finite(self) -> bool:
        return not self.diverged

    @property
    def kind(self) -> str:
        return self.body.kind()

    @property
    def cost(self) -> int:
        return cost(self.plan.header, self.plan.size)


def check(header: Buffer, schema: MessageSchema) -> Plan:
    """Decode and check a header. Raises WireError, naming the first mismatch."""
    if (length := len(header)) > MAX_HEADER:
        raise Malformed(f"the header is {length} bytes long; at most {MAX_HEADER} are allowed")
    try:
        found = msgpack.unpackb(header, raw=False, strict_map_key=True, use_list=True)
    except (ValueError, msgpack.exceptions.UnpackException, RecursionError, MemoryError) as error:
        raise Malformed(f"the header is not msgpack: {type(error).__name__}") from None
    match found:
        case [str(kind), count, dict(fields), list(entries)]:
            pass
        case _:
            raise Malformed("the header must be [kind, count, fields, tensors]")
    if type(count) is not int or not 1 <= count < 1 << 53:
        raise Malformed(f"count must be an integer from 1 to 2^53 - 1, got {shown(count)}")
    plain = {name: tuple(value) if type(value) is list else value for name, value in fields.items()}
    specs: dict[TensorPath, TensorSpec] = {}
    for entry in entries:
        path, spec = _tensor(entry)
        if path in specs:
            raise Malformed(f"duplicate tensor {path_name(path)}")
        specs[path] = spec
    layout = schema.match(kind, specs, plain, summed=count > 1)
    lengths = [spec.bytes for spec in specs.values()]
    offsets, size = _placed(lengths)
    placed = {path: (spec, offset) for (path, spec), offset in zip(specs.items(), offsets, strict=True)}
    return Plan(layout, count, plain, placed, sum(lengths), size, length)


def _tensor(entry: object) -> tuple[TensorPath, TensorSpec]:
    match entry:
        case [str(field), str() | None as key, str(dtype), list(shape)] if dtype in DTYPES:
            if len(shape) <= MAX_DIMENSIONS and all(type(n) is int and n >= 0 for n in shape):
                return (field, key), TensorSpec(DTYPES[dtype], tuple(shape))
    raise Malformed(f"expected [field, key, dtype, shape], got {shown(entry)}")
