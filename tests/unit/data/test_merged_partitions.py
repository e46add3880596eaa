"""Partitions of the merged pool (FedTGP): pathological and dirichlet."""

from __future__ import annotations

import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2pfl.data import Subset
from p2pfl.errors import DataError
from tests.partitioning import (
    assert_disjoint,
    assert_equal,
    assert_well_formed,
    few_examples,
    labels,
    sizes_of,
    some_labels,
    split,
)


@few_examples
@given(
    classes=st.integers(1, 12),
    wanted=st.integers(1, 6),
    peers=st.integers(1, 20),
    validation=st.sampled_from([0.0, 0.2]),
    seed=st.integers(0, 2**32),
)
def test_pathological_distributes_whole_classes(
    classes: int, wanted: int, peers: int, validation: float, seed: int
) -> None:
    wanted = min(wanted, classes)
    train, test = some_labels(seed, classes, 200, 400), some_labels(seed + 1, classes, 100, 200)
    pool = np.concatenate((train, test))

    def compute() -> list[Subset]:
        options = {"classes_per_peer": wanted, "validation": validation}
        return split("pathological", train, test, peers=peers, classes=classes, seed=seed, **options)

    subsets = compute()
    assert_equal(subsets, compute())
    assert_well_formed(subsets, train, test)
    union = assert_disjoint(subsets)
    peers_per_class = -(-peers * wanted // classes)
    counts = np.array(
        [
            np.bincount(pool[np.concatenate([subset.train, subset.validation, subset.test])], minlength=classes)
            for subset in subsets
        ]
    )
    for label, of_class in enumerate(np.bincount(pool, minlength=classes)):
        holders = np.flatnonzero(counts[:, label])
        assert len(holders) <= peers_per_class
        if len(holders):  # classes are distributed whole; all but the last peer get less than an even part
            assert counts[:, label].sum() == of_class
            even = of_class / len(holders)
            assert (counts[holders[:-1], label] < even).all()
            assert (counts[holders[:-1], label] >= int(even / 10)).all()
    classes_held = (counts > 0).sum(axis=1)
    assert classes_held.max() <= wanted
    assert classes_held.min() >= 1
    if peers * wanted == peers_per_class * classes and peers % peers_per_class == 0:
        assert (classes_held == wanted).all()
        assert len(union) == len(pool)
    for subset in subsets:
        total = sum(sizes_of(subset))
        assert len(subset.test) == total - int(0.75 * total)


def test_pathological_has_the_classes_of_fedtgp() -> None:
    """20 peers, 2 of 10 classes each: four peers have the same two classes (Fig. 7)."""
    train, test = labels(6000), labels(1000)
    subsets = split("pathological", train, test, peers=20)
    pool = np.concatenate((train, test))
    for peer, subset in enumerate(subsets):
        assert set(pool[subset.train]) == set(pool[subset.test]) == {peer // 4 * 2, peer // 4 * 2 + 1}
    assert any((subset.train >= len(train)).any() for subset in subsets)
    assert any((subset.test < len(train)).any() for subset in subsets)
    # 102 classes, 10 for each of 20 peers: the last two classes are unused.
    flowers = split("pathological", labels(60, 102), labels(20, 102), peers=20, classes=102, classes_per_peer=10)
    assert len(assert_disjoint(flowers)) == 100 * 80


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"classes_per_peer": 11}, "classes_per_peer is 11, but the dataset has 10 classes"),
        ({"peers": 100}, "the 11 samples of class 0 are too few for 20 peers with more than 1 each"),
    ],
)
def test_pathological_that_does_not_fit_is_rejected(options: dict[str, int], message: str) -> None:
    with pytest.raises(DataError, match=f"^partition pathological: {message}"):
        split("pathological", labels(10), labels(1), **{"peers": 10, **options})


@few_examples
@given(
    name=st.sampled_from(["dirichlet", "dirichlet-train"]),
    classes=st.integers(1, 12),
    peers=st.integers(1, 12),
    beta=st.sampled_from([0.3, 1.0, 100.0]),
    validation=st.sampled_from([0.0, 0.2]),
    seed=st.integers(0, 2**32),
)
def test_dirichlet_distributes_all_samples_in_sufficient_numbers(
    name: str, classes: int, peers: int, beta: float, validation: float, seed: int
) -> None:
    train, test = some_labels(seed, classes, 100, 200), some_labels(seed + 1, classes, 50, 100)

    def compute() -> list[Subset]:
        options = {"beta": beta, "validation": validation, "least": 10}
        return split(name, train, test, peers=peers, classes=classes, seed=seed, **options)

    try:
        subsets = compute()
    except DataError:  # draws with few classes may fail
        assert classes == 1 or beta < 1
        return
    assert_equal(subsets, compute())
    assert_well_formed(subsets, train, test)
    total = len(train) + len(test) if name == "dirichlet" else len(train)
    assert len(assert_disjoint(subsets)) == total
    for subset in subsets:
        train_size, validation_size, test_size = sizes_of(subset)
        if name == "dirichlet":
            assert train_size + validation_size == int(0.75 * (train_size + validation_size + test_size))
            assert train_size + validation_size + test_size >= min(10, total / peers / 2)
        else:
            assert train_size + validation_size >= min(10, total / peers / 2)
            np.testing.assert_array_equal(subset.test, np.arange(len(test)))
        assert validation_size == round(validation * (train_size + validation_size))


def test_small_beta_concentrates_classes_and_large_beta_spreads_them() -> None:
    train, test = labels(6000), labels(1000)

    def classes_of_half(beta: float) -> float:
        """Average number of classes that make up half of a peer's samples."""
        result = []
        for subset in split("dirichlet", train, test, peers=20, beta=beta):
            counts = np.sort(np.bincount(np.concatenate((train, test))[subset.train], minlength=10))[::-1]
            result.append(int(np.searchsorted(counts.cumsum(), counts.sum() / 2)) + 1)
        return float(np.mean(result))

    assert classes_of_half(0.1) < 1.7
    assert classes_of_half(100.0) > 4


def test_peers_with_enough_samples_get_no_further_classes() -> None:
    """A peer with n/M samples gets none of the following classes."""
    for subset in split("dirichlet", labels(6000), labels(1000), peers=20):
        assert sum(sizes_of(subset)) < 70_000 / 20 + 7000


@pytest.mark.parametrize("name", ["dirichlet", "dirichlet-train"])
def test_dirichlet_reports_the_best_of_its_failed_draws(name: str) -> None:
    message = rf"{name}: in 100 draws with beta 0.001, the smallest of 20 peers had at most \d+ samples instead of 25"
    with pytest.raises(DataError, match=message):
        split(name, labels(100), np.zeros(0, np.int64), peers=20, beta=0.001)
    with pytest.raises(DataError, match=r"10 (training )?samples are too few for 11 peers"):
        split(name, labels(1), np.zeros(0, np.int64), peers=11)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["dirichlet", "dirichlet-train"])
def test_dirichlet_suggests_a_smaller_least_only_if_one_helps(name: str) -> None:
    def draw(beta: float, least: int) -> str:
        try:
            split(name, labels(40), np.zeros(0, np.int64), peers=20, beta=beta, least=least, seed=1)
        except DataError as error:
            return str(error)
        return ""

    found = re.search(r"; try a larger beta, a least of (\d+), fewer peers or another seed$", draw(0.1, 25))
    assert found is not None
    assert draw(0.1, int(found[1])) == ""
    assert draw(0.1, int(found[1]) + 1) != ""
    assert draw(0.001, 1).endswith(
        "had at most 0 samples instead of 1; try a larger beta, fewer peers or another seed"
    )
