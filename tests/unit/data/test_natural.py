"""Partitions that the data brings along: by a column, and from a file of indices."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from p2pfl.data import PARTITIONS, Column, DatasetLabels, Subset
from p2pfl.errors import DataError, RunFileError
from p2pfl.run_file.load import load
from p2pfl.run_folder.new_run import create
from p2pfl.session.build import load_data

WRITERS = Column.of(np.array(["b", "a", "b", "c", "a", "b"]), np.array(["a", "c", "b", "d", "b"]))
LABELS = DatasetLabels(np.array([0, 1, 0, 1, 0, 1]), np.array([0, 1, 0, 1, 0]), 2, columns={"writer": WRITERS})


def split(peers: int, data: DatasetLabels = LABELS, seed: int = 0, **options: Any) -> list[Subset]:
    return PARTITIONS["natural"].parse({"column": "writer", **options}).split(data, peers, seed)


def test_each_peer_has_the_samples_of_one_value() -> None:
    subsets = split(3)
    assert [subset.train.tolist() for subset in subsets] == [[1, 4], [0, 2, 5], [3]]
    assert [subset.test.tolist() for subset in subsets] == [[0], [2, 4], [1]]
    assert not any(subset.merged for subset in subsets)


def test_validation_samples_are_held_out_of_the_training_samples() -> None:
    subset = split(3, validation=0.34)[1]
    assert (len(subset.train), len(subset.validation)) == (2, 1)
    assert sorted([*subset.train, *subset.validation]) == [0, 2, 5]


def test_test_samples_may_be_held_out_of_both_splits() -> None:
    subsets = split(3, test=0.4)
    assert all(subset.merged for subset in subsets)
    of_b = subsets[1]
    assert sorted([*of_b.train, *of_b.test]) == [
        0,
        2,
        5,
        8,
        10,
    ]  # the pool: 6 training samples, then the test samples
    assert len(of_b.test) == 2


def test_values_may_be_sampled_or_dealt_out() -> None:
    sampled = split(2, values="sample")
    whole = [[1, 4], [0, 2, 5], [3]]
    assert all(subset.train.tolist() in whole for subset in sampled)
    assert sampled[0].train.tolist() != sampled[1].train.tolist()
    dealt = split(2, values="all")
    assert sorted(np.concatenate([subset.train for subset in dealt])) == list(range(6))
    chosen = {tuple(subset.train.tolist()) for seed in range(20) for subset in split(2, values="sample", seed=seed)}
    assert len(chosen) == 3  # the choice depends on the seed


@pytest.mark.parametrize(
    ("peers", "options", "message"),
    [
        (4, {}, "column 'writer' has 3 values in the training split, too few for 4 peers; use at most 3 peers"),
        (2, {}, "has 3 values in the training split for 2 peers; use 3 peers, or set values: sample or values: all"),
        (3, {"column": "writr"}, "no column 'writr'; it has writer; did you mean 'writer'"),
    ],
)
def test_unsuitable_columns_are_errors(peers: int, options: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        split(peers, **options)


def test_a_peer_without_test_samples_is_an_error() -> None:
    writers = Column.of(np.array(["a", "b"]), np.array(["b", "b"]))
    data = DatasetLabels(np.array([0, 1]), np.array([0, 1]), 2, columns={"writer": writers})
    with pytest.raises(DataError, match=r"the test split has no samples of writer a \(peer 0\); set test"):
        split(2, data)


# ---- files of indices ----------------------------------------------------------------------------------------

RUN = """\
name: given
peers: 2
rounds: 1
data:
  dataset: digits
  partition: {name: indices, file: split.json}
algorithm: local
"""


@pytest.fixture
def run_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("P2PFL_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "study"
    folder.mkdir()
    (folder / "split.json").write_text('[{"train": [5, 3], "validation": [9], "test": [1, 0]}, {"train": [3]}]')
    (folder / "run.yaml").write_text(RUN)
    return folder / "run.yaml"


def test_indices_come_from_a_file_beside_the_run_file(run_file: Path) -> None:
    _, (first, second) = load_data(load(run_file))
    assert (first.train.tolist(), first.validation.tolist(), first.test.tolist()) == ([3, 5], [9], [0, 1])
    assert (second.train.tolist(), second.validation.tolist(), len(second.test)) == ([3], [], 355)


def test_run_folder_keeps_a_copy_of_the_indices(run_file: Path, tmp_path: Path) -> None:
    run = load(run_file)
    folder = create(run, tmp_path / "run")
    (run_file.parent / "split.json").unlink()
    resumed = load(folder.run_file)
    assert load_data(resumed)[1][0].train.tolist() == [3, 5]
    assert resumed.resolved() == load(folder.run_file).resolved()
    assert folder.info["config_hash"] == resumed.config_hash()


def test_config_hash_depends_on_the_indices_and_not_on_the_path(run_file: Path) -> None:
    before = load(run_file).config_hash()
    other = run_file.parent / "other.json"
    other.write_bytes((run_file.parent / "split.json").read_bytes())
    assert load(run_file, ["data.partition.file=other.json"]).config_hash() == before
    other.write_text('[{"train": [5]}, {"train": [3]}]')
    assert load(run_file, ["data.partition.file=other.json"]).config_hash() != before


def test_missing_file_of_indices_is_an_error_with_the_line(run_file: Path) -> None:
    (run_file.parent / "split.json").unlink()
    with pytest.raises(RunFileError) as caught:
        load(run_file)
    assert str(caught.value) == f"{run_file}:6: data.partition.file: no file '{run_file.parent / 'split.json'}'"


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("[\n{", r"split\.json:2: invalid JSON"),
        ({"0": {}}, "expected a list with an entry for each peer"),
        ([{"train": [1]}], "1 entries for 2 peers"),
        (
            [{"train": [1]}, {"tain": [1]}],
            "peer 1: expected a mapping with train, and optionally validation and test",
        ),
        ([{"train": [1]}, {"train": []}], "peer 1: train is empty"),
        (
            [{"train": [1]}, {"train": [1442]}],
            "peer 1: train: no sample 1442; the 1442 training samples are 0 to 1441",
        ),
        ([{"train": [1]}, {"train": [1], "test": [-1]}], "peer 1: test: no sample -1; the 355 test samples"),
        ([{"train": [1]}, {"train": [1, 1]}], "peer 1: train: sample 1 is listed twice"),
        ([{"train": [1]}, {"train": [1, True]}], "peer 1: train: expected a list of integers"),
        ([{"train": [1]}, {"train": [1, 2], "validation": [2]}], "peer 1: sample 2 is in train and in validation"),
    ],
)
def test_wrong_indices_are_errors(run_file: Path, content: Any, message: str) -> None:
    text = content if isinstance(content, str) else json.dumps(content)
    (run_file.parent / "split.json").write_text(text)
    with pytest.raises(RunFileError, match=message) as caught:
        load_data(load(run_file))
    assert str(caught.value).startswith(f"{run_file}:6: data.partition: ")
