"""Names of classes and notes on the data, wherever a user reads of classes."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import p2pfl
from launcher.facts.summary import current_summary
from launcher.prepare import LaunchRequest
from launcher.report import figures, papers
from launcher.report.collect import ReportedRun, collect
from launcher.report.findings import find
from launcher.report.learned import Learned
from launcher.tracking import mlflow
from launcher.views.partition import class_rows
from p2pfl.run_folder.folder import RunFolder
from tests.launcher_fixtures import Invoke, MakeFolder
from tests.reports import read

RUN = """\
name: named
rounds: 1
peers: 2
data: {dataset: {name: table, path: t.csv, label: y, test: 0.5}, partition: iid}
models: mlp-8
algorithm: local
device: cpu
metrics: [class-accuracy]
"""

NAMES = ("\\x1b[2Jevil", "$x_1$", "_9", "a.b/c d")
"""As they are shown, in the order of the texts in the file."""


@pytest.fixture
def table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run on a table whose classes have names that are hard to show."""
    monkeypatch.setenv("P2PFL_CACHE", str(tmp_path / "cache"))
    labels = ("_9", "\x1b[2Jevil", "a.b/c d", "$x_1$")
    rows = "".join(f"{k},{k * k},{labels[k % 4]}\n" for k in range(80))
    (tmp_path / "t.csv").write_text(f",a,y\n{rows}")
    (tmp_path / "run.yaml").write_text(RUN)
    return tmp_path / "run.yaml"


def test_data_show_lists_classes_by_name_and_notes(table: Path, invoke: Invoke) -> None:
    lines = invoke("data", "show", table).stdout.splitlines()
    assert lines[0] == "table: 40 training and 40 test vectors of 1 numbers, 4 classes; partition iid"
    assert [line.split() for line in lines[-6:-1]] == [
        ["class", "name", "training", "test"],
        *([str(k), *name.split(), "10", "10"] for k, name in enumerate(NAMES)),
    ]
    assert lines[-1].startswith(
        "note: t.csv: a column without a name is not used: it looks like the index of a pandas"
    )
    found = json.loads(invoke("data", "show", table, "--json").stdout)["dataset"]
    assert tuple(found["class_names"]) == NAMES
    assert (found["train_by_class"], found["test_by_class"]) == ([10] * 4, [10] * 4)
    assert len(found["notes"]) == 1


def test_many_names_are_cut() -> None:
    names = [f"class {k}" for k in range(120)]
    rows = class_rows({"class_names": names, "train_by_class": [1] * 120, "test_by_class": [2] * 120})
    assert rows[0] == ["0", "class 0", "1", "2"]
    assert rows[100:] == [["", "and 20 more (--json lists all)", "", ""]]


def test_a_run_says_what_there_is_to_know_about_its_data(table: Path, capfd: pytest.CaptureFixture[str]) -> None:
    LaunchRequest(table).load()
    assert capfd.readouterr().err.startswith("note: t.csv: a column without a name is not used")


def test_results_by_class_have_their_names(table: Path, tmp_path: Path) -> None:
    planned = p2pfl.load(table)
    assert planned.class_names() == NAMES
    run = planned.simulate(tmp_path / "run")
    assert run.class_names() == NAMES
    expected = sorted(f"class-accuracy.{name}" for name in NAMES)
    assert sorted(run.results()[0].metrics) == expected
    assert list(current_summary(RunFolder.open(run.folder)).metrics) == expected
    log = (run.folder / "peers" / "00" / "peer.log").read_text()
    assert "class-accuracy._9=" in log
    assert "'class-accuracy.a.b/c d'=" in log


@pytest.fixture
def run(table: Path, tmp_path: Path) -> ReportedRun:
    """A run whose peers have predicted each class once as itself and once as the next."""
    simulated = p2pfl.load(table).simulate(tmp_path / "run")
    found = collect(RunFolder.open(simulated.folder), models=True)
    pairs = [[k, said % 4, 1] for k in range(4) for said in (k, k + 1)]
    points: dict[str, Any] = {"x": [0.0] * 4, "y": [0.0] * 4, "kind": ["embedding"] * 4, "peer": [0] * 4}
    learned = replace(found.learned, confusion={0: pairs}, points={**points, "label": [0, 1, 2, 3]})
    return replace(found, learned=learned)


@pytest.mark.exhaustive
def test_figures_of_a_report_show_names(run: ReportedRun) -> None:
    made = figures.of_run(run)
    assert list(dict.fromkeys(made.tables["partition"]["label"])) == list(NAMES)
    assert made.tables["confusion"]["true"][:2] == [NAMES[0]] * 2
    assert made.tables["confusion"]["said"][:2] == [NAMES[0], NAMES[1]]
    assert made.tables["points"]["label"] == list(NAMES)
    for chart in ("partition", "confusion"):
        assert json.dumps({"domain": list(NAMES)}) in json.dumps(made.charts[chart].variants)


@pytest.mark.exhaustive
def test_figures_for_papers_draw_any_name(run: ReportedRun) -> None:
    partition = run.learned.partition
    assert partition is not None
    dataset = partition["dataset"] | {"class_names": ["\u732b", "@x", *NAMES[2:]]}
    run = replace(run, learned=replace(run.learned, partition=partition | {"dataset": dataset}))
    shown = dict(papers.specifications(figures.of_run(run)))
    for name, column in (("partition", "label"), ("confusion", "true")):
        assert {row[column] for row in shown[name]["datasets"][name]} >= {"\u732b", "@x"}
        assert '"@x"' in json.dumps(shown[name]["layer" if name == "confusion" else "encoding"])


@pytest.mark.parametrize(
    ("names", "said"),
    [(["cat", "dog", "cow"], "cat as dog, dog as cow, cow as cat"), ([], "0 as 1, 1 as 2, 2 as 0")],
)
def test_doubts_about_labels_name_the_classes(make_folder: MakeFolder, names: list[str], said: str) -> None:
    made = make_folder(peers=5, results={p: {"accuracy": 0.9 if p != 4 else 0.2} for p in range(5)})
    run = read(made)
    learned = Learned({"dataset": {"class_names": names}}, {4: [[k, (k + 1) % 3, 10] for k in range(3)]})
    texts = [finding.text for finding in find(run.summary, run.history, learned)]
    assert any(f"It predicts class {said}: are its labels right?" in text for text in texts)


def test_names_stay_different_in_mlflow() -> None:
    names = ["class-accuracy.a/b", "class-accuracy.a:b", "class-accuracy.a b", "class-accuracy.a_b", "loss.ce"]
    kept = [mlflow._mlflow_name(name) for name in names]
    assert kept == ["class-accuracy.a_2f_b", "class-accuracy.a_3a_b", *names[2:]]
