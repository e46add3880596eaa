"""Encoding is bit-identical both ways, and whatever a layout does not allow is rejected with a reason."""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from typing import Any
from unittest.mock import Mock

import msgpack
import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from benchmarks.fuzz.messages import Words
from p2pfl.errors import Malformed, Unexpected, WireError
from p2pfl.messaging.schema import (
    DTYPES,
    MAX_HEADER,
    Body,
    Layout,
    MessageSchema,
    tensors_of,
    what_diverged,
    with_tensors,
)
from p2pfl.messaging.wire import OVERHEAD, check, encode
from p2pfl.tensors import LIMIT
from tests.bodies import arrive, stored

property_of = settings(deadline=None, max_examples=200)


@dataclass(frozen=True)
class Sample(Body):
    x: Tensor


@dataclass(frozen=True)
class Votes(Body):
    choice: int
    ids: tuple[int, ...]


@dataclass(frozen=True)
class Built(Body):
    plan: str
    walls: Tensor


@dataclass(frozen=True)
class Anything(Body):
    value: Any


def round_trip(body: Body) -> Any:
    return arrive(body, [Layout.of(body)])


def assert_same_bits(left: Tensor, right: Tensor) -> None:
    def bits(tensor: Tensor) -> bytes:
        flat = torch.empty(tensor.numel(), dtype=tensor.dtype)
        flat.copy_(tensor.detach().reshape(-1))
        return b"".join(bytes(flat[n : n + 1].view(torch.uint8).tolist()) for n in range(len(flat)))

    assert (left.dtype, left.shape) == (right.dtype, right.shape)
    assert bits(left) == bits(right)


# ---- round trips


@st.composite
def tensors(draw: st.DrawFn) -> Tensor:
    """Any dtype, 0-d, empty or not, any bits (NaN payloads too), contiguous or not."""
    dtype = DTYPES[draw(st.sampled_from(sorted(DTYPES)))]
    shape = draw(st.lists(st.integers(0, 4), max_size=4))
    size = math.prod(shape) * dtype.itemsize
    raw = draw(st.binary(min_size=size, max_size=size))
    if dtype is torch.bool:
        raw = bytes(byte & 1 for byte in raw)
    tensor = torch.empty(shape, dtype=dtype)
    if raw:
        tensor = torch.frombuffer(bytearray(raw), dtype=dtype).reshape(shape)
    view = draw(st.sampled_from(["unchanged", "transposed", "every other", "expanded"]))
    if view == "transposed" and tensor.ndim > 1:
        return tensor.transpose(0, -1)
    if view == "every other" and tensor.ndim:
        return tensor[..., ::2]
    if view == "expanded":
        return tensor.unsqueeze(0).expand(2, *shape)
    return tensor


@pytest.mark.exhaustive
@property_of
@given(tensors())
@example(torch.frombuffer(bytearray(struct.pack("<II", 0x7FC12345, 0xFF800001)), dtype=torch.float32))
def test_a_decoded_tensor_is_bit_identical(tensor: Tensor) -> None:
    assert_same_bits(round_trip(Sample(tensor)).x, tensor)


@pytest.mark.exhaustive
@property_of
@given(
    number=st.integers(-(2**63), 2**64 - 1),
    real=st.floats(),
    flag=st.booleans(),
    text=st.text(),
    ids=st.lists(st.integers(-(2**63), 2**64 - 1)).map(tuple),
    named=st.dictionaries(st.text(), tensors(), max_size=3),
)
def test_plain_fields_and_dicts_of_tensors_are_decoded(**values: Any) -> None:
    body = Words(**values)
    arrived = round_trip(body)
    assert struct.pack("<d", arrived.real) == struct.pack("<d", body.real)
    for name in ("number", "flag", "text", "ids"):
        assert getattr(arrived, name) == getattr(body, name)
        assert type(getattr(arrived, name)) is type(getattr(body, name))
    assert list(arrived.named) == list(body.named)
    for name, tensor in body.named.items():
        assert_same_bits(arrived.named[name], tensor)


