"""Encoding is bit-identical both ways, and anything that is not of this protocol is rejected with a reason."""

from __future__ import annotations

import dataclasses
import math
import struct
from dataclasses import dataclass
from typing import Any

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
    TensorSpec,
    is_finite,
    tensors_of,
    with_tensors,
)
from p2pfl.messaging.wire import OVERHEAD, check, encode
from p2pfl.tensors import LIMIT
from tests.bodies import stored

# No deadline: a slow or busy machine is no failure.
property_of = settings(deadline=None, max_examples=100)


@dataclass(frozen=True)
class Sample(Body):
    x: Tensor


def any_shape(dimensions: int) -> TensorSpec:
    return TensorSpec(torch.float32, (1 << 48,) * dimensions, frozenset(range(dimensions)))


def schema_of(*bodies: Body) -> MessageSchema:
    return MessageSchema(Layout.of(body) for body in bodies)


def round_trip(body: Body, schema: MessageSchema | None = None) -> Any:
    encoded = encode(body)
    return check(encoded.header, schema or schema_of(body)).message(0, 1, stored(encoded)).body


def bits(tensor: Tensor) -> bytes:
    """The bytes of the tensor's elements in C order, without the encoder."""
    flat = torch.empty(tensor.numel(), dtype=tensor.dtype)
    flat.copy_(tensor.detach().reshape(-1))
    return b"".join(bytes(flat[n : n + 1].view(torch.uint8).tolist()) for n in range(len(flat)))


def assert_same_bits(left: Tensor, right: Tensor) -> None:
    assert (left.dtype, left.shape) == (right.dtype, right.shape)
    assert bits(left) == bits(right)


# ---- round trips -------------------------------------------------------------------------------------------


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


@property_of
@given(tensors())
@example(torch.frombuffer(bytearray(struct.pack("<II", 0x7FC12345, 0xFF800001)), dtype=torch.float32))
def test_a_decoded_tensor_is_bit_identical(tensor: Tensor) -> None:
    assert_same_bits(round_trip(Sample(tensor)).x, tensor)


@pytest.mark.parametrize("name", sorted(DTYPES))
@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (5,), (2, 3)])
def test_every_dtype_can_be_sent_in_every_kind_of_shape(name: str, shape: tuple[int, ...]) -> None:
    raw = torch.arange(math.prod(shape) * DTYPES[name].itemsize, dtype=torch.uint8) % (2 if name == "bool" else 251)
    tensor = raw.view(DTYPES[name]).reshape(shape)
    arrived = round_trip(Sample(tensor)).x
    assert_same_bits(arrived, tensor)


@property_of
@given(
    number=st.integers(-(2**63), 2**64 - 1),
    real=st.floats(),
    flag=st.booleans(),
    text=st.text(),
    ids=st.lists(st.integers(-(2**63), 2**64 - 1)).map(tuple),
    named=st.dictionaries(st.text(), tensors(), max_size=3),
)
def test_plain_fields_and_dicts_of_tensors_are_decoded(
    number: int, real: float, flag: bool, text: str, ids: tuple[int, ...], named: dict[str, Tensor]
) -> None:
    body = Words(number, real, flag, text, ids, torch.ones(1), named)
    arrived = round_trip(body)
    assert type(arrived) is Words
    assert struct.pack("<d", arrived.real) == struct.pack("<d", real)
    for name in ("number", "flag", "text", "ids"):
        assert getattr(arrived, name) == getattr(body, name)
        assert type(getattr(arrived, name)) is type(getattr(body, name))
    assert list(arrived.named) == list(named)
    for name, tensor in named.items():
        assert_same_bits(arrived.named[name], tensor)


def test_a_message_carries_its_round_sender_count_and_sizes() -> None:
    body = Words()
    encoded = encode(body, count=5)
    message = check(encoded.header, schema_of(body)).message(4, 2, stored(encoded))
    assert (message.t, message.sender, message.count, message.kind) == (4, 2, 5, "Words")
    assert message.payload == encoded.payload == 4 * (4 + 6 + 2)
    assert message.header == len(encoded.header)
    assert message.size == encoded.size == 2 * 64 + 8
    assert message.cost == message.header + message.size + OVERHEAD


