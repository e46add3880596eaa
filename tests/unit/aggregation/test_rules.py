"""What the built-in rules compute, by hand, and what they have in common: attackers, missing peers, types, files."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from p2pfl import rng
from p2pfl.aggregation import AGGREGATIONS, Contributions, Rule, RuleList
from p2pfl.aggregation.aggregator import Aggregator
from p2pfl.algorithms.averaging import AnyPart
from p2pfl.algorithms.class_means import Prototypes
from p2pfl.algorithms.fedavg import FedAvg
from p2pfl.messaging.tensor_file import Spool
from p2pfl.tensors import Tensors, clone, digest, equal, parameters_of
from tests.support import peer_data, random_dataset, setting, softmax_regression

RULES: list[Any] = [
    "median",
    {"name": "trimmed-mean", "f": 2},
    {"name": "krum", "f": 2},
    {"name": "krum", "f": 2, "keep": 3},
    "geometric-median",
    {"name": "centered-clipping", "radius": 1.0, "iterations": 3},
    {"name": "self-centered-clipping", "f": 2},
    {"name": "self-centered-clipping", "radius": 1.0},
    {"name": "monna", "f": 2},
    {"name": "arc", "f": 2},
    "norm-clip",
    {"name": "clip", "radius": 1.0},
    "balance",
    "sketchguard",
    "ubar",
    {"name": "caf", "f": 2},
    {"name": "mda", "f": 2},
    {"name": "smea", "f": 2},
    ["norm-clip", {"name": "nnm", "f": 2}, {"name": "trimmed-mean", "f": 2}],
    [{"name": "arc", "f": 2}, {"name": "nnm", "f": 2}, {"name": "centered-clipping", "radius": 1.0}],
]
"""Every built-in rule, set to two attackers."""


def rule(section: Any, **parameters: Any) -> Rule:
    if isinstance(section, list):
        return RuleList.parse({"rules": section})
    given = {"name": section, **parameters} if isinstance(section, str) else dict(section)
    return AGGREGATIONS[given.pop("name")].parse(given)


def loss(tensors: Tensors) -> float:
    """Is smallest at 1."""
    return sum(float((tensor - 1.0).abs().double().square().sum()) for tensor in tensors.values())


def contributions(values: Mapping[int, Tensors], me: int = 0, **changed: Any) -> Contributions:
    given: dict[str, Any] = {"own": values.get(me), "t": 0, "rounds": 10, "loss": loss} | changed
    weights = given.pop("weights", None) or equal(values)
    return Contributions(values, weights, me, kind="Model", **given)


def combine(rule: Rule, given: Contributions, out: Tensors | None = None) -> Tensors:
    return rule.combine(rule.transform(given), out)


def numbers(rule: Rule, *values: float, **changed: Any) -> float:
    """Combine one number of each peer; the first is the peer's own."""
    tensors = {j: {"x": torch.tensor([value], dtype=torch.float64)} for j, value in enumerate(values)}
    return float(combine(rule, contributions(tensors, **changed))["x"])


def models(n: int = 8, *, dtype: torch.dtype = torch.float32) -> dict[int, Tensors]:
    """Return models near 1 of n peers."""
    stream = torch.Generator().manual_seed(n)
    drawn = [1.0 + 0.05 * torch.randn(11, generator=stream) for _ in range(n)]
    return {j: {"w": x[:9].view(3, 3).to(dtype), "b": x[9:].to(dtype)} for j, x in enumerate(drawn)}


