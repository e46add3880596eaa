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
    pool = np.concatenate((train, test))
    for share in shares:
        trained, tested = (pool, pool) if share.merged else (train, test)
        for indices, among in ((share.train, trained), (share.validation, trained), (share.test, tested)):
            assert indices.dtype == np.int64
            assert (np.diff(indices) > 0).all()  # ascending, no sample twice
            assert len(indices) == 0 or (indices[0] >= 0 and indices[-1] < len(among))
        assert not np.intersect1d(share.train, share.validation).size
        if share.merged:
            assert not np.intersect1d(share.test, np.concatenate([share.train, share.validation])).size


def assert_disjoint(shares: list[Share]) -> np.ndarray:
    """All samples that are trained on or held out, and in a merged pool those that are tested on; ascending."""
    dealt = [part for share in shares for part in (share.train, share.validation)]
    if shares[0].merged:
        dealt += [share.test for share in shares]
    together = np.sort(np.concatenate(dealt))
    assert (np.diff(together) > 0).all()
    return together


def some_labels(seed: int, classes: int, low: int, high: int) -> np.ndarray:
    """Between ``low`` and ``high`` samples of each class, in random order."""
    stream = np.random.default_rng(seed)
    return stream.permutation(np.repeat(np.arange(classes), stream.integers(low, high, classes, endpoint=True)))


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


# --- fraction ---


@few_examples
@given(
    size=st.integers(20, 300),
    peers=st.integers(1, 10),
    fractions=st.lists(st.floats(0.05, 0.1), min_size=1, max_size=4),
    validation=st.sampled_from([0.0, 0.2]),
    seed=st.integers(0, 2**32),
)
def test_fraction(size: int, peers: int, fractions: list[float], validation: float, seed: int) -> None:
    train, test = np.zeros(size, np.int64), np.zeros(40, np.int64)
    options = {"fraction": fractions, "validation": validation}
    shares = split("fraction", train, test, peers=peers, classes=1, seed=seed, **options)
    assert_equal(shares, split("fraction", train, test, peers=peers, classes=1, seed=seed, **options))
    assert_well_formed(shares, train, test)
    assert_disjoint(shares)
    tested = np.concatenate([share.test for share in shares])
    assert len(np.unique(tested)) == len(tested)
    for peer, share in enumerate(shares):
        fraction = fractions[peer % len(fractions)]
        assert abs(len(share.train) + len(share.validation) - fraction * size) < 1
        assert abs(len(share.test) - fraction * 40) < 1


def test_one_fraction_for_all() -> None:
    shares = split("fraction", labels(100), labels(10), peers=3, fraction=0.3)
    assert [(len(share.train), len(share.test)) for share in shares] == [(300, 30)] * 3


