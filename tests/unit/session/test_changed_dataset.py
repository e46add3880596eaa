"""A dataset that changes between the start of a run and its end, or its evaluation."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from p2pfl.errors import BodyTooLarge, ChangedDataset
from p2pfl.run_file.load import load
from p2pfl.run_folder.folder import RunFolder
from p2pfl.run_folder.new_run import create
from p2pfl.session.build import DATASET, load_data
from p2pfl.session.scoring import evaluate_run
from p2pfl.simulation.simulate import simulate

RUN = """\
name: changing
peers: 2
rounds: 2
data: {dataset: {name: table, path: t.csv, label: y}}
models: mlp-4
algorithm: {name: local, batch: 4}
device: cpu
"""
ROWS = [f"{number % 7},{number % 3},{number % 2}" for number in range(40)]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunFolder:
    """A simulated run."""
    monkeypatch.setenv("P2PFL_CACHE", str(tmp_path / "cache"))
    _write(tmp_path, ROWS)
    (tmp_path / "run.yaml").write_text(RUN)
    run = load(tmp_path / "run.yaml")
    folder = create(run, tmp_path / "run")
    simulate(run, folder)
    return folder


def _write(folder: Path, rows: list[str]) -> None:
    (folder / "t.csv").write_text("a,b,y\n" + "\n".join(rows) + "\n")


@pytest.mark.parametrize("old", ["1,1,1", "0,0,0"])
def test_changed_dataset_is_refused_by_resume_and_evaluate(folder: RunFolder, old: str) -> None:
    _write(folder.root.parent, [row.replace(old, "5,0,1") for row in ROWS])
    run = load(folder.run_file)
    message = r"run\.yaml:\d+: data\.dataset: table has changed since this run began.* start a new run, or delete "
    for again in (
        lambda: simulate(run, folder),
        lambda: list(evaluate_run(run, folder)),
        lambda: load_data(run, folder.root),
    ):
        with pytest.raises(ChangedDataset, match=message) as error:
            again()
        assert error.value.exit_code == BodyTooLarge.exit_code, "the launcher restarts no such peer"
    assert len(load_data(run)[1]) == 2, "a new run of the same file"
    (folder.root / DATASET).unlink()
    assert len(load_data(run, folder.root)[1]) == 2


def test_dataset_with_another_time_of_change_is_the_same(folder: RunFolder) -> None:
    os.utime(folder.root.parent / "t.csv", (1, 1))
    assert len(list(evaluate_run(load(folder.run_file), folder))) == 2


def test_run_of_an_earlier_version_note_contribution(folder: RunFolder) -> None:
    (folder.root / DATASET).unlink()
    assert len(list(evaluate_run(load(folder.run_file), folder))) == 2
    assert not (folder.root / DATASET).exists()


def test_only_a_run_records_the_hash(folder: RunFolder) -> None:
    (folder.root / DATASET).unlink()
    run = load(folder.run_file)
    load_data(run)
    assert not (folder.root / DATASET).exists()
    simulate(run, folder)
    assert (folder.root / DATASET).exists()
