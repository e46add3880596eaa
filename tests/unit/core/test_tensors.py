"""Arithmetic on models, and the digest, which is equal only for bit-identical states."""

from __future__ import annotations

import struct
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from p2pfl.messaging.tensor_file import Spool
from p2pfl.tensors import (
    GROWTH,
    LIMIT,
    InitialValues,
    Tensors,
    assign,
    buffers_of,
    clone,
    constants_of,
    digest,
    displacement,
    diverged_entry,
    equal,
    fractions,
    has_diverged,
    parameters_of,
    subtract,
    weighted_sum,
)


def model() -> tuple[nn.Sequential, nn.Linear, nn.BatchNorm1d]:
    """A module and its layers."""
    linear, norm = nn.Linear(2, 3), nn.BatchNorm1d(3)
    return nn.Sequential(linear, norm), linear, norm


def test_parameters_of_returns_detached_views_without_buffers() -> None:
    module, linear, _ = model()
    found = parameters_of(module)
    assert list(found) == ["0.weight", "0.bias", "1.weight", "1.bias"]
    found["0.bias"].fill_(7.0)
    assert linear.bias.tolist() == [7.0] * 3
    assert not any(tensor.requires_grad for tensor in found.values())


def test_buffers_of_returns_views() -> None:
    module, _, norm = model()
    found = buffers_of(module)
    assert list(found) == ["1.running_mean", "1.running_var", "1.num_batches_tracked"]
    found["1.running_mean"].fill_(7.0)
    assert norm.running_mean is not None
    assert norm.running_mean.tolist() == [7.0] * 3


def test_buffers_of_omits_constants_and_shared_parameters() -> None:
    module, linear, _ = model()
    module.register_buffer("constant", torch.eye(2), persistent=False)
    assert isinstance(linear.weight, nn.Parameter)
    module.register_parameter("again", linear.weight)
    assert list(buffers_of(module)) == ["1.running_mean", "1.running_var", "1.num_batches_tracked"]


def average(models: Mapping[int, Tensors], weights: Mapping[int, float], out: Tensors | None = None) -> Tensors:
    return weighted_sum([(w, models[j]) for j, w in fractions(weights).items()], out)


def test_fractions_sum_to_1_in_ascending_order_of_ids() -> None:
    assert list(fractions({7: 1, 0: 1, 3: 2}).items()) == [(0, 0.25), (3, 0.5), (7, 0.25)]
    assert equal([2, 1]) == {1: 0.5, 2: 0.5}
    with pytest.raises(ValueError, match="sum to 0"):
        fractions({0: 0.0, 1: 0.0})


def test_assign_copies_in_place() -> None:
    module, linear, _ = model()
    parameters = parameters_of(module)
    values = {name: torch.full_like(tensor, 2.0) for name, tensor in parameters.items()}
    assign(parameters, values)
    values["0.bias"].zero_()
    assert linear.bias.tolist() == [2.0] * 3
    assert linear.bias.requires_grad


def test_a_weighted_sum_adds_name_by_name_in_the_order_given() -> None:
    terms = [
        (0.5, {"a": torch.tensor([2.0, 4.0]), "b": torch.tensor(8.0)}),
        (2.0, {"a": torch.ones(2), "b": torch.tensor(1.0)}),
    ]
    total = weighted_sum(terms)
    assert total["a"].tolist() == [3.0, 4.0]
    assert total["b"].item() == 6.0
    # (2^24 + 1) + 1 in float32: each 1 alone is rounded away
    big, small = {"a": torch.tensor(2.0**24)}, {"a": torch.tensor(1.0)}
    assert weighted_sum([(1.0, big), (1.0, small), (1.0, small)])["a"].item() == 2.0**24
    assert weighted_sum([(1.0, small), (1.0, small), (1.0, big)])["a"].item() == 2.0**24 + 2


def test_a_weighted_sum_does_not_modify_its_terms() -> None:
    term = {"a": torch.ones(2)}
    weighted_sum([(2.0, term), (3.0, term)])["a"].zero_()
    weighted_sum([(1.0, term)])["a"].zero_()
    assert term["a"].tolist() == [1.0, 1.0]


