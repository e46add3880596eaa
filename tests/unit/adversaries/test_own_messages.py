"""Attacks on a peer's own messages, computed by hand."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from p2pfl.adversaries import ADVERSARIES
from p2pfl.adversaries.attacking import Attacking
from p2pfl.adversaries.base import Attacker
from p2pfl.adversaries.before import Before
from p2pfl.algorithms.class_means import Prototypes
from p2pfl.messaging.neighborhood import Neighborhood
from p2pfl.messaging.pipeline import Chain
from p2pfl.messaging.schema import Body, Layout, TensorPath, tensors_of
from p2pfl.options import OptionErrors
from p2pfl.rng import Streams
from tests.bodies import complete

ATTACKER = Attacker(Neighborhood(1, complete(4)), frozenset({1, 3}))


@dataclass(frozen=True)
class Model(Body):
    values: Mapping[str, Tensor]
    samples: int = 5


def model(*numbers: float, dtype: torch.dtype = torch.float32, **others: Any) -> Model:
    return Model({"w": torch.tensor(numbers, dtype=dtype), **others})


def sent(body: Body, name: str, attacker: Attacker = ATTACKER, **options: Any) -> Any:
    """Return what is sent in place of a body to peer 0, and check that the body is the same as before."""
    before = {path: x.clone() for path, x in tensors_of(body).items()}
    torch.manual_seed(0)
    found = ADVERSARIES[name].parse(options).attack(body, [0], 2, attacker)
    assert all(torch.equal(x, before[path]) for path, x in tensors_of(body).items())
    return found if isinstance(found, Body) else found[0]


def w(body: Model) -> list[float]:
    return body.values["w"].tolist()


def knowing(**before: Tensor) -> Attacker:
    paths: dict[TensorPath, Tensor] = {("values", name): x for name, x in before.items()}
    return replace(ATTACKER, before=paths)


# ---- multiples of the update -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "options", "expected"),
    [
        ("sign-flip", {}, [0.0, 3.0]),  # 1 − (2 − 1), 2 − (1 − 2)
        ("sign-flip", {"scale": 2}, [-1.0, 4.0]),
        ("scaled", {}, [11.0, -8.0]),
        ("scaled", {"factor": 3}, [4.0, -1.0]),
    ],
)
def test_the_update_of_a_model_is_multiplied(name: str, options: dict[str, Any], expected: list[float]) -> None:
    assert w(sent(model(2, 1), name, knowing(w=torch.tensor([1.0, 2.0])), **options)) == expected


def test_tensors_without_an_earlier_value_are_multiplied_themselves() -> None:
    assert w(sent(model(2, 1), "sign-flip", scale=2)) == [-4.0, -2.0]
    assert w(sent(model(2, 1), "scaled", factor=3)) == [6.0, 3.0]


def test_dtypes_integers_and_fields_stay_and_nothing_overflows() -> None:
    body = model(60000, -60000, dtype=torch.float16, steps=torch.tensor(7), none=torch.ones(0))
    lie = sent(body, "scaled", factor=10)
    assert w(lie) == [65504.0, -65504.0]  # the largest numbers of float16
    assert {name: x.dtype for name, x in lie.values.items()} == {name: x.dtype for name, x in body.values.items()}
    assert (lie.values["steps"], lie.samples) == (7, 5)
    assert w(sent(model(1, 3, dtype=torch.bfloat16), "scaled", factor=2.5)) == [2.5, 7.5]


def test_a_running_variance_stays_positive_and_masks_stay() -> None:
    variance = {"bn.running_var": torch.tensor([4.0]), "mask": torch.tensor([-math.inf])}
    before = {"bn.running_var": torch.tensor([1.0]), "mask": torch.tensor([-math.inf])}
    lie = sent(Model(variance), "sign-flip", knowing(**before))
    assert (lie.values["bn.running_var"], lie.values["mask"]) == (0.0, -math.inf)  # 1 − (4 − 1) < 0


# ---- noise -------------------------------------------------------------------------------------------------


def test_noise_is_added_or_replaces_what_is_sent() -> None:
    body = Model({"w": torch.full((10_000,), 5.0)})
    added, alone = (sent(body, "noise", std=2, replace=replace).values["w"] for replace in (False, True))
    assert torch.allclose(added, 5.0 + alone)
    assert (float(alone.mean()), float(alone.std())) == pytest.approx((0.0, 2.0), abs=0.05)
    with pytest.raises(OptionErrors, match="std: missing"):
        ADVERSARIES["noise"].parse({})


# ---- rows of classes ---------------------------------------------------------------------------------------

ROWS = torch.tensor([[3.0, 4.0], [1.0, 0.0], [0.0, 2.0]])


def test_each_class_gets_the_prototype_of_the_next_one() -> None:
    lie = sent(Prototypes(ROWS, (1, 4, 7), (2, 3, 4)), "prototype-swap")
    assert lie.values.tolist() == [[1.0, 0.0], [0.0, 2.0], [3.0, 4.0]]
    assert (lie.classes, lie.samples) == ((1, 4, 7), (2, 3, 4))


def test_random_prototypes_have_the_norms_of_the_true_ones() -> None:
    lie = sent(Prototypes(ROWS, (1, 4, 7), ()), "random-prototypes")
    assert lie.values.norm(dim=1).tolist() == pytest.approx([5.0, 1.0, 2.0])
    assert not torch.allclose(lie.values, ROWS)
    nothing = Prototypes(ROWS[:0], (), ())
    assert [sent(nothing, name).values.shape for name in ("prototype-swap", "random-prototypes")] == [(0, 2)] * 2


@pytest.mark.parametrize("layer", ["head.", "", "head.2."])
def test_each_class_gets_the_weights_and_the_bias_of_the_next_one(layer: str) -> None:
    weight, bias = f"{layer}weight", f"{layer}bias"
    others: dict[str, Any] = {"backbone.weight": ROWS, "head.0.weight": torch.ones(5, 2)}
    head = {weight: ROWS, bias: torch.tensor([1.0, 2.0, 3.0])}
    lie = sent(Model({**others, **head}), "head-swap")
    assert lie.values[weight].tolist() == [[1.0, 0.0], [0.0, 2.0], [3.0, 4.0]]
    assert lie.values[bias].tolist() == [2.0, 3.0, 1.0]
    assert all(torch.equal(lie.values[name], x) for name, x in others.items())
    assert not ADVERSARIES["head-swap"].parse({}).changes(Layout.of(model(1)))


# ---- counts ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("factor", "expected"), [(None, 40), (3.0, 15), (100.0, 40), (0.01, 1)])
def test_as_many_samples_are_claimed_as_receivers_accept(factor: float | None, expected: int) -> None:
    layout = Layout.of(model(1), ranges={"samples": range(1, 41)})
    assert sent(model(1), "count-lie", replace(ATTACKER, layouts=[layout]), factor=factor).samples == expected
    lie = ADVERSARIES["count-lie"].parse({})
    fixed = Layout.of(model(1), ranges={"samples": range(1, 2)})
    assert [lie.changes(each) for each in (layout, fixed, Layout.of(model(1)))] == [True, False, False]


def test_every_count_of_a_class_is_a_lie() -> None:
    body = Prototypes(ROWS, (1, 4, 7), (2, 3, 4))
    layout = Layout.of(body, ranges={"samples": range(1, 10)})
    assert sent(body, "count-lie", replace(ATTACKER, layouts=[layout]), factor=3).samples == (6, 9, 9)


# ---- what becomes of them in a pipeline --------------------------------------------------------------------


def test_each_receiver_gets_what_its_attack_makes() -> None:
    attack = ADVERSARIES["equivocate"].parse({"attacks": ["none", "sign-flip", {"name": "scaled", "factor": 2}]})
    body = model(1, 2)
    found = attack.attack(body, [0, 2, 3, 4], 0, ATTACKER)
    assert {j: w(each) for j, each in found.items()} == {0: [1, 2], 2: [2, 4], 3: [1, 2], 4: [-1, -2]}  # type: ignore
    assert attack.uses_before
    assert [to for to, _ in Attacking(attack, ATTACKER, Streams(0, 1)).outgoing(body, [0, 2, 3, 4], 0)] == [
        [0, 3],
        [2],
        [4],
    ]
    assert ADVERSARIES["equivocate"].parse(attack.to_dict()) == attack


@pytest.mark.parametrize(
    ("attacks", "message"),
    [
        (["sign-flip"], "at least 2 items"),
        (["none", "sing-flip"], "did you mean 'sign-flip'?"),
        (["none", "noise"], "std: missing"),
        (["none", "free-rider"], "'free-rider' concerns all receivers; give it an entry of its own"),
    ],
)
def test_mistakes_in_the_attacks_of_receivers_are_named(attacks: list[Any], message: str) -> None:
    with pytest.raises(OptionErrors) as caught:
        ADVERSARIES["equivocate"].parse({"attacks": attacks})
    assert message in str(caught.value)


def test_a_free_rider_repeats_what_it_sent_first_also_after_a_restart() -> None:
    def rider() -> Attacking:
        return Attacking(ADVERSARIES["free-rider"].parse({}), replace(ATTACKER, memory={}), Streams(0, 1), first=1)

    def result(attacking: Attacking, t: int) -> list[float]:
        ((_, body),) = attacking.outgoing(model(t, t), [0], t)
        assert isinstance(body, Model)
        return w(body)

    attacking, again = rider(), rider()
    assert [result(attacking, t) for t in range(3)] == [[0, 0], [1, 1], [1, 1]]
    again.load_state_dict(attacking.state_dict())
    assert result(again, 3) == [1, 1]
    assert w(sent(model(3), "free-rider", sends="average")) == [3]


def test_earlier_values_of_parts_of_a_models_tensors() -> None:
    """DivShare sends ranges of parameters."""
    net = nn.Linear(3, 2)
    tensors = {name: tensor.detach() for name, tensor in net.named_parameters()}
    before = Before(lambda: tensors)
    before.keep(0)
    kept = {name: tensor.clone() for name, tensor in tensors.items()}
    flat = tensors["weight"].view(-1)
    with torch.no_grad():
        net.weight.add_(1.0)
    before.outgoing(Model({"weight": flat[2:5], "bias": tensors["bias"], "other": flat[2:5] + 0.0}), [0], 0)
    assert before.of_body.keys() == {("values", "weight"), ("values", "bias")}
    assert before.of_body["values", "weight"].equal(kept["weight"].view(-1)[2:5])
    assert before.of_body["values", "bias"].equal(kept["bias"])


def test_updates_are_relative_to_the_beginning_of_the_last_training() -> None:
    net = nn.Linear(1, 1, bias=False)
    body = Model({"w": net.weight.detach(), "computed": torch.ones(1)})

    def chain() -> tuple[Before, Chain]:
        before = Before(lambda: {"net.weight": net.weight.detach()})
        attack = ADVERSARIES["sign-flip"].parse({})
        twice = [Attacking(attack, ATTACKER, Streams(0, 1), before=before) for _ in range(2)]
        return before, Chain([before, *twice])

    def set_weight(value: float) -> None:
        nn.init.constant_(net.weight, value)

    def result(pipeline: Chain, t: int) -> list[float]:
        ((_, lie),) = pipeline.outgoing(body, [0], t)
        assert isinstance(lie, Model)
        return [float(lie.values["w"]), float(lie.values["computed"])]

    before, pipeline = chain()
    set_weight(1.0)
    assert result(pipeline, 0) == [1.0, 1.0]  # it is flipped twice; nothing was trained yet, so all of it
    before.keep(0)
    set_weight(3.0)
    before.keep(0)  # training goes on
    assert result(pipeline, 0) == [3.0, 1.0]  # 1 − 2, then 1 + 2
    assert before.of_body == {("values", "w"): torch.tensor([[1.0]])}
    set_weight(4.0)
    other, restored = chain()
    restored.load_state_dict(pipeline.state_dict())
    restored.outgoing(body, [0], 1)
    assert other.of_body == before.of_body  # sent in round 1 before its training: what was trained in round 0
    other.keep(1)
    restored.outgoing(body, [0], 1)
    assert other.of_body == {("values", "w"): torch.tensor([[4.0]])}
