"""The wire: what is encoded comes back bit by bit, and what is not of this protocol is refused by name."""

from __future__ import annotations

import dataclasses
import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgpack
import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from benchmarks.fuzz import Words
from p2pfl.errors import Malformed, Unexpected, WireError, WrongRun, WrongVersion
from p2pfl.wire import (
    DTYPES,
    MAX_HEADER,
    STOP,
    VERSION,
    Body,
    Buffer,
    Layout,
    TensorSpec,
    Vocabulary,
    decode,
    encode,
    is_finite,
    tensors_of,
    with_tensors,
)

RUN = "0123456789abcdef"

# No deadline: a slow or busy machine is no failure.
property_of = settings(deadline=None, max_examples=100)


@dataclass(frozen=True)
class One(Body):
    x: Tensor


def frames_of(body: Body, **envelope: Any) -> list[Buffer]:
    return encode(body).to(**{"run": RUN, "t": 4, "sender": 2, "seq": 7, **envelope})


def vocabulary_of(*bodies: Body) -> Vocabulary:
    return Vocabulary(Layout.of(body) for body in bodies)


def travel(body: Body) -> Any:
    return decode(frames_of(body), RUN, vocabulary_of(body)).body


def bits(tensor: Tensor) -> bytes:
    """The tensor's elements in C order, by a way of our own."""
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
    look = draw(st.sampled_from(["as it is", "transposed", "every other", "expanded"]))
    if look == "transposed" and tensor.ndim > 1:
        return tensor.transpose(0, -1)
    if look == "every other" and tensor.ndim:
        return tensor[..., ::2]
    if look == "expanded":
        return tensor.unsqueeze(0).expand(2, *shape)
    return tensor


@property_of
@given(tensors())
@example(torch.frombuffer(bytearray(struct.pack("<II", 0x7FC12345, 0xFF800001)), dtype=torch.float32))
def test_a_tensor_comes_back_bit_by_bit(tensor: Tensor) -> None:
    assert_same_bits(travel(One(tensor)).x, tensor)


@pytest.mark.parametrize("name", sorted(DTYPES))
@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (5,), (2, 3)])
def test_every_dtype_travels_in_every_kind_of_shape(name: str, shape: tuple[int, ...]) -> None:
    raw = torch.arange(math.prod(shape) * DTYPES[name].itemsize, dtype=torch.uint8) % (2 if name == "bool" else 251)
    tensor = raw.view(DTYPES[name]).reshape(shape)
    arrived = travel(One(tensor)).x
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
def test_plain_fields_and_dicts_of_tensors_come_back(
    number: int, real: float, flag: bool, text: str, ids: tuple[int, ...], named: dict[str, Tensor]
) -> None:
    body = Words(number, real, flag, text, ids, torch.ones(1), named)
    arrived = travel(body)
    assert type(arrived) is Words
    assert struct.pack("<d", arrived.real) == struct.pack("<d", real)
    for name in ("number", "flag", "text", "ids"):
        assert getattr(arrived, name) == getattr(body, name)
        assert type(getattr(arrived, name)) is type(getattr(body, name))
    assert list(arrived.named) == list(named)
    for name, tensor in named.items():
        assert_same_bits(arrived.named[name], tensor)


def test_the_envelope_comes_back_with_the_sizes_on_the_wire() -> None:
    body = Words()
    frames = encode(body).to(RUN, t=4, sender=2, seq=7, flags=STOP, count=5)
    message = decode(frames, RUN, vocabulary_of(body))
    assert (message.t, message.sender, message.seq, message.flags, message.count) == (4, 2, 7, STOP, 5)
    assert message.kind == "Words"
    assert message.payload == encode(body).payload == 4 * (4 + 6 + 2)
    assert message.header == len(frames[0])