def test_a_lazily_conjugated_tensor_is_sent_as_its_values() -> None:
    tensor = torch.tensor([1 + 2j, 3 - 4j]).conj()
    assert round_trip(Sample(tensor)).x.tolist() == [1 - 2j, 3 + 4j]
    assert round_trip(Sample(tensor.imag)).x.tolist() == [-2.0, 4.0]


def test_a_parameter_arrives_as_a_tensor_without_gradient() -> None:
    arrived = round_trip(Sample(torch.nn.Parameter(torch.ones(2)))).x
    assert not arrived.requires_grad
    assert type(arrived) is Tensor


# ---- the stored body ---------------------------------------------------------------------------------------


def test_tensors_lie_at_multiples_of_64_bytes_with_zeros_between() -> None:
    encoded = encode(Words(named={"a": torch.full((17,), 2.0), "empty": torch.ones(0, 3), "b": torch.ones(2).bool()}))
    assert [offset for offset, _ in encoded.tensors] == [0, 64, 192]
    raw = b"".join(bytes(part) for part in encoded.parts())
    assert raw == (
        struct.pack("<4f", 0, 1, 2, 3) + bytes(48) + struct.pack("<17f", *[2.0] * 17) + bytes(64 - 4) + b"\1\1"
    )
    assert len(raw) == encoded.size == 194
    assert encoded.payload == 16 + 68 + 2


def test_decoded_tensors_are_writable_views_of_the_buffer() -> None:
    encoded = encode(Words())
    buffer = stored(encoded)
    assert buffer is not None
    arrived = tensors_of(check(encoded.header, schema_of(Words())).message(0, 1, buffer).body)
    for (offset, _), tensor in zip(encoded.tensors, arrived.values(), strict=True):
        assert tensor.data_ptr() == buffer.data_ptr() + offset
        assert tensor.data_ptr() % 64 == 0
        assert tensor.is_contiguous()
    arrived["single", None].fill_(7.0)
    assert struct.unpack("<4f", buffer[:16].numpy().tobytes()) == (7.0,) * 4


def test_a_body_without_bytes_needs_no_buffer() -> None:
    for body in (Sample(torch.ones(0, 3)), Sample(torch.ones(0, dtype=torch.bool))):
        encoded = encode(body)
        assert (encoded.size, list(encoded.parts())) == (0, [])
        assert_same_bits(round_trip(body).x, body.x)


def test_a_dense_tensor_is_not_copied_to_be_stored() -> None:
    x = torch.ones(3)
    (_, raw), *_ = encode(Sample(x)).tensors
    assert raw.data_ptr() == x.data_ptr()


def test_equal_bodies_give_equal_bytes() -> None:
    first, second = encode(Words()), encode(Words())
    assert first.header == second.header
    assert b"".join(first.parts()) == b"".join(second.parts())


def test_with_tensors_keeps_plain_and_empty_fields() -> None:
    body = Words(named={})
    doubled = with_tensors(body, {path: 2 * tensor for path, tensor in tensors_of(body).items()})
    assert torch.equal(doubled.single, 2 * body.single)
    assert (doubled.number, doubled.ids, doubled.named) == (3, (1, 2), {})


def test_tensors_are_in_the_order_of_the_fields() -> None:
    assert list(tensors_of(Words())) == [("single", None), ("named", "w"), ("named", "b")]


# ---- bodies that cannot be sent ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Anything(Body):
    value: Any


@pytest.mark.parametrize(
    "value",
    [
        None,
        b"bytes",
        [1, 2],
        (1, 2.0),
        (True,),
        {"a": 1},
        {"a": None},
        {1: torch.ones(1)},
        np.ones(2),
        torch.zeros(1, dtype=torch.float8_e5m2fnuz),
        {"a": torch.zeros(1, dtype=torch.float8_e5m2fnuz)},
        torch.eye(2).to_sparse(),
    ],
    ids=repr,
)
def test_a_field_that_cannot_be_sent_raises_type_error_with_its_name(value: Any) -> None:
    with pytest.raises(TypeError, match=r"^Anything\.value"):
        encode(Anything(value))


# ---- rejections ----------------------------------------------------------------------------------------------

KIND_AT, COUNT_AT, FIELDS_AT, TENSORS_AT = range(4)
ENTRY = ["x", None, "float32", [2, 2]]