@pytest.mark.parametrize("terms", [1, 2, 8])
def test_a_weighted_sum_may_overwrite_one_of_its_terms(terms: int) -> None:
    stream = torch.Generator().manual_seed(0)
    models = [
        {"a": torch.randn(3, 37, generator=stream), "b": torch.randn(5, generator=stream)} for _ in range(terms)
    ]
    weights = [0.1 + n for n in range(terms)]
    expected = weighted_sum(list(zip(weights, models, strict=True)))
    target = models[terms // 2]
    assert weighted_sum(list(zip(weights, models, strict=True)), out=target) is target
    assert all(torch.equal(target[name], tensor) for name, tensor in expected.items())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("size", [1, 7, 33, 1000, 70_001])
def test_each_addition_of_a_weighted_sum_rounds_once_in_float32_at_least(dtype: torch.dtype, size: int) -> None:
    stream = torch.Generator().manual_seed(size)
    xs = [torch.randn(size, generator=stream).to(dtype) for _ in range(8)]
    wide = [x.to(torch.promote_types(dtype, torch.float32)) for x in xs]
    expected = wide[0] * 0.1
    for x in wide[1:]:
        expected = torch.add(expected, x, alpha=0.13)
    total = weighted_sum([(0.1 if n == 0 else 0.13, {"x": x}) for n, x in enumerate(xs)])
    assert torch.equal(total["x"], expected.to(dtype))


NARROW = [torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2]


def spooled(spool: Spool, models: Mapping[int, Tensors]) -> Mapping[int, Tensors]:
    return {j: spool.put(model) for j, model in models.items()}


@pytest.mark.parametrize("dtype", NARROW)
@pytest.mark.parametrize("on_disk", [False, True])
@pytest.mark.parametrize("peers", [3, 10, 101])
def test_an_average_of_equal_narrow_models_equals_them(dtype: torch.dtype, on_disk: bool, peers: int) -> None:
    stream = torch.Generator().manual_seed(peers)
    x = {"x": (torch.randn(999, generator=stream) * 10 ** torch.randn(999, generator=stream)).to(dtype)}
    models: Mapping[int, Tensors] = dict.fromkeys(range(peers), x)
    models = spooled(Spool(), models) if on_disk else models
    weights = {j: 0.1 + float(torch.rand((), generator=stream)) for j in models}
    found = average(models, weights)["x"]
    assert found.dtype is dtype
    assert torch.equal(found.float(), x["x"].float())
    out = clone(x)
    average(models, weights, out)
    assert torch.equal(out["x"].float(), x["x"].float())


@pytest.mark.parametrize("dtype", NARROW)
@pytest.mark.parametrize("on_disk", [False, True])
def test_an_average_of_narrow_models_is_rounded_once(dtype: torch.dtype, on_disk: bool) -> None:
    stream = torch.Generator().manual_seed(1)
    models: Mapping[int, Tensors] = {j: {"x": torch.randn(2000, generator=stream).to(dtype)} for j in range(16)}
    exact = torch.stack([model["x"].double() for model in models.values()]).mean(0)
    found = average(spooled(Spool(), models) if on_disk else models, dict.fromkeys(models, 1.0))["x"]
    assert (found.float() == exact.float().to(dtype).float()).double().mean() > 0.999  # float32 rounds too, far finer


def test_what_is_added_to_a_narrow_tensor_is_not_rounded_first() -> None:
    terms = [(0.5, {"x": torch.tensor([1.0], dtype=torch.bfloat16)}), (128.0, {"x": torch.tensor([1.0 + 2.0**-9])})]
    assert weighted_sum(terms)["x"].item() == 129.0  # 128.75; 128.5, rounded to even, if 1 + 2^-9 were rounded first


def test_differences_of_narrow_tensors_are_exact() -> None:
    now, before = {"x": torch.tensor([0.1], dtype=torch.bfloat16)}, {"x": torch.tensor([-77.0], dtype=torch.bfloat16)}
    expected = now["x"].double().item() + 77.0
    moved = displacement(now, before)
    for difference in (subtract(now, before), moved):
        assert difference["x"].item() == pytest.approx(expected, rel=1e-7)
    weighted_sum([(1.0, before), (1.0, moved)], out=before)
    assert torch.equal(before["x"], now["x"])


def test_a_displacement_takes_the_memory_of_what_was_moved() -> None:
    now = {"x": torch.tensor([3.0])}
    assert displacement(now, {"x": torch.tensor([1.0])})["x"] is now["x"]
    assert now["x"].tolist() == [2.0]


class Read(dict[str, Tensor]):
    """Lists the names whose tensors are read."""

    def __init__(self, log: list[str], owner: str, tensors: Tensors) -> None:
        super().__init__(tensors)
        self.log, self.owner = log, owner

    def __getitem__(self, name: str) -> Tensor:
        self.log.append(f"{self.owner}.{name}")
        return super().__getitem__(name)

    def items(self) -> Any:
        return ((name, self[name]) for name in self)


def test_an_average_reads_each_tensor_once_tensor_by_tensor_in_ascending_order_of_ids() -> None:
    log: list[str] = []
    models = {j: Read(log, str(j), {"a": torch.ones(2), "b": torch.ones(3)}) for j in (2, 0, 1)}
    average(models, dict.fromkeys(models, 1.0))
    assert log == ["0.a", "1.a", "2.a", "0.b", "1.b", "2.b"]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("other", [torch.float32, torch.float64])
def test_a_weighted_sum_has_the_dtype_of_the_first_term(dtype: torch.dtype, other: torch.dtype) -> None:
    total = weighted_sum([(0.5, {"a": torch.ones(2, dtype=dtype)}), (0.5, {"a": torch.ones(2, dtype=other)})])
    assert total["a"].dtype is dtype
    assert total["a"].tolist() == [1.0, 1.0]


def test_subtract_and_clone_make_new_tensors() -> None:
    left, right = {"a": torch.tensor([3.0])}, {"a": torch.tensor([1.0]), "unused": torch.ones(1)}
    difference, copy = subtract(left, right), clone(left)
    left["a"].zero_()
    assert (difference["a"].item(), copy["a"].item()) == (2.0, 3.0)


@pytest.mark.parametrize("weights", [(0.5, 0.5), (0.0, 1.0), (1.0, 0.0), (2.0, -1.0)])
@pytest.mark.parametrize("constant", [-torch.inf, torch.inf, torch.nan])
def test_an_entry_that_is_infinite_in_all_models_stays_so_in_their_average(
    constant: float, weights: tuple[float, float]
) -> None:
    models = {0: {"a": torch.tensor([constant, 1.0])}, 1: {"a": torch.tensor([constant, 3.0])}}
    expected = torch.tensor([constant, weights[0] + 3.0 * weights[1]])
    torch.testing.assert_close(average(models, dict(enumerate(weights)))["a"], expected, equal_nan=True)
    average(models, dict(enumerate(weights)), out=models[1])
    torch.testing.assert_close(models[1]["a"], expected, equal_nan=True)


def test_an_infinity_that_no_step_changes_stays_whatever_the_weights() -> None:
    local, other, step = (
        {"a": torch.tensor(values)} for values in ([-torch.inf, 1.0], [-torch.inf, 3.0], [0.0, 1.0])
    )
    assert weighted_sum([(0.0, local), (1.0, other), (1.0, step)])["a"].tolist() == [-torch.inf, 4.0]


def test_an_entry_that_is_infinite_in_some_models_is_so_in_their_average() -> None:
    models = {0: {"a": torch.tensor([-torch.inf, torch.inf, 1.0])}, 1: {"a": torch.tensor([0.0, -torch.inf, 3.0])}}
    found = average(models, {0: 1.0, 1: 1.0})["a"]
    torch.testing.assert_close(found, torch.tensor([-torch.inf, torch.nan, 2.0]), equal_nan=True)


def test_an_infinity_that_nothing_has_changed_has_no_difference() -> None:
    before = torch.tensor([-torch.inf, torch.nan, torch.inf, 1.0, torch.inf])
    after = torch.tensor([-torch.inf, torch.nan, torch.inf, 4.0, 1.0])
    expected = torch.tensor([0.0, 0.0, 0.0, 3.0, -torch.inf])
    assert subtract({"a": after}, {"a": before})["a"].tolist() == expected.tolist()
    assert displacement({"a": after}, {"a": before})["a"] is after
    assert after.tolist() == expected.tolist()


LARGE = 1.01 * LIMIT


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_parameters_diverge_at_the_limit(dtype: torch.dtype) -> None:
    def tensor(*values: float) -> Tensor:
        return torch.tensor(values, dtype=dtype)

    assert not has_diverged(tensor())
    assert not has_diverged(tensor(0.0, -1.0, 6e4))
    assert not has_diverged(tensor(6e4).expand(1000))  # their Euclidean norm is above the limit
    for value in (LARGE, -LARGE, 3e38, torch.inf, torch.nan):
        assert has_diverged(tensor(1.0, value, 2.0))


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex64, torch.int64])
def test_sums_may_be_large(dtype: torch.dtype) -> None:
    assert not has_diverged(torch.tensor([LARGE, 1e15], dtype=torch.float64).to(dtype))
    if dtype is not torch.int64:
        assert has_diverged(torch.tensor([1.0, torch.nan]).to(dtype))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_what_a_tensor_began_with_has_not_diverged(dtype: torch.dtype) -> None:
    began = torch.tensor([-torch.inf, torch.nan, 6e4, torch.inf, -torch.inf], dtype=dtype)
    start = InitialValues.of(began)
    assert not has_diverged(began, start)
    assert not has_diverged(began[2:], start)  # a slice of it
    for entry in (0, 1, 3):
        once_more = torch.cat([began, began[entry : entry + 1]])
        assert diverged_entry(once_more, start) == pytest.approx(float(began[entry]), nan_ok=True)