def test_a_lazily_conjugated_tensor_travels_as_its_values() -> None:
    tensor = torch.tensor([1 + 2j, 3 - 4j]).conj()
    assert travel(One(tensor)).x.tolist() == [1 - 2j, 3 + 4j]
    assert travel(One(tensor.imag)).x.tolist() == [-2.0, 4.0]


def test_a_parameter_arrives_as_a_tensor_without_gradient() -> None:
    arrived = travel(One(torch.nn.Parameter(torch.ones(2)))).x
    assert not arrived.requires_grad
    assert type(arrived) is Tensor


@pytest.mark.parametrize("offset", range(8))
def test_a_decoded_tensor_lies_in_aligned_writable_memory_of_its_own(offset: int) -> None:
    body = Words()
    header, *tensor_frames = frames_of(body)
    moved = [bytearray(offset) + bytes(frame) for frame in tensor_frames]
    views = [memoryview(frame)[offset:].toreadonly() for frame in moved]
    message = decode([header, *views], RUN, vocabulary_of(body))
    arrived = tensors_of(message.body)
    for tensor in arrived.values():
        assert tensor.data_ptr() % 64 == 0
        assert tensor.is_contiguous()
    for frame in moved:
        frame[:] = b"\xff" * len(frame)
    for path, tensor in tensors_of(body).items():
        assert torch.equal(arrived[path], tensor)
        arrived[path].add_(1)  # writable
        assert torch.equal(arrived[path], tensor + 1)


def test_a_scalar_and_a_small_tensor_are_aligned_too() -> None:
    for _ in range(20):
        assert travel(One(torch.tensor(1.0))).x.data_ptr() % 64 == 0
        assert travel(One(torch.ones(3, dtype=torch.bool))).x.data_ptr() % 64 == 0


def test_encode_takes_a_snapshot() -> None:
    x, w = torch.ones(3), torch.ones(2, 3)
    encoded = encode(Words(single=x, named={"w": w, "b": torch.zeros(2)}))
    x.zero_()
    w.t().fill_(9.0)
    arrived: Any = decode(encoded.to(RUN, 0, 0, 0), RUN, vocabulary_of(Words(single=x))).body
    assert torch.equal(arrived.single, torch.ones(3))
    assert torch.equal(arrived.named["w"], torch.ones(2, 3))


def test_one_encoded_body_serves_all_neighbours_with_the_same_tensor_frames() -> None:
    encoded = encode(Words())
    one, other = encoded.to(RUN, 0, 1, 0), encoded.to(RUN, 0, 1, 9)
    assert one[0] != other[0]
    assert all(left is right for left, right in zip(one[1:], other[1:], strict=True))


def test_equal_bodies_give_equal_bytes() -> None:
    one, other = frames_of(Words()), frames_of(Words())
    assert [bytes(frame) for frame in one] == [bytes(frame) for frame in other]


@given(st.text("0123456789abcdef", min_size=16, max_size=16))
@property_of
def test_the_header_is_as_long_whatever_the_run_id(run: str) -> None:
    assert len(frames_of(Words(), run=run)[0]) == len(frames_of(Words())[0])


def test_tensors_can_be_replaced_in_a_body_with_plain_and_empty_fields() -> None:
    body = Words(named={})
    doubled = with_tensors(body, {path: 2 * tensor for path, tensor in tensors_of(body).items()})
    assert torch.equal(doubled.single, 2 * body.single)
    assert (doubled.number, doubled.ids, doubled.named) == (3, (1, 2), {})


def test_tensors_travel_in_the_order_of_the_fields() -> None:
    assert list(tensors_of(Words())) == [("single", None), ("named", "w"), ("named", "b")]


# ---- what cannot travel ------------------------------------------------------------------------------------


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
        torch.empty(1, dtype=torch.float8_e5m2fnuz),
        {"a": torch.empty(1, dtype=torch.float8_e5m2fnuz)},
        torch.eye(2).to_sparse(),
    ],
    ids=repr,
)
def test_a_field_that_cannot_travel_is_our_own_mistake_and_named(value: Any) -> None:
    with pytest.raises(TypeError, match=r"^Anything\.value"):
        encode(Anything(value))