def sample() -> Sample:
    return Sample(torch.ones(2, 2))


def header_of(body: Body) -> list[Any]:
    header: list[Any] = msgpack.unpackb(encode(body).header)
    return header


def altered(body: Body, position: int, value: Any) -> bytes:
    """The header of ``body`` with another value at one position."""
    header = header_of(body)
    header[position] = value
    packed: bytes = msgpack.packb(header)
    return packed


def rejected(header: bytes, *bodies: Body) -> WireError:
    with pytest.raises(WireError) as info:
        check(header, schema_of(*(bodies or (sample(),))))
    return info.value


def test_an_unknown_kind_is_rejected_with_a_list_of_known_kinds() -> None:
    error = rejected(altered(sample(), KIND_AT, "Gossip"))
    assert type(error) is Unexpected
    assert str(error) == "unknown message kind 'Gossip'; expected one of Sample"


@pytest.mark.parametrize("value", [0, -1, 1 << 53, 1.0, "1", True, None, [1], {}])
def test_the_count_must_be_a_small_positive_integer(value: Any) -> None:
    error = rejected(altered(sample(), COUNT_AT, value))
    assert type(error) is Malformed
    assert str(error).startswith("count must be ")


@pytest.mark.parametrize(
    ("position", "value"),
    [(KIND_AT, 3), (KIND_AT, None), (FIELDS_AT, []), (FIELDS_AT, None), (TENSORS_AT, {}), (TENSORS_AT, "x")],
)
def test_kind_fields_and_tensors_must_have_their_types(position: int, value: Any) -> None:
    assert type(rejected(altered(sample(), position, value))) is Malformed


@pytest.mark.parametrize(
    "entry",
    [
        None,
        [],
        ENTRY[:3],
        [*ENTRY, 1],
        {"x": 1},
        [3, None, "float32", [2, 2]],
        [None, None, "float32", [2, 2]],
        ["x", 3, "float32", [2, 2]],
        ["x", ["k"], "float32", [2, 2]],
        ["x", None, "complex32", [2, 2]],
        ["x", None, "object", [2, 2]],
        ["x", None, None, [2, 2]],
        ["x", None, ["float32"], [2, 2]],
        ["x", None, "float32", None],
        ["x", None, "float32", "22"],
        ["x", None, "float32", {"2": 2}],
        ["x", None, "float32", [2, -2]],
        ["x", None, "float32", [2, 2.0]],
        ["x", None, "float32", [2, True]],
        ["x", None, "float32", [2, [2]]],
        ["x", None, "float32", [1 << 48]],
        ["x", None, "float32", [1] * 17],
    ],
    ids=repr,
)
def test_a_tensor_entry_of_another_form_is_malformed(entry: Any) -> None:
    assert type(rejected(altered(sample(), TENSORS_AT, [entry]))) is Malformed


@pytest.mark.parametrize("shape", [[1 << 47], [1 << 20, 1 << 27, 3], [(1 << 48) - 1] * 3, [3], [2, 2, 2]])
def test_a_header_is_checked_without_allocating_the_body(shape: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "empty", lambda *args, **kwargs: pytest.fail(f"allocates {args}"))
    loose = MessageSchema([Layout(Sample, {("x", None): any_shape(len(shape))}, {})])
    header = altered(sample(), TENSORS_AT, [["x", None, "float32", shape]])
    assert check(header, loose).size == check(header, loose).payload == 4 * math.prod(shape)
    assert type(rejected(header)) is Unexpected


def test_an_empty_tensor_with_huge_other_dimensions_is_malformed() -> None:
    schema = MessageSchema([Layout(Sample, {("x", None): any_shape(3)}, {})])
    with pytest.raises(Malformed):
        check(altered(sample(), TENSORS_AT, [["x", None, "float32", [0, 1 << 47, 1 << 47]]]), schema)


def test_a_duplicate_tensor_is_malformed() -> None:
    assert str(rejected(altered(sample(), TENSORS_AT, [ENTRY, ENTRY]))) == "duplicate tensor x"