def test_a_lazily_conjugated_tensor_and_a_parameter_are_sent_as_their_values() -> None:
    tensor = torch.tensor([1 + 2j, 3 - 4j]).conj()
    assert round_trip(Sample(tensor)).x.tolist() == [1 - 2j, 3 + 4j]
    assert round_trip(Sample(tensor.imag)).x.tolist() == [-2.0, 4.0]
    parameter = round_trip(Sample(torch.nn.Parameter(torch.ones(2)))).x
    assert (type(parameter), parameter.requires_grad) == (Tensor, False)


def test_tensors_lie_at_multiples_of_64_bytes_with_zeros_between() -> None:
    body = Words(named={"a": torch.full((17,), 2.0), "empty": torch.ones(0, 3), "b": torch.ones(2).bool()})
    encoded = encode(body, count=5)
    assert [offset for offset, _ in encoded.tensors] == [0, 64, 192]
    raw = b"".join(bytes(part) for part in encoded.parts())
    assert raw == (
        struct.pack("<4f", 0, 1, 2, 3) + bytes(48) + struct.pack("<17f", *[2.0] * 17) + bytes(64 - 4) + b"\1\1"
    )
    message = check(encoded.header, MessageSchema([Layout.of(body)])).message(4, 2, stored(encoded))
    assert (message.t, message.sender, message.kind, message.plan.count) == (4, 2, "Words", 5)
    assert message.plan.payload == encoded.payload == 16 + 68 + 2
    assert message.plan.size == encoded.size == len(raw) == 194
    assert message.cost == len(encoded.header) + 194 + OVERHEAD


def test_encoding_copies_no_dense_tensor_and_decoding_returns_writable_aligned_views() -> None:
    body = Words()
    encoded = encode(body)
    assert encoded.tensors[0][1].data_ptr() == body.single.data_ptr()
    buffer = stored(encoded)
    assert buffer is not None
    arrived = tensors_of(check(encoded.header, MessageSchema([Layout.of(body)])).message(0, 1, buffer).body)
    for (offset, _), tensor in zip(encoded.tensors, arrived.values(), strict=True):
        assert tensor.data_ptr() == buffer.data_ptr() + offset
        assert tensor.data_ptr() % 64 == 0
    arrived["single", None].fill_(7.0)
    assert struct.unpack("<4f", buffer[:16].numpy().tobytes()) == (7.0,) * 4


def test_with_tensors_keeps_the_order_and_plain_and_empty_fields() -> None:
    assert list(tensors_of(Words())) == [("single", None), ("named", "w"), ("named", "b")]
    body = Words(named={})
    doubled = with_tensors(body, {path: 2 * tensor for path, tensor in tensors_of(body).items()})
    assert torch.equal(doubled.single, 2 * body.single)
    assert (doubled.number, doubled.ids, doubled.named) == (3, (1, 2), {})


UNSENDABLE = torch.zeros(1, dtype=torch.float8_e5m2fnuz)


@pytest.mark.parametrize(
    "value",
    [
        *(None, b"bytes", [1, 2], (1, 2.0), (True,), {"a": 1}, {"a": None}, {1: torch.ones(1)}),
        *(np.ones(2), UNSENDABLE, {"a": UNSENDABLE}, torch.eye(2).to_sparse()),
    ],
    ids=repr,
)
def test_a_field_that_cannot_be_sent_raises_type_error_with_its_name(value: Any) -> None:
    with pytest.raises(TypeError, match=r"^Anything\.value"):
        encode(Anything(value))


@pytest.mark.exhaustive
@property_of
@given(tensors())
def test_a_body_note_contribution_unless_a_number_is_not_finite_or_a_parameter_too_large(tensor: Tensor) -> None:
    numbers = [complex(x) for x in (tensor.to(torch.complex128) if tensor.numel() else tensor).reshape(-1).tolist()]
    usable = all(math.isfinite(x.real) and math.isfinite(x.imag) for x in numbers)
    if tensor.is_floating_point() and tensor.dtype.itemsize <= 4:
        usable &= all(abs(x) < LIMIT for x in numbers)
    assert (not what_diverged(Sample(tensor))) == (not what_diverged(Words(named={"w": tensor}))) == usable
    assert what_diverged(Words(real=math.nan)) == "real is nan"


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("other", [torch.float32, torch.int64], ids=["one type", "two types"])
def test_a_body_has_diverged_where_it_differs_from_the_start(dtype: torch.dtype, other: torch.dtype) -> None:
    def body(*values: float) -> Words:
        return Words(named={"mask": torch.tensor(values, dtype=dtype), "w": torch.ones(3, dtype=other)})

    def diverged(sent: Words) -> str:
        plan = check((encoded := encode(sent)).header, schema)
        return plan.message(0, 1, stored(encoded)).diverged

    layout = Layout.of(body(-torch.inf, 6e4, torch.nan))
    schema = MessageSchema([layout])
    assert diverged(body(-torch.inf, 6e4, torch.nan)) == ""
    assert diverged(body(torch.nan, 6e4, torch.nan)) == "named['mask'] holds nan in Words of peer 1"
    assert diverged(body(-torch.inf, torch.inf, torch.nan)) == "named['mask'] holds inf in Words of peer 1"
    assert what_diverged(body(-torch.inf, 6e4, torch.nan)) == "named['mask'] holds nan"
    assert what_diverged(body(-torch.inf, 6e4, torch.nan), [Layout.of(Sample(torch.ones(1))), layout]) == ""


