"""Groups of runs over seeds: what sets them apart, statistics, budgets, formats."""

from __future__ import annotations

import math
import re
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from scipy import stats

from launcher.comparison import curves
from launcher.comparison.groups import ComparedRun, find_baseline, group, varied
from launcher.comparison.results import GroupLine, Results
from launcher.comparison.statistics import Statistic, VersusBaseline, compare, holm, p_value
from launcher.comparison.tables import comma_separated, latex, latex_text, markdown, page
from launcher.comparison.test_sets import WasTested
from launcher.errors import CompareError
from launcher.formatting.flat import flatten
from p2pfl.run_folder.folder import RunFolder
from tests.launcher_fixtures import MakeFolder
from tests.records import record, write_records

# ---- statistics --------------------------------------------------------------------------------------------


def test_mean_and_sample_deviation() -> None:
    assert Statistic.of([1.0, 2.0, None, 3.0, math.nan]) == Statistic(2.0, 1.0, 3)
    assert Statistic.of([0.5]) == Statistic(0.5, None, 1)
    assert Statistic.of([None]) is None


@pytest.mark.parametrize("seeds", [2, 5, 9])
def test_p_values_are_those_of_scipys_paired_tests(seeds: int) -> None:
    rng = np.random.default_rng(seeds)
    mine, base = rng.normal(0.8, 0.02, seeds), rng.normal(0.78, 0.02, seeds)
    found = compare(dict(enumerate(mine)), dict(enumerate(base)), "t")
    assert found is not None
    assert found.p == pytest.approx(stats.ttest_rel(mine, base).pvalue)
    assert found.difference == pytest.approx(float(np.mean(mine - base)))
    assert p_value(list(mine - base), "wilcoxon") == pytest.approx(stats.wilcoxon(mine, base).pvalue)


def test_the_signed_rank_test_of_five_seeds_cannot_be_significant() -> None:
    assert p_value([0.1, 0.2, 0.3, 0.4, 0.5], "wilcoxon") == pytest.approx(0.0625)


def test_pairs_only_seeds_that_both_have() -> None:
    found = compare({1: 0.5, 2: 0.7, 9: 0.0}, {1: 0.4, 2: 0.5, 3: 1.0}, "t")
    assert found is not None
    assert found.n == 2
    assert found.difference == pytest.approx(0.15)
    assert compare({1: 0.5}, {2: 0.4}, "t") is None
    assert compare({1: 0.5}, {1: 0.25}, "t") == VersusBaseline(0.25, 1, None)


def test_equal_differences_are_no_error() -> None:
    assert p_value([0.0, 0.0], "t") == 1.0
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert p_value([0.5, 0.5, 0.5], "t") is None
        assert p_value([0.8 - 0.7, 0.6 - 0.5], "t") is None  # they differ by a rounding error
        assert p_value([0.5] * 6, "wilcoxon") == pytest.approx(2 / 2**6)


def test_holms_correction() -> None:
    # Worked by hand: 0.01 * 4, 0.02 * 3, 0.03 * 2 (not below 0.06), 0.9 * 1.
    assert holm([0.9, 0.01, None, 0.03, 0.02]) == pytest.approx([0.9, 0.04, None, 0.06, 0.06])
    assert holm([0.6, 0.7]) == [1.0, 1.0]


# ---- groups ------------------------------------------------------------------------------------------------


def member(seed: int = 0, labels: dict[str, str] | None = None, **values: Any) -> ComparedRun:
    named = {key.replace("__", "."): v for key, v in values.items()}
    summary: Any = SimpleNamespace(seed=seed)
    return ComparedRun(RunFolder(Path("x")), summary, {}, named, labels, WasTested.of(seed, named, {}))


def names(*members: ComparedRun) -> list[str]:
    return [found.name for found in group(members)]


def test_runs_that_differ_in_the_seed_only_are_a_group() -> None:
    found = group([member(0, rounds=3), member(1, rounds=3), member(0, rounds=4)])
    assert [len(part.members) for part in found] == [2, 1]
    assert [part.name for part in found] == ["rounds=3", "rounds=4"]


def test_the_algorithm_names_groups_before_other_keys() -> None:
    runs = [
        member(algorithm__name=name, algorithm__lr=lr, rounds=rounds)
        for name, lr, rounds in [("a", 1, 1), ("a", 2, 2), ("b", 1, 3)]
    ]
    assert names(*runs) == ["a, lr=1", "a, lr=2", "b, lr=1"]


def test_versions_of_a_plug_in_are_named_by_the_first_digits_of_their_hashes() -> None:
    parts = group([member(plugins=[{"name": "method", "sha256": digit * 64}]) for digit in "ab"])
    assert [part.labels for part in parts] == [{"plugins": f"method@{digit * 8}"} for digit in "ab"]


