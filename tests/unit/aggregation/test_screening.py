"""Count-Sketches, and what a peer accepts by them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from p2pfl import rng
from p2pfl.aggregation import AGGREGATIONS, Rule, RuleList
from p2pfl.aggregation.aggregator import Aggregator
from p2pfl.aggregation.screening import RuleScreen
from p2pfl.aggregation.vectors import count_sketch
from p2pfl.errors import RunFileError
from p2pfl.messaging.schema import Body
from p2pfl.options import OptionErrors
from p2pfl.run_file.load import from_dict
from p2pfl.tensors import PART, Tensors
from tests.conftest import tree


@dataclass(frozen=True)
class Model(Body):
    values: dict[str, Tensor]


def model(seed: int, size: int = 5000) -> Tensors:
    stream = torch.Generator().manual_seed(seed)
    drawn = torch.randn(size, generator=stream)
    return {"w": drawn[:-10].view(-1, 10), "b": drawn[-10:]}


def test_a_sketch_adds_up_numbers_with_signs_at_places_that_all_peers_draw() -> None:
    tensors = {"b": torch.tensor([[1.0, 2.0], [4.0, 8.0]]), "a": torch.tensor([16.0]), "n": torch.tensor([3])}
    stream = rng.shared(7, "aggregation.sketch")
    places = [*stream.integers(6, size=1), *stream.integers(6, size=4)]  # by name: a, then b
    expected = np.zeros(3)
    for place, value in zip(places, [16.0, 1.0, 2.0, 4.0, 8.0], strict=True):
        expected[place % 3] += value if place < 3 else -value
    assert count_sketch(tensors, 3, seed=7).tolist() == expected.tolist()
    assert count_sketch(tensors, 3, seed=8).tolist() != expected.tolist()


def test_a_sketch_is_the_same_for_any_dtype_order_and_stride() -> None:
    half = {name: x.bfloat16() for name, x in model(1).items()}
    wide = {
        name: x.double().t().contiguous().t() if x.dim() == 2 else x.float() for name, x in reversed(half.items())
    }
    assert torch.equal(count_sketch(half, 100, 0), count_sketch(wide, 100, 0))


def test_a_sketch_is_linear_and_keeps_distances_about() -> None:
    one, other = model(1, PART + 5004), model(2, PART + 5004)
    apart = {name: one[name] - other[name] for name in one}
    sketches = [count_sketch(x, 1000, 3) for x in (one, other, apart)]
    torch.testing.assert_close(sketches[0] - sketches[1], sketches[2], rtol=0, atol=1e-3)
    exact = torch.cat([x.reshape(-1) for x in apart.values()]).norm()
    assert float(sketches[2].norm()) == pytest.approx(float(exact), rel=0.1)  # relative deviation: 1/√(2k) = 0.022


def test_entries_that_are_not_finite_count_as_zero() -> None:
    masked = {"x": torch.tensor([1.0, -torch.inf, torch.nan])}
    assert torch.equal(count_sketch(masked, 5, 0), count_sketch({"x": torch.tensor([1.0, 0.0, 0.0])}, 5, 0))


def rule(**parameters: Any) -> Rule:
    return AGGREGATIONS["sketchguard"].parse(parameters)


def test_peers_screen_by_the_first_of_several_rules_with_the_threshold_of_the_round() -> None:
    several = RuleList.parse({"rules": [{"name": "sketchguard", "gamma": 0.5, "size": 40}, "median"]})
    assert several.screening is not None
    aggregator = Aggregator(several, 0, rounds=10, measures=True)
    screen = RuleScreen(several.screening, aggregator, Model, seed=4)
    own, near = Model({"x": torch.tensor([6.0, 8.0])}), Model({"x": torch.tensor([6.0, 4.0])})  # 4 of 10 apart
    sketches = {1: screen.sketch(near), 2: -screen.sketch(own)}
    found: list[Any] = []
    for aggregator.t in (0, 2, 3):  # 5 exp(−t/10) is 5, 4.09 and 3.70
        found.append((screen.accepted(own, sketches), aggregator.measured()["Model"]))
    expected = {2: pytest.approx((2.0, 0.0))}
    assert found == [([1], expected), ([1], expected), ([], {1: pytest.approx((0.4, 0.0)), **expected})]


def test_a_model_that_hides_in_its_sketch_is_rejected_once_it_was_fetched() -> None:
    """Numbers at one place, with one sign, cancel out if they sum up to 0."""
    screening = rule(gamma=0.5, size=3).screening
    assert screening is not None
    own, places = torch.ones(40), rng.shared(4, "aggregation.sketch").integers(6, size=40)
    first, second = (places == places[0]).nonzero()[0][:2]
    lie = own.clone()
    lie[first] += 100.0
    lie[second] -= 100.0
    aggregator = Aggregator(screening, 0, rounds=10)
    screen = RuleScreen(screening, aggregator, Model, seed=4)
    bodies = {0: Model({"x": own}), 1: Model({"x": lie}), 2: Model({"x": 1.2 * own})}
    sketches = {j: screen.sketch(bodies[j]) for j in (1, 2)}
    assert screen.accepted(bodies[0], sketches) == [1, 2]
    assert all(screen.fits(j, bodies[j], sketches[j]) for j in (1, 2))
    torch.testing.assert_close(aggregator.combine(bodies)["x"], 1.1 * own)


def test_a_rule_that_screens_must_be_the_first_of_several() -> None:
    with pytest.raises(
        OptionErrors, match="'sketchguard' screens models before they are sent, so it must be the first"
    ):
        RuleList.parse({"rules": ["norm-clip", "sketchguard"]})


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        (
            {"algorithm": {"name": "cga", "batch": 16}},
            "aggregation: 'sketchguard' screens models before they are sent, but",
        ),
        ({"algorithm": {"name": "fedproto", "batch": 16}}, "choose another rule, e.g. balance"),
        ({"algorithm": {"name": "l2c", "batch": 16}}, "'sketchguard' ignores weights"),
        ({"graph": {"name": "el-local", "receivers": 2}}, "or a rule such as balance"),
        (
            {"adversaries": [{"peers": [1], "name": "alie"}]},
            "'alie' uses what honest neighbors send at the same point of a round, but with sketchguard a peer sends",
        ),
    ],
)
@pytest.mark.parametrize("section", ["sketchguard", ["sketchguard", "median"]])
def test_what_does_not_go_with_screening_is_refused_before_the_start(
    changes: dict[str, Any], expected: str, section: Any
) -> None:
    base: dict[str, Any] = {"algorithm": {"name": "dpsgd", "batch": 16}, "models": "tiny-cnn", "peers": 5}
    with pytest.raises(RunFileError) as caught:
        from_dict(tree(**{**base, "aggregation": section, **changes}))
    assert expected in str(caught.value)
    from_dict(tree(**base, aggregation=section))
