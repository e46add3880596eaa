"""Message bodies, and what a receiver accepts: which kinds, fields, dtypes and shapes."""

from __future__ import annotations

import dataclasses
import math
import reprlib
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, TypeVar

import torch
from torch import Tensor

from p2pfl.errors import Unexpected
from p2pfl.tensors import ORDINARY, InitialValues, diverged_entry

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

    A field holds a Tensor, a dict of named Tensors, an int, float, bool or str, or a tuple of ints. All but the
    content of the tensors is in the header, which has at most ``MAX_HEADER`` bytes.
    """

    counts: ClassVar[Literal["newest", "arrived", "current", "all"]] = "newest"
    """Which bodies of a sender count where rounds do not wait for one another (messaging/newest.py).

    newest: the last one that has arrived, in each round.
    arrived: each one that arrives, once; a new one replaces those still to be sent to the same receivers.
    current: likewise, but it replaces those still to be sent to any receiver.
    all: each one, once; none is replaced.
    """

    @classmethod
    def kind(cls) -> str:
        return cls.__name__


B = TypeVar("B", bound=Body)


@dataclass(frozen=True)
class TensorSpec:
    """The dtype and shape that a tensor has or must have; dimensions in ``free`` may be shorter.

    ``start`` tells when a received one has diverged.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    free: frozenset[int] = frozenset()
    start: InitialValues = dataclasses.field(default=ORDINARY, compare=False)

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def summed(self) -> TensorSpec:
        """What a sum of several such tensors must be: float32 in place of narrower floating-point types."""
        narrow = self.dtype.is_floating_point and self.dtype.itemsize < 4
        return dataclasses.replace(self, dtype=torch.float32) if narrow else self

    def admits(self, other: TensorSpec) -> bool:
        return (
            self.dtype == other.dtype
            and len(self.shape) == len(other.shape)
            and all(
                have == want or (axis in self.free and have < want)
                for axis, (want, have) in enumerate(zip(self.shape, other.shape, strict=True))
            )
        )

    def __str__(self) -> str:
        lengths = (f"≤{n}" if axis in self.free else str(n) for axis, n in enumerate(self.shape))
        return f"{DTYPE_NAMES[self.dtype]}[{', '.join(lengths)}]"


@dataclass(frozen=True)
class PlainSpec:
    """What a plain field must hold."""

    type: type
    value: Plain | None = None
    """The only value allowed."""
    range: range | None = None
    """The values allowed of an int, or of the items of an int tuple."""
    length: int | None = None
    """The largest length of an int tuple; None: only ``MAX_HEADER`` limits it."""

    def mismatch(self, value: object) -> str | None:
        """Return what is wrong with a value that was received, if anything."""
        if type(value) is not self.type:
            return f"must be {self.type.__name__}, got {type(value).__name__}"
        items = value if isinstance(value, tuple) else (value,)
        if isinstance(value, tuple) and not all(type(item) is int for item in items):
            return f"must hold ints only, got {shown(value)}"
        if self.length is not None and len(items) > self.length:
            return f"must hold at most {self.length} ints, got {len(items)}"
        if self.range is not None and any(item not in self.range for item in items):
            return f"must be in {self.range.start} to {self.range.stop - 1}, got {shown(value)}"
        return None