def test_labels_of_a_sweep_name_its_groups() -> None:
    runs = [
        member(labels={"algorithm": "mine"}, algorithm__lr=1),
        member(labels={"algorithm": "his"}, algorithm__lr=2),
    ]
    assert names(*runs) == ["mine", "his"]
    same = [member(labels={"a": "x"}, lr=1), member(labels={"b": "x"}, lr=2)]  # of two sweeps
    assert names(*same) == ["lr=1", "lr=2"]


def test_a_null_is_no_difference_from_a_key_that_another_version_does_not_have(make_folder: MakeFolder) -> None:
    old, new = make_folder("old"), make_folder("new")
    new.run_file.write_text(new.run_file.read_text() + "later: null\n")
    assert [len(part.members) for part in group([ComparedRun.of(old, None), ComparedRun.of(new, None)])] == [2]


def test_a_null_differs_from_a_value_beside_a_method_without_the_key() -> None:
    runs = [
        member(algorithm__name="mapl", algorithm__message_budget=None),
        member(algorithm__name="mapl", algorithm__message_budget=1000),
        member(algorithm__name="dpsgd"),
    ]
    assert names(*runs) == ["mapl, message_budget=–", "mapl, message_budget=1000", "dpsgd, message_budget=–"]


def test_long_values_that_begin_alike_get_different_names() -> None:
    paths = [f"/scratch/users/alice/experiments/patients_{letter}.csv" for letter in "ab"]
    assert names(*(member(data__path=path) for path in paths)) == [f"path={path}" for path in paths]


def test_an_empty_mapping_sets_no_runs_apart() -> None:
    files: list[dict[str, Any]] = [{"seed": 1, "hosts": {}}, {"seed": 1}, {"seed": 1, "hosts": {"a": {"port": 1}}}]
    runs = [dict(flatten(file)) for file in files]
    assert runs == [{"seed": 1}, {"seed": 1}, {"seed": 1, "hosts.a.port": 1}]
    assert varied(runs[:2]) == {}
    assert varied(runs) == {"hosts.a.port": [None, None, 1]}


def test_parameters_of_one_method_do_not_differ_from_their_absence_in_another() -> None:
    runs = [
        {"algorithm.name": "mapl", "algorithm.warmup": 3, "algorithm.lr": 0.1, "rounds": 3},
        {"algorithm.name": "mapl", "algorithm.warmup": 3, "algorithm.lr": 0.2, "rounds": 3},
        {"algorithm.name": "local", "algorithm.lr": 0.1, "metrics": [], "rounds": 3},
    ]
    assert varied(runs) == {
        "algorithm.name": ["mapl", "mapl", "local"],
        "algorithm.lr": [0.1, 0.2, 0.1],
        "metrics": [None, None, []],
    }


def test_a_baseline_is_a_name_or_labels() -> None:
    groups = group([member(algorithm__name=name, algorithm__lr=lr) for name in "ab" for lr in (1, 2)])
    assert find_baseline(groups, None).name == "a, lr=1"
    for text in ("b, lr=2", "b,2", "lr=2,b", "algorithm.lr=2, algorithm.name=b"):
        assert find_baseline(groups, text).name == "b, lr=2"
    with pytest.raises(CompareError, match=r"--baseline b: means 2 groups; the groups are: a, lr=1; "):
        find_baseline(groups, "b")
    with pytest.raises(CompareError, match=r"no such group; .*; did you mean 'a, lr=2'"):
        find_baseline(groups, "a, lr=3")


# ---- curves ------------------------------------------------------------------------------------------------

RECORDS = [
    record(0, 0, 0.1, 1.0),
    record(0, 1, None, 1.0),
    record(0, 2, 0.5, 1.0),
    record(1, 0, 0.3, 2.0),
    record(1, 1, 0.4, 3.0, elapsed=5.0),
    record(1, 2, 0.7, 2.0, elapsed=7.0),
]


def test_a_curve_has_the_last_accuracies_the_bytes_and_the_slowest_peers_time(make_folder: MakeFolder) -> None:
    folder = make_folder()
    write_records(folder, RECORDS)
    found = curves.curves(folder, masked=False)
    points = found.rounds
    assert [(p.rounds, p.bytes_sent, p.seconds) for p in points] == [(1, 200, 2.0), (2, 400, 5.0), (3, 600, 7.0)]
    assert [p.accuracy for p in points] == pytest.approx([0.2, 0.25, 0.6])
    assert curves.at_bytes(points, 599) == pytest.approx(0.25)
    assert (curves.rounds_to(points, 0.25), curves.rounds_to(points, 0.61)) == (2, None)
    assert curves.curves(folder, masked=True).rounds[0].accuracy == 1.0