# ---- refusals ----------------------------------------------------------------------------------------------


def envelope_of(body: Body) -> list[Any]:
    header: Any = msgpack.unpackb(bytes(frames_of(body)[0]))
    return list(header)


VERSION_AT, RUN_AT, KIND_AT, T_AT, SENDER_AT, SEQ_AT, FLAGS_AT, COUNT_AT, FIELDS_AT, TENSORS_AT = range(10)


def refused(frames: Sequence[Buffer], *bodies: Body) -> WireError:
    with pytest.raises(WireError) as info:
        decode(frames, RUN, vocabulary_of(*(bodies or (One(torch.ones(2, 2)),))))
    return info.value


def altered(body: Body, position: int, value: Any) -> list[Buffer]:
    """The frames of ``body`` with another value at one place of the header."""
    envelope = envelope_of(body)
    envelope[position] = value
    return [msgpack.packb(envelope), *frames_of(body)[1:]]


def one() -> One:
    return One(torch.ones(2, 2))


@pytest.mark.parametrize("version", [0, 1, 3, "2", None, 2.0, True, [2]])
def test_another_version_is_refused_and_named(version: Any) -> None:
    error = refused(altered(one(), VERSION_AT, version))
    assert type(error) is WrongVersion
    assert str(error) == f"protocol version {version!r}; this peer speaks 2"


def test_another_version_may_have_another_form() -> None:
    assert type(refused([msgpack.packb([3, {"everything": "else"}])])) is WrongVersion


def test_a_message_of_another_run_is_refused_unless_any_run_is_taken() -> None:
    frames = altered(one(), RUN_AT, "fedcba9876543210")
    error = refused(frames)
    assert type(error) is WrongRun
    assert str(error) == "a message of run 'fedcba9876543210'; this is run '0123456789abcdef'"
    assert decode(frames, None, vocabulary_of(one())).sender == 2


@pytest.mark.parametrize("run", [None, 5, ["0123456789abcdef"], {"a": 1}])
def test_a_run_id_that_is_no_string_is_malformed(run: Any) -> None:
    with pytest.raises(Malformed):
        decode(altered(one(), RUN_AT, run), None, vocabulary_of(one()))
    assert type(refused(altered(one(), RUN_AT, run))) is Malformed


def test_an_unknown_kind_is_unexpected_and_the_known_ones_are_listed() -> None:
    error = refused(altered(one(), KIND_AT, "Gossip"))
    assert type(error) is Unexpected
    assert str(error) == "kind 'Gossip' is not spoken here; known: One"


@pytest.mark.parametrize("position", [T_AT, SENDER_AT, SEQ_AT, FLAGS_AT, COUNT_AT])
@pytest.mark.parametrize("value", [-1, 1 << 53, 1.0, "1", True, None, [1], {}])
def test_numbers_of_the_envelope_must_be_small_unsigned_integers(position: int, value: Any) -> None:
    error = refused(altered(one(), position, value))
    assert type(error) is Malformed
    name = {T_AT: "t", SENDER_AT: "sender", SEQ_AT: "seq", FLAGS_AT: "flags", COUNT_AT: "count"}[position]
    assert str(error).startswith(f"{name} is ")


@pytest.mark.parametrize(
    ("position", "value"),
    [(KIND_AT, 3), (KIND_AT, None), (FIELDS_AT, []), (FIELDS_AT, None), (TENSORS_AT, {}), (TENSORS_AT, "x")],
)
def test_kind_fields_and_tensors_must_be_of_their_types(position: int, value: Any) -> None:
    assert type(refused(altered(one(), position, value))) is Malformed


ENTRY = ["x", None, "float32", [2, 2]]


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
    assert type(refused(altered(one(), TENSORS_AT, [entry]))) is Malformed


