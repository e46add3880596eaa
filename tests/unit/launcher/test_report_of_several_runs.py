"""`p2pfl report` of several runs: their groups, the tests between them, and the page."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from scipy import stats

from launcher.comparison.groups import RunGroup, differences
from launcher.formatting.flat import flatten
from launcher.report import command, comparison, several
from p2pfl.errors import RunFolderError
from p2pfl.run_folder.folder import RunFolder
from tests.launcher_fixtures import Invoke, MakeFolder
from tests.records import record_tests, write_records
from tests.reports import Page, change, record


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
    groups = several.read([(run, None) for run in runs])
    files = [dict(flatten(member.settings)) for group in groups for member in group.members]
    assert differences(files, "(none)") == {
        "seed": [0, 1, 0, 1],
        "algorithm.lr": [0.1, 0.1, 0.2, 0.2],
        "algorithm.momentum": ["(none)", "(none)", 0.9, 0.9],
    }
    assert [(group.title, len(group.members)) for group in groups] == [("lr=0.1", 2), ("lr=0.2", 2)]
    first = several.curve("lr=0.1", several.histories(groups[0]))[0]
    assert (first["mean"], first["std"], first["seeds"]) == (pytest.approx(0.55), pytest.approx(0.0707, abs=1e-4), 2)


def test_means_over_time_hold_until_a_peer_is_evaluated_again(make_folder: MakeFolder) -> None:
    runs = make_runs(make_folder, 0.1, [0.0, 0.0], peers=1)
    for run, at in zip(runs, [{1.0: 0.2, 2.0: 0.6}, {1.5: 0.4, 5.0: 0.8}], strict=True):
        write_records(run, [record(0, t, elapsed=at_, personal={"accuracy": at[at_]}) for t, at_ in enumerate(at)])
    (group,) = several.read([(run, None) for run in runs])
    found = several.curve_over_time("x", several.histories(group))
    assert [(row["seconds"], row["seeds"]) for row in found] == [(1.5, 2), (2.0, 2), (5.0, 2)]
    assert [row["mean"] for row in found] == pytest.approx([0.3, 0.5, 0.7])


@pytest.mark.usefixtures("short_library")
def test_the_page_has_the_seconds_to_an_accuracy(make_folder: MakeFolder, invoke: Invoke, tmp_path: Path) -> None:
    runs = [*make_runs(make_folder, 0.1, [0.5, 0.6]), *make_runs(make_folder, 0.2, [0.7, 0.9])]
    for run, first in zip(runs, [0.5, 0.6, 0.7, 0.9], strict=True):
        run.write_info({**run.info, "clock": "simulated"})
        found = [{"accuracy": first + 0.1 * t, "unmasked_accuracy": first + 0.1 * t} for t in range(3)]
        write_records(run, [record(peer, t, personal=found[t]) for peer in range(2) for t in range(3)])
    paths = [run.root for run in runs]
    assert invoke("report", *paths, "-o", tmp_path / "all.html", "--seconds-to", "0.7").exit_code == 0
    text = " ".join(Page((tmp_path / "all.html").read_text()).text.split())
    assert "seconds to 70.0 %" in text
    assert "10.0 ± 2.8" in text  # after 12 seconds from 0.5 on, after 8 from 0.6 on
    assert "Seconds are those of a simulated clock." in text
    alone = invoke("report", paths[0], "--seconds-to", "0.7")
    assert alone.exit_code == 2
    assert "name more runs" in alone.stderr


def test_real_and_simulated_seconds_are_not_compared(make_folder: MakeFolder) -> None:
    one, two = [*make_runs(make_folder, 0.1, [0.5]), *make_runs(make_folder, 0.2, [0.7])]
    two.write_info({**two.info, "clock": "simulated"})
    groups = several.read([(one, None), (two, None)])
    text = comparison._verdicts(groups, [])
    assert "Shortest" not in text
    assert "Seconds of some runs are simulated" in text
    assert "Seconds are those" not in comparison._results(groups, None)


def groups_of(make_folder: MakeFolder, one: list[float], two: list[float]) -> list[RunGroup]:
    runs = [*make_runs(make_folder, 0.1, one), *make_runs(make_folder, 0.2, two)]
    return several.read([(run, None) for run in runs])


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


def test_settings_with_the_same_accuracies_are_not_called_untested(make_folder: MakeFolder, tmp_path: Path) -> None:
    accuracies = [0.5, 0.62, 0.55]
    groups = groups_of(make_folder, accuracies, accuracies)
    (test,) = several.tests(groups)
    assert (test.pairs, test.low, test.high, test.t, test.wilcoxon) == (3, 0.0, 0.0, 1.0, 1.0)
    _, text = comparison._verdict(test)
    assert text == "lr=0.1 against lr=0.2: +0.0 points, the same in all 3 pairs of seeds: not tested."
    moved = replace(test, difference=0.01, low=0.01, high=0.01, t=None, corrected=None)
    assert comparison._verdict(moved)[1].endswith("+1.0 points, the same in all 3 pairs of seeds: not tested.")


def test_runs_that_have_not_finished_are_in_neither_results_nor_tests_nor_curves(make_folder: MakeFolder) -> None:
    runs = [*make_runs(make_folder, 0.1, [0.5, 0.6, 0.9]), *make_runs(make_folder, 0.2, [0.7, 0.9, 0.1])]
    for peer in runs[2].peers():
        result, status = peer.result(), peer.status()
        assert result is not None
        assert status is not None
        peer.write_result(replace(result, phase="stopped"))
        peer.write_status(replace(status, phase="stopped"))
    groups = several.read([(run, None) for run in runs])
    assert groups[0].by_seed() == {0: pytest.approx(0.51), 1: pytest.approx(0.61)}
    assert set(several._by_peer(groups[0])) == {(0, 0), (0, 1), (1, 0), (1, 1)}
    (test,) = several.tests(groups)
    assert test.pairs == 2
    assert [row["seeds"] for row in several.curve("", several.histories(groups[0]))] == [2, 2, 2]
    assert [row["seeds"] for row in several.curve("", several.histories(groups[1]))] == [3, 3, 3]
    text = comparison._verdicts(groups, [test])
    assert "1 of the runs did not finish." in text
    assert "leave out 1 of the runs: no peer of theirs has finished" in text
    alone = several.read([(runs[2], None)])  # nothing to say, but no error
    assert "Least traffic" not in comparison._verdicts(alone, [])
    assert "Mean over peers" in comparison._results(alone, None)


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
    for run in (one, two):
        change(run, data={"dataset": {"name": "digits"}})
        record_tests(run, {0: "all", 1: "all"})
    change(two, **changed)
    (test,) = several.tests(several.read([(one, None), (two, None)]))
    assert (test.unit, test.pairs) == (unit, 1 if unit == "seeds" else 2)


@pytest.mark.usefixtures("short_library")
def test_settings_with_other_test_samples_are_neither_tested_nor_ranked(
    make_folder: MakeFolder, tmp_path: Path
) -> None:
    runs = [*make_runs(make_folder, 0.1, [0.5, 0.6]), *make_runs(make_folder, 0.2, [0.7, 0.9])]
    for at, run in enumerate(runs):
        record_tests(run, {0: f"first-{at}", 1: f"second-{at}"})
    groups = several.read([(run, None) for run in runs])
    assert [group.title for group in groups] == ["lr=0.1 (test set A)", "lr=0.2 (test set B)"]
    assert several.tests(groups) == []
    command.write([(run, None) for run in runs], tmp_path / "x.html")
    text = Page((tmp_path / "x.html").read_text()).text
    assert "Different test sets (the recorded test samples): rows were tested on different samples" in text
    assert "Most accurate" not in text
    assert "Least traffic" in text


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
