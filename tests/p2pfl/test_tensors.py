"""Named arithmetic on models, and the digest that tells whether two states are equal bit by bit."""

from __future__ import annotations

import struct
from collections import OrderedDict
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from p2pfl.tensors import assign, average, buffers_of, clone, digest, parameters_of, subtract, weighted_sum


def model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))


def test_parameters_are_shared_and_without_gradient_and_buffers_are_left_out() -> None:
    module = model()
    found = parameters_of(module)
    assert list(found) == ["0.weight", "0.bias", "1.weight", "1.bias"]
    found["0.bias"].fill_(7.0)
    assert module[0].bias.tolist() == [7.0] * 3
    assert not any(tensor.requires_grad for tensor in found.values())


def test_buffers_are_shared() -> None:
    module = model()
    found = buffers_of(module)
    assert list(found) == ["1.running_mean", "1.running_var", "1.num_batches_tracked"]
    found["1.running_mean"].fill_(7.0)
    assert module[1].running_mean.tolist() == [7.0] * 3


def test_constants_and_parameters_that_go_by_two_names_are_no_buffers() -> None:
    module = model()
    module.register_buffer("constant", torch.eye(2), persistent=False)
    module.register_parameter("again", module[0].weight)
    assert list(buffers_of(module)) == ["1.running_mean", "1.running_var", "1.num_batches_tracked"]


def test_an_average_is_weighted_and_in_ascending_order_of_ids() -> None:
    models = {7: {"a": torch.tensor([2.0])}, 0: {"a": torch.tensor([8.0])}, 3: {"a": torch.tensor([1.0])}}
    assert average(models, {0: 1.0, 3: 2.0, 7: 1.0, 9: 100.0})["a"].tolist() == [3.0]
    values = {j: {"a": torch.tensor([v])} for j, v in ((2, 0.1), (1, 0.7), (0, 1e8))}
    equal = dict.fromkeys(values, 1.0)
    assert torch.equal(average(values, equal)["a"], average(dict(sorted(values.items())), equal)["a"])
    with pytest.raises(ValueError, match="sum to 0"):
        average(models, dict.fromkeys(models, 0.0))


def test_assign_copies_in_place() -> None:
    module = model()
    parameters = parameters_of(module)
    values = {name: torch.full_like(tensor, 2.0) for name, tensor in parameters.items()}
    assign(parameters, values)
    values["0.bias"].zero_()
    assert module[0].bias.tolist() == [2.0] * 3
    assert module[0].bias.requires_grad


def test_a_weighted_sum_adds_name_by_name_in_the_order_given() -> None:
    terms = [
        (0.5, {"a": torch.tensor([2.0, 4.0]), "b": torch.tensor(8.0)}),
        (2.0, {"a": torch.ones(2), "b": torch.tensor(1.0)}),
    ]
    total = weighted_sum(terms)
    assert total["a"].tolist() == [3.0, 4.0]
    assert total["b"].item() == 6.0
    # (2^24 + 1) + 1 in float32: each 1 alone is lost
    big, one = {"a": torch.tensor(2.0**24)}, {"a": torch.tensor(1.0)}
    assert weighted_sum([(1.0, big), (1.0, one), (1.0, one)])["a"].item() == 2.0**24
    assert weighted_sum([(1.0, one), (1.0, one), (1.0, big)])["a"].item() == 2.0**24 + 2


def test_a_weighted_sum_leaves_its_terms_alone() -> None:
    term = {"a": torch.ones(2)}
    weighted_sum([(2.0, term), (3.0, term)])["a"].zero_()
    weighted_sum([(1.0, term)])["a"].zero_()
    assert term["a"].tolist() == [1.0, 1.0]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("other", [torch.float32, torch.float64])
def test_a_weighted_sum_is_in_the_dtype_of_the_first_term(dtype: torch.dtype, other: torch.dtype) -> None:
    total = weighted_sum([(0.5, {"a": torch.ones(2, dtype=dtype)}), (0.5, {"a": torch.ones(2, dtype=other)})])
    assert total["a"].dtype is dtype
    assert total["a"].tolist() == [1.0, 1.0]