@pytest.mark.parametrize(
    ("other", "why"),
    [
        (Sample(torch.ones(2, 2, dtype=torch.float64)), "Sample: x must be float32[2, 2], got float64[2, 2]"),
        (Sample(torch.ones(2, 3)), "Sample: x must be float32[2, 2], got float32[2, 3]"),
        (Sample(torch.ones(4)), "Sample: x must be float32[2, 2], got float32[4]"),
        (Sample(torch.ones(2, 2, 1)), "Sample: x must be float32[2, 2], got float32[2, 2, 1]"),
    ],
)
def test_another_dtype_or_shape_is_rejected(other: Sample, why: str) -> None:
    error = rejected(encode(other).header)
    assert type(error) is Unexpected
    assert str(error) == why


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"number": 3}, "Words: expected fields ['flag', 'ids', 'number', 'real', 'text'], got ['number']"),
        (
            {"number": 3, "real": 0.5, "flag": True, "text": "", "ids": [], "more": 1},
            "Words: expected fields ['flag', 'ids', 'number', 'real', 'text'], "
            "got ['flag', 'ids', 'more', 'number', 'real', 'text']",
        ),
        (
            {"number": True, "real": 0.5, "flag": True, "text": "", "ids": []},
            "Words: number must be int, got bool",
        ),
        ({"number": 3, "real": 1, "flag": True, "text": "", "ids": []}, "Words: real must be float, got int"),
        ({"number": 3, "real": 0.5, "flag": 1, "text": "", "ids": []}, "Words: flag must be bool, got int"),
        ({"number": 3, "real": 0.5, "flag": True, "text": [], "ids": []}, "Words: text must be str, got tuple"),
        ({"number": 3, "real": 0.5, "flag": True, "text": "", "ids": "12"}, "Words: ids must be tuple, got str"),
    ],
)
def test_missing_surplus_and_mistyped_fields_are_rejected(fields: dict[str, Any], why: str) -> None:
    error = rejected(altered(Words(), FIELDS_AT, fields), Words())
    assert type(error) is Unexpected
    assert str(error) == why


def test_missing_and_surplus_tensors_are_rejected() -> None:
    error = rejected(encode(Words(named={"w": torch.ones(2, 3), "c": torch.ones(1)})).header, Words())
    assert type(error) is Unexpected
    assert str(error) == "Words: unexpected tensors [\"named['c']\"], missing tensors [\"named['b']\"]"


@pytest.mark.parametrize(
    "value",
    [None, [1, 2.0], [True], [[1]], ["a"], {"a": 1}, b"bytes", msgpack.ExtType(5, b"x"), msgpack.Timestamp(1, 2)],
    ids=repr,
)
def test_a_field_must_hold_a_plain_value(value: Any) -> None:
    error = rejected(altered(Words(), FIELDS_AT, {"number": value}), Words())
    assert type(error) is Malformed


@pytest.mark.parametrize("name", [b"number", 3, None])
def test_a_field_name_must_be_a_string(name: Any) -> None:
    assert type(rejected(altered(Words(), FIELDS_AT, {name: 1}), Words())) is Malformed


@pytest.mark.parametrize("byte", [2, 255])
def test_a_bool_tensor_with_other_bytes_than_0_and_1_is_malformed(byte: int) -> None:
    body = Sample(torch.ones(3, dtype=torch.bool))
    plan = check(encode(body).header, schema_of(body))
    with pytest.raises(Malformed, match="bytes 0 and 1 only"):
        plan.message(0, 1, torch.tensor([0, byte, 1], dtype=torch.uint8))


def test_an_oversized_header_is_rejected_without_being_parsed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(msgpack, "unpackb", lambda *args, **kwargs: pytest.fail("parsed"))
    error = rejected(bytes(MAX_HEADER + 1))
    assert str(error) == f"the header is {MAX_HEADER + 1} bytes long; at most {MAX_HEADER} are allowed"


