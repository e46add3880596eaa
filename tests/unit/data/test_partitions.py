"""Partitions: reproducible, complete, disjoint where promised, with clear errors."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from p2pfl.data import PARTITIONS, DatasetLabels, Subset
from p2pfl.errors import DataError
from p2pfl.run_file.options import OptionErrors

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
        ({"peers": 12}, "10 classes in 2 shards, .* 2, make 10 tasks for 12 peers; .* multiple of 5"),
        ({"peers": 2}, "10 .* in 1 shards, .* make 5 tasks for 2 peers"),
        ({"shards": 3, "peers": 16}, "10 .* in 3 shards, .* make 15 tasks for 16 peers; .*shards higher"),
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


# --- pathological and dirichlet (FedTGP): the merged pool ---


def sizes_of(subset: Subset) -> tuple[int, int, int]:
    return len(subset.train), len(subset.validation), len(subset.test)


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
    with pytest.raises(DataError, match=r"10 .*samples are too few for 11 peers"):
        split(name, labels(1), np.zeros(0, np.int64), peers=11)


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


# --- styles (FedStyle) ---


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