def test_a_curve_over_time_takes_each_evaluation_when_it_was_made(make_folder: MakeFolder) -> None:
    """Peer 0 is in a later round than peer 1: at 3 s its third evaluation counts, with the first one of peer 1."""
    folder = make_folder()
    write_records(folder, RECORDS)
    times = curves.curves(folder, masked=False).times
    assert [seconds for seconds, _ in times] == [2.0, 3.0, 5.0, 7.0]
    assert [accuracy for _, accuracy in times] == pytest.approx([0.2, 0.4, 0.45, 0.6])
    assert curves.at_seconds(times, 7.0) == pytest.approx(0.6)
    assert curves.at_seconds(times, 4.9) == pytest.approx(0.4)
    assert curves.at_seconds(times, 1.9) is None
    assert (curves.seconds_to(times, 0.4), curves.seconds_to(times, 0.61)) == (3.0, None)


def test_recorded_seconds_since_the_start_count_before_sums(make_folder: MakeFolder) -> None:
    folder = make_folder(peers=1)
    write_records(folder, [record(0, 0, 0.1, 1.0, elapsed=10.0), record(0, 1, 0.2, 1.0, elapsed=30.0)])
    assert [p.seconds for p in curves.curves(folder, masked=False).rounds] == [10.0, 30.0]


def test_a_record_without_its_round_is_left_out(make_folder: MakeFolder) -> None:
    folder = make_folder(peers=1)
    write_records(folder, [{"peer": 0}, record(0, 1, 0.2, 1.0)])
    assert [p.rounds for p in curves.curves(folder, masked=False).rounds] == [2]


# ---- formats -----------------------------------------------------------------------------------------------


def made_results(*labels: str) -> Results:
    lines = [
        GroupLine(
            name=label,
            labels={"algorithm_name": label},
            runs=3,
            all_runs=3,
            seeds=[0, 1, 2],
            accuracy=Statistic(0.5 + 0.1 * number, 0.01, 3),
            worst_tenth=None,
            at_bytes=None,
            at_seconds=None,
            rounds_to_target=None,
            bytes_sent=Statistic(1000.0, 0.0, 3),
            seconds=Statistic(3.0, 0.0, 3),
            metrics={},
            versus=VersusBaseline(-0.1, 3, 0.0001, 0.0002) if number else None,
        )
        for number, label in enumerate(labels)
    ]
    return Results(False, lines, labels[0], None, "t", None, None, None)


def test_latex_escapes_everything_special() -> None:
    assert latex_text(r"a_b & 5% $x #1 {y} ~ ^ \ < > |") == (
        r"a\_b \& 5\% \$x \#1 \{y\} \textasciitilde{} \textasciicircum{} \textbackslash{} $<$ $>$ $|$"
    )
    assert latex_text('é ± Δ – … 漢 \x1b "') == r"é $\pm$ $\Delta$ -- \dots{} ? ? ''"


def test_latex_is_a_booktabs_table_with_the_best_bold() -> None:
    lines = latex(page(made_results("a_b", "c&d"))).splitlines()
    begin = lines.index(r"\begin{tabular}{lrrrrrrr}")
    assert all(line.startswith("% ") for line in lines[:begin])
    head, rule, first, second = (lines[begin + at] for at in (2, 3, 4, 5))
    assert head.startswith(r"  algorithm\_name & seeds & unmasked \% & worst 10 \% & sent & time & $\Delta$ & p \\")
    assert rule == r"  \midrule"
    assert first == r"  a\_b & 3 & 50.0~$\pm$~1.0 & -- & 1.0~kB & 0:03 & baseline &  \\"
    assert second == r"  c\&d & 3 & \textbf{60.0~$\pm$~1.0} & -- & 1.0~kB & 0:03 & $-$10.0 & $<$~0.001 \\"
    assert lines[-2:] == [r"  \bottomrule", r"\end{tabular}"]


def test_markdown_escapes_cells_and_has_the_best_bold() -> None:
    lines = markdown(page(made_results("a|b", "*c*"))).splitlines()
    assert lines[1] == "| :-- | --: | --: | --: | --: | --: | --: | --: |"
    assert lines[2].startswith(r"| a\|b | 3 | 50.0 ± 1.0 |")
    assert lines[3].startswith(r"| \*c\* | 3 | **60.0 ± 1.0** |")
    assert {len(re.findall(r"(?<!\\)\|", line)) for line in lines[:4]} == {9}


def test_labels_cannot_command_a_terminal_or_end_a_line() -> None:
    for text in (
        latex(page(made_results("a\x1b[2J\nb", "c"))),
        markdown(page(made_results("a\x1b[2J\nb", "c"))),
        comma_separated(made_results("a\x1b[2J\nb", "c")),
    ):
        assert "\x1b" not in text
        assert not any(line.startswith("b") for line in text.splitlines())


def test_two_equal_bests_are_both_plain() -> None:
    results = made_results("a", "b")
    same = [GroupLine(**{**vars(line), "accuracy": Statistic(0.5, 0.0, 3)}) for line in results.lines]
    assert page(Results(**{**vars(results), "lines": same})).bold is None
