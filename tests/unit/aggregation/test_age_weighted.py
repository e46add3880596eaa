"""The rule ``age-weighted``: by hand, after other rules, and in a run whose ages follow from its devices."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from p2pfl.aggregation import Contributions, Mean, Rule, RuleList
from p2pfl.aggregation.age_weighted import AgeWeighted
from p2pfl.aggregation.aggregator import Aggregator
from p2pfl.messaging.schema import Body
from p2pfl.models.cost import flops
from p2pfl.options import OptionErrors
from p2pfl.run_folder.folder import Result
from p2pfl.run_folder.replay import order_of
from p2pfl.session import metrics
from p2pfl.session.build import load_data
from p2pfl.simulation.simulate import simulate
from p2pfl.tensors import Tensors, clone, equal

AGES = {0: 0, 1: 3, 2: -2, 3: 8}
"""At a power of 0.5: factors 1, 1/2, 1 and 1/3."""


@dataclass(frozen=True)
class Model(Body):
    values: Tensors


def combined(
    rule: Rule, values: Mapping[int, float], ages: Mapping[int, int] = AGES, me: int = 0, **given: Any
) -> float:
    """Combine one number of each peer."""
    aggregator = Aggregator(rule, me, rounds=10)
    aggregator.ages = {"Model": {j: age for j, age in ages.items() if j != me}, "Another": dict.fromkeys(ages, 99)}
    bodies = {j: Model({"x": torch.tensor([value], dtype=torch.float64)}) for j, value in values.items()}
    return float(aggregator.combine(bodies, **given)["x"])


VALUES = {0: 8.0, 1: 4.0, 2: 2.0, 3: 11.0}


def test_neighbors_lose_weight_by_their_age_and_the_peer_gets_it() -> None:
    assert combined(AgeWeighted(), VALUES) == pytest.approx((8 * (1 + 1 / 2 + 2 / 3) + 4 / 2 + 2 + 11 / 3) / 4)
    weights = {0: 0.1, 1: 0.2, 2: 0.3, 3: 0.4}
    expected = 8 * (0.1 + 0.1 + 0.4 * 8 / 9) + 4 * 0.1 + 2 * 0.3 + 11 * 0.4 / 9
    assert combined(AgeWeighted(power=1.0), VALUES, {1: 1, 3: 8}, weights=weights) == pytest.approx(expected)


def test_equal_rounds_give_the_bits_of_the_mean() -> None:
    weights = {0: 0.1, 1: 0.2, 2: 0.3, 3: 0.4}
    for ages in ({}, {1: -3, 2: -1, 3: 0}):
        assert combined(AgeWeighted(), VALUES, ages, weights=weights) == combined(Mean(), VALUES, weights=weights)


def test_own_contribution_takes_part_though_the_method_left_it_out() -> None:
    """As it is in MAPL+, for a peer whose weight of itself is 0: ``out`` is its own."""
    own = {"x": torch.tensor([8.0], dtype=torch.float64)}
    others = {1: 4.0, 3: 11.0}
    assert combined(AgeWeighted(), others, out=own) == pytest.approx((8 * (1 / 2 + 2 / 3) + 4 / 2 + 11 / 3) / 2)


def test_without_an_own_contribution_weights_are_scaled_to_sum_to_one() -> None:
    """Of a class that the peer has no samples of, or after it has diverged."""
    expected = (4 / 2 + 11 / 3) / (1 / 2 + 1 / 3)
    assert combined(AgeWeighted(), {1: 4.0, 3: 11.0}) == pytest.approx(expected)
    broken = {"x": torch.tensor([torch.nan])}
    tensors = {j: {"x": torch.tensor([VALUES[j]])} for j in (1, 3)}
    given = Contributions(tensors, equal(tensors), 0, broken, "Model", 0, 10, ages=AGES)  # a rule has dropped it
    rule = AgeWeighted()
    assert rule.combine(rule.transform(given))["x"].item() == pytest.approx(expected)


def test_rules_before_and_after_it() -> None:
    nearest = RuleList.parse({"rules": [{"name": "monna", "f": 1}, "age-weighted"]})  # without peer 2
    assert combined(nearest, VALUES) == pytest.approx((8 * (1 + 1 / 2 + 2 / 3) + 4 / 2 + 11 / 3) / 3)
    clipped = {"name": "norm-clip", "factor": 1.0}  # the median of 4, 6 and 3
    for rules in (["age-weighted", clipped], [clipped, "age-weighted"]):
        expected = (8 * (1 + 1 / 2 + 2 / 3) + 4 / 2 + 4 + 11 / 3) / 4
        assert combined(RuleList.parse({"rules": rules}), VALUES) == pytest.approx(expected)
    with pytest.raises(OptionErrors, match="'median' ignores the weights that 'age-weighted' before it sets"):
        RuleList.parse({"rules": ["age-weighted", "norm-clip", "median"]})


def test_the_fraction_that_is_taken_is_measured() -> None:
    aggregator = Aggregator(AgeWeighted(), 0, rounds=10, measures=True)
    aggregator.ages = {"Model": {1: 3}}
    aggregator.combine({j: Model({"x": torch.tensor([value])}) for j, value in ((0, 8.0), (1, 4.0))})
    assert aggregator.measured() == {"Model": {1: (0.5, 0.5)}}


@pytest.mark.parametrize("power", [0, -1, 11])
def test_power_is_positive_and_small(power: float) -> None:
    with pytest.raises(OptionErrors):
        AgeWeighted.parse({"power": power})


# ---- a run -----------------------------------------------------------------------------------------------------


def test_a_run_weighs_what_a_slow_neighbor_sends_by_its_age_and_is_replayed_with_the_same_bits(
    make_run: Any, prepare: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of two peers takes as long for a round as the other for four, and a tenth more."""
    changes = {
        "peers": 2,
        "rounds": 6,
        "synchrony": "none",
        "data": {"partition": {"name": "iid"}},
        "algorithm": {"name": "dpsgd", "batch": 1000, "local_epochs": 1},
    }
    plain = make_run(**changes)
    dataset, subsets = load_data(plain)
    work = [
        len(subset.train) * flops("tiny-mixer", dataset.channels, dataset.size, dataset.classes).training
        for subset in subsets
    ]
    speeds = tmp_path / "speeds.csv"
    speeds.write_text(f"peer,speed\n0,{work[0] / 10}\n1,{work[1] / 41}\n")  # rounds of 10 and of 41 seconds
    changes["time"] = {"devices": {"file": str(speeds)}}

    found: dict[tuple[int, int], tuple[Mapping[int, Tensors], Tensors]] = {}
    combine = Aggregator.combine_tensors

    def observed(self: Aggregator, kind: type[Body], tensors: Mapping[int, Tensors], *args: Any, **given: Any) -> Any:
        before = {j: clone(x) for j, x in tensors.items()}
        result = combine(self, kind, tensors, *args, **given)
        found[self.me, self.t] = before, clone(result)
        return result

    monkeypatch.setattr(Aggregator, "combine_tensors", observed)

    def run(name: str, **more: Any) -> tuple[list[Result], dict[tuple[int, int], Any]]:
        found.clear()
        run = make_run(**changes, **more)
        results = simulate(run, prepare(tmp_path / name, run), clock=True)
        assert len(found) == 2 * 6
        return results, dict(found)

    def check(steps: Mapping[tuple[int, int], Any], factors: Mapping[tuple[int, int], float]) -> None:
        """x_i + s / 2 (x_j − x_i), as both peers have the weight 1/2; x_i while nothing has arrived."""
        for (me, t), (before, after) in steps.items():
            assert set(before) == ({0, 1} if (me, t) in factors else {me})
            for name, own in before[me].items():
                other, part = before.get(1 - me, before[me])[name], factors.get((me, t), 1.0) / 2
                torch.testing.assert_close(after[name], own + part * (other - own))

    ahead = {(1, t): 1.0 for t in range(6)}  # of the slow peer, the other is ahead in each round
    results, steps = run("aged", aggregation="age-weighted")
    check(steps, {(0, 4): 5**-0.5, (0, 5): 6**-0.5} | ahead)  # round 0 of the slow peer, which is 4 and 5 rounds old
    records = metrics.read(tmp_path / "aged" / "peers" / "00" / "metrics.jsonl")
    assert [record.get("ages", {}) for record in records][4:] == [{"Parameters": {"1": 4}}, {"Parameters": {"1": 5}}]

    plain_results, plain_steps = run("plain")
    check(plain_steps, {(0, 4): 1.0, (0, 5): 1.0} | ahead)
    for j in (0, 1):  # they differ from this round on only
        for name, tensor in steps[0, 4][0][j].items():
            assert torch.equal(tensor, plain_steps[0, 4][0][j][name])
    assert results[0].digest != plain_results[0].digest

    aged = make_run(**changes, aggregation="age-weighted")
    again = prepare(tmp_path / "again", aged)
    for peer in range(2):
        shutil.copyfile(tmp_path / "aged" / "peers" / f"{peer:02d}" / "order.jsonl", order_of(again.peer(peer)))
    assert [result.digest for result in simulate(aged, again)] == [result.digest for result in results]
