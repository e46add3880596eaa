"""Message bodies, and what a receiver accepts: which kinds, fields, dtypes and shapes."""

from __future__ import annotations

import dataclasses
import itertools
import math
import reprlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from p2pfl.errors import Unexpected
from p2pfl.tensors import has_diverged

MAX_HEADER = 1 << 20
"""Bytes; a model with ten thousand named tensors fits."""

Plain = int | float | bool | str | tuple[int, ...]
TensorPath = tuple[str, str | None]
"""Field, and key if the field holds a dict of tensors."""

DTYPES: dict[str, torch.dtype] = {
    name: getattr(torch, name)
    for name in (
        *("float16", "bfloat16", "float32", "float64", "complex64", "complex128"),
        *("uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64", "bool"),
        *("float8_e4m3fn", "float8_e5m2"),
    )
}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True)
class Body:
    """The content of a message. A subclass is a frozen dataclass, and **the class is the kind**.

    A field holds a Tensor, a dict of named Tensors, an int, float, bool or str, or a tuple of ints.
    """

    @classmethod
    def kind(cls) -> str:
        return cls.__name__


B = TypeVar("B", bound=Body)


@dataclass(frozen=True)
class TensorSpec:
    """The dtype and shape that a tensor must have; dimensions in ``free`` may be shorter."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    free: frozenset[int] = frozenset()

    def admits(self, dtype: torch.dtype, shape: Sequence[int]) -> bool:
        return (
            dtype == self.dtype
            and len(shape) == len(self.shape)
            and all(
                have == want or (axis in self.free and have < want)
                for axis, (want, have) in enumerate(zip(self.shape, shape, strict=True))
            )
        )

    def largest(self, limit: int) -> int:
        """Return the bytes of the largest tensor that fits, at most ``limit``."""
        return min(limit, math.prod(self.shape) * self.dtype.itemsize)

    def __str__(self) -> str:
        lengths = (f"≤{n}" if axis in self.free else str(n) for axis, n in enumerate(self.shape))
        return f"{DTYPE_NAMES[self.dtype]}[{', '.join(lengths)}]"


@dataclass(frozen=True)
class Layout:
    """One accepted form of a kind of body: the specs of its tensors, the types of its plain fields."""

    body: type[Body]
    tensors: Mapping[TensorPath, TensorSpec]
    plain: Mapping[str, type]
    maps: frozenset[str] = frozenset()
    """Fields that hold a dict of tensors, which may be empty."""
    values: Mapping[str, Plain] = dataclasses.field(default_factory=dict)
    """Plain fields that must have exactly this value."""
    ranges: Mapping[str, range] = dataclasses.field(default_factory=dict)
    """Ranges of plain int fields, and of the items of int tuples."""
    lengths: Mapping[str, int] = dataclasses.field(default_factory=dict)
    """Largest lengths of int tuples; that of others is limited by ``MAX_HEADER`` only."""

    @classmethod
    def of(
        cls,
        body: Body,
        free: Mapping[str, Mapping[int, int]] | None = None,
        fixed: Iterable[str] = (),
        ranges: Mapping[str, range] | None = None,
    ) -> Layout:
        """Return the layout of bodies like ``body``.

        Args:
            free: {field: {dimension of its tensors: largest length}} of those that may have any length up to it. An
                int tuple has one dimension, 0.
            fixed: plain fields that must equal those of ``body``, e.g. an architecture's name that decides shapes.
            ranges: {field: allowed values} of ints and of the items of int tuples; others are refused on arrival.
        """
        tensors, plain = take_apart(body)
        specs = {}
        for (field, key), tensor in tensors.items():
            largest = (free or {}).get(field, {})
            shape = tuple(largest.get(axis, length) for axis, length in enumerate(tensor.shape))
            specs[field, key] = TensorSpec(tensor.dtype, shape, frozenset(largest))
        types = {name: type(value) for name, value in plain.items()}
        values = {name: plain[name] for name in fixed}
        lengths = {name: bounds[0] for name, bounds in (free or {}).items() if name in plain}
        return cls(type(body), specs, types, _maps(body), values, dict(ranges or {}), lengths)


class MessageSchema:
    """The kinds of message that a peer accepts, each with its layouts."""

    def __init__(self, layouts: Iterable[Layout]) -> None:
        self._layouts: dict[str, list[Layout]] = {}
        for layout in layouts:
            self._layouts.setdefault(layout.body.kind(), []).append(layout)

    def __contains__(self, kind: object) -> bool:
        return kind in self._layouts

    def largest(self, limit: int) -> int:
        """Return the bytes of the largest message that fits, if no tensor exceeds ``limit`` bytes."""
        layouts = itertools.chain.from_iterable(self._layouts.values())
        bodies = [sum(tensor.largest(limit) for tensor in layout.tensors.values()) for layout in layouts]
        return MAX_HEADER + max(bodies, default=0)

    def match(
        self,
        kind: str,
        tensors: Mapping[TensorPath, tuple[torch.dtype, tuple[int, ...]]],
        plain: Mapping[str, object],
    ) -> Layout:
        """Return the layout that a body has. Raises Unexpected if none fits, naming the first mismatch."""
        if kind not in self._layouts:
            raise Unexpected(f"unknown message kind {shown(kind)}; expected one of {', '.join(self._layouts)}")
        layouts = self._layouts[kind]
        candidates = [
            layout
            for layout in layouts
            if all(plain.get(name) == required for name, required in layout.values.items())
        ]
        if not candidates:
            fixed = [dict(layout.values) for layout in layouts]
            found = {name: plain.get(name) for name in fixed[0]}
            raise Unexpected(f"{kind}: expected one of {', '.join(map(str, fixed))}, got {shown(found)}")
        for layout in candidates:
            if (mismatch := _mismatch(layout, tensors, plain)) is None:
                return layout
        raise Unexpected(f"{kind}: {mismatch}")


def _mismatch(
    layout: Layout,
    tensors: Mapping[TensorPath, tuple[torch.dtype, tuple[int, ...]]],
    plain: Mapping[str, object],
) -> str | None:
    if plain.keys() != layout.plain.keys():
        return f"expected fields {sorted(layout.plain)}, got {shown(sorted(plain))}"
    for name, value in plain.items():
        if type(value) is not layout.plain[name]:
            return f"{name} must be {layout.plain[name].__name__}, got {type(value).__name__}"
        allowed = layout.ranges.get(name)
        items = value if isinstance(value, tuple) else (value,)
        if len(items) > layout.lengths.get(name, len(items)):
            return f"{name} must hold at most {layout.lengths[name]} ints, got {len(items)}"
        if allowed is not None and any(item not in allowed for item in items):
            return f"{name} must be in {allowed.start} to {allowed.stop - 1}, got {shown(value)}"
    if tensors.keys() != layout.tensors.keys():
        surplus = [path_name(path) for path in tensors if path not in layout.tensors]
        missing = [path_name(path) for path in layout.tensors if path not in tensors]
        return f"unexpected tensors {shown(surplus)}, missing tensors {shown(missing)}"
    for path, (dtype, shape) in tensors.items():
        if not layout.tensors[path].admits(dtype, shape):
            return f"{path_name(path)} must be {layout.tensors[path]}, got {TensorSpec(dtype, shape)}"
    return None


def path_name(path: TensorPath) -> str:
    """Return ``field`` or ``field['key']``, shortened."""
    field = path[0] if path[0].isidentifier() and len(path[0]) <= _BRIEF.maxstring else shown(path[0])
    return field if path[1] is None else f"{field}[{shown(path[1])}]"


_BRIEF = reprlib.Repr()
_BRIEF.maxstring = _BRIEF.maxother = 60


def shown(value: object) -> str:
    """Return a short one-line ``repr`` of what a neighbor sent, for error messages."""
    return _BRIEF.repr(value)


# ---- bodies as parts


def take_apart(body: Body) -> tuple[dict[TensorPath, Tensor], dict[str, Plain]]:
    """Return the tensors of a body, in sending order, and its plain fields.

    Raises TypeError, naming the field, if the body holds something that cannot be sent.
    """
    tensors: dict[TensorPath, Tensor] = {}
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
            raise TypeError(f"{body.kind()}.{field.name}: cannot send {type(value).__name__}; see Body")
    for (field_name, key), tensor in tensors.items():
        where = f"{body.kind()}.{field_name}"
        if not isinstance(tensor, Tensor) or not isinstance(key, str | None):
            raise TypeError(f"{where}: a dict must map names to tensors")
        if tensor.dtype not in DTYPE_NAMES or tensor.layout is not torch.strided:
            raise TypeError(f"{where}: cannot send a tensor of {tensor.dtype}, {tensor.layout}")
    return tensors, plain


def assemble(
    kind: type[B], tensors: Mapping[TensorPath, Tensor], plain: Mapping[str, Plain], maps: Iterable[str]
) -> B:
    """Build a body from its parts; ``maps`` are the fields that hold a dict of tensors."""
    values: dict[str, Any] = {**plain, **{name: {} for name in maps}}
    for (field, key), tensor in tensors.items():
        if key is None:
            values[field] = tensor
        else:
            values[field][key] = tensor
    return kind(**values)


def _maps(body: Body) -> frozenset[str]:
    fields = dataclasses.fields(body)
    return frozenset(field.name for field in fields if isinstance(getattr(body, field.name), Mapping))


def tensors_of(body: Body) -> dict[TensorPath, Tensor]:
    """Return the tensors of a body by (field, key), in sending order."""
    return take_apart(body)[0]


def with_tensors(body: B, tensors: Mapping[TensorPath, Tensor]) -> B:
    """Return a copy of ``body`` with other tensors."""
    return assemble(type(body), tensors, take_apart(body)[1], _maps(body))


def is_finite(body: Body) -> bool:
    """Return whether no number in the body is NaN or infinite, and no tensor has diverged (``has_diverged``)."""
    tensors, plain = take_apart(body)
    numbers = (value for value in plain.values() if isinstance(value, float))
    return all(map(math.isfinite, numbers)) and not any(map(has_diverged, tensors.values()))
