"""Kept states: copies on disk of what may become a checkpoint, and values that cannot."""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from p2pfl.algorithms.mapl import MAPL, Hyper
from p2pfl.session import checkpoint
from p2pfl.tensors import digest
from tests.checkpoints import loaded, state
from tests.support import linear_model, peer_data, random_dataset, setting


@pytest.fixture
def kept(tmp_path: Path) -> Iterator[checkpoint.KeptState]:
    with closing(checkpoint.KeptState(tmp_path)) as kept:
        yield kept
    assert not list(tmp_path.glob(".*"))


def test_a_kept_state_is_independent_of_what_was_written(kept: checkpoint.KeptState) -> None:
    original: dict[str, Any] = {
        "tensor": torch.ones(2),
        "nested": {"list": [torch.ones(2), {"number": 1}], "tuple": (torch.ones(2), "x")},
        "plain": [1, 2],
    }
    before = digest(original)
    kept.write(original)
    original["tensor"].zero_()
    original["nested"]["list"][0].zero_()
    original["nested"]["list"][1]["number"] = 2
    original["plain"].append(3)
    found = kept.read()
    assert digest(found) == before
    assert type(found["nested"]["tuple"]) is tuple


@pytest.mark.parametrize(
    "tensor",
    [
        torch.tensor(3.0),
        torch.empty(0, 3),
        torch.arange(6).reshape(2, 3).T,
        torch.tensor([True, False]),
        torch.tensor([1 + 2j]).conj(),
        torch.randn(5).to(torch.bfloat16),
        torch.arange(100_000, dtype=torch.uint8),
    ],
    ids=["scalar", "empty", "transposed", "bool", "conjugate", "bfloat16", "large"],
)
def test_keeps_tensors_of_any_kind(kept: checkpoint.KeptState, tensor: torch.Tensor) -> None:
    kept.write({"before": torch.ones(1), "x": tensor, "after": torch.ones(1)})
    found = kept.read()
    assert torch.equal(found["x"], tensor)
    assert (found["x"].dtype, found["x"].shape) == (tensor.dtype, tensor.shape)
    assert found["x"].is_contiguous()
    assert found["before"] == found["after"] == 1.0


def test_values_keep_their_types_in_a_checkpoint(kept: checkpoint.KeptState, path: Path) -> None:
    state = {
        "a": [
            1,
            1.5,
            True,
            None,
            "s",
            b"x",
            bytearray(b"x"),
            1j,
            torch.float32,
            torch.device("cpu"),
            torch.Size([2]),
        ],
        "b": {(0, 1): OrderedDict(x=2), 3: Counter("aab")},
    }
    kept.write(state)
    checkpoint.save(path, kept.read())
    found = checkpoint.read(path)
    assert found == state
    assert [*map(type, found["a"]), *map(type, found["b"].values())] == [*map(type, state["a"]), OrderedDict, Counter]


class Pair(NamedTuple):
    first: int
    second: int


@pytest.mark.parametrize(
    "value",
    [
        object(),
        np.float64(0.5),
        np.zeros(3),
        deque([1]),
        defaultdict(list),
        frozenset([1]),
        {1},
        Pair(1, 2),
        lambda: 0,
    ],
    ids=lambda value: type(value).__name__,
)
def test_names_the_place_of_a_value_that_could_not_be_read_again(kept: checkpoint.KeptState, value: object) -> None:
    state = {"fine": [1], "a": {"b": (0, [value])}}
    with pytest.raises(
        checkpoint.Unstorable, match=rf"^of type (\w+\.)*{type(value).__name__}, which a checkpoint"
    ) as caught:
        kept.write(state)
    assert caught.value.place(state, "state") == "state['a']['b'][1][0]"
    assert ("item" in str(caught.value)) == isinstance(value, np.generic | np.ndarray)


@pytest.mark.parametrize("key", [np.int64(1), np.str_("a"), (1, np.int64(2)), frozenset(), torch.zeros(1)], ids=repr)
def test_names_the_place_of_a_key_that_could_not_be_read_again(kept: checkpoint.KeptState, key: object) -> None:
    for mapping in ({key: 1}, Counter({key: 1})):
        state = {"a": [mapping]}
        with pytest.raises(checkpoint.Unstorable) as caught:
            kept.write(state)
        assert caught.value.place(state, "state") == "a key of state['a'][0]"


def test_keeps_the_last_state_only(kept: checkpoint.KeptState) -> None:
    for size in (1000, 5000, 10):
        kept.write({"x": torch.full((size,), float(size))})
    assert digest(kept.read()) == digest({"x": torch.full((10,), 10.0)})


def test_modifying_what_was_read_does_not_change_what_is_kept(kept: checkpoint.KeptState) -> None:
    kept.write({"x": torch.ones(3)})
    kept.read()["x"].zero_()
    assert kept.read()["x"].tolist() == [1.0, 1.0, 1.0]


def test_training_does_not_change_a_kept_state(kept: checkpoint.KeptState) -> None:
    algorithm = MAPL(Hyper(projector_hidden=4), setting(0, 2, linear_model(4, 5, 3), peer_data(random_dataset(8))))
    algorithm.train(epochs=1, batch=4)
    kept.write(algorithm.state_dict())
    before = digest(algorithm.state_dict())
    algorithm.train(epochs=1, batch=4)
    assert digest(kept.read()) == before != digest(algorithm.state_dict())


def test_keeps_no_gradients_and_only_the_numbers_of_a_view(kept: checkpoint.KeptState, path: Path) -> None:
    large = torch.arange(1_000_000.0)
    kept.write(state(p=torch.nn.Parameter(torch.ones(2)), view=large[10:12]))
    checkpoint.save(path, kept.read())
    found = loaded(path)
    assert type(found["p"]) is torch.Tensor
    assert not found["p"].requires_grad
    assert found["view"].tolist() == [10.0, 11.0]