@dataclass(frozen=True)
class Layout:
    """One accepted form of a kind of body."""

    body: type[Body]
    tensors: Mapping[TensorPath, TensorSpec]
    plain: Mapping[str, PlainSpec]
    maps: frozenset[str] = frozenset()
    """Fields that hold a dict of tensors, which may be empty."""

    @classmethod
    def of(
        cls,
        body: Body,
        free: Mapping[str, Mapping[int, int | None]] | None = None,
        fixed: Iterable[str] = (),
        ranges: Mapping[str, range] | None = None,
        constants: Mapping[str, Collection[str]] | None = None,
    ) -> Layout:
        """Return the layout of bodies like ``body``, whose tensors have their values before the first round.

        A received tensor has diverged if it holds NaN or infinity in more entries, or far larger values.

        Args:
            free: {field: {dimension of its tensors: largest length}} of dimensions that may be shorter; None stands
                for the length in ``body``. An int tuple has one dimension, 0.
            fixed: plain fields that must have the value in ``body``, e.g. an architecture's name that decides shapes.
            ranges: {field: allowed values} of ints and of the items of int tuples; others are refused on arrival.
            constants: {field: keys of the tensors that are not trained}; they may hold anything but NaN.
        """
        tensors, plain = take_apart(body)
        specs = {}
        for (field, key), tensor in tensors.items():
            largest = (free or {}).get(field, {})
            lengths = ((largest.get(axis), length) for axis, length in enumerate(tensor.shape))
            shape = tuple(length if limit is None else limit for limit, length in lengths)
            start = InitialValues.of(tensor, constant=key in (constants or {}).get(field, ()))
            specs[field, key] = TensorSpec(tensor.dtype, shape, frozenset(largest), start)
        fields = {}
        for name, value in plain.items():
            length = (free or {}).get(name, {}).get(0)
            fields[name] = PlainSpec(type(value), value if name in fixed else None, (ranges or {}).get(name), length)
        return cls(type(body), specs, fields, _maps(body))

    @property
    def fixed(self) -> dict[str, Plain]:
        return {name: spec.value for name, spec in self.plain.items() if spec.value is not None}

    def mismatch(
        self, tensors: Mapping[TensorPath, TensorSpec], plain: Mapping[str, object], *, summed: bool = False
    ) -> str | None:
        """Return how a body differs from the layout, if it does; ``summed``: it should be a sum of such bodies."""
        if plain.keys() != self.plain.keys():
            return f"expected fields {sorted(self.plain)}, got {shown(sorted(plain, key=str))}"
        for name, value in plain.items():
            if (wrong := self.plain[name].mismatch(value)) is not None:
                return f"{name} {wrong}"
        if tensors.keys() != self.tensors.keys():
            surplus = [path_name(path) for path in tensors if path not in self.tensors]
            missing = [path_name(path) for path in self.tensors if path not in tensors]
            return f"unexpected tensors {shown(surplus)}, missing tensors {shown(missing)}"
        for path, spec in tensors.items():
            expected = self.tensors[path].summed if summed else self.tensors[path]
            if not expected.admits(spec):
                return f"{path_name(path)} must be {expected}, got {spec}"
        return None

    def what_diverged(self, tensors: Mapping[TensorPath, Tensor], plain: Mapping[str, object]) -> str:
        """Return which number of a body is NaN or infinite, or which tensor has diverged; empty if none."""
        for name, value in plain.items():
            if isinstance(value, float) and not math.isfinite(value):
                return f"{name} is {value:.3g}"
        for path, tensor in tensors.items():
            start = self.tensors[path].start if path in self.tensors else ORDINARY
            if (entry := diverged_entry(tensor, start)) is not None:
                return f"{path_name(path)} holds {entry:.3g}"
        return ""


class MessageSchema:
    """The kinds of message that a peer accepts, each with its layouts."""

    def __init__(self, layouts: Iterable[Layout]) -> None:
        self.layouts: dict[str, list[Layout]] = {}
        """By kind."""
        for layout in layouts:
            self.layouts.setdefault(layout.body.kind(), []).append(layout)

    def largest(self, limit: int) -> int:
        """Return the bytes of the largest message that fits, if no body exceeds ``limit`` bytes."""
        layouts = [layout for of_kind in self.layouts.values() for layout in of_kind]
        bodies = [min(limit, sum(spec.summed.bytes for spec in layout.tensors.values())) for layout in layouts]
        return MAX_HEADER + max(bodies, default=0)

    def match(
        self,
        kind: str,
        tensors: Mapping[TensorPath, TensorSpec],
        plain: Mapping[str, object],
        *,
        summed: bool = False,
    ) -> Layout:
        """Return the layout that a body has, or a sum of several: ``summed``.

        Raises Unexpected if none fits, naming the first mismatch.
        """
        if kind not in self.layouts:
            raise Unexpected(f"unknown message kind {shown(kind)}; expected one of {', '.join(self.layouts)}")
        layouts = self.layouts[kind]
        candidates = [each for each in layouts if all(plain.get(name) == value for name, value in each.fixed.items())]
        if not candidates:
            found = {name: plain.get(name) for name in layouts[0].fixed}
            expected = ", ".join(str(layout.fixed) for layout in layouts)
            raise Unexpected(f"{kind}: expected one of {expected}, got {shown(found)}")
        mismatches = [layout.mismatch(tensors, plain, summed=summed) for layout in candidates]
        if None not in mismatches:
            raise Unexpected(f"{kind}: {mismatches[-1]}")
        return candidates[mismatches.index(None)]


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


def copied(body: B) -> B:
    """Return a copy of ``body`` with copies of its tensors."""
    return with_tensors(body, {path: tensor.clone() for path, tensor in tensors_of(body).items()})


def what_diverged(body: Body, layouts: Iterable[Layout] = ()) -> str:
    """Return which number of a body is NaN or infinite, or which tensor has diverged; empty if none.

    Args:
        layouts: what a receiver accepts, to judge as it does.
    """
    tensors, plain = take_apart(body)
    specs = {path: TensorSpec(tensor.dtype, tuple(tensor.shape)) for path, tensor in tensors.items()}
    alike = (each for each in layouts if each.body is type(body) and each.mismatch(specs, plain) is None)
    return next(alike, Layout(type(body), {}, {})).what_diverged(tensors, plain)