@pytest.mark.parametrize(
    ("fraction", "message"),
    [
        (0.3, "the fractions of 4 peers add up to 1.2, more than 1"),
        ([0.5, 0.2], "add up to 1.4"),
        (0.05, "0.05 of 10 test samples is less than one"),
        ([], "fraction is an empty list"),
    ],
)
def test_fractions_that_do_not_fit(fraction: object, message: str) -> None:
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
def test_shards(tasks: int, per_peer: int, shards: int, validation: float, seed: int) -> None:
    classes, peers = tasks * per_peer, tasks * shards
    train, test = some_labels(seed, classes, shards, 40), some_labels(seed + 1, classes, 1, 9)

    def again() -> list[Share]:
        options = {"classes_per_peer": per_peer, "validation": validation}
        return split("shards", train, test, peers=peers, classes=classes, seed=seed, **options)

    shares = again()
    assert_equal(shares, again())
    assert_well_formed(shares, train, test)
    assert assert_disjoint(shares).tolist() == list(range(len(train)))
    for row in range(shards):  # each row is one shard of every class
        held = [np.unique(train[share.train]) for share in shares[row * tasks : (row + 1) * tasks]]
        assert sorted(np.concatenate(held)) == list(range(classes))
        assert {len(mine) for mine in held} == {per_peer}
    for peer, share in enumerate(shares):
        mine = np.sort(np.concatenate([share.train, share.validation]))
        for label in np.unique(train[mine]):
            of_class = np.flatnonzero(train == label)
            shard = mine[train[mine] == label]
            # a contiguous cut of the class, and the one that belongs to the row
            first = int(np.searchsorted(of_class, shard[0]))
            np.testing.assert_array_equal(of_class[first : first + len(shard)], shard)
            assert abs(first - peer // tasks * len(of_class) / shards) < shards
            assert abs(len(shard) - len(of_class) / shards) < 1
            kept = np.count_nonzero(train[share.train] == label)
            assert kept == max(len(shard) - round(validation * len(shard)), 1)
        own = np.unique(train[share.train])
        np.testing.assert_array_equal(share.test, np.flatnonzero(np.isin(test, own)))


def test_shards_of_l2c_table_1() -> None:
    shares = split("shards", labels(5000), labels(1000), peers=100)
    assert {(len(share.train), len(share.validation), len(share.test)) for share in shares} == {(400, 100, 2000)}
    hundred = split("shards", labels(500, 100), labels(100, 100), peers=100, classes=100, classes_per_peer=10)
    assert {(len(share.train), len(share.validation), len(share.test)) for share in hundred} == {(400, 100, 1000)}


def test_fewer_peers_than_tasks_leave_shards_over() -> None:
    everyone = split("shards", labels(200), labels(10), peers=100)
    assert_equal(split("shards", labels(200), labels(10), peers=7, shards=20), everyone[:7])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"classes_per_peer": 3},
            "10 classes cannot be dealt out 3 to a peer; .* that can: 1, 2, 5, 10",
        ),
        ({"peers": 12}, "10 classes, 2 to a peer, in 2 shards make 10 tasks for 12 peers; peers .* a multiple of 5"),
        ({"peers": 2}, "10 .* in 1 shards make 5 tasks for 2 peers"),
        ({"shards": 3, "peers": 16}, "10 .* in 3 shards make 15 tasks for 16 peers; .*shards larger"),
        ({"peers": 55}, "11 shards ask for as many training samples of each class, but class 0 has 10"),
    ],
)
def test_shards_that_do_not_fit(options: dict[str, int], message: str) -> None:
    with pytest.raises(DataError, match=f"^partition shards: {message}"):
        split("shards", labels(10), labels(1), **{"peers": 10, **options})  # type: ignore[arg-type]


# --- groups (L2C, Fig. 4) ---


@few_examples
@given(
    groups=st.integers(1, 5),
    per_group=st.integers(1, 3),
    extra=st.integers(0, 9),
    per_class=st.one_of(st.none(), st.integers(1, 5)),
    seed=st.integers(0, 2**32),
)
def test_groups(groups: int, per_group: int, extra: int, per_class: int | None, seed: int) -> None:
    classes, peers = groups * per_group, groups + extra
    train, test = some_labels(seed, classes, 10, 40), some_labels(seed + 1, classes, 1, 9)

    def again() -> list[Share]:
        options = {"groups": groups, "per_class": per_class}
        return split("groups", train, test, peers=peers, classes=classes, seed=seed, **options)

    shares = again()
    assert_equal(shares, again())
    assert_well_formed(shares, train, test)
    together = assert_disjoint(shares)
    if per_class is None:
        assert len(together) == len(train)
    assert [share.group for share in shares] == sorted(share.group for share in shares)
    tasks: dict[int, set[int]] = {}
    for share in shares:
        mine = np.concatenate([share.train, share.validation])
        own = set(train[mine])
        assert tasks.setdefault(share.group, own) == own == set(train[share.train])
        np.testing.assert_array_equal(share.test, np.flatnonzero(np.isin(test, list(own))))
        if per_class is not None:
            assert np.bincount(train[mine]).max() <= per_class
    assert sorted(label for task in tasks.values() for label in task) == list(range(classes))
    assert {len(task) for task in tasks.values()} == {per_group}


