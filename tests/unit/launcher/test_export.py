"""`p2pfl export`: TensorBoard, CSV and Parquet have the numbers of the records."""

from __future__ import annotations

import csv
import shutil
import sys
from pathlib import Path

import pytest

from p2pfl.api import open_run
from p2pfl.run_folder.folder import RunFolder
from tests.launcher_fixtures import Invoke, MakeFolder
from tests.records import record, write_records


@pytest.fixture
def run(make_folder: MakeFolder) -> RunFolder:
    folder = make_folder("toy.a")
    records = [record(0, 0, 0.1, loss={"ce": 2.0}), record(0, 1, 0.3), record(1, 0, None, 2.0)]
    write_records(folder, records)
    return folder


def test_csv_is_the_table_of_the_python_api(run: RunFolder, tmp_path: Path, invoke: Invoke) -> None:
    outcome = invoke("export", run.root, "--format", "csv", "-o", tmp_path / "out")
    assert outcome.exit_code == 0
    assert outcome.stdout == f"{tmp_path}/out/toy.a.csv\n"
    with (tmp_path / "out" / "toy.a.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    frame = open_run(run.root).metrics()
    assert set(rows[0]) == set(frame.columns)
    assert [row["accuracy"] for row in rows] == ["0.1", "0.3", ""]
    assert [row["sent.bytes"] for row in rows] == ["100"] * 3
    assert [row["loss.ce"] for row in rows] == ["2.0", "", ""]


def test_parquet_is_the_table_of_the_python_api(run: RunFolder, tmp_path: Path, invoke: Invoke) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    assert invoke("export", run.root, "--format", "parquet", "-o", tmp_path).exit_code == 0
    table = parquet.read_table(tmp_path / "toy.a.parquet").to_pydict()
    assert list(table) == list(open_run(run.root).metrics().columns)
    assert table["accuracy"] == [0.1, 0.3, None]
    assert table["t"] == [0, 1, 0]


def test_tensorboard_has_a_run_for_each_peer_and_the_mean(run: RunFolder, tmp_path: Path, invoke: Invoke) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    outcome = invoke("export", run.root, "--format", "tensorboard", "-o", tmp_path / "tb")
    assert outcome.exit_code == 0
    folders = [str(Path(line).relative_to(tmp_path / "tb").parent) for line in outcome.stdout.splitlines()]
    assert folders == ["toy.a/peer-00", "toy.a/peer-01", "toy.a/mean"]
    events = accumulator.EventAccumulator(str(tmp_path / "tb" / "toy.a" / "peer-00")).Reload()
    assert {"accuracy", "loss/ce", "sent/bytes", "seconds/total"} <= set(events.Tags()["scalars"])
    found = [(event.step, event.value) for event in events.Scalars("accuracy")]
    assert found == [(0, pytest.approx(0.1)), (1, pytest.approx(0.3))]
    times = [event.wall_time for event in events.Scalars("accuracy")]
    assert times[1] - times[0] == pytest.approx(1.0)
    mean = accumulator.EventAccumulator(str(tmp_path / "tb" / "toy.a" / "mean")).Reload()
    assert [event.value for event in mean.Scalars("seconds/total")] == [1.5, 1.0]


def test_a_second_export_replaces_the_first(run: RunFolder, tmp_path: Path, invoke: Invoke) -> None:
    for form in ("csv", "tensorboard"):
        before = invoke("export", run.root, "--format", form, "-o", tmp_path / "out").stdout
        assert invoke("export", run.root, "--format", form, "-o", tmp_path / "out").stdout == before
    assert len(list((tmp_path / "out").rglob("*.p2pfl"))) == 3


def test_a_run_without_records_exits_with_1(make_folder: MakeFolder, tmp_path: Path, invoke: Invoke) -> None:
    outcome = invoke("export", make_folder().root, "--format", "csv", "-o", tmp_path / "out")
    assert outcome.exit_code == 1
    assert "no records: no peer has completed a round" in outcome.stderr


def test_runs_without_records_do_not_keep_others_from_being_exported(
    run: RunFolder, make_folder: MakeFolder, tmp_path: Path, invoke: Invoke
) -> None:
    empty = make_folder("empty")
    outcome = invoke("export", empty.root, run.root, "--format", "csv", "-o", tmp_path / "out")
    assert outcome.exit_code == 1
    assert f"{empty.root}: no records: no peer has completed a round; 1 of 2 runs are in " in outcome.stderr
    assert (tmp_path / "out" / "toy.a.csv").exists()


def test_runs_of_one_name_are_refused(run: RunFolder, tmp_path: Path, invoke: Invoke) -> None:
    outcome = invoke("export", run.root, run.root, "--format", "csv", "-o", tmp_path / "out")
    assert outcome.exit_code == 1
    assert "another run is called toy.a too; export them into two folders" in outcome.stderr


def test_runs_of_sweeps_are_in_folders_of_their_names(run: RunFolder, tmp_path: Path, invoke: Invoke) -> None:
    made = []
    for name in ("one", "two"):
        made.append(tmp_path / name / "runs" / "mapl-seed=0")
        shutil.copytree(run.root, made[-1])
        (tmp_path / name / "sweep.yaml").write_text("")
    for form, files in (("csv", ["mapl-seed=0.csv"]), ("tensorboard", ["mean", "peer-00", "peer-01"])):
        out = tmp_path / form
        outcome = invoke("export", *made, "--format", form, "-o", out)
        assert outcome.exit_code == 0, outcome.stderr
        for name in ("one", "two"):
            folder = out / name if form == "csv" else out / name / "mapl-seed=0"
            assert sorted(path.name for path in folder.iterdir()) == files


@pytest.mark.parametrize(
    ("form", "module", "extra"),
    [("parquet", "pyarrow", "parquet"), ("tensorboard", "tensorboard.summary.writer.record_writer", "tensorboard")],
)
def test_a_missing_extra_is_named(
    run: RunFolder,
    tmp_path: Path,
    invoke: Invoke,
    monkeypatch: pytest.MonkeyPatch,
    form: str,
    module: str,
    extra: str,
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    outcome = invoke("export", run.root, "--format", form, "-o", tmp_path / "out")
    assert outcome.exit_code == 1
    assert f"pip install 'p2pfl-mesh[{extra}]'" in outcome.stderr
