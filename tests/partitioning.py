"""Labels to partition, and what is true of every partition."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import settings

from p2pfl.data import PARTITIONS, DatasetLabels, Subset

few_examples = settings(max_examples=15, deadline=None)


def labels(per_class: int, classes: int = 10) -> np.ndarray:
    """Labels 0, 1, …, repeated ``per_class`` times."""
    return np.tile(np.arange(classes), per_class)


def split(
    name: str,
    train: np.ndarray,
    test: np.ndarray,
    *,
    peers: int,
    classes: int = 10,
    seed: int = 0,
    **options: Any,
) -> list[Subset]:
    return PARTITIONS[name].parse(options).split(DatasetLabels(train, test, classes), peers, seed)


def assert_well_formed(subsets: list[Subset], train: np.ndarray, test: np.ndarray) -> None:
    pool = np.concatenate((train, test))
    for subset in subsets:
        train_labels, test_labels = (pool, pool) if subset.merged else (train, test)
        for indices, among in (
            (subset.train, train_labels),
            (subset.validation, train_labels),
            (subset.test, test_labels),
        ):
            assert indices.dtype == np.int64
            assert (np.diff(indices) > 0).all()  # ascending, no sample twice
            assert len(indices) == 0 or (indices[0] >= 0 and indices[-1] < len(among))
        assert not np.intersect1d(subset.train, subset.validation).size
        if subset.merged:
            assert not np.intersect1d(subset.test, np.concatenate([subset.train, subset.validation])).size


def assert_disjoint(subsets: list[Subset]) -> np.ndarray:
    """All training and validation samples, and the test samples of merged subsets, without repetition; ascending."""
    parts = [part for subset in subsets for part in (subset.train, subset.validation)]
    if subsets[0].merged:
        parts += [subset.test for subset in subsets]
    union = np.sort(np.concatenate(parts))
    assert (np.diff(union) > 0).all()
    return union


def some_labels(seed: int, classes: int, low: int, high: int) -> np.ndarray:
    """Between ``low`` and ``high`` samples of each class, in random order."""
    stream = np.random.default_rng(seed)
    return stream.permutation(np.repeat(np.arange(classes), stream.integers(low, high, classes, endpoint=True)))


def assert_equal(left: list[Subset], right: list[Subset]) -> None:
    for a, b in zip(left, right, strict=True):
        assert a.group == b.group
        for name in ("train", "validation", "test"):
            np.testing.assert_array_equal(getattr(a, name), getattr(b, name))


def sizes_of(subset: Subset) -> tuple[int, int, int]:
    return len(subset.train), len(subset.validation), len(subset.test)