# ---- by hand ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("section", "values", "expected"),
    [
        ("median", (3, 9, 1), 3),
        ("median", (3, 9, 1, 5), 4),
        ({"name": "trimmed-mean", "f": 1}, (3, 9, 1, 5), 4),
        ({"name": "trimmed-mean", "f": 0}, (3, 9, 1, 5), 4.5),
        ("trimmed-mean", (3, 90, 1, 5), 4),  # f = 1
        ({"name": "krum", "f": 1}, (0, 1, 2.5, 9, 10), 1),  # its nearest two: 1 + 2.25
        ({"name": "monna", "f": 1}, (0, 1, -2, 9), -1 / 3),
        ("norm-clip", (0, 1, 2, 3, 90), (1 + 2 + 3 + 5) / 5),  # the median of 1, 2, 3, 90, times 2
        ({"name": "norm-clip", "factor": 1.0}, (1, 2, 4, 91), (1 + 2 + 4 + 4) / 4),
        ({"name": "arc", "f": 1}, (1, 3, -4, 90), (1 + 3 - 4 + 4) / 4),  # ⌊2/4 · 3⌋ = 1
        ({"name": "clip", "radius": 2.0}, (1, 2, 4, 91), (1 + 2 + 3 + 3) / 4),  # in the first round, from its own
        ({"name": "self-centered-clipping", "radius": 2}, (1, 2, 4, 91), (1 + 2 + 3 + 3) / 4),
        ({"name": "self-centered-clipping", "f": 0}, (1, 2, 4, 91), 24.5),
        ({"name": "centered-clipping", "radius": 2}, (1, 2, 4, 91), 1 + (0 + 1 + 2 + 2) / 4),
        ({"name": "balance", "gamma": 0.5, "kappa": 0}, (10, 12, 14, 16), (10 + 13) / 2),
        ({"name": "balance", "gamma": 0.1, "kappa": 0}, (10, 12, 14, 16), 10),
        ({"name": "balance", "gamma": 0.5, "kappa": 0, "alpha": 0.25}, (10, 12, 14, 16), 0.25 * 10 + 0.75 * 13),
        ({"name": "sketchguard", "gamma": 0.5, "kappa": 0}, (10, 12, 14, 16), (10 + 13) / 2),
        (
            {"name": "ubar", "rho": 0.75},
            (3, 2, 5, -2, -9),
            (3 + 2) / 2,
        ),  # of 2, 5, -2, with the losses 1, 16, 9 over 4
        ({"name": "ubar", "rho": 0.5}, (1, 2, 5, -2, -9), (1 + 2) / 2),  # none is as good as its own: the best
        ({"name": "mda", "f": 2}, (0, 1, 8, 9, 8.5), (8 + 9 + 8.5) / 3),
        ({"name": "smea", "f": 1}, (0, 1, 2, 9), 1),
    ],
)
def test_rule_by_hand(section: Any, values: Sequence[float], expected: float) -> None:
    assert numbers(rule(section), *map(float, values)) == pytest.approx(expected)


def test_radius_of_self_centered_clipping_follows_from_the_nearest() -> None:
    """r² = Σ_{j nearest} W_j ‖x_j − x_i‖² / Σ_{j other} W_j: of equal weights, (1 + 4) / 1."""
    expected = (0 + 1 - 2 + math.sqrt(5)) / 4
    assert numbers(rule("self-centered-clipping", f=1), 0.0, 1.0, -2.0, 90.0) == pytest.approx(expected)
    weights = {0: 0.4, 1: 0.3, 2: 0.2, 3: 0.1}
    expected = 0.3 * 1 - 0.2 * 2 + 0.1 * math.sqrt((0.3 * 1 + 0.2 * 4) / 0.1)
    found = numbers(rule("self-centered-clipping", f=1), 0.0, 1.0, -2.0, 90.0, weights=weights)
    assert found == pytest.approx(expected)


def test_threshold_of_balance_shrinks_over_the_rounds() -> None:
    found = [numbers(rule("balance", gamma=0.5), 10.0, 14.0, t=t) for t in (0, 2, 3, 9)]
    assert found == [12.0, 12.0, 10.0, 10.0]  # 5 exp(−t/10) is 4.09 and 3.70


def test_geometric_median_of_a_line_is_its_median() -> None:
    assert numbers(rule("geometric-median", nu=1e-6, iterations=100), 0.0, 1.0, 90.0) == pytest.approx(1.0, abs=1e-3)


def test_krum_prefers_its_own_of_two_and_the_lower_of_others() -> None:
    assert numbers(rule("krum"), 5.0, 1.0) == 5.0
    tensors = {j: {"x": torch.tensor([float(j)])} for j in (1, 2)}
    assert combine(rule("krum"), contributions(tensors, own=None))["x"].tolist() == [1.0]


def test_caf_ends_where_a_removed_contribution_stays_the_farthest() -> None:
    assert numbers(rule("caf", f=2), 0.0, 0.1, -0.1, 0.2, 1e9, -0.2) == pytest.approx(0.0, abs=0.2)


def test_nnm_alone_passes_far_ones_on_and_the_next_rule_drops_them() -> None:
    values = (0.0, 1.0, 2.0, 3.0, 90.0, 90.0)
    assert rule("nnm").tolerates(6) == 0
    nearest = [(0 + 1 + 2 + 3) / 4] * 4 + [(90 + 90 + 3 + 2) / 4] * 2
    assert numbers(rule("nnm", f=2), *values) == pytest.approx(sum(nearest) / 6)
    assert numbers(rule([{"name": "nnm", "f": 2}, {"name": "trimmed-mean", "f": 2}]), *values) == pytest.approx(1.5)


