"""Distances between what neighbors send and a peer's own, and what a rule takes, for the records."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from p2pfl.aggregation import Contributions, Mean, Rule
from p2pfl.aggregation.aggregator import Aggregator
from p2pfl.algorithms.class_means import Prototypes, PrototypeTable, class_means
from p2pfl.algorithms.mapl_prototypes import Prototypes as MAPLPrototypes
from p2pfl.algorithms.mapl_prototypes import aggregate
from p2pfl.messaging.schema import Body
from p2pfl.tensors import Tensors


@dataclass(frozen=True)
class Model(Body):
    values: dict[str, Tensor]


class First(Rule):
    """Leaves out all but the first two in ``transform``."""

    def transform(self, given: Contributions) -> Contributions:
        return given.only(list(given.tensors)[:2])


class Unweighted(Rule):
    """Leaves out the last one by its weight, and clips the second one to a quarter."""

    def transform(self, given: Contributions) -> Contributions:
        given.taken[list(given.tensors)[1]] = 0.25
        return replace(given, weights={**given.weights, max(given.tensors): 0.0})


class Last(Rule):
    """Takes the last one only, in ``combine``."""

    def combine(self, given: Contributions, out: Tensors | None = None, step: Tensors | None = None) -> Tensors:
        last = max(given.tensors)
        given.taken.update({j: float(j == last) for j in given.tensors})
        return super().combine(given.only([last]), out, step)


def at(rule: Rule, me: int = 0) -> Aggregator:
    return Aggregator(rule, me, rounds=10, measures=True)


def models(**values: Mapping[str, Sequence[float]]) -> dict[int, Model]:
    return {int(j[1:]): Model({n: torch.tensor(x) for n, x in of.items()}) for j, of in values.items()}


THREE = models(_0={"a": [3.0], "b": [4.0]}, _1={"a": [3.0], "b": [6.5]}, _2={"a": [0.0], "b": [0.0]})


def test_distance_is_relative_to_the_norm_of_the_own_body() -> None:
    found = at(Mean())
    found.combine(THREE)
    assert found.measured() == {"Model": {1: (0.5, 1.0), 2: (1.0, 1.0)}}
    assert found.measured() == {}  # of the next round


def test_nothing_is_measured_unless_it_is_asked_for() -> None:
    found = Aggregator(Mean(), 0, rounds=10)
    found.combine(THREE)
    assert found.measured() == {}


@pytest.mark.parametrize(
    ("rule", "taken"), [(First(), (1.0, 0.0)), (Unweighted(), (0.25, 0.0)), (Last(), (0.0, 1.0))], ids=str
)
def test_a_rule_shows_what_it_leaves_out_and_clips(rule: Rule, taken: tuple[float, float]) -> None:
    found = at(rule)
    found.combine(THREE)
    assert tuple(fraction for _, fraction in found.measured()["Model"].values()) == taken


def test_the_own_values_are_those_before_they_are_overwritten() -> None:
    own = {"a": torch.tensor([3.0]), "b": torch.tensor([4.0])}
    found = at(Mean())
    found.combine({0: Model(own), 1: THREE[1]}, out=own)
    assert own["b"].item() == 5.25
    assert found.measured()["Model"][1] == (0.5, 1.0)


def test_several_combinations_of_a_round_count_by_their_sizes() -> None:
    found = at(First())
    found.combine(models(_0={"a": [3.0, 0.0, 0.0]}, _1={"a": [3.0] * 3}, _2={"a": [3.0, 0.0, 8.0]}))
    found.combine(models(_0={"b": [4.0]}, _2={"b": [10.0]}), of="another part")
    found.combine({j: Model({}) for j in range(3)}, of="nothing")
    assert found.measured()["Model"][2] == (math.hypot(8, 6) / 5, 0.25)


def test_only_floating_point_values_count_where_the_own_ones_are_finite() -> None:
    own = {"x": torch.tensor([2.0, -math.inf]).bfloat16(), "n": torch.tensor([5])}
    other = {"x": torch.tensor([3.0, -math.inf]).bfloat16(), "n": torch.tensor([500])}
    found = at(Mean())
    found.combine({0: Model(own), 1: Model(other)})
    assert found.measured()["Model"][1] == (0.5, 1.0)


def test_distance_from_zero_and_of_very_large_values() -> None:
    found = at(Mean())
    found.combine(models(_0={"a": [0.0]}, _1={"a": [1.0]}))
    assert math.isnan(found.measured()["Model"][1][0])
    found.combine(models(_0={"a": [1.0]}, _1={"a": [1e30]}))  # whose square no float32 holds
    assert found.measured()["Model"][1][0] == pytest.approx(1e30)


def test_a_peer_without_something_to_compare_measures_nothing() -> None:
    found = at(Mean(), me=9)
    found.combine(THREE)
    assert found.measured() == {}


def prototypes(classes: Sequence[int], *rows: Sequence[float]) -> Prototypes:
    return Prototypes(torch.tensor(rows), tuple(classes), ())


@pytest.mark.parametrize("rule", [Mean(), First()], ids=["by its formula", "by a rule"])
def test_prototypes_are_compared_where_both_have_samples_of_a_class(rule: Rule) -> None:
    bodies = {0: prototypes([0, 2], [3.0], [4.0]), 1: prototypes([1, 2], [9.0], [6.0]), 3: prototypes([1], [7.0])}
    found = at(rule)
    class_means(PrototypeTable.of(bodies, 1, torch.device("cpu")), 3, weighted=True, aggregation=found)
    assert found.measured() == {"Prototypes": {1: (0.5, 1.0)}}


def test_mapls_prototypes_are_compared_by_class_too() -> None:
    own = MAPLPrototypes(torch.tensor([[3.0], [4.0], [0.0]]), (0, 1))
    other = MAPLPrototypes(torch.tensor([[8.0], [6.0], [7.0]]), (1, 2))
    found = at(Mean())
    aggregate(own, {1: other}, torch.tensor([0.5, 0.5]), found)
    assert found.measured() == {"Prototypes": {1: (0.5, 1.0)}}
