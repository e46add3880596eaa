"""Partitions: reproducible, complete, disjoint where promised, with clear errors."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from p2pfl.data import PARTITIONS
from p2pfl.errors import DataError
from tests.partitioning import assert_disjoint, assert_equal, assert_well_formed, few_examples, labels, split

# --- iid ---


@few_examples
@given(
    size=st.integers(1, 300),
    peers=st.integers(1, 30),
    validation=st.floats(0, 0.99),
    seed=st.integers(0, 2**32),
)
def test_iid_distributes_all_samples_once_and_evenly(size: int, peers: int, validation: float, seed: int) -> None:
    assume(size >= peers)
    train, test = np.zeros(size, np.int64), np.zeros(peers + size // 2, np.int64)
    subsets = split("iid", train, test, peers=peers, classes=1, seed=seed, validation=validation)
    assert_well_formed(subsets, train, test)
    assigned = np.concatenate([part for subset in subsets for part in (subset.train, subset.validation)])
    assert sorted(assigned) == list(range(size))
    assert sorted(np.concatenate([subset.test for subset in subsets])) == list(range(len(test)))
    totals = [len(subset.train) + len(subset.validation) for subset in subsets]
    assert max(totals) - min(totals) <= 1
    for subset, total in zip(subsets, totals, strict=True):
        assert len(subset.train) >= 1
        assert abs(len(subset.validation) - validation * total) <= 1
        assert subset.group == 0
    assert_equal(subsets, split("iid", train, test, peers=peers, classes=1, seed=seed, validation=validation))


def test_iid_per_peer_limits_training_and_held_out_samples() -> None:
    subsets = split("iid", labels(100), labels(10), peers=4, per_peer=50, validation=0.2)
    assert [(len(subset.train), len(subset.validation), len(subset.test)) for subset in subsets] == [(40, 10, 25)] * 4


def test_iid_rejects_more_peers_than_samples() -> None:
    with pytest.raises(DataError, match="9 test samples are too few for 10 peers"):
        split("iid", labels(1), labels(1)[:9], peers=10)


def test_another_seed_gives_other_subsets() -> None:
    first, second = (split("iid", labels(20), labels(2), peers=2, seed=seed)[0] for seed in (0, 1))
    assert first.train.tolist() != second.train.tolist()


# --- iid-train (DFML) ---


@few_examples
@given(size=st.integers(1, 200), peers=st.integers(1, 20), seed=st.integers(0, 2**32))
def test_iid_train_tests_all_peers_on_the_whole_test_set(size: int, peers: int, seed: int) -> None:
    assume(size >= peers)
    train, test = np.zeros(size, np.int64), np.zeros(7, np.int64)
    subsets = split("iid-train", train, test, peers=peers, classes=1, seed=seed)
    assert_equal(subsets, split("iid-train", train, test, peers=peers, classes=1, seed=seed))
    assert_well_formed(subsets, train, test)
    assert len(assert_disjoint(subsets)) == size
    totals = [len(subset.train) + len(subset.validation) for subset in subsets]
    assert max(totals) - min(totals) <= 1
    for subset, total in zip(subsets, totals, strict=True):
        assert subset.test.tolist() == list(range(7))
        assert len(subset.validation) == round(0.2 * total) or total <= 2


def test_iid_train_rejects_more_peers_than_samples() -> None:
    with pytest.raises(DataError, match="partition iid-train: 10 training samples are too few for 11 peers"):
        split("iid-train", labels(1), labels(1), peers=11)


# --- fraction ---


@few_examples
@given(
    size=st.integers(20, 300),
    peers=st.integers(1, 10),
    fractions=st.lists(st.floats(0.05, 0.1), min_size=1, max_size=4),
    validation=st.sampled_from([0.0, 0.2]),
    seed=st.integers(0, 2**32),
)
def test_fractions_of_samples_are_disjoint(
    size: int, peers: int, fractions: list[float], validation: float, seed: int
) -> None:
    train, test = np.zeros(size, np.int64), np.zeros(40, np.int64)
    options = {"fraction": fractions, "validation": validation}
    subsets = split("fraction", train, test, peers=peers, classes=1, seed=seed, **options)
    assert_equal(subsets, split("fraction", train, test, peers=peers, classes=1, seed=seed, **options))
    assert_well_formed(subsets, train, test)
    assert_disjoint(subsets)
    test_indices = np.concatenate([subset.test for subset in subsets])
    assert len(np.unique(test_indices)) == len(test_indices)
    for peer, subset in enumerate(subsets):
        fraction = fractions[peer % len(fractions)]
        assert abs(len(subset.train) + len(subset.validation) - fraction * size) < 1
        assert abs(len(subset.test) - fraction * 40) < 1


def test_one_fraction_applies_to_all_peers() -> None:
    subsets = split("fraction", labels(100), labels(10), peers=3, fraction=0.3)
    assert [(len(subset.train), len(subset.test)) for subset in subsets] == [(300, 30)] * 3


@pytest.mark.parametrize(
    ("fraction", "message"),
    [
        (0.3, "the fractions of 4 peers add up to 1.2, more than 1"),
        ([0.5, 0.2], "add up to 1.4"),
        (0.05, "0.05 of 10 test samples is less than one"),
        ([], "fraction is an empty list"),
    ],
)
def test_fractions_that_do_not_fit_are_rejected(fraction: object, message: str) -> None:
    with pytest.raises(DataError, match=message):
        split("fraction", labels(10), labels(1), peers=4, fraction=fraction)


# --- all ---


@pytest.mark.parametrize("name", list(PARTITIONS))
def test_options_survive_serialization(name: str) -> None:
    required: dict[str, dict[str, Any]] = {
        "fraction": {"fraction": 0.05},
        "natural": {"column": "writer"},
        "indices": {"file": "split.json"},
        "flwr": {"class": "IidPartitioner"},
    }
    options = PARTITIONS[name].parse(required.get(name, {}))
    assert PARTITIONS[name].parse(options.to_dict()) == options