def test_constants_of_a_body_may_become_anything_but_nan() -> None:
    zeros = {"mask": torch.zeros(2), "w": torch.zeros(2)}
    layout = Layout.of(Words(named=zeros), constants={"named": {"mask"}})
    assert what_diverged(Words(named={**zeros, "mask": torch.tensor([-torch.inf, 1e30])}), [layout]) == ""
    assert what_diverged(Words(named={**zeros, "mask": torch.tensor([0.0, torch.nan])}), [layout]) != ""
    assert what_diverged(Words(named={**zeros, "w": torch.tensor([0.0, 1e30])}), [layout]) == "named['w'] holds 1e+30"


# ---- headers of another form: mutated ones are in test_fuzz.py

ENTRY = ["x", None, "float32", [2, 2]]
SAMPLE = ["Sample", 1, {}, [ENTRY]]


def rejected(header: bytes | list[Any], *bodies: Body) -> WireError:
    with pytest.raises(WireError) as info:
        check(
            header if isinstance(header, bytes) else msgpack.packb(header),
            MessageSchema(map(Layout.of, bodies or (Sample(torch.ones(2, 2)),))),
        )
    return info.value


@pytest.mark.parametrize(
    "header",
    [
        b"",
        b"\xc1",  # never used in msgpack
        b"\x93\x01",  # a list of three, cut off
        b"\x01\x01",  # bytes after the end
        b"\x91" * 100_000,  # nested lists
        b"\xdd\xff\xff\xff\xff",  # a list of 2^32 - 1
        b"\xc6\xff\xff\xff\xff",  # 2^32 - 1 bytes
        b"\xa2\xff\xfe",  # a string that is not UTF-8
        b"\xd7\xff" + b"\xff" * 8,  # a time stamp with too many nanoseconds
        b"\xd4\x05\x00",  # an extension type
        *map(msgpack.packb, ({}, None, "Sample", SAMPLE[:3], [*SAMPLE, 1], {"kind": "Sample"})),
        *(msgpack.packb([kind, *SAMPLE[1:]]) for kind in (3, None, ["Sample"])),
        *(msgpack.packb(["Sample", count, *SAMPLE[2:]]) for count in (0, -1, 1 << 53, 1.0, "1", True, None, [1])),
        *(msgpack.packb(["Sample", 1, fields, [ENTRY]]) for fields in (None, "", {3: 1}, {None: 1})),
        *(msgpack.packb([*SAMPLE[:3], tensors]) for tensors in (None, "x", [ENTRY, ENTRY])),
    ],
    ids=lambda header: header[:12].hex() or "empty",
)
def test_a_header_of_another_form_is_malformed(header: bytes) -> None:
    assert type(rejected(header)) is Malformed