def test_groups_of_l2c_figure_4() -> None:
    shares = split("groups", labels(5000), labels(1000), peers=15)
    assert [share.group for share in shares] == [peer // 3 for peer in range(15)]
    assert all(len(share.train) + len(share.validation) in (3332, 3333, 3334) for share in shares)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"groups": 3}, "10 classes cannot be dealt out evenly to 3 groups"),
        ({"peers": 4}, "4 peers cannot form 5 groups"),
        ({"peers": 60}, "groups of 12 peers ask for as many training samples of each class, but class 0 has 10"),
    ],
)
def test_groups_that_do_not_fit(options: dict[str, int], message: str) -> None:
    with pytest.raises(DataError, match=f"^partition groups: {message}"):
        split("groups", labels(10), labels(1), **{"peers": 10, **options})  # type: ignore[arg-type]


# --- pathological and dirichlet (FedTGP): the merged pool ---


def sizes_of(share: Share) -> tuple[int, int, int]:
    return len(share.train), len(share.validation), len(share.test)


@few_examples
@given(
    classes=st.integers(1, 12),
    wanted=st.integers(1, 6),
    peers=st.integers(1, 20),
    validation=st.sampled_from([0.0, 0.2]),
    seed=st.integers(0, 2**32),
)
def test_pathological(classes: int, wanted: int, peers: int, validation: float, seed: int) -> None:
    wanted = min(wanted, classes)
    train, test = some_labels(seed, classes, 200, 400), some_labels(seed + 1, classes, 100, 200)
    pool = np.concatenate((train, test))

    def again() -> list[Share]:
        options = {"classes_per_peer": wanted, "validation": validation}
        return split("pathological", train, test, peers=peers, classes=classes, seed=seed, **options)

    shares = again()
    assert_equal(shares, again())
    assert_well_formed(shares, train, test)
    together = assert_disjoint(shares)
    at_once = -(-peers * wanted // classes)
    counts = np.array(
        [
            np.bincount(pool[np.concatenate([share.train, share.validation, share.test])], minlength=classes)
            for share in shares
        ]
    )
    for label, of_class in enumerate(np.bincount(pool, minlength=classes)):
        holders = np.flatnonzero(counts[:, label])
        assert len(holders) <= at_once
        if len(holders):  # a class is dealt out whole or not at all; all but the last get at most an even share
            assert counts[:, label].sum() == of_class
            even = of_class / len(holders)
            assert (counts[holders[:-1], label] < even).all()
            assert (counts[holders[:-1], label] >= int(even / 10)).all()
    held = (counts > 0).sum(axis=1)
    assert held.max() <= wanted
    assert held.min() >= 1
    if peers * wanted == at_once * classes and peers % at_once == 0:
        assert (held == wanted).all()
        assert len(together) == len(pool)
    for share in shares:
        total = sum(sizes_of(share))
        assert len(share.test) == total - int(0.75 * total)


def test_pathological_of_fedtgp() -> None:
    """20 peers, 2 of 10 classes each: four peers share two classes (Fig. 7)."""
    train, test = labels(6000), labels(1000)
    shares = split("pathological", train, test, peers=20)
    pool = np.concatenate((train, test))
    for peer, share in enumerate(shares):
        assert set(pool[share.train]) == set(pool[share.test]) == {peer // 4 * 2, peer // 4 * 2 + 1}
    assert any((share.train >= len(train)).any() for share in shares)
    assert any((share.test < len(train)).any() for share in shares)
    # 102 classes, 10 for each of 20 peers: the last two classes are nobody's.
    flowers = split("pathological", labels(60, 102), labels(20, 102), peers=20, classes=102, classes_per_peer=10)
    assert len(assert_disjoint(flowers)) == 100 * 80


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"classes_per_peer": 11}, "11 classes for each peer, but there are 10"),
        ({"peers": 100}, "the 11 samples of class 0 are too few for 20 peers: each should have more than 1"),
    ],
)
def test_pathological_that_does_not_fit(options: dict[str, int], message: str) -> None:
    with pytest.raises(DataError, match=f"^partition pathological: {message}"):
        split("pathological", labels(10), labels(1), **{"peers": 10, **options})  # type: ignore[arg-type]