@pytest.mark.parametrize(
    "shape", [[1 << 47], [1 << 47, 1 << 47], [1 << 20, 1 << 27, 3], [(1 << 48) - 1] * 16, [3], [2, 2, 2], []]
)
def test_a_shape_that_does_not_fit_the_frame_is_malformed_and_allocates_nothing(
    shape: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    def forbidden(*args: Any, **kwargs: Any) -> Tensor:
        raise AssertionError(f"allocates {args}")

    monkeypatch.setattr(torch, "empty", forbidden)
    spec = TensorSpec(torch.float32, (None,) * len(shape))
    vocabulary = Vocabulary([Layout(One, {("x", None): spec}, {})])
    frames = altered(one(), TENSORS_AT, [["x", None, "float32", shape]])
    with pytest.raises(Malformed, match=r"^tensor x: \d+ bytes announced, 16 came$"):
        decode(frames, RUN, vocabulary)


def test_an_empty_tensor_with_impossible_other_lengths_is_malformed() -> None:
    vocabulary = Vocabulary([Layout(One, {("x", None): TensorSpec(torch.float32, (None, None, None))}, {})])
    header, _ = altered(one(), TENSORS_AT, [["x", None, "float32", [0, 1 << 47, 1 << 47]]])
    with pytest.raises(Malformed):
        decode([header, b""], RUN, vocabulary)


def test_a_refused_layout_allocates_nothing_either(monkeypatch: pytest.MonkeyPatch) -> None:
    frames = frames_of(One(torch.ones(3)))
    monkeypatch.setattr(torch, "empty", lambda *args, **kwargs: pytest.fail("allocated"))
    assert type(refused(frames)) is Unexpected


@pytest.mark.parametrize("change", [-16, -1, 1, 16])
def test_a_frame_of_another_length_is_malformed(change: int) -> None:
    header, frame = frames_of(one())
    raw = bytes(frame) + bytes(max(0, change))
    error = refused([header, raw[: 16 + change]])
    assert type(error) is Malformed
    assert str(error) == f"tensor x: 16 bytes announced, {16 + change} came"


def test_too_few_and_too_many_frames_are_malformed() -> None:
    frames = frames_of(one())
    assert str(refused(frames[:1])) == "1 tensors announced, 0 frames follow"
    assert str(refused([*frames, b"x"])) == "1 tensors announced, 2 frames follow"
    assert str(refused([])) == "a message without frames"


def test_a_tensor_that_comes_twice_is_malformed() -> None:
    header, frame = altered(one(), TENSORS_AT, [ENTRY, ENTRY])
    assert str(refused([header, frame, frame])) == "tensor x comes twice"


@pytest.mark.parametrize(
    ("other", "why"),
    [
        (One(torch.ones(2, 2, dtype=torch.float64)), "One: x is float64[2, 2] instead of float32[2, 2]"),
        (One(torch.ones(2, 3)), "One: x is float32[2, 3] instead of float32[2, 2]"),
        (One(torch.ones(4)), "One: x is float32[4] instead of float32[2, 2]"),
        (One(torch.ones(2, 2, 1)), "One: x is float32[2, 2, 1] instead of float32[2, 2]"),
    ],
)
def test_another_dtype_or_shape_is_unexpected(other: One, why: str) -> None:
    error = refused(frames_of(other))
    assert type(error) is Unexpected
    assert str(error) == why


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"number": 3}, "Words: fields ['number'] instead of ['flag', 'ids', 'number', 'real', 'text']"),
        (
            {"number": 3, "real": 0.5, "flag": True, "text": "", "ids": [], "more": 1},
            "Words: fields ['flag', 'ids', 'more', 'number', 'real', 'text'] instead of "
            "['flag', 'ids', 'number', 'real', 'text']",
        ),
        (
            {"number": True, "real": 0.5, "flag": True, "text": "", "ids": []},
            "Words: number is a bool instead of a int",
        ),
        ({"number": 3, "real": 1, "flag": True, "text": "", "ids": []}, "Words: real is a int instead of a float"),
        ({"number": 3, "real": 0.5, "flag": 1, "text": "", "ids": []}, "Words: flag is a int instead of a bool"),
        ({"number": 3, "real": 0.5, "flag": True, "text": [], "ids": []}, "Words: text is a tuple instead of a str"),
        ({"number": 3, "real": 0.5, "flag": True, "text": "", "ids": "12"}, "Words: ids is a str instead of a tuple"),
    ],
)
def test_missing_surplus_and_mistyped_fields_are_unexpected(fields: dict[str, Any], why: str) -> None:
    error = refused(altered(Words(), FIELDS_AT, fields), Words())
    assert type(error) is Unexpected
    assert str(error) == why


