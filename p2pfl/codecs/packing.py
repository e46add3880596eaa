"""The pipeline that packs what a peer sends, and unpacks what it takes.

A packed body keeps the name of its kind and its plain fields. In place of its tensors it holds their parts, with the
tensors' numbers in the order of their names, and the tensors' shapes, from which a receiver computes what the parts
must be.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, make_dataclass, replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from p2pfl import PeerId
from p2pfl.codecs.base import Codec
from p2pfl.messaging.pipeline import Pipeline
from p2pfl.messaging.schema import Body, Layout, PlainSpec, TensorPath, TensorSpec, assemble, path_name, take_apart
from p2pfl.messaging.wire import Message
from p2pfl.rng import Streams

PARTS, SHAPES = "parts_", "shapes_"
"""Fields of a packed body; none of a method's ends in an underscore."""

Parts = Mapping[str, TensorSpec] | None


def parts_of(codec: Codec, spec: TensorSpec) -> Parts:
    """Return into what a tensor is packed; None if it stays as it is."""
    return codec.parts(spec) if spec.dtype.is_floating_point and spec.bytes else None


@lru_cache(maxsize=64)
def _packed(kind: str, plain: tuple[str, ...]) -> type[Body]:
    """Return the class of packed bodies of a kind, with its name and its plain fields."""
    fields = [(PARTS, Mapping[str, Tensor]), (SHAPES, tuple[int, ...]), *((name, Any) for name in plain)]
    return make_dataclass(kind, fields, bases=(Body,), frozen=True)


def _ordered(paths: Iterable[TensorPath]) -> list[TensorPath]:
    return sorted(paths, key=lambda path: (path[0], path[1] or ""))


@dataclass(frozen=True)
class PackedLayout(Layout):
    """The packed form of the bodies with another layout."""

    dense: Layout = field(kw_only=True)
    codec: Codec = field(kw_only=True)

    @classmethod
    def of_dense(cls, dense: Layout, codec: Codec) -> PackedLayout:
        largest = _on_the_wire(codec, dense.tensors)
        axes = sum(len(spec.shape) for spec in dense.tensors.values())
        plain = {**dense.plain, SHAPES: PlainSpec(tuple, length=axes)}
        body = _packed(dense.body.kind(), tuple(dense.plain))
        return cls(body, largest, plain, frozenset({PARTS}), dense=dense, codec=codec)

    def mismatch(
        self, tensors: Mapping[TensorPath, TensorSpec], plain: Mapping[str, object], *, summed: bool = False
    ) -> str | None:
        if summed:
            return "a sum must not be packed"
        bare = Layout(self.body, {}, self.plain)
        if (wrong := bare.mismatch({}, plain)) is not None:
            return wrong
        shapes = plain[SHAPES]
        assert isinstance(shapes, tuple)
        specs = self._specs(shapes)
        if isinstance(specs, str):
            return specs
        return replace(bare, tensors=_on_the_wire(self.codec, specs)).mismatch(tensors, plain)

    def what_diverged(self, tensors: Mapping[TensorPath, Tensor], plain: Mapping[str, object]) -> str:
        """Return nothing: values are judged once they are unpacked."""
        return ""

    def _specs(self, shapes: tuple[int, ...]) -> dict[TensorPath, TensorSpec] | str:
        """Return the dtypes and shapes of the dense tensors, or what is wrong with the shapes."""
        specs, lengths = {}, iter(shapes)
        for path in _ordered(self.dense.tensors):
            allowed = self.dense.tensors[path]
            shape = tuple(length for _, length in zip(allowed.shape, lengths, strict=False))
            spec = TensorSpec(allowed.dtype, shape, start=allowed.start)
            if not allowed.admits(spec) or min(shape, default=0) < 0:
                return f"{path_name(path)} must be {allowed}, got {spec}"
            specs[path] = spec
        return "too many shapes" if next(lengths, None) is not None else specs

    def unpack(self, body: Body) -> Body:
        """Return the dense body. Raises ValueError, or what the codec raises, if the parts do not fit."""
        tensors, plain = take_apart(body)
        specs = self._specs(plain.pop(SHAPES))  # type: ignore[arg-type]
        assert not isinstance(specs, str)  # the header was checked
        parts: dict[TensorPath, dict[str, Tensor]] = {path: {} for path in specs}
        for name, (path, _) in _expected(self.codec, specs).items():
            parts[path][name.partition(".")[2]] = tensors[PARTS, name]
        dense = {}
        for path in self.dense.tensors:
            found = parts[path].get("")
            if found is None:
                found = self.codec.unpack(parts[path], specs[path])
                if (found.dtype, tuple(found.shape)) != (specs[path].dtype, specs[path].shape):
                    raise ValueError(f"{path_name(path)} is unpacked to {found.dtype} {list(found.shape)}")
            dense[path] = found
        return assemble(self.dense.body, dense, plain, self.dense.maps)