def test_subtract_and_clone_make_new_tensors() -> None:
    left, right = {"a": torch.tensor([3.0])}, {"a": torch.tensor([1.0]), "unused": torch.ones(1)}
    difference, copy = subtract(left, right), clone(left)
    left["a"].zero_()
    assert (difference["a"].item(), copy["a"].item()) == (2.0, 3.0)


# ---- digests -----------------------------------------------------------------------------------------------


def state() -> dict[str, Any]:
    return {
        "model": OrderedDict(weight=torch.tensor([[1.0, 2.0]]), count=torch.tensor(3)),
        "optimizer": {
            "state": {0: {"step": torch.tensor(1.0)}},
            "groups": [{"lr": 0.1, "betas": (0.5, 0.9), "on": True}],
        },
        "w": torch.zeros(2, dtype=torch.float64),
        "empty": torch.zeros(0),
    }


def with_nan(payload: int) -> Tensor:
    return torch.frombuffer(bytearray(struct.pack("<I", 0x7FC00000 + payload)), dtype=torch.float32)


def test_equal_states_have_equal_digests() -> None:
    assert digest(state()) == digest(state())
    assert len(digest(state())) == 64


def test_the_digest_does_not_depend_on_the_order_of_keys_nor_on_strides() -> None:
    wide = torch.arange(12.0).reshape(3, 4)
    assert digest({"a": 1, "b": 2}) == digest({"b": 2, "a": 1})
    assert digest(wide.t()) == digest(wide.t().contiguous())
    assert digest(wide[:1, ::4]) == digest(torch.zeros(1, 1))
    assert digest(wide[0, 1:2]) == digest(torch.ones(1))
    assert digest(torch.ones(4)[::4]) == digest(torch.ones(1))


def test_every_change_of_a_bit_a_dtype_a_shape_or_a_key_changes_the_digest() -> None:
    found = [digest(state())]

    def note(value: Any) -> None:
        found.append(digest(value))

    changes: list[tuple[tuple[Any, ...], Any]] = [
        (("model", "weight"), torch.tensor([[1.0, 2.0 + 2**-22]])),
        (("model", "weight"), torch.tensor([1.0, 2.0])),
        (("model", "weight"), torch.tensor([[1.0], [2.0]])),
        (("model", "weight"), torch.tensor([[1.0, 2.0]]).view(torch.int32)),
        (("model", "count"), torch.tensor(3, dtype=torch.int32)),
        (("w",), torch.tensor([0.0, -0.0], dtype=torch.float64)),
        (("empty",), torch.zeros(0, 1)),
        (("empty",), torch.zeros(0, dtype=torch.float64)),
        (("optimizer", "groups", 0, "lr"), 0.1 + 2**-56),
        (("optimizer", "groups", 0, "betas"), (0.5, 0.95)),
        (("optimizer", "groups", 0, "on"), 1),
        (("optimizer", "groups"), []),
        (("optimizer", "state", 0), {}),
        (("more",), None),
    ]
    for path, value in changes:
        changed = state()
        place: Any = changed
        for part in path[:-1]:
            place = place[part]
        place[path[-1]] = value
        note(changed)
    assert len(set(found)) == 1 + len(changes)


def test_nans_of_other_bits_have_other_digests() -> None:
    assert digest(with_nan(1)) == digest(with_nan(1))
    assert digest(with_nan(1)) != digest(with_nan(2))


def test_bfloat16_and_scalars_have_digests() -> None:
    assert digest(torch.tensor(1.0, dtype=torch.bfloat16)) != digest(torch.tensor(1.0))


def test_the_digest_of_a_state_survives_saving(tmp_path: Any) -> None:
    torch.save(state(), tmp_path / "state.pt")
    assert digest(torch.load(tmp_path / "state.pt", weights_only=True)) == digest(state())
