"""Layouts: which bodies a receiver accepts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.fuzz.messages import Words
from p2pfl.errors import Unexpected
from p2pfl.messaging.schema import MAX_HEADER, Body, Layout, MessageSchema
from tests.unit.messaging.test_wire import Sample, assert_same_bits, round_trip, sample, schema_of


def test_a_free_dimension_accepts_all_lengths_up_to_its_largest() -> None:
    schema = MessageSchema([Layout.of(sample(), free={"x": {0: 7}})])
    for length in (0, 1, 7):
        arrived: Any = round_trip(Sample(torch.ones(length, 2)), schema)
        assert arrived.x.shape == (length, 2)
    for wrong in ((8, 2), (2, 3), (2, 1)):
        with pytest.raises(Unexpected, match=rf"x must be float32\[≤7, 2\], got float32\[{wrong[0]}, {wrong[1]}\]"):
            round_trip(Sample(torch.ones(wrong)), schema)


def test_a_free_dimension_does_not_lift_the_limit_on_messages() -> None:
    schema = MessageSchema([Layout.of(sample(), free={"x": {0: 7}})])
    assert schema.largest(1 << 40) == MAX_HEADER + 7 * 2 * 4
    assert schema.largest(8) == MAX_HEADER + 8


@dataclass(frozen=True)
class Built(Body):
    plan: str
    walls: Tensor


def test_fixed_fields_select_the_layout() -> None:
    plans = {"hut": 1, "house": 4}
    layouts = [Layout.of(Built(plan, torch.ones(walls)), fixed=("plan",)) for plan, walls in plans.items()]
    schema = MessageSchema(layouts)
    for plan, walls in plans.items():
        arrived: Any = round_trip(Built(plan, torch.ones(walls)), schema)
        assert (arrived.plan, len(arrived.walls)) == (plan, walls)
    with pytest.raises(Unexpected, match=r"walls must be float32\[1\], got float32\[4\]"):
        round_trip(Built("hut", torch.ones(4)), schema)
    with pytest.raises(Unexpected, match=r"expected one of .*'hut'.*'house'.*, got .*'castle'"):
        round_trip(Built("castle", torch.ones(4)), schema)


def test_a_kind_may_have_several_layouts() -> None:
    schema = schema_of(Sample(torch.ones(2)), Sample(torch.ones(3, dtype=torch.int64)))
    assert "Sample" in schema
    assert "Words" not in schema
    for body in (Sample(torch.ones(2)), Sample(torch.ones(3, dtype=torch.int64))):
        assert_same_bits(round_trip(body, schema).x, body.x)
    with pytest.raises(Unexpected):
        round_trip(Sample(torch.ones(3)), schema)


def test_a_dict_may_arrive_in_another_order_of_keys() -> None:
    body = Words(named={"b": torch.zeros(2), "w": torch.ones(2, 3)})
    arrived: Any = round_trip(body, schema_of(Words()))
    assert list(arrived.named) == ["b", "w"]


@dataclass(frozen=True)
class Votes(Body):
    choice: int
    ids: tuple[int, ...]


RANGED = MessageSchema([Layout.of(Votes(0, ()), ranges={"choice": range(2, 5), "ids": range(10)})])


@pytest.mark.parametrize("body", [Votes(2, ()), Votes(4, (0, 9, 9)), Votes(3, (5,))])
def test_ints_within_their_range_are_accepted(body: Votes) -> None:
    assert round_trip(body, RANGED) == body


@pytest.mark.parametrize(
    ("body", "why"),
    [
        (Votes(1, ()), "Votes: choice must be in 2 to 4, got 1"),
        (Votes(5, ()), "Votes: choice must be in 2 to 4, got 5"),
        (Votes(-3, ()), "Votes: choice must be in 2 to 4, got -3"),
        (Votes(2, (0, 10)), "Votes: ids must be in 0 to 9, got (0, 10)"),
        (Votes(2, (-1,)), "Votes: ids must be in 0 to 9, got (-1,)"),
        (Votes(2, (1 << 40,) * 100), "Votes: ids must be in 0 to 9, got (" + "1099511627776, " * 6 + "...)"),
    ],
)
def test_ints_outside_their_range_are_rejected(body: Votes, why: str) -> None:
    with pytest.raises(Unexpected) as info:
        round_trip(body, RANGED)
    assert str(info.value) == why


def test_a_tuple_of_ints_has_at_most_its_largest_length() -> None:
    schema = MessageSchema([Layout.of(Votes(0, ()), free={"ids": {0: 3}}, ranges={"ids": range(10)})])
    for body in (Votes(0, ()), Votes(0, (1, 1, 9))):
        assert round_trip(body, schema) == body
    with pytest.raises(Unexpected, match=r"^Votes: ids must hold at most 3 ints, got 4$"):
        round_trip(Votes(0, (1, 2, 3, 4)), schema)


def test_ranges_tell_layouts_of_one_kind_apart() -> None:
    layouts = [Layout.of(Votes(0, ()), ranges={"choice": allowed}) for allowed in (range(2), range(8, 9))]
    for choice, accepted in ((0, True), (1, True), (2, False), (8, True), (9, False)):
        body = Votes(choice, (99,))
        if accepted:
            assert round_trip(body, MessageSchema(layouts)) == body
        else:
            with pytest.raises(Unexpected):
                round_trip(body, MessageSchema(layouts))