@pytest.mark.parametrize(
    ("name", "tolerated"),
    [
        ("mean", [0, 0, 0, 0, 0]),
        ("median", [0, 0, 1, 2, 3]),
        ("trimmed-mean", [0, 0, 1, 2, 3]),
        ("krum", [0, 0, 0, 1, 2]),
        ("norm-clip", [0, 0, 0, 1, 2]),
        ("ubar", [0, 0, 1, 2, 3]),
        ("nnm", [0, 0, 0, 0, 0]),
    ],
)
def test_how_many_attackers_a_rule_tolerates(name: str, tolerated: list[int]) -> None:
    assert [rule(name).tolerates(n) for n in (1, 2, 3, 5, 7)] == tolerated


def test_f_is_a_third_by_default_and_never_more_than_the_rule_tolerates() -> None:
    trimmed, krum = AGGREGATIONS["trimmed-mean"], AGGREGATIONS["krum"]
    assert [trimmed.parse({}).assumed(n) for n in (1, 4, 10)] == [{"f": 0}, {"f": 1}, {"f": 3}]
    assert krum.parse({}).assumed(4) == {"f": 0}
    assert krum.parse({"f": 3}).assumed(4) == {}
    assert rule(["arc", {"name": "nnm", "f": 1}, "trimmed-mean"]).assumed(7) == {"arc.f": 2, "trimmed-mean.f": 2}


# ---- attackers -------------------------------------------------------------------------------------------------


def every(section: Any) -> str:
    return "-".join(map(every, section)) if isinstance(section, list) else str(section)