def test_a_header_for_which_memory_is_too_short_is_malformed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A peer whose memory is limited drops it and goes on."""
    monkeypatch.setattr(msgpack, "unpackb", Mock(side_effect=MemoryError))
    assert str(rejected(b"\x91")) == "the header is not msgpack: MemoryError"


@pytest.mark.parametrize(
    "entry",
    [
        *(None, [], ENTRY[:3], [*ENTRY, 1], {"x": 1}),
        *([field, None, "float32", [2, 2]] for field in (3, None, b"x")),
        *(["x", key, "float32", [2, 2]] for key in (3, ["k"])),
        *(["x", None, dtype, [2, 2]] for dtype in ("complex32", "object", None, ["float32"])),
        *(["x", None, "float32", shape] for shape in (None, "22", {"2": 2}, [2, -2], [2, 2.0], [2, True], [2, [2]])),
        ["x", None, "float32", [1] * 17],
    ],
    ids=repr,
)
def test_a_tensor_entry_of_another_form_is_malformed(entry: Any) -> None:
    assert str(rejected([*SAMPLE[:3], [entry]])).startswith("expected [field, key, dtype, shape], got ")


def test_an_oversized_header_is_not_parsed_and_nothing_is_allocated_for_a_body(monkeypatch: Any) -> None:
    monkeypatch.setattr(torch, "empty", lambda *args, **kwargs: pytest.fail(f"allocates {args}"))
    layout = Layout.of(Sample(torch.ones(1)), free={"x": {0: 1 << 50}})
    assert check(msgpack.packb(["Sample", 1, {}, [["x", None, "float32", [1 << 50]]]]), MessageSchema([layout]))
    monkeypatch.setattr(msgpack, "unpackb", lambda *args, **kwargs: pytest.fail("parsed"))
    error = rejected(bytes(MAX_HEADER + 1))
    assert str(error) == f"the header is {MAX_HEADER + 1} bytes long; at most {MAX_HEADER} are allowed"


@pytest.mark.parametrize("byte", [2, 255])
def test_a_bool_tensor_with_other_bytes_than_0_and_1_is_malformed(byte: int) -> None:
    body = Sample(torch.ones(3, dtype=torch.bool))
    plan = check(encode(body).header, MessageSchema([Layout.of(body)]))
    with pytest.raises(Malformed, match="bytes 0 and 1 only"):
        plan.message(0, 1, torch.tensor([0, byte, 1], dtype=torch.uint8))


def test_error_messages_quote_received_values_shortened_and_on_one_line() -> None:
    long, good = "x\n" * 100_000, ["single", None, "float32", [4]]
    for position, value in [
        (0, long),
        (1, long),
        (2, {long: 1}),
        (3, [["single", None, long, [4]]]),
        (3, [[long, None, "float32", [4]]]),
        (3, [["single", long, "float32", [4]]] * 2),
        (3, [good, [long, long, "float32", [4]]]),
    ]:
        header = msgpack.unpackb(encode(Words()).header)
        header[position] = value
        text = str(rejected(header, Words()))
        assert len(text) < 400
        assert text.isprintable()


# ---- layouts

FIELDS: dict[Any, Any] = {"number": 3, "real": 0.5, "flag": True, "text": "", "ids": []}
NAMES = sorted(FIELDS)
VOTES = Layout.of(Votes(0, ()), free={"ids": {0: 3}}, ranges={"choice": range(2, 5), "ids": range(10)})
FREE = Layout.of(Sample(torch.ones(2, 2)), free={"x": {0: 7}})


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"number": 3}, f"expected fields {NAMES}, got ['number']"),
        ({**FIELDS, "more": 1}, f"expected fields {NAMES}, got {sorted([*NAMES, 'more'])}"),
        ({**FIELDS, b"number": 1}, f"expected fields {NAMES}, got {sorted([*NAMES, b'number'], key=str)}"),
        ({**FIELDS, "number": True}, "number must be int, got bool"),
        ({**FIELDS, "number": None}, "number must be int, got NoneType"),
        ({**FIELDS, "number": msgpack.ExtType(5, b"x")}, "number must be int, got ExtType"),
        ({**FIELDS, "real": 1}, "real must be float, got int"),
        ({**FIELDS, "flag": 1}, "flag must be bool, got int"),
        ({**FIELDS, "text": []}, "text must be str, got tuple"),
        ({**FIELDS, "ids": "12"}, "ids must be tuple, got str"),
        *(
            ({**FIELDS, "ids": ids}, f"ids must hold ints only, got {tuple(ids)!r}")
            for ids in ([1, 2.0], [True], [[1]])
        ),
    ],
)
def test_missing_surplus_and_mistyped_fields_are_rejected(fields: dict[str, Any], why: str) -> None:
    error = rejected(["Words", 1, fields, msgpack.unpackb(encode(Words()).header)[3]], Words())
    assert (type(error), str(error)) == (Unexpected, f"Words: {why}")


@pytest.mark.parametrize(
    ("layout", "body", "why"),
    [
        (FREE, Votes(2, ()), "unknown message kind 'Votes'; expected one of Sample"),
        (FREE, Sample(torch.ones(8, 2)), "Sample: x must be float32[≤7, 2], got float32[8, 2]"),
        (FREE, Sample(torch.ones(2, 1)), "Sample: x must be float32[≤7, 2], got float32[2, 1]"),
        (FREE, Sample(torch.ones(2, 2).double()), "Sample: x must be float32[≤7, 2], got float64[2, 2]"),
        (FREE, Sample(torch.ones(4)), "Sample: x must be float32[≤7, 2], got float32[4]"),
        (VOTES, Votes(1, ()), "Votes: choice must be in 2 to 4, got 1"),
        (VOTES, Votes(5, ()), "Votes: choice must be in 2 to 4, got 5"),
        (VOTES, Votes(2, (0, 10)), "Votes: ids must be in 0 to 9, got (0, 10)"),
        (VOTES, Votes(2, (-1,)), "Votes: ids must be in 0 to 9, got (-1,)"),
        (VOTES, Votes(2, (1, 2, 3, 4)), "Votes: ids must hold at most 3 ints, got 4"),
        (
            Layout.of(Words()),
            Words(named={"w": torch.ones(2, 3), "c": torch.ones(1)}),
            "Words: unexpected tensors [\"named['c']\"], missing tensors [\"named['b']\"]",
        ),
    ],
)
def test_a_body_that_does_not_fit_its_layout_is_rejected(layout: Layout, body: Body, why: str) -> None:
    with pytest.raises(Unexpected) as info:
        arrive(body, [layout])
    assert str(info.value) == why


@pytest.mark.parametrize(
    ("layout", "body"),
    [
        *((FREE, Sample(torch.ones(length, 2))) for length in (0, 1, 7)),
        *((VOTES, body) for body in (Votes(2, ()), Votes(4, (0, 9, 9)))),
        (Layout.of(Words()), Words(named={"b": torch.zeros(2), "w": torch.ones(2, 3)})),  # in another order
    ],
)
def test_a_body_that_fits_its_layout_arrives(layout: Layout, body: Body) -> None:
    arrived = tensors_of(arrive(body, [layout]))
    assert [(path, x.tolist()) for path, x in arrived.items()] == [
        (path, x.tolist()) for path, x in tensors_of(body).items()
    ]


def test_the_largest_message_is_that_of_the_layouts_or_of_the_limit() -> None:
    schema = MessageSchema([FREE, VOTES])
    assert (schema.largest(1 << 40), schema.largest(8)) == (MAX_HEADER + 7 * 2 * 4, MAX_HEADER + 8)
    of_two_tensors = MessageSchema([Layout.of(Words(named={"b": torch.ones(9), "w": torch.ones(9)}))])
    assert of_two_tensors.largest(40) == MAX_HEADER + 40


def test_a_kind_may_have_several_layouts_told_apart_by_fixed_fields_ranges_or_tensors() -> None:
    plans = {"hut": 1, "house": 4}
    built = [Layout.of(Built(plan, torch.ones(walls)), fixed=("plan",)) for plan, walls in plans.items()]
    for plan, walls in plans.items():
        assert len(arrive(Built(plan, torch.ones(walls)), built).walls) == walls
    with pytest.raises(Unexpected, match=r"walls must be float32\[1\], got float32\[4\]"):
        arrive(Built("hut", torch.ones(4)), built)
    with pytest.raises(Unexpected, match=r"expected one of .*'hut'.*'house'.*, got .*'castle'"):
        arrive(Built("castle", torch.ones(4)), built)
    votes = [Layout.of(Votes(0, ()), ranges={"choice": allowed}) for allowed in (range(2), range(8, 9))]
    assert [arrive(Votes(choice, (99,)), votes).choice for choice in (0, 1, 8)] == [0, 1, 8]
    with pytest.raises(Unexpected):
        arrive(Votes(2, (99,)), votes)
    samples = [Layout.of(Sample(x)) for x in (torch.ones(2), torch.ones(3).long())]
    assert_same_bits(arrive(Sample(torch.ones(3).long()), samples).x, torch.ones(3).long())
