"""`p2pfl report`: the data that is collected, and the page."""

from __future__ import annotations

import base64
import hashlib
import importlib.util
import json
import re
import sys
from collections import Counter
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import yaml
from scipy import stats

from launcher.commands import run as run_commands
from launcher.prepare import LaunchRequest
from launcher.report import command, figures, history, page, papers, several
from launcher.report.collect import Collected, collect
from launcher.report.findings import find
from launcher.report.learned import Learned
from launcher.report.several import Group
from p2pfl.errors import RunFileError, RunFolderError
from p2pfl.session.run_folder import RunFolder, Status
from tests.launcher_fixtures import Invoke, MakeFolder

HOSTILE = '</script><script>alert("1")</script><img src=x onerror=alert(2)>\x1b[31m'


def record(peer: int, t: int, **changes: Any) -> dict[str, Any]:
    return {
        "peer": peer,
        "t": t,
        "loss": {"ce": 2.0 - 0.1 * t, "proto": 1.0},
        "seconds": {"training": 1.0, "waiting": 2.0, "sending": 0.25, "queued": 0.5, "evaluating": 0.1, "total": 4.0},
        "sent": {str(1 - peer): {"Head": [1, 100, 10]}},
        "received": {},
        "missing": {},
        "weights": {"0": 0.75, "1": 0.25} if peer == 0 else {"0": 0.5, "1": 0.5},
        "personal": {"accuracy": 0.5 + 0.1 * t + 0.1 * peer},
        **changes,
    }


def write_records(folder: RunFolder, records: list[dict[str, Any]]) -> None:
    for files in folder.peers():
        lines = [json.dumps(entry) + "\n" for entry in records if entry["peer"] == files.peer]
        files.metrics.write_text("".join(lines))


def change(folder: RunFolder, **keys: object) -> None:
    plain = yaml.safe_load(folder.run_file.read_text())
    folder.run_file.write_text(yaml.safe_dump({**plain, **keys}))


@pytest.fixture
def folder(make_folder: MakeFolder) -> RunFolder:
    made = make_folder(results={0: {"accuracy": 0.7, "weights": {"0": 0.75, "1": 0.25}}, 1: {"accuracy": 0.8}})
    write_records(made, [record(peer, t) for peer in range(2) for t in range(3)])
    return made