@few_examples
@given(
    name=st.sampled_from(["dirichlet", "dirichlet-train"]),
    classes=st.integers(1, 12),
    peers=st.integers(1, 12),
    beta=st.sampled_from([0.3, 1.0, 100.0]),
    validation=st.sampled_from([0.0, 0.2]),
    seed=st.integers(0, 2**32),
)
def test_dirichlet(name: str, classes: int, peers: int, beta: float, validation: float, seed: int) -> None:
    train, test = some_labels(seed, classes, 100, 200), some_labels(seed + 1, classes, 50, 100)

    def again() -> list[Share]:
        options = {"beta": beta, "validation": validation, "least": 10}
        return split(name, train, test, peers=peers, classes=classes, seed=seed, **options)

    try:
        shares = again()
    except DataError:  # one class, or few, cannot do without luck
        assert classes == 1 or beta < 1
        return
    assert_equal(shares, again())
    assert_well_formed(shares, train, test)
    dealt = len(train) + len(test) if name == "dirichlet" else len(train)
    assert len(assert_disjoint(shares)) == dealt
    for share in shares:
        kept, held_out, tested = sizes_of(share)
        if name == "dirichlet":
            assert kept + held_out == int(0.75 * (kept + held_out + tested))
            assert kept + held_out + tested >= min(10, dealt / peers / 2)
        else:
            assert kept + held_out >= min(10, dealt / peers / 2)
            np.testing.assert_array_equal(share.test, np.arange(len(test)))
        assert held_out == round(validation * (kept + held_out))


def test_a_small_beta_gives_classes_to_few_and_a_large_one_to_all() -> None:
    train, test = labels(6000), labels(1000)

    def classes_of_half(beta: float) -> float:
        """How many classes make up half of a peer's samples, on average."""
        result = []
        for share in split("dirichlet", train, test, peers=20, beta=beta):
            counts = np.sort(np.bincount(np.concatenate((train, test))[share.train], minlength=10))[::-1]
            result.append(int(np.searchsorted(counts.cumsum(), counts.sum() / 2)) + 1)
        return float(np.mean(result))

    assert classes_of_half(0.1) < 1.7
    assert classes_of_half(100.0) > 4


def test_no_peer_goes_far_beyond_an_even_share() -> None:
    """A peer that has n/M samples gets none of the classes that follow."""
    for share in split("dirichlet", labels(6000), labels(1000), peers=20):
        assert sum(sizes_of(share)) < 70_000 / 20 + 7000


@pytest.mark.parametrize("name", ["dirichlet", "dirichlet-train"])
def test_a_dirichlet_without_luck_gives_up_with_what_it_saw(name: str) -> None:
    message = rf"{name}: in 100 draws with beta 0.001 the smallest of 20 peers had at most \d+ samples, not 25"
    with pytest.raises(DataError, match=message):
        split(name, labels(100), np.zeros(0, np.int64), peers=20, beta=0.001)
    with pytest.raises(DataError, match=r"10 .*samples are too few for 11 peers"):
        split(name, labels(1), np.zeros(0, np.int64), peers=11)


# --- iid-train (DFML) ---


@few_examples
@given(size=st.integers(1, 200), peers=st.integers(1, 20), seed=st.integers(0, 2**32))
def test_iid_train(size: int, peers: int, seed: int) -> None:
    assume(size >= peers)
    train, test = np.zeros(size, np.int64), np.zeros(7, np.int64)
    shares = split("iid-train", train, test, peers=peers, classes=1, seed=seed)
    assert_equal(shares, split("iid-train", train, test, peers=peers, classes=1, seed=seed))
    assert_well_formed(shares, train, test)
    assert len(assert_disjoint(shares)) == size
    totals = [len(share.train) + len(share.validation) for share in shares]
    assert max(totals) - min(totals) <= 1
    for share, total in zip(shares, totals, strict=True):
        assert share.test.tolist() == list(range(7))
        assert len(share.validation) == round(0.2 * total) or total <= 2


def test_iid_train_needs_a_sample_for_everyone() -> None:
    with pytest.raises(DataError, match="partition iid-train: 10 training samples are too few for 11 peers"):
        split("iid-train", labels(1), labels(1), peers=11)


# --- styles (FedStyle) ---


