"""Flower's partitioners, compared with ours; skipped without the extra ``flwr``."""

from __future__ import annotations

import re
import sys
from typing import Any

import numpy as np
import pytest

from p2pfl.data import PARTITIONS, Column, DatasetLabels, Subset
from p2pfl.errors import DataError, MissingExtra, RunFileError
from p2pfl.run_file.load import from_dict
from p2pfl.session.build import load_data

pytestmark = pytest.mark.filterwarnings("default")  # of the library's dependencies

LABELS = DatasetLabels(
    np.tile(np.arange(10), 200),
    np.tile(np.arange(10), 20),
    10,
    columns={"writer": Column.of(np.repeat(np.arange(8), 250) * 7 % 8, np.tile(np.arange(8), 25))},
)


def split(name: str, *, peers: int = 8, seed: int = 0, **options: Any) -> list[Subset]:
    if name == "flwr":
        pytest.importorskip("flwr_datasets", reason="needs the extra `flwr`", exc_type=ImportError)
    return PARTITIONS[name].parse(options).split(LABELS, peers, seed)


IID: dict[str, Any] = {"class": "IidPartitioner"}


def flower(name: str, *, peers: int = 8, seed: int = 0, **args: Any) -> list[Subset]:
    return split("flwr", peers=peers, seed=seed, **{"class": name, "args": args})


def distinct(subsets: list[Subset]) -> np.ndarray:
    union = np.concatenate([subset.train for subset in subsets])
    assert len(np.unique(union)) == len(union)
    return union


def concentration(subsets: list[Subset]) -> float:
    """The mean fraction of the most frequent class of a peer."""
    return float(np.mean([np.bincount(LABELS.train[subset.train]).max() / len(subset.train) for subset in subsets]))


def test_iid_divides_evenly_as_ours() -> None:
    theirs, ours = flower("IidPartitioner"), split("iid-train", validation=0.0)
    assert len(distinct(theirs)) == len(distinct(ours)) == 2000
    assert [len(subset.train) for subset in theirs] == [len(subset.train) for subset in ours] == [250] * 8
    assert [len(subset.test) for subset in theirs] == [len(subset.test) for subset in ours] == [200] * 8


def test_natural_gives_the_same_samples_as_ours() -> None:
    theirs = flower("NaturalIdPartitioner", partition_by="writer")
    ours = split("natural", column="writer")
    assert {tuple(subset.train) for subset in theirs} == {tuple(subset.train) for subset in ours}


@pytest.mark.parametrize("alpha", [0.1, 0.5, 10.0])
def test_dirichlet_concentrates_classes_as_ours(alpha: float) -> None:
    seeds = range(12)
    args: dict[str, Any] = {
        "alpha": alpha,
        "min_partition_size": 5,
        "self_balancing": True,
    }  # ours gives full peers no more, too
    theirs = [flower("DirichletPartitioner", seed=seed, **args) for seed in seeds]
    ours = [split("dirichlet-train", seed=seed, beta=alpha, least=5, validation=0.0) for seed in seeds]
    assert all(len(distinct(subsets)) == 2000 for subsets in (*theirs, *ours))
    means = [float(np.mean([concentration(subsets) for subsets in drawn])) for drawn in (theirs, ours)]
    assert means[0] == pytest.approx(means[1], rel=0.1)


def test_result_depends_on_the_seed_alone() -> None:
    one, again, other = (
        flower("PathologicalPartitioner", seed=seed, num_classes_per_partition=2) for seed in (3, 3, 4)
    )
    assert all(np.array_equal(a.train, b.train) for a, b in zip(one, again, strict=True))
    assert not all(np.array_equal(a.train, b.train) for a, b in zip(one, other, strict=True))
    assert all(len(np.unique(LABELS.train[subset.train])) == 2 for subset in one)


def test_samples_may_be_held_out() -> None:
    subsets = split("flwr", test=0.25, validation=0.2, **IID)
    assert all(subset.merged for subset in subsets)
    sizes = {(len(subset.train), len(subset.validation), len(subset.test)) for subset in subsets}
    assert sizes == {(165, 41, 69)}
    everything = np.concatenate([np.concatenate((s.train, s.validation, s.test)) for s in subsets])
    assert sorted(everything) == list(range(2200))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"class": "DirichletPartitoner"}, "no class 'DirichletPartitoner'; did you mean 'DirichletPartitioner'?"),
        ({"class": "DirichletPartitioner"}, "DirichletPartitioner: TypeError: "),
        ({"class": "NaturalIdPartitioner", "args": {"partition_by": "writer"}}, "makes 8 partitions for 7 peers"),
        ({"class": "VerticalEvenPartitioner"}, "divides features; peers need whole samples"),
    ],
)
def test_unusable_partitioners_are_errors(options: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=re.escape(message)):
        split("flwr", peers=7, **options)


def test_without_the_library_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flwr_datasets", None)
    with pytest.raises(MissingExtra, match=r"needs .*p2pfl-mesh\[flwr\]"):
        PARTITIONS["flwr"].parse(IID).split(LABELS, 8, 0)
    data = {"dataset": "digits", "partition": {"name": "flwr", **IID}}
    run = from_dict({"name": "toy", "peers": 2, "rounds": 1, "algorithm": "local", "data": data})
    with pytest.raises(RunFileError, match=r"^run: data\.partition: the partition flwr needs flwr-datasets"):
        load_data(run)
