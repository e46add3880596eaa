"""Partitions that give peers some of the classes: clusters (MAPL), shards and groups (L2C)."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2pfl.data import PARTITIONS, Subset
from p2pfl.errors import DataError
from p2pfl.options import OptionErrors
from tests.partitioning import (
    assert_disjoint,
    assert_equal,
    assert_well_formed,
    few_examples,
    labels,
    some_labels,
    split,
)

# --- clusters ---


@st.composite
def clusterings(draw: st.DrawFn) -> dict[str, int]:
    clusters = draw(st.integers(1, 4))
    step = draw(st.integers(1, 3))
    overlap = draw(st.integers(0, 4))
    return {
        "clusters": clusters,
        "overlap": overlap,
        "classes": clusters * step + overlap,
        "peers": clusters + draw(st.integers(0, 8)),
    }


@few_examples
@given(
    clustering=clusterings(),
    low=st.integers(1, 6),
    more=st.integers(0, 4),
    test_per_class=st.integers(1, 4),
    validation=st.sampled_from([0.0, 0.25]),
    preset=st.sampled_from(["paper", "official"]),
    seed=st.integers(0, 2**32),
)
def test_clusters_have_their_classes_and_sample_counts(
    clustering: dict[str, int],
    low: int,
    more: int,
    test_per_class: int,
    validation: float,
    preset: str,
    seed: int,
) -> None:
    classes, overlap, clusters = clustering["classes"], clustering["overlap"], clustering["clusters"]
    train, test = labels(10, classes), labels(4, classes)

    def compute() -> list[Subset]:
        return split(
            "clusters",
            train,
            test,
            **clustering,
            seed=seed,
            preset=preset,
            per_class=[low, low + more],
            test_per_class=test_per_class,
            validation=validation,
        )

    subsets = compute()
    assert_equal(subsets, compute())
    assert_well_formed(subsets, train, test)

    groups = [subset.group for subset in subsets]
    assert groups == sorted(groups)
    sizes = np.bincount(groups, minlength=clusters)
    assert sizes.max() - sizes.min() <= 1

    classes_of: dict[int, set[Any]] = {}
    for subset in subsets:
        class_counts = np.bincount(train[np.concatenate([subset.train, subset.validation])], minlength=classes)
        present = set(np.flatnonzero(class_counts))
        assert classes_of.setdefault(subset.group, present) == present
        assert all(low <= class_counts[label] <= low + more for label in present)
        test_counts = np.bincount(test[subset.test], minlength=classes)
        assert set(np.flatnonzero(test_counts)) == present
        assert all(test_counts[label] == test_per_class for label in present)
        assert set(train[subset.train]) == present  # at least one sample of each class remains for training
    assert set.union(*classes_of.values()) == set(range(classes))
    for cluster in range(clusters - 1):
        assert len(classes_of[cluster] & classes_of[cluster + 1]) == overlap
    assert len({len(present) for present in classes_of.values()}) == 1


@pytest.mark.parametrize(("overlap", "expected"), [(0, [range(5), range(5, 10)]), (4, [range(7), range(3, 10)])])
@pytest.mark.parametrize("per_class", [300, [100, 300]])
def test_clusters_of_the_papers_four_scenarios(overlap: int, expected: list[range], per_class: object) -> None:
    train, test = labels(6000), labels(1000)
    subsets = split("clusters", train, test, peers=10, overlap=overlap, per_class=per_class)
    for peer, subset in enumerate(subsets):
        assert subset.group == peer // 5
        assert set(train[subset.train]) == set(test[subset.test]) == set(expected[subset.group])
        counts = np.bincount(train[subset.train], minlength=10)[expected[subset.group]]
        if per_class == 300:
            assert set(counts) == {300}
        else:
            assert len(set(counts)) > 1
            assert counts.min() >= 100
            assert counts.max() <= 300
    # Ten peers times 300 are fewer than 6000: no sample is used twice, not even across clusters.
    for part in ("train", "test"):
        indices = np.concatenate([getattr(subset, part) for subset in subsets])
        assert len(np.unique(indices)) == len(indices)


def test_slices_overlap_only_when_a_class_is_used_up() -> None:
    train = labels(10)
    subsets = split("clusters", train, labels(15), peers=6, per_class=4)
    for label in range(5):
        slices = [set(subset.train[train[subset.train] == label]) for subset in subsets[:3]]
        assert not slices[0] & slices[1]
        assert not slices[1] & slices[2]
        assert len(slices[0] & slices[2]) == 2  # 10 samples: [0, 4), [4, 8), [8, 10) and [0, 2)


@pytest.mark.parametrize("overlap", [0, 4])
def test_official_slices_are_staggered_within_each_cluster(overlap: int) -> None:
    train, test = labels(6000), labels(1000)
    subsets = split("clusters", train, test, peers=10, preset="official", overlap=overlap)
    for cluster in range(2):
        members = [subset for subset in subsets if subset.group == cluster]
        for label in set(train[members[0].train]):
            slices = [set(subset.train[train[subset.train] == label]) for subset in members]
            assert [len(a & b) for a, b in pairwise(slices)] == [100] * 4
            assert len(set.union(*slices)) == 4 * 200 + 300
    if overlap:  # class 4 belongs to both clusters, whose i-th peers take the same slice of it
        for left, right in zip(subsets[:5], subsets[5:], strict=True):
            left_slice, right_slice = (set(subset.train[train[subset.train] == 4]) for subset in (left, right))
            assert left_slice == right_slice


def test_validation_is_held_out_of_each_class() -> None:
    train = labels(100)
    for subset in split("clusters", train, labels(15), peers=2, per_class=20, validation=0.25):
        assert np.unique(train[subset.train], return_counts=True)[1].tolist() == [15] * 5
        assert np.unique(train[subset.validation], return_counts=True)[1].tolist() == [5] * 5


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"clusters": 3}, r"10 classes .* overlap of 0 .* 3 equal clusters; possible overlaps: 1, 4, 7"),
        ({"overlap": 3}, "possible overlaps: 0, 2, 4, 6, 8"),
        ({"overlap": 10}, "possible overlaps: 0, 2, 4, 6, 8"),
        ({"clusters": 11}, "possible overlaps: none"),
        ({"clusters": 5}, "4 peers are too few for 5 clusters"),
        ({"per_class": 8}, "per_class needs 8 training samples of each class, but class 3 has 7"),
        ({"per_class": [1, 8]}, "per_class needs 8 training samples of each class, but class 3 has 7"),
        ({"test_per_class": 6}, "test_per_class needs 6 test samples of each class, but class 0 has 5"),
    ],
)
def test_clusters_that_do_not_fit_are_rejected(options: dict[str, Any], message: str) -> None:
    train = np.delete(labels(8), 3)
    with pytest.raises(DataError, match=message):
        split("clusters", train, labels(5), peers=4, **{"per_class": 2, "test_per_class": 2, **options})


@pytest.mark.parametrize("per_class", [0, [0, 3], [3, 2], [1, 2, 3], "many", None])
def test_invalid_per_class_is_one_problem(per_class: object) -> None:
    with pytest.raises(OptionErrors, match=r"^per_class: should be a number of samples > 0, or") as caught:
        PARTITIONS["clusters"].parse({"per_class": per_class})
    assert len(caught.value.problems) == 1


# --- shards (L2C) ---


@few_examples
@given(
    tasks=st.integers(1, 5),
    per_peer=st.integers(1, 4),
    shards=st.integers(1, 6),
    validation=st.sampled_from([0.0, 0.2, 0.5]),
    seed=st.integers(0, 2**32),
)
def test_shards_are_consecutive_slices_of_each_class(
    tasks: int, per_peer: int, shards: int, validation: float, seed: int
) -> None:
    classes, peers = tasks * per_peer, tasks * shards
    train, test = some_labels(seed, classes, shards, 40), some_labels(seed + 1, classes, 1, 9)

    def compute() -> list[Subset]:
        options = {"classes_per_peer": per_peer, "validation": validation}
        return split("shards", train, test, peers=peers, classes=classes, seed=seed, **options)

    subsets = compute()
    assert_equal(subsets, compute())
    assert_well_formed(subsets, train, test)
    assert assert_disjoint(subsets).tolist() == list(range(len(train)))
    for row in range(shards):  # each row is one shard of every class
        classes_of_row = [np.unique(train[subset.train]) for subset in subsets[row * tasks : (row + 1) * tasks]]
        assert sorted(np.concatenate(classes_of_row)) == list(range(classes))
        assert {len(row_classes) for row_classes in classes_of_row} == {per_peer}
    for peer, subset in enumerate(subsets):
        indices = np.sort(np.concatenate([subset.train, subset.validation]))
        for label in np.unique(train[indices]):
            of_class = np.flatnonzero(train == label)
            shard = indices[train[indices] == label]
            # a contiguous slice of the class, at the position of its row
            first = int(np.searchsorted(of_class, shard[0]))
            np.testing.assert_array_equal(of_class[first : first + len(shard)], shard)
            assert abs(first - peer // tasks * len(of_class) / shards) < shards
            assert abs(len(shard) - len(of_class) / shards) < 1
            kept_count = np.count_nonzero(train[subset.train] == label)
            assert kept_count == max(len(shard) - round(validation * len(shard)), 1)
        local_classes = np.unique(train[subset.train])
        np.testing.assert_array_equal(subset.test, np.flatnonzero(np.isin(test, local_classes)))


def test_shards_have_the_sizes_of_l2c_table_1() -> None:
    subsets = split("shards", labels(5000), labels(1000), peers=100)
    assert {(len(subset.train), len(subset.validation), len(subset.test)) for subset in subsets} == {(400, 100, 2000)}
    hundred = split("shards", labels(500, 100), labels(100, 100), peers=100, classes=100, classes_per_peer=10)
    assert {(len(subset.train), len(subset.validation), len(subset.test)) for subset in hundred} == {(400, 100, 1000)}


def test_fewer_peers_than_tasks_leave_shards_unused() -> None:
    all_subsets = split("shards", labels(200), labels(10), peers=100)
    assert_equal(split("shards", labels(200), labels(10), peers=7, shards=20), all_subsets[:7])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"classes_per_peer": 3},
            "10 classes cannot be divided into tasks of 3 classes; .*: 1, 2, 5, 10",
        ),
        (
            {"peers": 12},
            "10 .* in 2 shards, .* make 10 tasks for 12 peers; use a multiple of 5 peers, or .* 3$",
        ),
        ({"peers": 2}, "10 .* in 1 shards, .* make 5 tasks for 2 peers; .*, or set shards: 1$"),
        (
            {"shards": 3, "peers": 16},
            "10 .* in 3 shards, .* .* 15 tasks for 16 peers; use at most 15 peers, or .* 4$",
        ),
        ({"peers": 55}, "11 shards need as many training samples of each class, but class 0 has 10"),
    ],
)
def test_shards_that_do_not_fit_are_rejected(options: dict[str, int], message: str) -> None:
    with pytest.raises(DataError, match=f"^partition shards: {message}"):
        split("shards", labels(10), labels(1), **{"peers": 10, **options})


# --- groups (L2C, Fig. 4) ---


@few_examples
@given(
    groups=st.integers(1, 5),
    per_group=st.integers(1, 3),
    extra=st.integers(0, 9),
    per_class=st.one_of(st.none(), st.integers(1, 5)),
    seed=st.integers(0, 2**32),
)
def test_groups_have_disjoint_tasks(
    groups: int, per_group: int, extra: int, per_class: int | None, seed: int
) -> None:
    classes, peers = groups * per_group, groups + extra
    train, test = some_labels(seed, classes, 10, 40), some_labels(seed + 1, classes, 1, 9)

    def compute() -> list[Subset]:
        options = {"groups": groups, "per_class": per_class}
        return split("groups", train, test, peers=peers, classes=classes, seed=seed, **options)

    subsets = compute()
    assert_equal(subsets, compute())
    assert_well_formed(subsets, train, test)
    union = assert_disjoint(subsets)
    if per_class is None:
        assert len(union) == len(train)
    assert [subset.group for subset in subsets] == sorted(subset.group for subset in subsets)
    tasks: dict[int, set[Any]] = {}
    for subset in subsets:
        indices = np.concatenate([subset.train, subset.validation])
        local_classes = set(train[indices])
        assert tasks.setdefault(subset.group, local_classes) == local_classes == set(train[subset.train])
        np.testing.assert_array_equal(subset.test, np.flatnonzero(np.isin(test, list(local_classes))))
        if per_class is not None:
            assert np.bincount(train[indices]).max() <= per_class
    assert sorted(label for task in tasks.values() for label in task) == list(range(classes))
    assert {len(task) for task in tasks.values()} == {per_group}


def test_groups_have_the_sizes_of_l2c_figure_4() -> None:
    subsets = split("groups", labels(5000), labels(1000), peers=15)
    assert [subset.group for subset in subsets] == [peer // 3 for peer in range(15)]
    assert all(len(subset.train) + len(subset.validation) in (3332, 3333, 3334) for subset in subsets)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"groups": 3}, "10 classes cannot be divided evenly among 3 groups"),
        ({"peers": 4}, "4 peers are too few for 5 groups"),
        ({"peers": 60}, "groups of 12 peers need as many training samples of each class, but class 0 has 10"),
    ],
)
def test_groups_that_do_not_fit_are_rejected(options: dict[str, int], message: str) -> None:
    with pytest.raises(DataError, match=f"^partition groups: {message}"):
        split("groups", labels(10), labels(1), **{"peers": 10, **options})
