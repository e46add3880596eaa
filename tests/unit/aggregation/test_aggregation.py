"""Aggregation rules: what they are given, how they follow one another, and what they keep."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import pytest
import torch
from torch import Tensor

from p2pfl.aggregation import AGGREGATIONS, Contributions, Mean, PerTensor, Rule, RuleList
from p2pfl.aggregation.aggregator import Aggregator
from p2pfl.algorithms.class_means import Prototypes, PrototypeTable, class_means
from p2pfl.algorithms.fedavg_dec import Trained
from p2pfl.algorithms.mapl_prototypes import Prototypes as MAPLPrototypes
from p2pfl.algorithms.mapl_prototypes import aggregate
from p2pfl.algorithms.width_scaling import Slice, Whole, Width
from p2pfl.messaging.schema import Body
from p2pfl.options import OptionErrors
from p2pfl.tensors import Tensors, clone
from tests.support import mean_at


@dataclass(frozen=True)
class Model(Body):
    values: dict[str, Tensor]


class Averaging(Rule):
    """The mean by another name."""


class Largest(PerTensor):
    """The largest value of each coordinate."""

    weighted = False

    def tolerates(self, n: int) -> int:
        return n // 4

    def combine_tensor(self, tensors: Sequence[Tensor], given: Contributions) -> Tensor:
        return torch.stack(list(tensors)).amax(0)


@dataclass(frozen=True)
class Scaled(Rule):
    """Scale all tensors, and count the rounds."""

    by: float = 2.0
    """The factor."""

    def tolerates(self, n: int) -> int:
        return n // 2

    def transform(self, given: Contributions) -> Contributions:
        given.state["rounds"] = given.state.get("rounds", 0) + 1
        scaled = {j: {name: self.by * x for name, x in tensors.items()} for j, tensors in given.tensors.items()}
        return replace(given, tensors=scaled)


@dataclass(frozen=True)
class Recording(Rule):
    """Keep what is given."""

    given: list[Contributions] = field(default_factory=list)
    owns: list[Tensors | None] = field(default_factory=list)
    """Copies: the result may overwrite them."""

    def transform(self, given: Contributions) -> Contributions:
        self.given.append(given)
        self.owns.append(None if given.own is None else clone(given.own))
        return given


@pytest.fixture(autouse=True)
def names() -> Iterator[None]:
    rules = {"largest": Largest, "scaled": Scaled}
    for name, rule in rules.items():
        AGGREGATIONS.register(name, rule, f"tests.{name}")
    yield
    for name in rules:
        AGGREGATIONS.unregister(name)


def models(**values: Sequence[float]) -> dict[int, Model]:
    """``models(_3=[1.0])`` is what peer 3 has sent."""
    return {int(j[1:]): Model({"x": torch.tensor(value)}) for j, value in values.items()}


def at(rule: Rule, me: int = 0) -> Aggregator:
    return Aggregator(rule, me, rounds=10)


# ---- what is combined ------------------------------------------------------------------------------------------


def test_mean_is_weighted_and_adds_the_step_before_it_rounds() -> None:
    bodies = models(_7=[2.0], _0=[8.0], _3=[1.0])
    weights = {0: 0.25, 3: 0.5, 7: 0.25}
    assert at(Mean()).combine(bodies, weights)["x"].tolist() == [3.0]
    assert at(Mean()).combine(bodies, weights, step={"x": torch.tensor([0.5])})["x"].tolist() == [3.5]
    assert at(Mean()).combine(bodies)["x"].item() == pytest.approx(11 / 3)
    narrow = {j: Model({"x": torch.ones(1, dtype=torch.bfloat16)}) for j in range(2)}
    step = {"x": torch.tensor([2.0**-8 + 2.0**-12])}
    assert at(Mean()).combine(narrow, step=step)["x"].item() == 1.0 + 2.0**-7


def test_rule_per_tensor_replaces_the_mean_and_may_overwrite_a_contribution() -> None:
    bodies = models(_0=[1.0, 5.0], _2=[3.0, 4.0])
    local = bodies[0].values
    found = at(Largest()).combine(bodies, out=local, step={"x": torch.tensor([0.5, 0.0])})
    assert found is local
    assert local["x"].tolist() == [3.5, 5.0]


@pytest.mark.parametrize("rule", [Mean(), Averaging(), Largest()])
def test_only_the_names_that_are_overwritten_are_combined(rule: Rule) -> None:
    bodies = {j: Model({"x": torch.ones(1), "mean": torch.ones(1)}) for j in (0, 1)}
    out = {"x": torch.zeros(1)}
    assert at(rule).combine(bodies, out=out)["x"].tolist() == [1.0]
    assert list(out) == ["x"]


def test_weights_that_do_not_sum_to_1_are_an_error() -> None:
    with pytest.raises(ValueError, match="must sum to 1, not to 5"):
        at(Mean()).combine(models(_0=[1.0], _1=[2.0]), {0: 2, 1: 3})


def test_rule_is_given_senders_weights_kind_round_and_own() -> None:
    rule = Recording()
    aggregator = at(rule, me=3)
    aggregator.t = 4
    bodies = models(_3=[1.0], _1=[2.0])
    aggregator.combine(bodies, {1: 0.25, 3: 0.75})
    (given,) = rule.given
    assert (list(given.tensors), dict(given.weights), given.me) == ([1, 3], {1: 0.25, 3: 0.75}, 3)
    assert (given.kind, given.t, given.rounds) == ("Model", 4, 10)
    assert given.own is bodies[3].values


@pytest.mark.parametrize(("before", "own"), [([7.0], [7.0]), ([torch.nan], None)])
def test_own_of_a_peer_that_sends_nothing_is_what_it_has_unless_that_diverged(
    before: list[float], own: list[float] | None
) -> None:
    rule = Recording()
    at(rule, me=3).combine(models(_1=[2.0]), out={"x": torch.tensor(before)})
    at(rule, me=3).combine(models(_1=[2.0]))
    assert [None if found is None else found["x"].tolist() for found in rule.owns] == [own, None]


def test_only_scales_the_weights_of_the_senders_that_stay() -> None:
    rule = Recording()
    at(rule).combine(models(_0=[1.0], _1=[2.0], _2=[4.0]), {0: 0.0, 1: 0.25, 2: 0.75})
    (given,) = rule.given
    assert given.only([2, 1]).weights == {1: 0.25, 2: 0.75}
    assert given.only([0, 2]).weights == {0: 0.0, 2: 1.0}
    assert given.only([0]).weights == {0: 1.0}
    assert list(given.only([2, 9]).tensors) == [2]


# ---- several rules, and what they keep -------------------------------------------------------------------------


def test_rules_of_a_list_transform_in_turn_and_the_last_one_combines() -> None:
    rule = RuleList.parse({"rules": [{"name": "scaled", "by": 3.0}, "scaled", "largest"]})
    assert at(rule).combine(models(_0=[1.0], _1=[2.0]))["x"].tolist() == [12.0]
    assert not rule.weighted
    assert RuleList.parse({"rules": ["scaled", "mean"]}).weighted
    assert rule.to_dict() == {
        "rules": [{"name": "scaled", "by": 3.0}, {"name": "scaled", "by": 2.0}, {"name": "largest"}]
    }


@pytest.mark.parametrize(
    ("rules", "tolerated"), [(["mean"], 0), (["scaled", "largest"], 2), (["scaled", "mean"], 4), (["scaled"], 4)]
)
def test_a_list_tolerates_what_its_last_rule_does_unless_that_is_the_mean(rules: list[str], tolerated: int) -> None:
    assert RuleList.parse({"rules": rules}).tolerates(8) == tolerated


@pytest.mark.parametrize(
    ("rules", "problem"),
    [
        (["largest", "mean"], "'largest' replaces the mean, so it must be the last rule"),
        ([{"by": 3.0}], "should be a rule"),
        (["scaeld"], "did you mean 'scaled'"),
        ([{"name": "scaled", "of": 1}], "unknown key 'of'"),
        ([], "at least 1 item"),
    ],
)
def test_wrong_lists_are_refused(rules: list[object], problem: str) -> None:
    with pytest.raises(OptionErrors, match=problem):
        RuleList.parse({"rules": rules})


@pytest.mark.parametrize("of_list", [False, True])
def test_rule_keeps_its_state_for_each_thing_that_is_combined(of_list: bool) -> None:
    rule = RuleList.parse({"rules": ["scaled", "scaled"]}) if of_list else Scaled()
    aggregator = at(rule)
    bodies = models(_0=[1.0], _1=[2.0])
    for _ in range(3):
        aggregator.combine(bodies)
    aggregator.combine(bodies, of="statistics")
    kept = aggregator.state_dict()
    counts = [state["rule 1"] if of_list else state for state in kept.values()]
    assert counts == [{"rounds": 3}, {"rounds": 1}]
    restored = at(rule)
    restored.load_state_dict(kept)
    restored.combine(bodies)
    assert restored.state_dict() == aggregator.state_dict()


def test_the_mean_keeps_nothing() -> None:
    aggregator = at(Mean())
    aggregator.combine(models(_0=[1.0]))
    assert aggregator.state_dict() == {}


# ---- rows and entries ------------------------------------------------------------------------------------------


def test_rows_are_combined_over_the_peers_that_have_them() -> None:
    rows = [(0, 1, torch.tensor([4.0]), 1.0), (0, 0, torch.tensor([1.0]), 2.0), (2, 5, torch.tensor([7.0]), 3.0)]
    ignored = (1, 1, torch.tensor([9.0]), 0.0)
    out = torch.full((3, 1), -1.0)
    assert at(Mean()).combine_rows(Prototypes, [*rows, ignored], out).tolist() == [[2.0], [-1.0], [7.0]]


def table() -> PrototypeTable:
    stream = torch.Generator().manual_seed(0)
    labels = torch.tensor([0, 2, 0, 1, 2])
    senders, samples = torch.tensor([0, 0, 1, 2, 2]), torch.tensor([3, 1, 5, 2, 4], dtype=torch.float64)
    return PrototypeTable(torch.randn(5, 6, generator=stream), labels, senders, samples)


def prototypes(aggregator: Aggregator) -> Tensor:
    return class_means(table(), 4, weighted=True, aggregation=aggregator)[0]


def unweighted_prototypes(aggregator: Aggregator) -> Tensor:
    return class_means(table(), 4, weighted=False, aggregation=aggregator)[0]


def prototypes_of_mapl(aggregator: Aggregator) -> Tensor:
    bodies = {j: MAPLPrototypes(torch.full((2, 3), float(2**j)), (0, 1)) for j in range(3)}
    return aggregate(bodies.pop(0), bodies, torch.tensor([0.5, 0.125, 0.375], dtype=torch.float64), aggregator)


def slices(aggregator: Aggregator) -> Tensor:
    """Widths 4, 2 and 4 of a layer, the last one from the second step on."""
    wide, narrow = (Width(f"{n}", {"x": (n,)}, {"x": (n,)}) for n in (4, 2))
    held: Mapping[int, tuple[Slice, Tensors]] = {
        0: (Slice(wide), {"x": torch.tensor([1.0, 2.0, 3.0, 4.0])}),
        3: (Slice(narrow), {"x": torch.tensor([5.0, 6.0])}),
        4: (Slice(narrow, 1), {"x": torch.tensor([9.0, 8.0])}),
    }
    whole = Whole.mean(wide, 4, list(held.values()))
    return (whole if aggregator.is_mean else whole.combined(Trained, held, aggregator)).means["x"]


@pytest.mark.parametrize("combined", [prototypes, unweighted_prototypes, prototypes_of_mapl, slices])
def test_a_rule_that_averages_agrees_with_the_formula_of_the_paper(combined: Callable[[Aggregator], Tensor]) -> None:
    torch.testing.assert_close(combined(at(Averaging())), combined(mean_at()), rtol=1e-6, atol=1e-6)
    assert not torch.allclose(combined(at(Largest())), combined(mean_at()))


def test_entries_are_combined_over_the_models_that_hold_them() -> None:
    assert slices(at(Largest())).tolist() == [5.0, 9.0, 8.0, 4.0]
    assert prototypes(at(Largest()))[3].tolist() == [0.0] * 6
