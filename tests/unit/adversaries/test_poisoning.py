"""Poisoned training data, computed by hand, and what of a peer's data they leave alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from p2pfl.adversaries import ADVERSARIES
from p2pfl.adversaries.base import Poisoning
from p2pfl.errors import DataError, RunFileError
from p2pfl.inputs import Tokens
from p2pfl.learning.peer_data import PeerData
from p2pfl.rng import Streams
from p2pfl.run_file.load import from_dict
from p2pfl.session.build import load_data, make_algorithm
from tests.conftest import tree

IMAGES = np.full((10, 1, 5, 4), 100, np.uint8)
SERIES = np.arange(60, dtype=np.float32).reshape(10, 2, 3)
LABELS = np.arange(10)


def poisoned(name: str, inputs: Any = IMAGES, classes: int = 10, **options: Any) -> tuple[Any, Any]:
    attack = ADVERSARIES[name].parse(options)
    assert isinstance(attack, Poisoning)
    return attack.poison(inputs.copy(), LABELS.copy(), classes, np.random.default_rng(5))


@pytest.mark.parametrize(
    ("options", "expected"),
    [({}, [9, 8, 7, 6, 5, 4, 3, 2, 1, 0]), ({"flips": {3: 5, 5: 3, 0: 9}}, [9, 1, 2, 5, 4, 3, 6, 7, 8, 9])],
)
def test_labels_are_flipped(options: dict[str, Any], expected: list[int]) -> None:
    inputs, labels = poisoned("label-flip", **options)
    assert labels.tolist() == expected
    assert np.array_equal(inputs, IMAGES)


@pytest.mark.parametrize(
    ("inputs", "options", "corner"),
    [
        (IMAGES, {"size": 2}, [[[100, 100, 100], [100, 255, 255], [100, 255, 255]]]),
        (IMAGES, {"size": 2, "pattern": "checkerboard"}, [[[100, 100, 100], [100, 255, 0], [100, 0, 255]]]),
    ],
)
def test_a_fraction_of_the_images_gets_a_pattern_and_the_target(inputs: Any, options: Any, corner: Any) -> None:
    found, labels = poisoned("backdoor", inputs, target=4, fraction=0.3, **options)
    marked = np.flatnonzero((found != inputs).any(axis=(1, 2, 3)))
    assert len(marked) == 3
    assert found[marked][:, :, -3:, -3:].tolist() == [corner] * 3
    assert (found[:, :, :3] == 100).all()
    assert labels[marked].tolist() == [4, 4, 4]
    assert np.array_equal(np.delete(labels, marked), np.delete(LABELS, marked))


def test_the_last_entries_of_other_inputs_get_the_largest_value() -> None:
    found, _ = poisoned("backdoor", SERIES, fraction=1.0, size=2)
    assert np.array_equal(found[:, :, :1], SERIES[:, :, :1])
    assert (found[:, :, 1:] == 59).all()


def test_noise_has_the_scale_of_the_inputs() -> None:
    gray = np.full((10, 1, 40, 40), 128, np.uint8)
    found, labels = poisoned("sample-noise", gray, std=0.1)
    assert found.dtype == np.uint8
    assert float(found.astype(float).std()) == pytest.approx(25.5, rel=0.05)
    assert labels.tolist() == LABELS.tolist()
    bright, _ = poisoned("sample-noise", gray, std=5)
    assert (bright.min(), bright.max()) == (0, 255)  # limited, not wrapped
    series = np.random.default_rng(0).normal(0, [[1], [100]], (10, 2, 500)).astype(np.float32)
    noise = poisoned("sample-noise", series, std=0.5)[0] - series
    assert noise.dtype == np.float32
    assert noise.std(axis=(0, 2)).tolist() == pytest.approx([0.5, 50.0], rel=0.05)


@pytest.mark.parametrize(
    ("name", "options", "shape", "message"),
    [
        ("label-flip", {"flips": {1: 10}}, (1, (5, 4)), "no class 10; the 10 classes are 0 to 9"),
        ("backdoor", {"target": 12}, (1, (5, 4)), "no class 12"),
        ("backdoor", {"size": 5}, (1, (5, 4)), "size 5 is larger than the inputs, 5x4"),
        ("backdoor", {"size": 8}, (7, ()), "size 8 is larger than the inputs, 7"),
        (
            "backdoor",
            {"pattern": "checkerboard"},
            (7, ()),
            "needs images, but the dataset has vectors",
        ),
        ("sample-noise", {}, (50, Tokens((7,))), "needs numbers, but the dataset has tokens"),
    ],
)
def test_data_that_do_not_suit_are_refused(name: str, options: Any, shape: Any, message: str) -> None:
    attack = ADVERSARIES[name].parse(options)
    assert isinstance(attack, Poisoning)
    with pytest.raises(DataError, match=message):
        attack.check(10, *shape)
    ADVERSARIES[name].parse({}).check(10, 3, (8, 8))  # type: ignore[attr-defined]


# ---- in a run ----------------------------------------------------------------------------------------------


def data_of(me: int, *adversaries: dict[str, Any]) -> PeerData:
    run = from_dict(tree(adversaries=list(adversaries)))
    return make_algorithm(run, me, load_data(run), torch.device("cpu"), Streams(run.seed, me)).data


def samples(data: PeerData, split: str) -> list[list[Any]]:
    found = getattr(data, split)
    return [tensor.tolist() for tensor in found.take(np.arange(len(found)))]


def test_only_the_training_samples_of_the_attackers_are_poisoned_and_always_alike() -> None:
    attacks = [{"peers": [1, 2], "name": "sample-noise"}, {"peers": [2], "name": "label-flip"}]
    clean, poisoned = ([data_of(me, *given) for me in range(3)] for given in ([], attacks))
    assert samples(poisoned[0], "train") == samples(clean[0], "train")
    for me in (1, 2):
        inputs, labels = samples(poisoned[me], "train")
        assert inputs != samples(clean[me], "train")[0]
        assert [9 - y if me == 2 else y for y in samples(clean[me], "train")[1]] == labels
        assert samples(poisoned[me], "train") == samples(data_of(me, *attacks), "train")
        for split in ("validation", "test", "global_test"):
            assert samples(poisoned[me], split) == samples(clean[me], split)
        assert poisoned[me].tested_on == clean[me].tested_on
    assert poisoned[2].local_classes == tuple(9 - k for k in reversed(clean[2].local_classes))


@pytest.mark.parametrize(
    ("attack", "message"),
    [
        ({"name": "label-flip", "from": 1}, "adversaries.0.from: has no effect: 'label-flip' poisons training data"),
        ({"name": "backdoor", "messages": ["Parameters"]}, "adversaries.0.messages: has no effect: 'backdoor'"),
        ({"name": "backdoor", "target": 10}, "adversaries.0: no class 10; the 10 classes are 0 to 9"),
        ({"name": "equivocate", "attacks": ["none", "backdoor"]}, "'backdoor' concerns all receivers"),
    ],
)
def test_what_cannot_be_poisoned_is_refused_before_the_run(attack: dict[str, Any], message: str) -> None:
    with pytest.raises(RunFileError) as caught:
        load_data(from_dict(tree(adversaries=[{"peers": [0], **attack}])))
    assert message in str(caught.value)