def test_missing_and_surplus_tensors_are_unexpected() -> None:
    error = refused(frames_of(Words(named={"w": torch.ones(2, 3), "c": torch.ones(1)})), Words())
    assert type(error) is Unexpected
    assert str(error) == "Words: tensors [\"named['c']\"] are not expected, [\"named['b']\"] are missing"


@pytest.mark.parametrize(
    "value",
    [None, [1, 2.0], [True], [[1]], ["a"], {"a": 1}, b"bytes", msgpack.ExtType(5, b"x"), msgpack.Timestamp(1, 2)],
    ids=repr,
)
def test_a_field_holds_nothing_but_plain_values(value: Any) -> None:
    error = refused(altered(Words(), FIELDS_AT, {"number": value}), Words())
    assert type(error) is Malformed


@pytest.mark.parametrize("name", [b"number", 3, None])
def test_a_field_name_is_a_string(name: Any) -> None:
    assert type(refused(altered(Words(), FIELDS_AT, {name: 1}), Words())) is Malformed


@pytest.mark.parametrize("byte", [2, 255])
def test_a_bool_tensor_with_other_bytes_than_0_and_1_is_malformed(byte: int) -> None:
    body = One(torch.ones(3, dtype=torch.bool))
    header, _ = frames_of(body)
    error = refused([header, bytes([0, byte, 1])], body)
    assert type(error) is Malformed


def test_a_header_beyond_the_limit_is_malformed_without_being_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(msgpack, "unpackb", lambda *args, **kwargs: pytest.fail("read"))
    error = refused([bytes(MAX_HEADER + 1)])
    assert str(error) == f"a header of {MAX_HEADER + 1} bytes; at most {MAX_HEADER}"


@pytest.mark.parametrize(
    "header",
    [
        b"",
        b"\xc1",  # never used in msgpack
        b"\x93\x01",  # a list of three, cut off
        b"\x01\x01",  # something after the end
        b"\x91" * 100_000,  # lists in lists
        b"\x81\x01" * 1000,  # maps in maps
        b"\xdd\xff\xff\xff\xff",  # a list of 2^32 - 1
        b"\xdf\xff\xff\xff\xff",  # a map of 2^32 - 1
        b"\xc6\xff\xff\xff\xff",  # 2^32 - 1 bytes
        b"\xa2\xff\xfe",  # a string that is not UTF-8
        b"\xd7\xff" + b"\xff" * 8,  # a time stamp with too many nanoseconds
        b"\xd4\x05\x00",  # an extension type
        b"\x80",
        b"\x90",
        b"\xc0",
        msgpack.packb("One"),
        msgpack.packb([VERSION]),
        msgpack.packb([VERSION] * 11),
        msgpack.packb({"version": VERSION}),
    ],
    ids=lambda header: header[:8].hex() or "empty",
)
def test_a_header_of_another_form_is_malformed(header: bytes) -> None:
    assert type(refused([header])) is Malformed