def _expected(codec: Codec, specs: Mapping[TensorPath, TensorSpec]) -> dict[str, tuple[TensorPath, TensorSpec]]:
    """Return the parts of a body's tensors: {name on the wire: (the tensor's path, dtype and shape)}."""
    found = {}
    for number, path in enumerate(_ordered(specs)):
        parts = parts_of(codec, specs[path])
        named = {f"{number}": specs[path]} if parts is None else {f"{number}.{name}": x for name, x in parts.items()}
        found.update({name: (path, spec) for name, spec in named.items()})
    return found


def _on_the_wire(codec: Codec, specs: Mapping[TensorPath, TensorSpec]) -> dict[TensorPath, TensorSpec]:
    """Return the dtypes and shapes of all tensors of a packed body."""
    return {(PARTS, name): spec for name, (_, spec) in _expected(codec, specs).items()}


def pack(codec: Codec, body: Body) -> Body:
    """Return the packed form of a body; the body itself if the codec leaves all its tensors as they are."""
    tensors, plain = take_apart(body)
    parts: dict[str, Tensor] = {}
    shapes: list[int] = []
    packed = False
    for number, path in enumerate(_ordered(tensors)):
        tensor = tensors[path].detach()
        shapes += tensor.shape
        if parts_of(codec, TensorSpec(tensor.dtype, tuple(tensor.shape))) is None:
            parts[f"{number}"] = tensor
            continue
        packed = True
        parts.update({f"{number}.{name}": part for name, part in codec.pack(tensor).items()})
    if not packed:
        return body
    return _packed(body.kind(), tuple(plain))(**{**plain, PARTS: parts, SHAPES: tuple(shapes)})


class Packing(Pipeline):
    """Packs the bodies of some kinds.

    Args:
        codec_of: returns the codec of a kind, if it has one.
        streams: the peer's random streams.
    """

    def __init__(self, codec_of: Callable[[str], Codec | None], streams: Streams) -> None:
        self._codec_of = codec_of
        self._streams = streams

    def layouts(self, layout: Layout) -> Sequence[Layout]:
        codec = self._codec_of(layout.body.kind())
        return [layout] if codec is None else [layout, PackedLayout.of_dense(layout, codec)]

    def outgoing(self, body: Body, to: Sequence[PeerId], t: int) -> Iterator[tuple[Sequence[PeerId], Body]]:
        if (codec := self._codec_of(body.kind())) is not None:
            with self._streams.torch("codec"), torch.no_grad():
                body = pack(codec, body)
        yield to, body

    def incoming(self, message: Message) -> Message:
        layout = message.plan.layout
        if not (message.finite and isinstance(layout, PackedLayout)):
            return message
        try:
            body = layout.unpack(message.body)
        except Exception as error:  # a neighbor must not end this peer
            text = f"{message.kind} of peer {message.sender} cannot be unpacked: {type(error).__name__}: {error}"
            return replace(message, diverged=text)
        found = layout.dense.what_diverged(*take_apart(body))
        return replace(message, body=body, diverged=found and f"{found} in {message.kind} of peer {message.sender}")