OTHER_FORMS = [
    b"",
    b"\xc1",  # never used in msgpack
    b"\x93\x01",  # a list of three, cut off
    b"\x01\x01",  # bytes after the end
    b"\x91" * 100_000,  # nested lists
    b"\x81\x01" * 1000,  # nested maps
    b"\xdd\xff\xff\xff\xff",  # a list of 2^32 - 1
    b"\xdf\xff\xff\xff\xff",  # a map of 2^32 - 1
    b"\xc6\xff\xff\xff\xff",  # 2^32 - 1 bytes
    b"\xa2\xff\xfe",  # a string that is not UTF-8
    b"\xd7\xff" + b"\xff" * 8,  # a time stamp with too many nanoseconds
    b"\xd4\x05\x00",  # an extension type
    *(b"\x80", b"\x90", b"\xc0"),
    *map(msgpack.packb, ("Sample", ["Sample"], ["Sample"] * 5, {"kind": "Sample"})),
]


@pytest.mark.parametrize("header", OTHER_FORMS, ids=lambda header: header[:8].hex() or "empty")
def test_a_header_of_another_form_is_malformed(header: bytes) -> None:
    assert type(rejected(header)) is Malformed


def test_error_messages_quote_received_values_shortened_and_on_one_line() -> None:
    long, tensor = "x\n" * 100_000, ["single", None, "float32", [4]]
    for position, value in [
        (KIND_AT, long),
        (COUNT_AT, long),
        (FIELDS_AT, {long: 1}),
        (TENSORS_AT, [["single", None, long, [4]]]),
        (TENSORS_AT, [[long, None, "float32", [4]]]),
        (TENSORS_AT, [[long, long, "float32", [3]]]),
        (TENSORS_AT, [["single", long, "float32", [4]]] * 2),
        (TENSORS_AT, [tensor, [long, long, "float32", [4]]]),
    ]:
        text = str(rejected(altered(Words(), position, value), Words()))
        assert len(text) < 400
        assert text.isprintable()


# ---- arbitrary headers; mutated ones are in test_fuzz.py ------------------------------------------------------

LOOSE = Layout(Sample, {("x", None): any_shape(3)}, {})  # admits all lengths, so that only earlier checks can reject
ACCEPTED = MessageSchema([Layout.of(Words()), LOOSE])

scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**63), 2**64 - 1),
    st.floats(),
    st.text(max_size=5),
    st.binary(max_size=5),
)
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)
lengths = st.sampled_from([0, 1, 2, 3, 4, -1, 1 << 47, (1 << 48) - 1, 1 << 48, 1 << 63])
entries = st.lists(
    st.tuples(
        st.sampled_from(["x", "single", "named", ""]) | values,
        st.none() | st.sampled_from(["w", "b"]) | values,
        st.sampled_from(["float32", "bool", "int64", "float"]) | values,
        st.lists(lengths, max_size=4) | values,
    ).map(list)
    | values,
    max_size=3,
)
headers = st.tuples(
    st.sampled_from(["Words", "Sample"]) | values,
    st.integers(0, 3) | values,
    st.just(header_of(Words())[FIELDS_AT]) | st.just({}) | values,
    entries | values,
).map(list)


@settings(deadline=None, max_examples=300)
@given(headers.map(msgpack.packb) | st.binary(max_size=64))
@example(msgpack.packb(["Sample", 1, {}, [["x", None, "float32", [0, 1 << 47, 1 << 47]]]]))
@example(msgpack.packb(["Sample", 1, {}, [["x", None, "float32", [0, 2, 1]]]]))
def test_random_headers_raise_nothing_but_wire_errors(header: bytes) -> None:
    try:
        plan = check(header, ACCEPTED)
    except WireError:
        return
    assert plan.layout.body in (Words, Sample)


@property_of
@given(tensors())
def test_a_body_is_usable_unless_a_number_is_not_finite_or_a_parameter_too_large(tensor: Tensor) -> None:
    numbers = [complex(x) for x in (tensor.to(torch.complex128) if tensor.numel() else tensor).reshape(-1).tolist()]
    usable = all(math.isfinite(x.real) and math.isfinite(x.imag) for x in numbers)
    if tensor.is_floating_point() and tensor.dtype.itemsize <= 4:
        usable &= all(abs(x) < LIMIT for x in numbers)
    assert is_finite(Sample(tensor)) == usable


def test_is_finite_checks_plain_numbers_and_dicts() -> None:
    assert is_finite(Words())
    assert not is_finite(Words(real=math.nan))
    assert not is_finite(Words(named={"w": torch.tensor([0.0, -math.inf])}))


def test_bodies_are_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        Words().number = 4  # type: ignore[misc]
