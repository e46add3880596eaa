"""Packed bodies: what a receiver accepts, and what it gets."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from p2pfl.codecs import Codec
from p2pfl.codecs.packing import PARTS, SHAPES, Packing, pack
from p2pfl.errors import Unexpected
from p2pfl.messaging import wire
from p2pfl.messaging.schema import Body, Layout, MessageSchema, TensorSpec
from p2pfl.messaging.wire import Message
from p2pfl.rng import Streams
from tests.bodies import Vector, Word, stored, vector


@dataclass(frozen=True)
class Positive(Codec):
    """Where a tensor is positive, and these entries; those of one entry stay as they are."""

    def parts(self, spec: TensorSpec) -> Mapping[str, TensorSpec] | None:
        size = spec.bytes // spec.dtype.itemsize
        if size == 1:
            return None
        return {
            "where": TensorSpec(torch.bool, spec.shape),
            "values": TensorSpec(spec.dtype, (size,), frozenset({0})),
        }

    def pack(self, tensor: Tensor) -> Mapping[str, Tensor]:
        return {"where": tensor > 0, "values": tensor[tensor > 0]}

    def unpack(self, parts: Mapping[str, Tensor], spec: TensorSpec) -> Tensor:
        return torch.zeros(spec.shape).masked_scatter(parts["where"], parts["values"])


@dataclass(frozen=True)
class Mixed(Body):
    """Two parameters, of a model of some size, and what is never packed."""

    values: Tensor
    model: dict[str, Tensor]
    samples: int
    classes: tuple[int, ...]


def mixed(rows: int = 4) -> Mixed:
    model = {"w": torch.arange(6.0).view(2, 3) - 2, "b": torch.ones(1), "steps": torch.tensor(7), "no": torch.ones(0)}
    return Mixed(torch.randn(rows, 2), model, rows, tuple(range(rows)))


LAYOUT = Layout.of(mixed(), free={"values": {0: 4}, "classes": {0: 4}})
PIPELINE = Packing({"Mixed": Positive(), "Vector": Positive()}.get, Streams(0, 0))
SCHEMA = MessageSchema(
    [accepted for each in (LAYOUT, Layout.of(vector(1, 2, 3))) for accepted in PIPELINE.layouts(each)]
)


def received(body: Body, count: int = 1) -> Message:
    encoded = wire.encode(body, count)
    return PIPELINE.incoming(wire.check(encoded.header, SCHEMA).message(2, 1, stored(encoded)))


def packed(body: Body) -> Any:
    ((_, sent),) = PIPELINE.outgoing(body, [1], 2)
    return sent


@pytest.mark.parametrize("rows", [4, 1, 0])
def test_a_body_arrives_as_packing_and_unpacking_leave_it(rows: int) -> None:
    body = mixed(rows)
    sent = packed(body)
    assert (sent.kind(), type(sent)) == ("Mixed", type(packed(mixed(2))))
    message = received(sent)
    assert (message.diverged, message.t, message.sender, type(message.body)) == ("", 2, 1, Mixed)
    found = message.body
    assert torch.equal(found.values, body.values.relu() if body.values.numel() > 1 else body.values)  # type: ignore[attr-defined]
    assert list(found.model) == list(body.model)  # type: ignore[attr-defined]
    assert torch.equal(found.model["w"], body.model["w"].relu())  # type: ignore[attr-defined]
    assert all(torch.equal(found.model[name], body.model[name]) for name in ("b", "steps", "no"))  # type: ignore[attr-defined]
    assert (found.samples, found.classes) == (rows, body.classes)  # type: ignore[attr-defined]


def test_dense_bodies_are_accepted_too_and_kinds_without_a_codec_stay_as_they_are() -> None:
    assert torch.equal(received(vector(-1, 2, 3)).body.x, vector(-1, 2, 3).x)  # type: ignore[attr-defined]
    word = Word("x")
    assert packed(word) is word
    assert pack(Positive(), word) is word
    single = Vector(torch.ones(1))
    assert packed(single) is single
    assert list(PIPELINE.layouts(Layout.of(word))) == [Layout.of(word)]


def altered(**changes: Any) -> Body:
    sent = packed(mixed(2))
    parts = {**getattr(sent, PARTS), **changes.pop("parts", {})}
    found: Body = replace(sent, **{PARTS: {name: x for name, x in parts.items() if x is not None}, **changes})
    return found


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"parts": {"4.where": torch.ones(3, 2, dtype=torch.bool)}},
            r"where'\] must be bool\[2, 2\], got bool\[3, 2\]",
        ),
        ({"parts": {"4.values": torch.ones(5)}}, r"values'\] must be float32\[≤4\], got float32\[5\]"),
        ({"parts": {"4.values": torch.ones(4, dtype=torch.float64)}}, "must be float32"),
        ({"parts": {"4.values": None}}, r"missing tensors .*4\.values"),
        ({"parts": {"5": torch.ones(4)}}, "unexpected tensors"),
        ({"parts": {"0": torch.ones(2)}}, "must be float32"),
        ({SHAPES: (1, 0, 2, 3, 5, 2)}, r"values must be float32\[≤4, 2\], got float32\[5, 2\]"),
        ({SHAPES: (1, 0, 2, 3, -1, 2)}, "values must be"),
        ({SHAPES: (1, 0, 2, 3, 2)}, "values must be"),
        ({SHAPES: (1, 0, 2, 3, 2, 2, 2)}, "shapes_ must hold at most 6 ints"),
        ({"samples": "2"}, "samples must be int"),
        ({"classes": (1, 2, 3, 4, 5)}, "classes must hold at most 4 ints"),
    ],
)
def test_a_header_that_does_not_fit_is_refused_before_memory_is_allocated(changes: Any, message: str) -> None:
    received(altered())
    with pytest.raises(Unexpected, match=message):
        wire.check(wire.encode(altered(**changes)).header, SCHEMA)


def test_a_packed_sum_is_refused() -> None:
    with pytest.raises(Unexpected, match="a sum must not be packed"):
        received(packed(vector(1, 2, 3)), count=2)


@pytest.mark.parametrize(
    ("parts", "reason"),
    [
        ({"0.values": torch.tensor([1.0])}, "Vector of peer 1 cannot be unpacked: RuntimeError: "),
        ({"0.values": torch.tensor([1.0, torch.nan, 3.0])}, "x holds nan in Vector of peer 1"),
        ({"0.values": torch.tensor([1.0, 1e30, 3.0])}, "x holds 1e+30 in Vector of peer 1"),
    ],
)
def test_a_message_whose_content_is_unusable_has_diverged(parts: Any, reason: str) -> None:
    sent = packed(vector(1, 2, 3))
    message = received(replace(sent, **{PARTS: {**getattr(sent, PARTS), **parts}}))
    assert reason in message.diverged


class Doubles(Positive):
    def unpack(self, parts: Mapping[str, Tensor], spec: TensorSpec) -> Tensor:
        return super().unpack(parts, spec).double()


def test_a_codec_that_returns_another_dtype_is_caught() -> None:
    pipeline = Packing(lambda kind: Doubles(), Streams(0, 0))
    encoded = wire.encode(packed(vector(1, 2, 3)))
    plan = wire.check(encoded.header, MessageSchema(pipeline.layouts(Layout.of(vector(1, 2, 3)))))
    assert "x is unpacked to torch.float64 [3]" in pipeline.incoming(plan.message(0, 1, stored(encoded))).diverged


def test_random_numbers_come_from_the_stream_of_the_peer() -> None:
    class Noisy(Positive):
        def pack(self, tensor: Tensor) -> Mapping[str, Tensor]:
            return super().pack(tensor + torch.rand_like(tensor))

    streams = Streams(3, 1)
    pipeline, before = Packing(lambda kind: Noisy(), streams), torch.get_rng_state()
    position = streams.state_dict()
    first = [getattr(sent, PARTS) for _ in range(2) for _, sent in pipeline.outgoing(vector(1, 2, 3), [1], 0)]
    assert torch.equal(torch.get_rng_state(), before)
    assert not torch.equal(first[0]["0.values"], first[1]["0.values"])
    streams.load_state_dict(position)
    ((_, again),) = pipeline.outgoing(vector(1, 2, 3), [1], 0)
    assert torch.equal(getattr(again, PARTS)["0.values"], first[0]["0.values"])