@pytest.fixture
def short_library(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace the plotting library, which takes seconds to bundle."""
    monkeypatch.setattr(page, "library", lambda: "/* library */")


def read(folder: RunFolder) -> Collected:
    return collect(folder, models=False)


# ---- records ------------------------------------------------------------------------------------------------


def test_bytes_and_seconds_are_cumulative_and_elapsed_is_preferred() -> None:
    found = history.read([record(0, 0), record(0, 1), record(1, 0, elapsed=7.5), record(1, 1, elapsed=9.0)])
    assert [(row["peer"], row["bytes"], row["seconds"]) for row in found.rows] == [
        (0, 110.0, 4.0),
        (0, 220.0, 8.0),
        (1, 110.0, 7.5),
        (1, 220.0, 9.0),
    ]
    assert found.kinds == {"Head": [4.0, 400.0, 40.0]}
    assert dict(found.edges) == {(0, 1): 220.0, (1, 0): 220.0}
    assert found.seconds[0] == {
        "training": 2.0,
        "waiting": 4.0,
        "queued": 1.0,
        "sending": 0.5,
        "evaluating": 0.2,
        "other": pytest.approx(0.3),
    }


def test_values_of_wrong_types_in_records_count_as_absent() -> None:
    broken = record(0, 0, loss={HOSTILE: None}, seconds="x", sent={"1": {"Head": "x"}, "y": 3}, weights={"0": "x"})
    broken |= {"personal": {"accuracy": True}, "missing": {"Head": [1, "x"], "Body": 7}, "elapsed": 10**400}
    found = history.read([broken, {"peer": "a"}, {}, record(1, 0)])
    assert [row["accuracy"] for row in found.rows] == [None, 0.6]
    assert [row["bytes"] for row in found.rows] == [0.0, 110.0]
    assert dict(found.missing) == {(0, 1): 1}
    assert found.diverged == {0: 0}
    assert "\x1b" not in "".join(found.terms)


def test_thinning_keeps_the_first_and_the_last_round_and_the_limit() -> None:
    assert history.thinned(range(5), 9) == [0, 1, 2, 3, 4]
    kept = history.thinned(range(1000), 10)
    assert (len(kept), kept[0], kept[-1]) == (10, 0, 999)


def test_a_long_history_is_thinned_but_keeps_evaluated_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(history, "MAX_ROWS", 40)
    records = [record(0, t, **({} if t % 50 == 49 else {"personal": None})) for t in range(400)]
    table = history.columns(history.read(records), {0: None})
    assert len(table["t"]) <= 40
    assert sum(value is not None for value in table["accuracy"]) == 8
    assert (table["t"][0], table["t"][-1]) == (0, 399)


def test_means_and_deviations_are_over_peers_and_stay_within_accuracies() -> None:
    rows = [record(0, 0, personal={"accuracy": 0.1}), record(1, 0, personal={"accuracy": 0.9})]
    rows += [record(0, 1, personal={"accuracy": 1.0}), record(1, 1, personal={"accuracy": 0.2})]
    first, second = history.means(history.read(rows))
    assert [first["mean"], first["std"], first["t"]] == pytest.approx([0.5, 0.4, 0])
    assert [second["low"], second["high"]] == pytest.approx([0.2, 1.0])


def test_frames_hold_weights_in_thousandths_by_group_and_mark_unknown_rows() -> None:
    found = history.read([record(0, 0), record(1, 0), record(0, 1)])
    assert history.frames(found, [1, 0]) == [
        {"t": 0, "cells": [500, 500, 250, 750]},
        {"t": 1, "cells": [-1, -1, 250, 750]},
    ]


# ---- what stands out ----------------------------------------------------------------------------------------


def test_names_the_inaccurate_the_slow_the_dead_and_the_restarted_peer(make_folder: MakeFolder) -> None:
    made = make_folder(peers=6, results={p: {"accuracy": 0.9 if p != 4 else 0.2} for p in range(5)} | {5: None})
    records = [
        record(peer, t, seconds={"training": 9.0 if peer == 2 else 1.0, "waiting": 1.0, "total": 12.0})
        for peer in range(6)
        for t in range(3)
    ]
    write_records(made, records)
    for entry in records:
        entry["missing"] = {"Head": [3, 5]} if entry["peer"] == 0 else {}
    write_records(made, records)
    made.peer(1).write_status(Status(1, 2**22 + 1, "finished", 2, 3, starts=2))
    texts = [finding.text for finding in read(made).findings]
    assert texts[0] == "Peer 5 did not finish: never started, after 0 rounds, 0:36 after the start."
    assert "Peer 4 is far less accurate: 20.0 %, the median is 90.0 %." in texts
    slow = "Peer 2 is slow: it trains 9 s in the median round, 9.0 times as long as the median peer"
    assert any(text.startswith(slow) for text in texts)
    assert "Peer 1 was restarted once." in texts
    assert "3 messages did not arrive in time, all from peer 3." in texts  # that peer 5 stopped is said above


def test_a_peer_that_stopped_is_compared_in_the_last_round_that_it_has_evaluated(make_folder: MakeFolder) -> None:
    made = make_folder(peers=6, results={p: {"accuracy": 0.9} for p in range(5)} | {5: {"accuracy": 0.5}})
    records = [
        record(peer, t, personal={"accuracy": 0.5 if t == 0 else 0.9})
        for peer in range(6)
        for t in range(3 if peer < 5 else 1)
    ]
    write_records(made, records)
    assert not any("Peer 5 is far less accurate" in finding.text for finding in read(made).findings)
    result = made.peer(5).result()
    assert result is not None
    records[-1]["personal"]["accuracy"] = 0.3
    write_records(made, records)
    made.peer(5).write_result(replace(result, accuracy=0.3))
    texts = [finding.text for finding in read(made).findings]
    assert "Peer 5 is far less accurate: 30.0 % after round 0, the median is 50.0 %." in texts


@pytest.mark.parametrize(
    ("confusion", "said"),
    [
        ([[0, 1, 9], [0, 0, 1], [1, 0, 10], [2, 2, 10]], " It predicts class 0 as 1, 1 as 0: are its labels right?"),
        ([[0, 1, 5], [0, 2, 5], [1, 0, 5], [1, 1, 4], [2, 1, 6]], ""),
        ([[0, 1, 9], [1, 1, 10], [2, 2, 10]], ""),
        ([[0, 0, 10], [1, 1, 10]], ""),
        ([], ""),
    ],
    ids=["renamed", "guessed", "one class for another", "right", "unknown"],
)
def test_labels_are_doubted_if_predictions_would_be_right_under_other_names(
    make_folder: MakeFolder, confusion: list[list[int]], said: str
) -> None:
    made = make_folder(peers=5, results={p: {"accuracy": 0.9 if p != 4 else 0.2} for p in range(5)})
    run = read(made)
    found = find(run.summary, run.history, Learned(confusion={4: confusion}))
    assert f"Peer 4 is far less accurate: 20.0 %, the median is 90.0 %.{said}" in [finding.text for finding in found]


@pytest.mark.parametrize(
    ("accuracies", "said"),
    [
        ([0.2, 0.5, 0.8, *[0.9] * 9], "The mean accuracy has been level at 90.0 % since round 3, after 0:16."),
        ([0.2, 0.5, 0.8, *[0.9] * 4, 0.8, *[0.9] * 4], "The mean accuracy has been level at 90.0 % since round 8, "),
        ([0.2, 0.5, *[0.9] * 7], None),  # too few evaluations
        ([0.2, 0.5, *[0.9] * 8], "The mean accuracy has been level at 90.0 % since round 2, "),
        ([*[0.9] * 9, 0.915, 0.885, 0.9], None),  # within the last fifth it still moves
        (
            [0.1 * t for t in range(10)],
            "The mean accuracy still rises (+20.0 points in the last fifth): train longer.",
        ),
        ([*[0.9] * 9, 0.8], "The mean accuracy fell by 10.0 points since its best round, 0."),
    ],
)
def test_says_since_when_the_mean_accuracy_is_level(
    folder: RunFolder, accuracies: list[float], said: str | None
) -> None:
    records = [
        record(peer, t, personal={"accuracy": accuracy}, elapsed=4.0 * (t + 1))
        for peer in range(sum(1 for _ in folder.peers()))
        for t, accuracy in enumerate(accuracies)
    ]
    write_records(folder, records)
    texts = [finding.text for finding in read(folder).findings if "The mean accuracy" in finding.text]
    assert len(texts) == (said is not None)
    assert said is None or texts[0].startswith(said)


def test_an_even_run_has_nothing_that_stands_out(folder: RunFolder) -> None:
    findings = read(folder).findings
    assert {finding.level for finding in findings} == {"good"}
    assert findings[0].text.startswith("No peer stands out")


def test_events_of_the_logs_are_listed_by_time_and_equal_ones_of_several_peers_once(
    folder: RunFolder,
) -> None:
    dead = "neighbor declared dead peer=1: no connection for 5 s\n"
    folder.peer(0).log.write_text(
        f"2026-11-21T02:41:02.000 WARNING messages missing kind=Head\n2026-11-21T02:41:03.000 INFO    {dead}"
    )
    folder.peer(1).log.write_text(
        "2026-11-21T02:41:00.000 INFO    round done t=0\n2026-11-21T02:41:01.000 INFO    resumed t=1\n"
        + 2 * f"2026-11-21T02:41:04.000 INFO    {dead}"
    )
    events = read(folder).events
    assert events.count == 5
    assert [(event["at"][17:19], event["peers"], event["level"], event["text"]) for event in events.shown] == [
        ("01", [1], "INFO", "resumed t=1"),
        ("02", [0], "WARNING", "messages missing kind=Head"),
        ("03", [0, 1], "INFO", dead.strip()),
        ("04", [1], "INFO", dead.strip()),
    ]


def test_summary_json_stays_as_the_launcher_wrote_it_and_its_cause_of_death_is_shown(folder: RunFolder) -> None:
    folder.peer(1).clear_result()
    status = folder.peer(1).status()
    assert status is not None
    status.phase = "training"
    folder.peer(1).write_status(status)
    written = json.dumps({"peers": [{"peer": 1, "ended": "killed by SIGKILL"}]})
    folder.summary.write_text(written)
    assert [peer.ended for peer in read(folder).summary.peers] == ["finished", "killed by SIGKILL"]
    assert folder.summary.read_text() == written


# ---- the page -----------------------------------------------------------------------------------------------


class Page(HTMLParser):
    """Reads a page and checks that its elements are nested properly."""

    VOID = ("meta", "link", "input", "br", "img", "hr")

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.attributes: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[tuple[dict[str, str | None], str]] = []
        self.text = ""
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)
        if tag == "script":
            self.scripts.append((dict(attrs), ""))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open[-1:] == ["script"]:
            self.scripts[-1] = self.scripts[-1][0], self.scripts[-1][1] + data
        else:
            self.text += data

    def of(self, name: str) -> list[str]:
        return [value for _, attributes in self.attributes if (value := attributes.get(name)) is not None]


def written(folder: RunFolder, tmp_path: Path) -> Page:
    file = tmp_path / "report.html"
    command.write_run(read(folder), file)
    return Page(file.read_text(encoding="utf-8"))


@pytest.mark.usefixtures("short_library")
def test_page_is_nested_properly_and_every_reference_resolves_inside_it(folder: RunFolder, tmp_path: Path) -> None:
    found = written(folder, tmp_path)
    ids = Counter(found.of("id"))
    assert max(ids.values()) == 1
    assert not found.of("src")
    for link in found.of("href"):
        assert link == "data:," or (link[0] == "#" and link[1:] in ids)
    for target in (*found.of("for"), *found.of("aria-labelledby")):
        assert target in ids
    assert dict(found.attributes[0][1]) == {"lang": "en"}


@pytest.mark.usefixtures("short_library")
def test_policy_allows_the_two_scripts_of_the_page_and_no_request(folder: RunFolder, tmp_path: Path) -> None:
    found = written(folder, tmp_path)
    (policy,) = (content for content in found.of("content") if "default-src" in content)
    scripts = [text for attributes, text in found.scripts if attributes.get("type") is None]
    assert len(scripts) == 2
    for script in scripts:
        assert base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() in policy
    assert policy.startswith("default-src 'none'; script-src 'sha256-")
    assert "http" not in policy
    assert "'unsafe-eval'" not in policy


@pytest.mark.usefixtures("short_library")
def test_text_of_peers_is_escaped_wherever_it_is_shown(make_folder: MakeFolder, tmp_path: Path) -> None:
    made = make_folder(results={0: {"model": HOSTILE, "accuracy": 0.5}, 1: {"phase": "failed", "error": HOSTILE}})
    write_records(made, [record(0, 0, loss={HOSTILE: 1.0}, sent={"1": {HOSTILE: [1, 2, 3]}}), record(1, 0)])
    made.peer(0).log.write_text(f"2026-11-21T02:41:00.000 WARNING {HOSTILE}\n")
    made.write_info({**made.info, "versions": {HOSTILE: HOSTILE}, "started": HOSTILE, "command": HOSTILE})
    made.run_file.write_text(f"{made.run_file.read_text()}\n# {HOSTILE.replace(chr(27), '')}\n")
    change(made, algorithm={"name": HOSTILE.replace("\x1b", "")})
    found = written(made, tmp_path)
    assert len(found.scripts) == 3
    assert "img" not in {tag for tag, _ in found.attributes}
    assert not [key for _, attributes in found.attributes for key in attributes if key.startswith("on")]
    assert found.text.count("<img src=x onerror=alert(2)>") >= 6
    assert "\x1b" not in found.text
    data = json.loads(next(text for attributes, text in found.scripts if attributes.get("id") == "data"))
    assert data["charts"]["loss0"]


@pytest.mark.usefixtures("short_library")
def test_data_of_the_page_holds_a_table_for_each_chart(folder: RunFolder, tmp_path: Path) -> None:
    found = written(folder, tmp_path)
    data = json.loads(next(text for attributes, text in found.scripts if attributes.get("id") == "data"))
    assert set(data["charts"]) == {"accuracy", "loss0", "loss1", "weights", "drawing", "traffic", "time"}
    drawn = {name for chart in data["charts"].values() for name in chart["tables"]}
    assert drawn - set(data["tables"]) == {"cells", "edges"}  # the script computes them from the frames
    assert [frame["t"] for frame in data["frames"]["list"]] == [0, 1, 2]
    assert set(found.of("data-chart")) == set(data["charts"])


@pytest.mark.usefixtures("short_library")
def test_a_run_without_records_gives_a_page_that_says_what_is_missing(
    make_folder: MakeFolder, tmp_path: Path
) -> None:
    found = written(make_folder(results={0: None, 1: None}), tmp_path)
    assert found.of("data-chart") == []
    for words in (
        "Accuracy: not shown, no peer has evaluated its model yet.",
        "Mixing weights: not shown, the method has no mixing weights, or no round is completed.",
        "Data partition: not shown, left out by --without-models.",
        "Time by phase: not shown, no round is completed.",
    ):
        assert words in found.text


@pytest.mark.usefixtures("short_library")
def test_a_method_without_mixing_weights_is_drawn_by_its_traffic(folder: RunFolder, tmp_path: Path) -> None:
    write_records(folder, [record(peer, t, weights=None) for peer in range(2) for t in range(3)])
    run = read(folder)
    shown = figures.of_run(run)
    assert "weights" not in shown.charts
    assert shown.frames is None
    assert shown.tables["edges"]["value"] == [660]
    assert "Mixing weights: not shown" in written(folder, tmp_path).text


@pytest.mark.usefixtures("short_library")
def test_code_of_a_collection_is_not_executed(folder: RunFolder, tmp_path: Path) -> None:
    folder.write_info({**folder.info, "collected": {"sources": [], "at": "2026-11-21T09:30:00+00:00"}})
    (tmp_path / "evil.py").write_text(f"open({str(tmp_path / 'executed')!r}, 'w')")
    change(folder, plugins=[str(tmp_path / "evil.py")])
    run = collect(folder)
    assert set(run.learned.absent) == {"partition", "confusion", "points"}
    assert all(reason.startswith("a collection") for reason in run.learned.absent.values())
    assert not (tmp_path / "executed").exists()


# ---- several runs -------------------------------------------------------------------------------------------


def make_runs(
    make_folder: MakeFolder, lr: float, accuracies: list[float], peers: int = 2, **keys: Any
) -> list[RunFolder]:
    made = []
    for seed, accuracy in enumerate(accuracies):
        results = {p: {"accuracy": accuracy + 0.02 * p} for p in range(peers)}
        one = make_folder(f"lr{lr}-{seed}", peers=peers, results=results)
        change(one, seed=seed, algorithm={"name": "local", "lr": lr, **keys})
        write_records(
            one, [record(peer, t, personal={"accuracy": accuracy}) for peer in range(peers) for t in range(3)]
        )
        made.append(one)
    return made


def test_runs_are_grouped_by_what_differs_besides_the_seed(make_folder: MakeFolder) -> None:
    runs = [*make_runs(make_folder, 0.1, [0.5, 0.6]), *make_runs(make_folder, 0.2, [0.7, 0.9], momentum=0.9)]
    members = several.read([(run, None) for run in runs])
    assert several.differences(members) == {
        "seed": [0, 1, 0, 1],
        "algorithm.lr": [0.1, 0.1, 0.2, 0.2],
        "algorithm.momentum": ["(none)", "(none)", 0.9, 0.9],
    }
    groups = several.group(members)
    assert [(group.name, len(group.members)) for group in groups] == [("lr=0.1", 2), ("lr=0.2", 2)]
    first = several.curve(groups[0])[0]
    assert (first["mean"], first["std"], first["seeds"]) == (pytest.approx(0.55), pytest.approx(0.0707, abs=1e-4), 2)


def groups_of(make_folder: MakeFolder, one: list[float], two: list[float]) -> list[Group]:
    runs = [*make_runs(make_folder, 0.1, one), *make_runs(make_folder, 0.2, two)]
    return several.group(several.read([(run, None) for run in runs]))


def test_settings_are_compared_by_paired_tests_over_common_seeds(make_folder: MakeFolder) -> None:
    one, two = [0.5, 0.62, 0.55, 0.7], [0.6, 0.66, 0.7]
    (test,) = several.tests(groups_of(make_folder, one, two))
    assert (test.unit, test.pairs) == ("seeds", 3)
    expected = stats.ttest_rel(one[:3], two)
    low, high = expected.confidence_interval()
    assert test.t == pytest.approx(expected.pvalue)
    assert [test.low, test.high] == pytest.approx([low, high])
    assert test.wilcoxon == pytest.approx(stats.wilcoxon(one[:3], two).pvalue)
    assert test.corrected == test.t


def test_with_one_common_seed_the_peers_are_paired(make_folder: MakeFolder) -> None:
    (test,) = several.tests(groups_of(make_folder, [0.5], [0.6]))
    assert (test.unit, test.pairs) == ("peers", 2)
    assert test.difference == pytest.approx(-0.1)


@pytest.mark.parametrize(
    ("changed", "unit"),
    [
        ({"data": {"dataset": {"name": "digits"}, "partition": {"name": "iid"}}}, "seeds"),
        ({"peers": 3}, "seeds"),
        ({"data": {"dataset": {"name": "digits"}, "root": "/elsewhere"}}, "peers"),
    ],
)
def test_only_peers_with_the_same_samples_are_paired(
    changed: dict[str, Any], unit: str, make_folder: MakeFolder
) -> None:
    one, two = make_runs(make_folder, 0.1, [0.5])[0], make_runs(make_folder, 0.2, [0.6])[0]
    change(one, data={"dataset": {"name": "digits"}})
    change(two, data={"dataset": {"name": "digits"}})
    change(two, **changed)
    (test,) = several.tests(several.group(several.read([(one, None), (two, None)])))
    assert (test.unit, test.pairs) == (unit, 1 if unit == "seeds" else 2)


@pytest.mark.usefixtures("short_library")
def test_peers_of_one_seed_decide_nothing_and_unlike_runs_are_warned_of(
    make_folder: MakeFolder, invoke: Invoke, tmp_path: Path
) -> None:
    one, two = (make_runs(make_folder, lr, [lr], peers=8)[0] for lr in (0.5, 0.6))
    change(two, rounds=7)
    for peer in range(8):
        result = two.peer(peer).result()
        assert result is not None
        assert result.accuracy is not None
        two.peer(peer).write_result(replace(result, accuracy=result.accuracy + 0.002 * peer))
    assert invoke("report", one.root, two.root, "-o", tmp_path / "all.html").exit_code == 0
    text = Page((tmp_path / "all.html").read_text()).text
    assert "-10.7 points, from one seed, whose peers are not independent: run more seeds." in text
    assert re.findall("The runs differ in ([^:]*):", text) == ["rounds"]
    assert "not clearly more than" in text
    assert "unlikely to be chance" not in text


@pytest.mark.usefixtures("short_library")
def test_several_runs_give_one_page_with_tests_and_differences(
    make_folder: MakeFolder, invoke: Invoke, tmp_path: Path
) -> None:
    runs = [*make_runs(make_folder, 0.1, [0.5, 0.6]), *make_runs(make_folder, 0.2, [0.7, 0.9])]
    outcome = invoke("report", *[run.root for run in runs], "-o", tmp_path / "all.html")
    assert outcome.exit_code == 0
    assert outcome.stdout.split() == [str(tmp_path / "all.html")]
    found = Page((tmp_path / "all.html").read_text())
    assert found.of("data-chart") == ["compared"]
    assert "The runs differ in" not in found.text  # but in seeds, and what is compared
    for words in (
        "4 runs compared",
        "not clearly more than lr=0.1",
        "lr=0.1 − lr=0.2",
        "2 seeds",
        "-25.00",
        "algorithm.lr",
        "56.0 ± 7.1",
    ):
        assert words in found.text


def test_a_run_given_twice_is_refused(folder: RunFolder, tmp_path: Path) -> None:
    with pytest.raises(RunFolderError, match="given more than once"):
        command.write([(folder, None)] * 2, tmp_path / "x.html")


# ---- commands -----------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("short_library")
def test_report_goes_into_the_run_folder_by_default(folder: RunFolder, invoke: Invoke) -> None:
    outcome = invoke("report", folder.root, "--without-models")
    assert outcome.exit_code == 0
    assert outcome.stdout == f"{folder.root / 'report.html'}\n"
    assert outcome.stderr == f"open it: python -m webbrowser {(folder.root / 'report.html').as_uri()}\n"
    assert Page((folder.root / "report.html").read_text()).text.count("toy") >= 2


def test_missing_extra_is_named_before_any_work(
    folder: RunFolder, invoke: Invoke, monkeypatch: pytest.MonkeyPatch
) -> None:
    page.library.cache_clear()
    monkeypatch.setitem(sys.modules, "vl_convert", None)
    outcome = invoke("report", folder.root)
    assert outcome.exit_code == 1
    assert "p2pfl report needs vl-convert-python, which is not installed: pip install 'p2pfl-mesh[report]'" in (
        outcome.stderr
    )
    assert not (folder.root / "report.html").exists()


@pytest.mark.exhaustive
@pytest.mark.usefixtures("short_library")
def test_figures_for_papers_are_png_and_pdf(folder: RunFolder, tmp_path: Path) -> None:
    files = papers.write(papers.of_run(read(folder)), tmp_path / "png", tmp_path / "all.pdf")
    names = [file.stem for file in files[:-1]]
    assert names == [*(f"accuracy-{x}" for x in ("rounds", "bytes", "seconds")), "loss", "weights", "traffic", "time"]
    assert all(file.read_bytes().startswith(b"\x89PNG") for file in files[:-1])
    pdf = files[-1].read_bytes()
    assert pdf.startswith(b"%PDF")
    assert len(re.findall(rb"/Type /Page\b", pdf)) == len(names)


@pytest.mark.usefixtures("short_library")
def test_a_run_ends_with_the_line_that_makes_its_report(folder: RunFolder) -> None:
    assert run_commands._report_line(folder) == f"report: p2pfl report {folder.root}"
    assert not (folder.root / "report.html").exists()


@pytest.mark.usefixtures("short_library")
def test_a_run_that_asks_for_its_report_ends_with_the_line_that_opens_it(folder: RunFolder) -> None:
    change(folder, report=True)
    line = run_commands._report_line(folder)
    assert line == f"report: python -m webbrowser {(folder.root / 'report.html').as_uri()}"
    assert (folder.root / "report.html").exists()


@pytest.mark.usefixtures("short_library")
def test_a_report_that_cannot_be_written_is_no_failure_of_the_run(folder: RunFolder) -> None:
    change(folder, report=True)
    (folder.root / "report.html").mkdir()
    assert run_commands._report_line(folder).startswith("no report: ")


@pytest.mark.usefixtures("short_library")
def test_missing_matplotlib_is_named_before_any_work(
    folder: RunFolder, invoke: Invoke, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    outcome = invoke("report", folder.root, "--png", folder.root / "png")
    assert outcome.exit_code == 1
    assert "drawing figures needs matplotlib" in outcome.stderr
    assert not (folder.root / "report.html").exists()


def test_a_run_file_that_asks_for_a_report_needs_the_extra_before_peers_start(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file.write_text(f"{file.read_text()}report: true\n")
    LaunchRequest(file).load()
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(RunFileError, match=r"toy.yaml:\d+: report: writing a report needs vl-convert-python"):
        LaunchRequest(file).load()


def test_opener_quotes_paths() -> None:
    from launcher.commands.report import opener

    assert opener(Path("/tmp/a b.html")) == "python -m webbrowser file:///tmp/a%20b.html"