def styled(
    seed: int, classes: int, sizes: list[int], *, peers: int, run_seed: int = 0, **options: object
) -> tuple[Labelled, list[Share]]:
    """A dataset with that many samples of each class in each style, and its shares."""
    stream = np.random.default_rng(seed)
    styles = stream.permutation(np.repeat(np.arange(len(sizes)), np.array(sizes) * classes))
    train = np.empty(len(styles), np.int64)
    for style in range(len(sizes)):
        mine = np.flatnonzero(styles == style)
        train[mine] = np.arange(len(mine)) % classes
    test_styles = np.arange(4 * classes * len(sizes)) % len(sizes)
    test = np.arange(len(test_styles)) // len(sizes) % classes
    data = Labelled(train, test, classes, styles, test_styles)
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
def test_styles(classes: int, sizes: list[int], each: int, beta: float | None, validation: float, seed: int) -> None:
    def again() -> tuple[Labelled, list[Share]]:
        peers = each * len(sizes)
        return styled(1, classes, sizes, peers=peers, run_seed=seed, beta=beta, validation=validation)

    data, shares = again()
    assert data.train_styles is not None
    assert data.test_styles is not None
    assert_equal(shares, again()[1])
    total = round(classes * np.mean(sizes) / each)
    for peer, share in enumerate(shares):
        assert share.group == peer // each
        assert len(share.train) + len(share.validation) == total
        assert len(share.validation) == round(validation * total)
        assert set(data.train_styles[share.train]) == {share.group}
        assert (np.diff(share.train) >= 0).all()
        np.testing.assert_array_equal(share.test, np.flatnonzero(data.test_styles == share.group))
        if beta is None:
            counts = np.bincount(data.train[share.train], minlength=classes)
            assert counts.max() - counts.min() <= 2
            # A sample comes twice only when all samples of that class and style have come.
            if len(share.train) <= (1 - validation) * classes * sizes[share.group] - 3 * classes:
                assert len(np.unique(share.train)) == len(share.train)
    trained = np.concatenate([share.train for share in shares])
    held_out = np.concatenate([share.validation for share in shares])
    assert not np.intersect1d(trained, held_out).size


def test_a_small_style_is_repeated_and_a_large_one_cut() -> None:
    _data, shares = styled(0, 10, [100, 20], peers=2)
    small, large = shares[1], shares[0]
    assert len(small.train) == len(large.train) == 600
    assert len(np.unique(large.train)) == 600
    assert len(np.unique(small.train)) == 200
    assert set(np.unique(small.train, return_counts=True)[1]) == {3}
    _, several = styled(0, 10, [100, 100], peers=4)
    assert not np.intersect1d(several[0].train, several[1].train).size


def test_per_peer_sets_the_size() -> None:
    _, shares = styled(0, 10, [100, 20], peers=2, per_peer=50, validation=0.2)
    assert [sizes_of(share)[:2] for share in shares] == [(40, 10)] * 2


def test_a_small_beta_concentrates_classes() -> None:
    data, shares = styled(0, 10, [100, 100], peers=10, beta=0.2)
    counts = np.array([np.bincount(data.train[share.train], minlength=10) for share in shares])
    assert (counts.max(axis=1) > 0.25 * counts.sum(axis=1)).mean() > 0.7
    assert len({tuple(row) for row in counts}) == 10


def test_styles_that_do_not_fit() -> None:
    with pytest.raises(DataError, match="this dataset has no styles; those that have: styled, styles"):
        split("styles", labels(10), labels(1), peers=2)
    with pytest.raises(DataError, match="5 peers cannot be dealt out evenly to 2 styles"):
        styled(0, 3, [10, 10], peers=5)
    data = Labelled(labels(10, 2), labels(2, 2), 3, labels(10, 2), labels(2, 2))
    with pytest.raises(DataError, match="too few training samples of class 1 in style 0"):
        PARTITIONS["styles"]().split(data, 2, 0)


# --- all ---


@pytest.mark.parametrize("name", list(PARTITIONS))
def test_options_survive_a_round_trip(name: str) -> None:
    options = PARTITIONS[name].parse({"fraction": 0.05} if name == "fraction" else {})
    assert PARTITIONS[name].parse(options.to_dict()) == options