@pytest.mark.parametrize("section", RULES, ids=every)
@pytest.mark.parametrize("attack", [1e5, -1e5, math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_two_attackers_cannot_move_the_result_far(section: Any, attack: float, dtype: torch.dtype) -> None:
    values = models(dtype=dtype)
    honest = torch.stack([torch.cat([x["w"].reshape(-1), x["b"]]) for x in values.values()])
    for j in (3, 6):
        values[j] = {name: torch.full_like(tensor, attack) for name, tensor in values[j].items()}
    assert rule(section).tolerates(8) >= 2
    found = combine(rule(section), contributions(values))
    moved = torch.cat([found["w"].reshape(-1), found["b"]]) - honest.mean(0)
    assert float(moved.abs().max()) < 1.0


@pytest.mark.parametrize("section", RULES, ids=every)
def test_one_entry_that_is_not_a_number_does_not_pass(section: Any) -> None:
    values = models()
    values[3]["w"][1, 1] = math.nan
    values[5]["b"][0] = math.inf
    found = combine(rule(section), contributions(values))
    assert all(bool(tensor.isfinite().all()) for tensor in found.values())


@pytest.mark.parametrize("section", RULES, ids=every)
def test_a_peer_that_has_diverged_continues_with_what_the_others_have(section: Any) -> None:
    values = models()
    values[0] = {name: torch.full_like(tensor, math.nan) for name, tensor in values[0].items()}
    found = combine(rule(section), contributions(values))
    for tensor in found.values():
        torch.testing.assert_close(tensor, torch.ones_like(tensor), rtol=0.0, atol=0.2)


@pytest.mark.parametrize("section", RULES, ids=every)
def test_a_mask_of_infinities_that_all_have_stays(section: Any) -> None:
    values = models()
    for tensors in values.values():
        tensors["w"][0, 0] = -math.inf
    found = combine(rule(section), contributions(values))
    assert float(found["w"][0, 0]) == -math.inf
    assert bool(found["w"].reshape(-1)[1:].isfinite().all())


def test_ubar_measures_models_on_a_batch_of_each_round_and_leaves_the_local_one() -> None:
    def peer(t: int) -> FedAvg:
        data = peer_data(random_dataset(60, classes=3))
        context = replace(setting(0, 2, softmax_regression(4, 3), data), aggregation=rule("ubar"))
        method = FedAvg(AnyPart.parse({"batch": 8}), context)
        method.aggregation.t = t
        return method

    mine, other = peer(0), softmax_regression(4, 3, seed=1)
    before = digest(mine.state_dict())
    values = clone(parameters_of(other))
    found = mine.loss_with(values)
    order = rng.shared(0, "aggregation.loss", 0)
    images, labels = next(mine.data.batches(8, order))
    expected = torch.nn.functional.cross_entropy(other(mine.data.input(images, augmented=False)), labels)
    assert found == pytest.approx(float(expected.detach()))
    assert (mine.loss_with(values), peer(0).loss_with(values)) == (found, found)
    assert peer(1).loss_with(values) != found
    assert digest(mine.state_dict()) == before


# ---- who takes part --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("section", RULES, ids=every)
def test_equal_models_are_their_average(section: Any) -> None:
    one = models(1)[0]
    found = combine(rule(section), contributions({j: clone(one) for j in range(6)}))
    for name, tensor in one.items():
        torch.testing.assert_close(found[name], tensor)


@pytest.mark.parametrize("section", RULES, ids=every)
@pytest.mark.parametrize("n", [1, 2, 3])
@pytest.mark.parametrize("own", [True, False])
def test_few_contributions_are_combined_with_the_own_one_or_without(section: Any, n: int, own: bool) -> None:
    values = models(n)
    found = combine(rule(section), contributions(values, me=0 if own else 9))
    for name, tensor in found.items():
        stacked = torch.stack([x[name] for x in values.values()])
        assert bool((tensor >= stacked.amin(0) - 1e-6).all())
        assert bool((tensor <= stacked.amax(0) + 1e-6).all())


def test_a_peer_that_sends_nothing_measures_by_what_it_has() -> None:
    values = {j: {"x": torch.tensor([float(j)])} for j in (1, 2, 9)}
    own = {"x": torch.tensor([0.0])}
    assert float(combine(rule("monna", f=1), contributions(values, own=own))["x"]) == 1.5
    assert float(combine(rule("balance"), contributions(values, own=own))["x"]) == 0.0
    assert float(combine(rule("monna", f=1), contributions(values))["x"]) == 1.5  # nearest to the median


@pytest.mark.parametrize("section", RULES, ids=every)
def test_the_result_may_overwrite_the_own_model(section: Any) -> None:
    expected = combine(rule(section), contributions(models()))
    values = models()
    out = values[0]
    assert combine(rule(section), contributions(values), out) is out
    for name, tensor in expected.items():
        torch.testing.assert_close(out[name], tensor)


@pytest.mark.parametrize("section", ["median", "monna", "krum", "geometric-median", ["norm-clip", "nnm", "median"]])
def test_classes_are_combined_over_the_peers_that_have_them(section: Any) -> None:
    """Class 0 has four senders, one of which lies; class 1 two, and class 2 only the neighbor."""
    rows = [(0, j, torch.tensor([value, 1.0]), 1.0) for j, value in enumerate((1.0, 1.1, 0.9, 500.0, 1.0))]
    rows += [(1, 0, torch.tensor([2.0, 2.0]), 1.0), (1, 3, torch.tensor([2.0, 2.0]), 1.0)]
    rows += [(2, 3, torch.tensor([4.0, 5.0]), 1.0)]
    found = Aggregator(rule(section), 0, 10).combine_rows(Prototypes, rows, torch.full((4, 2), -1.0))
    assert found[0].tolist() == pytest.approx([1.0, 1.0], abs=0.2)
    assert found[1:].tolist() == [[2.0, 2.0], [4.0, 5.0], [-1.0, -1.0]]


# ---- types, files, state ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("section", RULES, ids=every)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_types_are_combined_in_float32_and_rounded(section: Any, dtype: torch.dtype) -> None:
    narrow = models(dtype=dtype)
    wide = {j: {name: tensor.float() for name, tensor in x.items()} for j, x in narrow.items()}
    found, expected = (combine(rule(section), contributions(values)) for values in (narrow, wide))
    for name, tensor in found.items():
        assert tensor.dtype == dtype
        torch.testing.assert_close(tensor, expected[name].to(dtype), rtol=0.02, atol=0.0)


@pytest.mark.parametrize("section", RULES, ids=every)
def test_integers_and_complex_numbers_do_not_disturb(section: Any) -> None:
    values: dict[int, dict[str, Tensor]] = {j: dict(x) for j, x in models().items()}
    for j, tensors in values.items():
        tensors["count"] = torch.tensor([4 + j % 2])
        tensors["phase"] = torch.complex(tensors["b"], 2.0 * tensors["b"])
    found = combine(rule(section), contributions(values))
    assert 3.0 < float(found["count"]) < 6.0
    assert found["phase"].is_complex()
    torch.testing.assert_close(found["phase"].real, found["b"], rtol=0.1, atol=0.0)


@pytest.mark.parametrize("section", RULES, ids=every)
def test_models_on_disk_give_the_same_bits(section: Any) -> None:
    spool, values = Spool(), models(9)
    on_disk = {j: x if j == 0 else spool.put(x) for j, x in values.items()}
    found, expected = (combine(rule(section), contributions(given)) for given in (on_disk, values))
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


@pytest.mark.parametrize("name", ["monna", "norm-clip", "self-centered-clipping", "balance"])
def test_rules_that_measure_by_their_own_read_models_one_by_one(name: str) -> None:
    """At most one tensor is in memory while distances are measured, whatever the number of neighbors."""
    reading: list[tuple[str, int]] = []

    class Counted(dict[str, Tensor]):
        def __init__(self, j: int, tensors: Tensors) -> None:
            super().__init__(tensors)
            self.j = j

        def __getitem__(self, key: str) -> Tensor:
            reading.append((key, self.j))
            return super().__getitem__(key)

    rule(name).transform(contributions({j: Counted(j, x) for j, x in models().items()}, own=models()[0]))
    assert reading == [(key, j) for key in ("w", "b") for j in range(8)]


def test_centered_clipping_follows_its_last_result_after_a_restart() -> None:
    clipping = rule("centered-clipping", radius=0.5)
    aggregator, expected = Aggregator(clipping, 0, 10), 0.0
    for t in range(4):
        if t == 2:
            state = clone_state(aggregator.state_dict())
            aggregator = Aggregator(clipping, 0, 10)
            aggregator.load_state_dict(state)
        bodies = {j: {"x": torch.tensor([value])} for j, value in enumerate((0.0, 10.0, 10.0))}
        found = aggregator.combine_tensors(Prototypes, bodies)
        expected += sum(max(-0.5, min(0.5, value - expected)) for value in (0.0, 10.0, 10.0)) / 3
        assert float(found["x"]) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("section", "of_updates"),
    [
        ({"name": "clip", "radius": 2.0}, (1 + 2 + 2 - 2) / 4),
        ([{"name": "clip", "radius": 2.0}, "median"], (1 + 2) / 2),
        ({"name": "arc", "f": 1}, (1 + 3 + 4 - 4) / 4),  # ⌊2/4 · 3⌋ = 1
    ],
)
def test_updates_since_the_last_result_are_clipped(section: Any, of_updates: float) -> None:
    aggregator = Aggregator(rule(section), 0, 10)
    v = float(aggregator.combine_tensors(Prototypes, {j: {"x": torch.tensor([7.0])} for j in range(4)})["x"])
    assert v == 7.0
    for _ in range(2):
        resumed = Aggregator(rule(section), 0, 10)
        resumed.load_state_dict(clone_state(aggregator.state_dict()))
        bodies = {j: {"x": torch.tensor([v + update])} for j, update in enumerate((1.0, 3.0, 4.0, -9.0))}
        found = aggregator.combine_tensors(Prototypes, bodies)["x"]
        assert torch.equal(resumed.combine_tensors(Prototypes, bodies)["x"], found)
        v += of_updates
        assert float(found) == pytest.approx(v)


@pytest.mark.parametrize("name", ["centered-clipping", "clip"])
def test_rules_that_follow_their_last_result_start_anew_where_shapes_change(name: str) -> None:
    aggregator = Aggregator(rule(name, radius=9.0), 0, 10)
    for n in (2, 3, 2):
        bodies = {j: {"x": torch.full((n,), float(j))} for j in range(3)}
        assert aggregator.combine_tensors(Prototypes, bodies)["x"].tolist() == pytest.approx([1.0] * n)


def clone_state(state: dict[str, Any]) -> dict[str, Any]:
    return {key: clone_state(value) if isinstance(value, dict) else value.clone() for key, value in state.items()}


def test_members_of_a_list_keep_their_parameters_and_states() -> None:
    several = rule(["norm-clip", {"name": "nnm", "f": 1}, {"name": "centered-clipping", "radius": 1.0}])
    aggregator = Aggregator(several, 0, 10)
    values = models(5)
    aggregator.combine_tensors(Prototypes, values)
    (state,) = aggregator.state_dict().values()
    assert {key: list(kept) for key, kept in state.items()} == {"rule 0": [], "rule 1": [], "rule 2": ["center"]}
    assert several.to_dict()["rules"] == [
        {"name": "norm-clip", "factor": 2.0},
        {"name": "nnm", "f": 1},
        {"name": "centered-clipping", "radius": 1.0, "iterations": 1},
    ]
