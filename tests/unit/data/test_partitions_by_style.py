"""Partitions by style (FedStyle)."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2pfl.data import PARTITIONS, DatasetLabels, Subset
from p2pfl.errors import DataError
from tests.partitioning import assert_equal, few_examples, labels, sizes_of, split


def styled(
    seed: int, classes: int, sizes: list[int], *, peers: int, run_seed: int = 0, **options: object
) -> tuple[DatasetLabels, list[Subset]]:
    """Labels of a dataset with ``sizes[style]`` samples per class and style, and its subsets."""
    stream = np.random.default_rng(seed)
    styles = stream.permutation(np.repeat(np.arange(len(sizes)), np.array(sizes) * classes))
    train = np.empty(len(styles), np.int64)
    for style in range(len(sizes)):
        members = np.flatnonzero(styles == style)
        train[members] = np.arange(len(members)) % classes
    test_styles = np.arange(4 * classes * len(sizes)) % len(sizes)
    test = np.arange(len(test_styles)) // len(sizes) % classes
    data = DatasetLabels(train, test, classes, styles, test_styles)
    return data, PARTITIONS["styles"].parse(options).split(data, peers, run_seed)


@few_examples
@given(
    classes=st.integers(1, 6),
    sizes=st.lists(st.integers(5, 40), min_size=1, max_size=4),
    each=st.integers(1, 3),
    beta=st.one_of(st.none(), st.sampled_from([0.2, 0.8])),
    validation=st.sampled_from([0.0, 0.25]),
    seed=st.integers(0, 2**32),
)
def test_styles_give_each_peer_one_style(
    classes: int, sizes: list[int], each: int, beta: float | None, validation: float, seed: int
) -> None:
    def compute() -> tuple[DatasetLabels, list[Subset]]:
        peers = each * len(sizes)
        return styled(1, classes, sizes, peers=peers, run_seed=seed, beta=beta, validation=validation)

    data, subsets = compute()
    assert data.train_styles is not None
    assert data.test_styles is not None
    assert_equal(subsets, compute()[1])
    total = round(classes * np.mean(sizes) / each)
    for peer, subset in enumerate(subsets):
        assert subset.group == peer // each
        assert len(subset.train) + len(subset.validation) == total
        assert len(subset.validation) == round(validation * total)
        assert set(data.train_styles[subset.train]) == {subset.group}
        assert (np.diff(subset.train) >= 0).all()
        np.testing.assert_array_equal(subset.test, np.flatnonzero(data.test_styles == subset.group))
        if beta is None:
            counts = np.bincount(data.train[subset.train], minlength=classes)
            assert counts.max() - counts.min() <= 2
            # A sample is repeated only when all samples of that class and style are used.
            if len(subset.train) <= (1 - validation) * classes * sizes[subset.group] - 3 * classes:
                assert len(np.unique(subset.train)) == len(subset.train)
    trained = np.concatenate([subset.train for subset in subsets])
    held_out = np.concatenate([subset.validation for subset in subsets])
    assert not np.intersect1d(trained, held_out).size


def test_samples_of_a_small_style_are_repeated() -> None:
    _, subsets = styled(0, 10, [100, 20], peers=2)
    small, large = subsets[1], subsets[0]
    assert len(small.train) == len(large.train) == 600
    assert len(np.unique(large.train)) == 600
    assert len(np.unique(small.train)) == 200
    assert set(np.unique(small.train, return_counts=True)[1]) == {3}
    _, several = styled(0, 10, [100, 100], peers=4)
    assert not np.intersect1d(several[0].train, several[1].train).size


def test_styles_per_peer_sets_the_number_of_samples() -> None:
    _, subsets = styled(0, 10, [100, 20], peers=2, per_peer=50, validation=0.2)
    assert [sizes_of(subset)[:2] for subset in subsets] == [(40, 10)] * 2


def test_single_peer_has_what_one_peer_of_each_style_would_have() -> None:
    _, apart = styled(0, 10, [100, 20], peers=2, per_peer=50, validation=0.2)
    _, (whole,) = styled(0, 10, [100, 20], peers=1, per_peer=50, validation=0.2)
    for name in ("train", "validation", "test"):
        expected = sorted(index for subset in apart for index in getattr(subset, name).tolist())
        assert getattr(whole, name).tolist() == expected
    assert whole.group == 0
    assert styled(0, 10, [100], peers=1)[1][0].group == 0


def test_styles_with_small_beta_concentrate_classes() -> None:
    data, subsets = styled(0, 10, [100, 100], peers=10, beta=0.2)
    counts = np.array([np.bincount(data.train[subset.train], minlength=10) for subset in subsets])
    assert (counts.max(axis=1) > 0.25 * counts.sum(axis=1)).mean() > 0.7
    assert len({tuple(row) for row in counts}) == 10


def test_styles_that_do_not_fit_are_rejected() -> None:
    with pytest.raises(DataError, match="the dataset has no styles; use dataset styled or styles"):
        split("styles", labels(10), labels(1), peers=2)
    with pytest.raises(DataError, match="5 peers cannot be divided evenly among 2 styles"):
        styled(0, 3, [10, 10], peers=5)
    data = DatasetLabels(labels(10, 2), labels(2, 2), 3, labels(10, 2), labels(2, 2))
    with pytest.raises(DataError, match="too few training samples of class 1 in style 0"):
        PARTITIONS["styles"]().split(data, 2, 0)
