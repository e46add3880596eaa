"""Partitions: pure, complete, disjoint where they promise it, and clear when the data do not suffice."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from p2pfl.data import PARTITIONS, Labelled, Share
from p2pfl.errors import DataError
from p2pfl.options import OptionErrors

few_examples = settings(max_examples=50, deadline=None)


def labels(per_class: int, classes: int = 10) -> np.ndarray:
    """Every class ``per_class`` times, in turn."""
    return np.tile(np.arange(classes), per_class)


def split(
    name: str,
    train: np.ndarray,
    test: np.ndarray,
    *,
    peers: int,
    classes: int = 10,
    seed: int = 0,
    **options: object,
) -> list[Share]:
    return PARTITIONS[name].parse(options).split(Labelled(train, test, classes), peers, seed)


def assert_well_formed(shares: list[Share], train: np.ndarray, test: np.ndarray) -> None:
    for share in shares:
        for indices, among in ((share.train, train), (share.validation, train), (share.test, test)):
            assert indices.dtype == np.int64
            assert (np.diff(indices) > 0).all()  # ascending, no sample twice
            assert len(indices) == 0 or (indices[0] >= 0 and indices[-1] < len(among))
        assert not np.intersect1d(share.train, share.validation).size


def assert_equal(left: list[Share], right: list[Share]) -> None:
    for mine, yours in zip(left, right, strict=True):
        assert mine.group == yours.group
        for name in ("train", "validation", "test"):
            np.testing.assert_array_equal(getattr(mine, name), getattr(yours, name))


# --- iid ---


@few_examples
@given(
    size=st.integers(1, 300),
    peers=st.integers(1, 30),
    validation=st.floats(0, 0.99),
    seed=st.integers(0, 2**32),
)
def test_iid_deals_out_everything_once_and_evenly(size: int, peers: int, validation: float, seed: int) -> None:
    assume(size >= peers)
    train, test = np.zeros(size, np.int64), np.zeros(peers + size // 2, np.int64)
    shares = split("iid", train, test, peers=peers, classes=1, seed=seed, validation=validation)
    assert_well_formed(shares, train, test)
    dealt = np.concatenate([part for share in shares for part in (share.train, share.validation)])
    assert sorted(dealt) == list(range(size))
    assert sorted(np.concatenate([share.test for share in shares])) == list(range(len(test)))
    totals = [len(share.train) + len(share.validation) for share in shares]
    assert max(totals) - min(totals) <= 1
    for share, total in zip(shares, totals, strict=True):
        assert len(share.train) >= 1
        assert abs(len(share.validation) - validation * total) <= 1
        assert share.group == 0
    assert_equal(shares, split("iid", train, test, peers=peers, classes=1, seed=seed, validation=validation))


def test_iid_per_peer_limits_the_training_samples_held_out_ones_included() -> None:
    shares = split("iid", labels(100), labels(10), peers=4, per_peer=50, validation=0.2)
    assert [(len(share.train), len(share.validation), len(share.test)) for share in shares] == [(40, 10, 25)] * 4


def test_iid_says_when_there_are_more_peers_than_samples() -> None:
    with pytest.raises(DataError, match="9 test samples are too few for 10 peers"):
        split("iid", labels(1), labels(1)[:9], peers=10)


def test_another_seed_deals_otherwise() -> None:
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
def test_clusters(
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

    def shares_again() -> list[Share]:
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

    shares = shares_again()
    assert_equal(shares, shares_again())
    assert_well_formed(shares, train, test)

    groups = [share.group for share in shares]
    assert groups == sorted(groups)
    sizes = np.bincount(groups, minlength=clusters)
    assert sizes.max() - sizes.min() <= 1

    classes_of: dict[int, set[int]] = {}
    for share in shares:
        got = np.bincount(train[np.concatenate([share.train, share.validation])], minlength=classes)
        held = set(np.flatnonzero(got))
        assert classes_of.setdefault(share.group, held) == held
        assert all(low <= got[label] <= low + more for label in held)
        tested = np.bincount(test[share.test], minlength=classes)
        assert set(np.flatnonzero(tested)) == held
        assert all(tested[label] == test_per_class for label in held)
        assert set(train[share.train]) == held  # some of each class is always left to train on
    assert set.union(*classes_of.values()) == set(range(classes))
    for cluster in range(clusters - 1):
        assert len(classes_of[cluster] & classes_of[cluster + 1]) == overlap
    assert len({len(held) for held in classes_of.values()}) == 1


@pytest.mark.parametrize(("overlap", "expected"), [(0, [range(5), range(5, 10)]), (4, [range(7), range(3, 10)])])
@pytest.mark.parametrize("per_class", [300, [100, 300]])
def test_the_four_scenarios_of_the_paper(overlap: int, expected: list[range], per_class: object) -> None:
    train, test = labels(6000), labels(1000)
    shares = split("clusters", train, test, peers=10, overlap=overlap, per_class=per_class)
    for peer, share in enumerate(shares):
        assert share.group == peer // 5
        assert set(train[share.train]) == set(test[share.test]) == set(expected[share.group])
        counts = np.bincount(train[share.train], minlength=10)[expected[share.group]]
        if per_class == 300:
            assert set(counts) == {300}
        else:
            assert len(set(counts)) > 1
            assert counts.min() >= 100
            assert counts.max() <= 300
    # Ten peers times 300 are fewer than 6000: nobody shares a sample, not even across clusters.
    for part in ("train", "test"):
        everyone = np.concatenate([getattr(share, part) for share in shares])
        assert len(np.unique(everyone)) == len(everyone)


def test_peers_share_samples_only_once_a_class_is_used_up() -> None:
    train = labels(10)
    shares = split("clusters", train, labels(15), peers=6, per_class=4)
    for label in range(5):
        mine = [set(share.train[train[share.train] == label]) for share in shares[:3]]
        assert not mine[0] & mine[1]
        assert not mine[1] & mine[2]
        assert len(mine[0] & mine[2]) == 2  # 10 samples: [0, 4), [4, 8), [8, 10) and [0, 2)


@pytest.mark.parametrize("overlap", [0, 4])
def test_official_slices_are_staggered_within_each_cluster(overlap: int) -> None:
    train, test = labels(6000), labels(1000)
    shares = split("clusters", train, test, peers=10, preset="official", overlap=overlap)
    for cluster in range(2):
        members = [share for share in shares if share.group == cluster]
        for label in set(train[members[0].train]):
            mine = [set(share.train[train[share.train] == label]) for share in members]
            assert [len(a & b) for a, b in pairwise(mine)] == [100] * 4
            assert len(set.union(*mine)) == 4 * 200 + 300
    if overlap:  # class 4 belongs to both clusters, whose i-th peers take the same slice of it
        for left, right in zip(shares[:5], shares[5:], strict=True):
            of_left, of_right = (set(share.train[train[share.train] == 4]) for share in (left, right))
            assert of_left == of_right


def test_validation_is_held_out_of_each_class() -> None:
    train = labels(100)
    for share in split("clusters", train, labels(15), peers=2, per_class=20, validation=0.25):
        assert np.unique(train[share.train], return_counts=True)[1].tolist() == [15] * 5
        assert np.unique(train[share.validation], return_counts=True)[1].tolist() == [5] * 5


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"clusters": 3}, r"10 classes .* overlap of 0 .* 3 equal clusters; overlaps that can: 1, 4, 7"),
        ({"overlap": 3}, "overlaps that can: 0, 2, 4, 6, 8"),
        ({"overlap": 10}, "overlaps that can: 0, 2, 4, 6, 8"),
        ({"clusters": 11}, "overlaps that can: none"),
        ({"clusters": 5}, "4 peers cannot form 5 clusters"),
        ({"per_class": 8}, "per_class asks for 8 training samples of each class, but class 3 has 7"),
        ({"per_class": [1, 8]}, "per_class asks for 8 training samples of each class, but class 3 has 7"),
        ({"test_per_class": 6}, "test_per_class asks for 6 test samples of each class, but class 0 has 5"),
    ],
)
def test_clusters_say_what_does_not_fit(options: dict[str, object], message: str) -> None:
    train = np.delete(labels(8), 3)
    with pytest.raises(DataError, match=message):
        split("clusters", train, labels(5), peers=4, **{"per_class": 2, "test_per_class": 2, **options})


@pytest.mark.parametrize("per_class", [0, [0, 3], [3, 2], [1, 2, 3], "many", None])
def test_a_bad_per_class_is_one_clear_problem(per_class: object) -> None:
    with pytest.raises(OptionErrors, match=r"^per_class: should be a number of samples > 0, or") as caught:
        PARTITIONS["clusters"].parse({"per_class": per_class})
    assert len(caught.value.problems) == 1


@pytest.mark.parametrize("name", list(PARTITIONS))
def test_options_survive_a_round_trip(name: str) -> None:
    options = PARTITIONS[name].parse({"fraction": 0.05} if name == "fraction" else {})
    assert PARTITIONS[name].parse(options.to_dict()) == options