def test_what_a_neighbour_sent_appears_in_messages_shortened_and_on_one_line() -> None:
    long = "x\n" * 100_000
    body = Words()
    frames = frames_of(body)
    tensor = ["single", None, "float32", [4]]
    for bad in (
        altered(body, VERSION_AT, long),
        altered(body, RUN_AT, long),
        altered(body, KIND_AT, long),
        altered(body, T_AT, long),
        altered(body, FIELDS_AT, {long: 1}),
        [msgpack.packb([*envelope_of(body)[:9], [["single", None, long, [4]]]]), frames[1]],
        [msgpack.packb([*envelope_of(body)[:9], [[long, None, "float32", [4]]]]), frames[1]],
        [msgpack.packb([*envelope_of(body)[:9], [[long, long, "float32", [3]]]]), frames[1]],
        [msgpack.packb([*envelope_of(body)[:9], [["single", long, "float32", [4]]] * 2]), frames[1], frames[1]],
        [msgpack.packb([*envelope_of(body)[:9], [tensor, [long, long, "float32", [4]]]]), frames[1], frames[1]],
    ):
        text = str(refused(bad, body))
        assert len(text) < 400
        assert text.isprintable()


# ---- layouts -----------------------------------------------------------------------------------------------


def test_free_dimensions_take_any_length_and_the_others_do_not() -> None:
    vocabulary = Vocabulary([Layout.of(one(), free={"x": (0,)})])
    for length in (0, 1, 7):
        arrived: Any = decode(frames_of(One(torch.ones(length, 2))), RUN, vocabulary).body
        assert arrived.x.shape == (length, 2)
    with pytest.raises(Unexpected, match=r"x is float32\[2, 3\] instead of float32\[\*, 2\]"):
        decode(frames_of(One(torch.ones(2, 3))), RUN, vocabulary)


@dataclass(frozen=True)
class Built(Body):
    plan: str
    walls: Tensor


def test_fixed_fields_decide_which_layout_it_is() -> None:
    plans = {"hut": 1, "house": 4}
    layouts = [Layout.of(Built(plan, torch.ones(walls)), fixed=("plan",)) for plan, walls in plans.items()]
    vocabulary = Vocabulary(layouts)
    for plan, walls in plans.items():
        arrived: Any = decode(frames_of(Built(plan, torch.ones(walls))), RUN, vocabulary).body
        assert (arrived.plan, len(arrived.walls)) == (plan, walls)
    with pytest.raises(Unexpected, match=r"walls is float32\[4\] instead of float32\[1\]"):
        decode(frames_of(Built("hut", torch.ones(4))), RUN, vocabulary)
    with pytest.raises(Unexpected, match=r"'castle'.* is none of .*'hut'.*'house'"):
        decode(frames_of(Built("castle", torch.ones(4))), RUN, vocabulary)


def test_a_kind_may_have_several_layouts() -> None:
    vocabulary = vocabulary_of(One(torch.ones(2)), One(torch.ones(3, dtype=torch.int64)))
    assert "One" in vocabulary
    assert "Words" not in vocabulary
    for body in (One(torch.ones(2)), One(torch.ones(3, dtype=torch.int64))):
        assert_same_bits(decode(frames_of(body), RUN, vocabulary).body.x, body.x)  # type: ignore[attr-defined]
    with pytest.raises(Unexpected):
        decode(frames_of(One(torch.ones(3))), RUN, vocabulary)


def test_a_dict_may_be_sent_in_another_order_of_keys() -> None:
    body = Words(named={"b": torch.zeros(2), "w": torch.ones(2, 3)})
    arrived: Any = decode(frames_of(body), RUN, vocabulary_of(Words())).body
    assert list(arrived.named) == ["b", "w"]


# ---- whatever comes ----------------------------------------------------------------------------------------

VALID = [bytes(frame) for frame in frames_of(Words())]
LOOSE = Layout(
    One, {("x", None): TensorSpec(torch.float32, (None, None, None))}, {}
)  # admits all lengths, so that only the checks before it stand in the way
TAKES = Vocabulary([Layout.of(Words()), LOOSE])

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
envelopes = st.tuples(
    st.just(VERSION) | values,
    st.just(RUN) | values,
    st.sampled_from(["Words", "One"]) | values,
    *[st.integers(0, 3) | values] * 5,
    st.just(envelope_of(Words())[FIELDS_AT]) | st.just({}) | values,
    entries | values,
).map(list)