def test_a_large_tensor_diverges_where_it_grows_a_thousandfold() -> None:
    start = InitialValues.of(torch.tensor([1.0, -1e7]))
    assert not has_diverged(torch.tensor([9e9, -9e9]), start)
    assert diverged_entry(torch.tensor([1.0, -1.1e10]), start) == pytest.approx(-1.1e10)
    huge = torch.tensor([3e38])
    assert not has_diverged(huge, InitialValues.of(huge))
    assert diverged_entry(torch.tensor([torch.inf]), InitialValues.of(huge)) == torch.inf


def test_the_limit_of_ordinary_tensors_does_not_depend_on_their_start() -> None:
    for began in (torch.zeros(0), torch.tensor([LIMIT / GROWTH]), torch.tensor([-torch.inf]), torch.arange(3)):
        assert InitialValues.of(began).limit == LIMIT


def test_a_constant_may_become_anything_but_nan() -> None:
    start = InitialValues.of(torch.zeros(3), constant=True)
    assert not has_diverged(torch.tensor([-torch.inf, torch.inf, 1e30]), start)
    assert has_diverged(torch.tensor([0.0, torch.nan, 0.0]), start)


def test_statistics_of_normalization_are_no_constants() -> None:
    module = nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 2))
    module.register_buffer("mask", torch.zeros(1))
    module.register_buffer("cache", torch.zeros(1), persistent=False)
    assert constants_of(module) == {"0.num_batches_tracked", "mask"}


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


