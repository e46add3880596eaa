"""Figures of a run in which some peers attack: honest peers alone, and the attackers apart."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from rich.console import Console

from launcher.comparison.curves import curves
from launcher.comparison.groups import ComparedRun
from launcher.comparison.lines import lines
from launcher.facts.runs import find_runs
from launcher.facts.snapshot import Snapshot
from launcher.facts.status import RunStatus
from launcher.facts.summary import current_summary, summarize
from launcher.report import command, figures, history, sections
from launcher.tracking.__main__ import track
from launcher.ui import drawing
from launcher.ui.state import RunState
from launcher.views.print_summary import accuracy_lines, print_summary
from launcher.views.status import render
from p2pfl.api import open_run
from p2pfl.run_folder.folder import RunFolder
from p2pfl.run_folder.records import parse
from tests.conftest import tree
from tests.guide_pages import files
from tests.launcher_fixtures import Invoke, MakeFolder
from tests.records import write_records
from tests.reports import Page, change, read, record

ADVERSARIES = [{"name": "flip", "peers": [1]}, {"name": "noise", "peers": [3]}]
WEIGHTS = {0: [0.4, 0.1, 0.4, 0.1], 1: [0.25] * 4, 2: [0.3, 0.0, 0.6, 0.1], 3: [0.25] * 4}
ACCURACIES = [0.9, 0.1, 0.7, 0.2]


@pytest.fixture
def attacked(make_folder: MakeFolder) -> RunFolder:
    """A run of four peers, of which 1 and 3 attack."""
    results: dict[int, dict[str, object] | None] = {
        peer: {
            "accuracy": accuracy,
            "best": accuracy,
            "correct": round(10 * accuracy),
            "samples": 10,
            "metrics": {"macro-f1": accuracy if peer != 3 else None},
            "extra_metrics": {"peak": accuracy},
            "masked_accuracies": {"personal": accuracy, "peak": accuracy},
            "unmasked_accuracies": {"personal": accuracy, "peak": accuracy},
            "weights": {str(j): weight for j, weight in enumerate(WEIGHTS[peer])},
            "sent": {"0": {"Head": [1, 100, 10]}},
        }
        for peer, accuracy in enumerate(ACCURACIES)
    }
    folder = make_folder("attacked", peers=4, results=results)
    change(folder, adversaries=ADVERSARIES)
    records = [
        record(
            peer,
            t,
            personal={"accuracy": accuracy, "masked_accuracy": accuracy, "unmasked_accuracy": accuracy},
            weights=dict(enumerate(WEIGHTS[peer])),
            combined={"Head": {str(j): [1.0 + j, float(j != 3)] for j in range(4) if j != peer}},
        )
        for peer, accuracy in enumerate(ACCURACIES)
        for t in range(2)
    ]
    write_records(folder, records)
    return folder


def printed(renderable: Any) -> str:
    console = Console(file=io.StringIO(), width=150, markup=False, highlight=False)
    console.print(renderable) if not callable(renderable) else renderable(console)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


# ---- summary, status, list, live view -------------------------------------------------------------------------


def test_all_figures_of_a_summary_are_of_honest_peers(attacked: RunFolder) -> None:
    summary = summarize(attacked)
    assert summary.accuracy is not None
    assert summary.best is not None
    assert summary.accuracy.mean == pytest.approx(0.8)
    assert summary.accuracy.worst_tenth == 0.7
    assert summary.best.mean == summary.extra_metrics["peak"].mean == pytest.approx(0.8)
    assert summary.masked_accuracies["personal"].mean == pytest.approx(0.8)
    assert summary.metrics["macro-f1"].lowest == 0.7
    assert summary.nonfinite_metrics == {}
    assert summary.weighted_accuracy == pytest.approx(0.8)
    assert summary.collaboration is not None
    assert summary.collaboration.inside == pytest.approx(0.35)  # 0.4 and 0.3, between peers 0 and 2
    assert summary.collaboration.weights[1] == [0.25] * 4
    assert summary.traffic["Head"]["messages"] == 4  # of all peers
    assert [peer.peer for peer in summary.honest] == [0, 2]
    plain = json.loads(attacked.summary.read_text())["attackers"]
    assert plain["attacks"] == {"1": "flip", "3": "noise"}
    assert plain["accuracy"]["mean"] == pytest.approx(0.15)
    assert plain["weight"] == pytest.approx((0.1 + 0.1 + 0.0 + 0.1) / 4)
    assert plain["honest_weight"] == pytest.approx(0.35)


def test_the_summary_prints_attackers_apart_and_marks_their_rows(attacked: RunFolder) -> None:
    summary = current_summary(attacked)
    assert accuracy_lines(summary)[-1] == (
        "attackers, not in these figures: peer 1 (flip); peer 3 (noise), accuracy 15.0 %, "
        "mean weight at honest peers 0.0750 (of each other 0.3500)"
    )
    rows = printed(lambda console: print_summary(summary, console)).splitlines()
    assert rows[0].split()[:3] == ["peer", "attack", "model"]
    assert [row.split()[1] for row in rows[1:5]] == ["tiny-cnn", "flip", "tiny-cnn", "noise"]


def test_a_run_without_attackers_says_nothing_of_them(make_folder: MakeFolder) -> None:
    summary = summarize(make_folder(results={0: {"accuracy": 0.5}}))
    assert "attackers" not in summary.to_dict()
    assert "attack" not in printed(lambda console: print_summary(summary, console))
    status = RunStatus.take(make_folder("other"))
    assert "attacks" not in status.to_dict()
    assert "attack" not in printed(render(status))
    assert "attack" not in printed(render(status, height=20))


def test_a_run_in_which_all_peers_attack_has_no_accuracy(attacked: RunFolder) -> None:
    change(attacked, adversaries=[{"name": "flip", "peers": {"fraction": 1.0}}])
    summary = summarize(attacked)
    assert summary.accuracy is None
    assert summary.attackers is not None
    assert summary.attackers.accuracy is not None
    assert summary.attackers.accuracy.mean == pytest.approx(0.475)
    assert summary.attackers.weight is None
    run = read(attacked)
    assert "accuracy 47.5" in sections.body(run, figures.of_run(run))


def test_status_means_over_honest_peers_and_names_attacks(attacked: RunFolder) -> None:
    status = RunStatus.take(attacked)
    assert status.to_dict()["attacks"] == {1: "flip", 3: "noise"}
    head, _, *rows = printed(render(status)).splitlines()
    assert "| accuracy 80.0 % | attackers, not in it: 1 3 |" in head
    assert [row.split()[1] for row in rows[:4]] == ["finished", "flip", "finished", "noise"]


def test_accuracies_while_a_run_goes_on_are_of_honest_peers(attacked: RunFolder) -> None:
    snapshot = Snapshot.take(attacked, range(4), 3, attackers={1, 3})
    assert snapshot.accuracy == pytest.approx(0.8)
    (line,) = find_runs(attacked.root.parent)
    assert line.accuracy == pytest.approx(0.8)


def test_the_live_view_marks_attackers(attacked: RunFolder) -> None:
    state = RunState(attacked, 3, {1: "flip", 3: "noise"})
    state.read()
    assert "accuracy 80.0 % ·" in drawing.summary(state, "toy", "", 200).plain
    assert drawing.summary(state, "toy", "", 200).plain.endswith(" · * attackers, not in it: 1 3")
    columns = drawing.columns_for(120)
    shown = ["".join(s.text for s in drawing.row(peer, columns, 3, drawing.Scales.of(state))) for peer in state.peers]
    assert [row.split()[0] for row in shown] == ["0", "1*", "2", "3*"]


# ---- compare, export, track -----------------------------------------------------------------------------------


def test_curves_and_comparisons_are_of_honest_peers(
    attacked: RunFolder, make_folder: MakeFolder, invoke: Invoke
) -> None:
    assert [point.accuracy for point in curves(attacked, masked=False).rounds] == [pytest.approx(0.8)] * 2
    (line,) = lines([ComparedRun.of(attacked, None)])
    assert line.accuracy is not None
    assert line.accuracy.mean == pytest.approx(0.8)
    assert line.attackers == 2
    honest = make_folder("honest", peers=4, results={peer: {"accuracy": 0.6} for peer in range(4)})
    outcome = invoke("compare", attacked.root, honest.root)
    head, *rows = outcome.stdout.splitlines()
    assert head.split()[:4] == ["run", "algorithm", "peers", "attackers"]
    assert [row.split()[3] for row in rows[:2]] == ["2", "0"]
    note = "Accuracies and metrics are of honest peers; attackers are left out, 0 to 2 of a run."
    assert note in outcome.stdout
    grouped = invoke("compare", attacked.root, honest.root, "--format", "markdown").stdout
    assert note in grouped
    plain = json.loads(invoke("compare", attacked.root, honest.root, "--json").stdout)
    assert [run.get("attackers") for run in plain["runs"]] == [2, None]
    assert plain["comparison"]["without_attackers"] == note
    alone = json.loads(invoke("compare", honest.root, honest.root, "--json").stdout)
    assert "without_attackers" not in alone["comparison"]


def test_exports_name_the_attack_of_each_peer(attacked: RunFolder, tmp_path: Path, invoke: Invoke) -> None:
    assert invoke("export", attacked.root, "--format", "csv", "-o", tmp_path / "out").exit_code == 0
    with (tmp_path / "out" / "attacked.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["attack"] for row in rows] == ["", "", "flip", "flip", "", "", "noise", "noise"]
    frame = open_run(attacked.root).metrics()
    assert list(frame.columns) == list(rows[0])
    assert not any(name.startswith("combined") for name in frame.columns)


def test_means_of_tensorboard_are_of_honest_peers(attacked: RunFolder, tmp_path: Path, invoke: Invoke) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    assert invoke("export", attacked.root, "--format", "tensorboard", "-o", tmp_path / "tb").exit_code == 0
    mean = accumulator.EventAccumulator(str(tmp_path / "tb" / "attacked" / "mean")).Reload()
    assert [event.value for event in mean.Scalars("accuracy")] == [pytest.approx(0.8)] * 2


def test_trackers_get_means_of_honest_peers(attacked: RunFolder) -> None:
    written: list[tuple[str, int, float]] = []

    class Keeping:
        def __init__(self, run: object) -> None: ...

        def write(self, stream: str, t: int, values: Any) -> None:
            written.append((stream, t, values["accuracy"]))

        def flush(self) -> None: ...

        def close(self, finished: bool) -> None: ...

    (attacked.root / "tracking").mkdir()
    track(attacked, attacked.settings, {"name": "keeping"}, Keeping, lambda: True)
    means = {t: value for stream, t, value in written if stream == "mean"}
    assert means == pytest.approx({0: 0.8, 1: 0.8})
    assert ("peer-01", 0, 0.1) in written


# ---- report ---------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("short_library")
def test_a_report_marks_attackers_in_its_texts_and_pictures(attacked: RunFolder, tmp_path: Path) -> None:
    run = read(attacked)
    shown = command.write_run(run, tmp_path / "report.html")
    page = Page((tmp_path / "report.html").read_text(encoding="utf-8"))
    for text in (
        "4 peers (2 honest)",
        "Who attacks?peers 1 3flip, noise; accuracy 15.0\N{NO-BREAK SPACE}%",
        "honest peers; median 80.0\N{NO-BREAK SPACE}%",
        "Peer 1 (flip); peer 3 (noise) attack: the figures are of honest peers, which give an attacker a mean weight "
        "of 0.075, and each other 0.350.",
        "Dashed rings: attackers.",
        "Attackers are dashed, and not in the mean.",
    ):
        assert text in page.text
    assert not any("less accurate" in remark.text or "little trusted" in remark.text for remark in run.findings)
    assert shown.tables["nodes"]["attacks"] == [False, True, False, True]
    assert shown.tables["rounds"]["attacks"] == [False] * 2 + [True] * 2 + [False] * 2 + [True] * 2
    assert shown.tables["means"]["mean"] == [0.8, 0.8]
    assert list(shown.charts["neighbors"].variants) == ["distance", "taken"]
    rings = shown.charts["drawing"].variants[""]["layer"][2]
    assert rings["transform"] == [{"filter": "datum.attacks"}]


def test_distances_are_summed_up_by_round_for_honest_neighbors_and_attackers(attacked: RunFolder) -> None:
    table = history.neighbors(read(attacked).history)
    rows = list(zip(*(table[column] for column in ("t", "of", "low", "distance", "high", "taken")), strict=True))
    assert rows[:2] == [
        (0, "honest neighbors", 1.5, 2.0, 2.5, 1.0),  # peer 2 for peer 0: 3; peer 0 for peer 2: 1
        (0, "attackers", 3.0, 3.0, 3.0, 0.5),  # for both: peer 1: 2, and peer 3: 4, which the rule leaves out
    ]
    assert len(rows) == 4


def test_distances_of_wrong_types_count_as_absent() -> None:
    broken = [{"Head": 3}, {"Head": {"x": [1.0, 1.0], "1": [None, 1.0], "2": [1.0], "3": "no"}}, 7]
    found = history.read(parse([record(0, t, combined=each) for t, each in enumerate(broken)]))
    assert not found.neighbors


def test_a_report_of_a_rule_without_attackers_has_distances_too(folder: RunFolder) -> None:
    write_records(folder, [record(peer, 0, combined={"Head": {str(1 - peer): [0.0, 1.0]}}) for peer in range(2)])
    table = history.neighbors(read(folder).history)
    assert (table["of"], table["distance"]) == (["honest neighbors"], [0.0])
    assert list(figures.of_run(read(folder)).charts["neighbors"].variants) == ["distance"]


# ---- graph ----------------------------------------------------------------------------------------------------


@pytest.fixture
def run_file(tmp_path: Path) -> Path:
    (tmp_path / "my_parts.py").write_text(files("own-codec.md")["my_parts.py"])
    path = tmp_path / "star.yaml"
    path.write_text(
        "name: star\npeers: 7\nrounds: 4\ngraph: star\ndata: {dataset: digits}\nmodels: tiny-cnn\n"
        "algorithm: dpsgd\nplugins: [my_parts.py]\nadversaries: [{peers: [2, 5], name: two-faced}]\n"
    )
    return path


def test_a_run_with_the_recommended_rule_names_it(tmp_path: Path, invoke: Invoke) -> None:
    file, root = tmp_path / "run.yaml", tmp_path / "run"
    file.write_text(yaml.safe_dump(tree(rounds=1, peers=4, algorithm="fedproto", aggregation="auto")))
    shown = invoke("graph", file).stdout
    assert "aggregation   monna (auto); attackers among the neighbors of each honest peer:" in shown
    assert "note: aggregation: auto is monna for fedproto" in invoke("simulate", file, "--run-dir", root).stderr
    assert yaml.safe_load((root / "run.yaml").read_text())["aggregation"] == {"name": "monna", "f": "auto"}
    log = (root / "peers" / "02" / "peer.log").read_text()
    assert log.count("aggregation t=0 rule=monna contributions=4 f=1") == 1


def test_graph_says_how_many_attackers_a_peers_rule_withstands(run_file: Path, invoke: Invoke) -> None:
    found = json.loads(invoke("graph", run_file, "--set", "aggregation=median", "--json").stdout)["attackers"]
    assert (found["attacks"], found["aggregation"]) == ({"2": "two-faced", "5": "two-faced"}, "median")
    assert [peer["peer"] for peer in found["peers"]] == [0, 1, 3, 4, 6]
    assert found["peers"][0] == {"peer": 0, "neighbors": 6, "attackers": 2, "withstands": 3, "tolerates": 3}
    assert found["peers"][1] == {"peer": 1, "neighbors": 1, "attackers": 0, "withstands": 0, "tolerates": 0}


def test_graph_marks_peers_with_more_attackers_than_their_rule_withstands(run_file: Path, invoke: Invoke) -> None:
    text = invoke("graph", run_file, "--set", "aggregation={name: trimmed-mean, f: 0}").stdout
    assert "attackers     peers 2 5 (two-faced)\n" in text
    rows = [line.split() for line in text.splitlines()[-3:-1]]
    assert rows == [["1", "3-4", "6", "1", "0", "0", "0"], ["0", "6", "2", "0", "3", "too", "many"]]
    assert text.endswith("peer 0 has more attackers among the neighbors than the aggregation withstands\n")
    mean = invoke("graph", run_file).stdout
    assert "aggregation   mean; " in mean
    assert "peer 0 has more" in mean


def test_graph_of_honest_peers_with_the_mean_says_nothing_of_attackers(run_file: Path, invoke: Invoke) -> None:
    assert "attackers" not in invoke("graph", run_file, "--set", "adversaries=[]").stdout
    assert "attackers" not in json.loads(invoke("graph", run_file, "--set", "adversaries=[]", "--json").stdout)


def test_the_worst_round_of_a_graph_that_changes_counts(run_file: Path, invoke: Invoke) -> None:
    lists = "graph={name: list, graphs: [ring, star]}"
    outcome = invoke("graph", run_file, "--set", lists, "--set", "aggregation=median", "--json")
    peers = json.loads(outcome.stdout)["attackers"]["peers"]
    assert {peer["peer"]: (peer["neighbors"], peer["attackers"]) for peer in peers} == {
        0: (2, 0),  # tolerates 1 in the ring, and one more than its two attackers in the star
        1: (2, 1),
        3: (2, 1),
        4: (2, 1),
        6: (2, 1),
    }


@pytest.mark.exhaustive
def test_a_picture_of_a_graph_rings_attackers(run_file: Path, tmp_path: Path, invoke: Invoke) -> None:
    pytest.importorskip("vl_convert")
    assert invoke("graph", run_file, "--png", tmp_path / "honest.svg", "--set", "adversaries=[]").exit_code == 0
    assert invoke("graph", run_file, "--png", tmp_path / "attacked.svg").exit_code == 0
    honest, attacked = ((tmp_path / f"{name}.svg").read_text() for name in ("honest", "attacked"))
    assert (honest.count("stroke-dasharray"), attacked.count("stroke-dasharray")) == (0, 2)