def decode_or_refuse(frames: Sequence[bytes]) -> None:
    try:
        message = decode(frames, RUN, TAKES)
    except WireError:
        return
    assert message.kind in ("Words", "One")
    assert message.payload == sum(map(len, frames[1:]))


@settings(deadline=None, max_examples=500)
@given(st.lists(st.binary(max_size=64), max_size=5))
def test_random_bytes_raise_nothing_but_wire_errors(frames: list[bytes]) -> None:
    decode_or_refuse(frames)


@settings(deadline=None, max_examples=700)
@given(envelopes, st.lists(st.binary(max_size=24), max_size=3))
@example([1, RUN, "One", 0, 0, 0, 0, 1, {}, [["x", None, "float32", [0, 1 << 47, 1 << 47]]]], [b""])
@example([1, RUN, "One", 0, 0, 0, 0, 1, {}, [["x", None, "float32", [0, 2, 1]]]], [b""])
def test_random_headers_raise_nothing_but_wire_errors(envelope: list[Any], tensor_frames: list[bytes]) -> None:
    decode_or_refuse([msgpack.packb(envelope, use_bin_type=True), *tensor_frames])


@st.composite
def mutations(draw: st.DrawFn) -> list[bytes]:
    """A valid message with a few bytes changed, inserted or cut out, or frames swapped, dropped or doubled."""
    frames = [bytearray(frame) for frame in VALID]
    for _ in range(draw(st.integers(1, 4))):
        if not frames:
            break
        # The header is where most can go wrong.
        which = draw(st.sampled_from([0, 0, 0, *range(len(frames))]))
        frame = frames[which]
        how = draw(st.sampled_from(["change", "insert", "cut", "truncate", "drop", "double", "swap"]))
        at = draw(st.integers(0, max(0, len(frame) - 1)))
        if how == "change" and frame:
            frame[at] = draw(st.integers(0, 255))
        elif how == "insert":
            frame[at:at] = draw(st.binary(min_size=1, max_size=4))
        elif how == "cut":
            del frame[at : at + draw(st.integers(1, 4))]
        elif how == "truncate":
            del frame[at:]
        elif how == "drop":
            del frames[which]
        elif how == "double":
            frames.insert(which, bytearray(frame))
        elif how == "swap":
            other = draw(st.integers(0, len(frames) - 1))
            frames[which], frames[other] = frames[other], frames[which]
    return [bytes(frame) for frame in frames]


@settings(deadline=None, max_examples=1000)
@given(mutations())
def test_damaged_messages_raise_nothing_but_wire_errors(frames: list[bytes]) -> None:
    decode_or_refuse(frames)


def test_the_undamaged_message_is_taken() -> None:
    decode_or_refuse(VALID)
    assert decode(VALID, RUN, TAKES).body.number == 3  # type: ignore[attr-defined]


@property_of
@given(tensors())
def test_a_body_is_finite_exactly_when_all_its_numbers_are(tensor: Tensor) -> None:
    one = [complex(x) for x in (tensor.to(torch.complex128) if tensor.numel() else tensor).reshape(-1).tolist()]
    assert is_finite(One(tensor)) == all(math.isfinite(x.real) and math.isfinite(x.imag) for x in one)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_finite_numbers_whose_sum_overflows_are_finite(dtype: torch.dtype) -> None:
    assert is_finite(One(torch.full((3,), torch.finfo(dtype).max, dtype=dtype)))


def test_plain_numbers_count_too() -> None:
    assert is_finite(Words())
    assert not is_finite(Words(real=math.nan))
    assert not is_finite(Words(named={"w": torch.tensor([0.0, -math.inf])}))


def test_bodies_are_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        Words().number = 4  # type: ignore[misc]