def test_the_digest_ignores_the_order_of_keys_and_strides() -> None:
    wide = torch.arange(12.0).reshape(3, 4)
    assert digest({"a": 1, "b": 2}) == digest({"b": 2, "a": 1})
    assert digest(wide.t()) == digest(wide.t().contiguous())
    assert digest(wide[:1, ::4]) == digest(torch.zeros(1, 1))
    assert digest(wide[0, 1:2]) == digest(torch.ones(1))
    assert digest(torch.ones(4)[::4]) == digest(torch.ones(1))


def test_the_digest_changes_with_every_bit_dtype_shape_and_key() -> None:
    digests = {digest(state())}
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
        parent: Any = changed
        for key in path[:-1]:
            parent = parent[key]
        parent[path[-1]] = value
        digests.add(digest(changed))
    assert len(digests) == 1 + len(changes)


def test_the_digest_distinguishes_nan_payloads() -> None:
    assert digest(with_nan(1)) == digest(with_nan(1))
    assert digest(with_nan(1)) != digest(with_nan(2))


def test_bfloat16_and_scalars_have_digests() -> None:
    assert digest(torch.tensor(1.0, dtype=torch.bfloat16)) != digest(torch.tensor(1.0))


def test_the_digest_of_a_state_survives_saving(tmp_path: Any) -> None:
    torch.save(state(), tmp_path / "state.pt")
    assert digest(torch.load(tmp_path / "state.pt", weights_only=True)) == digest(state())
