"""Groups of runs over seeds: what sets them apart, statistics, budgets, formats."""

from __future__ import annotations

import csv
import io
import json
import math
import re
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from scipy import stats

from launcher.comparison import curves
from launcher.comparison.groups import Member, find_baseline, group, varied
from launcher.comparison.results import GroupLine, Results
from launcher.comparison.statistics import Comparison, Statistic, compare, holm, p_value
from launcher.comparison.tables import comma_separated, latex, latex_text, markdown, page
from launcher.errors import CompareError
from launcher.flat import flatten
from p2pfl.errors import RunFolderError
from p2pfl.session.run_folder import RunFolder
from tests.launcher_fixtures import Invoke, MakeFolder

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
    assert compare({1: 0.5}, {1: 0.25}, "t") == Comparison(0.25, 1, None)


def test_equal_differences_are_no_error() -> None:
    assert p_value([0.0, 0.0], "t") == 1.0
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert p_value([0.5, 0.5, 0.5], "t") == 0.0


def test_holms_correction() -> None:
    # Worked by hand: 0.01 * 4, 0.02 * 3, 0.03 * 2 (not below 0.06), 0.9 * 1.
    assert holm([0.9, 0.01, None, 0.03, 0.02]) == pytest.approx([0.9, 0.04, None, 0.06, 0.06])
    assert holm([0.6, 0.7]) == [1.0, 1.0]


# ---- groups ------------------------------------------------------------------------------------------------


def member(seed: int = 0, labels: dict[str, str] | None = None, **values: Any) -> Member:
    return Member(RunFolder(Path("x")), seed, {key.replace("__", "."): v for key, v in values.items()}, labels)


def names(*members: Member) -> list[str]:
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


def record(peer: int, t: int, accuracy: float | None, seconds: float = 1.0, **more: Any) -> dict[str, Any]:
    personal = (
        None if accuracy is None else {"accuracy": accuracy, "unmasked_accuracy": accuracy, "masked_accuracy": 1.0}
    )
    sent = {"1": {"Shared": [1, 90, 10]}}
    return {"peer": peer, "t": t, "seconds": {"total": seconds}, "sent": sent, "personal": personal, **more}


def write_records(folder: RunFolder, records: list[dict[str, Any]]) -> None:
    for files in folder.peers():
        text = "".join(json.dumps(found) + "\n" for found in records if found["peer"] == files.peer)
        files.metrics.write_text(text)


RECORDS = [
    record(0, 0, 0.1, 1.0),
    record(0, 1, None, 1.0),
    record(0, 2, 0.5, 1.0),
    record(1, 0, 0.3, 2.0),
    record(1, 1, 0.4, 3.0),
    record(1, 2, 0.7, 2.0),
]


def test_a_curve_has_the_last_accuracies_the_bytes_and_the_slowest_peers_time(make_folder: MakeFolder) -> None:
    folder = make_folder()
    write_records(folder, RECORDS)
    points = curves.curve(folder, masked=False, as_recorded=True)
    assert [(p.rounds, p.bytes_sent, p.seconds) for p in points] == [(1, 200, 2.0), (2, 400, 5.0), (3, 600, 7.0)]
    assert [p.accuracy for p in points] == pytest.approx([0.2, 0.25, 0.6])
    assert curves.at_bytes(points, 599) == pytest.approx(0.25)
    assert curves.at_seconds(points, 7.0) == pytest.approx(0.6)
    assert curves.at_seconds(points, 1.9) is None
    assert (curves.rounds_to(points, 0.25), curves.rounds_to(points, 0.61)) == (2, None)
    assert curves.curve(folder, masked=True, as_recorded=False)[0].accuracy == 1.0


def test_recorded_seconds_since_the_start_count_before_sums(make_folder: MakeFolder) -> None:
    folder = make_folder(peers=1)
    write_records(folder, [record(0, 0, 0.1, 1.0, elapsed=10.0), record(0, 1, 0.2, 1.0, elapsed=30.0)])
    assert [p.seconds for p in curves.curve(folder, masked=False, as_recorded=True)] == [10.0, 30.0]


def test_a_record_without_its_round_is_an_error(make_folder: MakeFolder) -> None:
    folder = make_folder(peers=1)
    write_records(folder, [{"peer": 0}])
    with pytest.raises(RunFolderError, match=r"metrics.jsonl: damaged: a record without 't'"):
        curves.curve(folder, masked=False, as_recorded=True)


# ---- the command -------------------------------------------------------------------------------------------


def made(make_folder: MakeFolder, name: str, seed: int, accuracy: float, algorithm: str = "local") -> RunFolder:
    result = {
        "accuracy": accuracy,
        "unmasked_accuracies": {"personal": accuracy},
        "masked_accuracies": {"personal": accuracy},
        "sent": {"1": {"Shared": [3, 300, 0]}},
        "seconds": {"total": 4.0},
        "metrics": {"f1": accuracy**2, "time": accuracy},
    }
    folder = make_folder(name, peers=1, results={0: result})
    plain = yaml.safe_load(folder.run_file.read_text())
    folder.run_file.write_text(yaml.safe_dump({**plain, "seed": seed, "algorithm": {"name": algorithm}}))
    write_records(folder, [record(0, 0, accuracy / 2), record(0, 1, accuracy)])
    return folder


@pytest.fixture
def runs(make_folder: MakeFolder) -> list[Path]:
    """Two methods, three seeds."""
    table = {"local": (0.5, 0.6, 0.7), "mapl": (0.6, 0.71, 0.79)}
    return [
        made(make_folder, f"{name}-{seed}", seed, accuracy, name).root
        for name, accuracies in table.items()
        for seed, accuracy in enumerate(accuracies)
    ]


def words(line: str) -> str:
    return " ".join(line.split())


def test_seeds_of_plain_runs_are_grouped(runs: list[Path], invoke: Invoke) -> None:
    outcome = invoke("compare", *runs, "--target", "60%")
    assert outcome.exit_code == 0
    head, local, mapl, *rest = outcome.stdout.splitlines()
    assert words(head) == (
        "algorithm seeds unmasked % worst 10 % f1 metric:time rounds to 60.0 % % at 200 B % at 2.0 s sent time Δ p"
    )
    assert words(local).startswith(
        "local 3 60.0 ± 10.0 60.0 ± 10.0 0.3667 ± 0.1201 0.6000 ± 0.1000 2.0 ± 0.0 (2 of 3) 60.0 ± 10.0 "
    )
    assert words(local).endswith("300 B 0:04 baseline")
    p = stats.ttest_rel([0.6, 0.71, 0.79], [0.5, 0.6, 0.7]).pvalue
    assert words(mapl).endswith(f"+10.0 {p:.3f}")
    text = words(" ".join(rest))
    assert "p: paired t-test, two-sided, Holm's correction for 1 comparison." in text
    assert "differ in" not in text  # but in the method, which has a column


def test_notes_name_the_keys_that_differ_and_the_groups(runs: list[Path], invoke: Invoke) -> None:
    for root in runs:
        plain = yaml.safe_load((root / "run.yaml").read_text())
        mapl = plain["algorithm"]["name"] == "mapl"
        plain["transport"] = {"deadline": 3.0 if mapl else 9.0}
        (root / "run.yaml").write_text(yaml.safe_dump(plain))
    text = words(invoke("compare", *runs).stdout)
    assert "groups differ in transport.deadline: 9.0 (local); 3.0 (mapl)" in text


def test_a_run_that_has_not_ended_does_not_count(runs: list[Path], make_folder: MakeFolder, invoke: Invoke) -> None:
    (runs[5] / "peers" / "00" / "result.json").unlink()
    (runs[5] / "peers" / "00" / "status.json").unlink()
    outcome = invoke("compare", *runs)
    assert outcome.exit_code == 1
    assert words(outcome.stdout.splitlines()[2]).startswith("mapl 2 of 3 65.5 ± 7.8")


def test_json_has_runs_and_groups(runs: list[Path], invoke: Invoke) -> None:
    outcome = invoke("compare", *runs, "--format", "json", "--baseline", "mapl", "--test", "wilcoxon")
    plain = json.loads(outcome.stdout)
    assert invoke("compare", *runs, "--json", "--baseline", "mapl", "--test", "wilcoxon").stdout == outcome.stdout
    assert len(plain["runs"]) == 6
    assert [line["name"] for line in plain["groups"]] == ["local", "mapl"]
    assert plain["groups"][0]["versus"] == {
        "difference": pytest.approx(-0.1),
        "n": 3,
        "p": pytest.approx(0.25),
        "adjusted": pytest.approx(0.25),
    }
    assert plain["groups"][1]["versus"] is None
    assert plain["comparison"]["differ"] == {
        "algorithm.name": [{"value": name, "groups": [name]} for name in ("local", "mapl")]
    }


def test_csv_has_plain_numbers(runs: list[Path], invoke: Invoke) -> None:
    rows = list(csv.DictReader(io.StringIO(invoke("compare", *runs, "--format", "csv").stdout)))
    assert [row["algorithm.name"] for row in rows] == ["local", "mapl"]
    assert float(rows[1]["accuracy_mean"]) == pytest.approx(0.7)
    assert float(rows[0]["accuracy_std"]) == pytest.approx(0.1)
    assert rows[0]["seeds"] == "0 1 2"
    assert rows[0]["p"] == ""


def test_budgets_can_be_given(runs: list[Path], invoke: Invoke) -> None:
    plain = json.loads(invoke("compare", *runs, "--json", "--at-bytes", 150, "--at-seconds", 0.5).stdout)
    assert plain["groups"][0]["at_bytes"]["mean"] == pytest.approx(0.3)
    assert plain["groups"][0]["at_seconds"] is None


@pytest.mark.parametrize("text", ["0", "1.5", "150%", "high", "-1"])
def test_a_target_is_a_fraction(runs: list[Path], invoke: Invoke, text: str) -> None:
    outcome = invoke("compare", *runs, f"--target={text}")
    assert outcome.exit_code == 2
    assert f"{text!r} is no accuracy; expected a fraction above 0" in words(outcome.stderr)


def test_columns_can_be_chosen(runs: list[Path], invoke: Invoke) -> None:
    outcome = invoke("compare", *runs, "--columns", "p,accuracy", "--format", "markdown")
    head, _, local, mapl, *rest = outcome.stdout.splitlines()
    assert head == "| algorithm | p | unmasked % |"
    assert local == "| local |  | 60.0 ± 10.0 |"
    assert re.fullmatch(r"\| mapl \| 0\.\d+ \| \*\*70.0 ± 9.5\*\* \|", mapl)
    assert not any("worst" in line or "bytes" in line for line in rest)
    wrong = invoke("compare", *runs, "--columns", "acuracy")
    assert wrong.exit_code == 1
    assert "unknown column 'acuracy'; known: seeds, accuracy, worst, f1, metric:time, rounds" in words(wrong.stderr)
    assert "did you mean 'accuracy'?" in words(wrong.stderr)
    for form in ("csv", "json"):
        ignored = invoke("compare", *runs, "--columns", "accuracy", "--format", form)
        assert (ignored.exit_code, "csv and json have all columns" in ignored.stderr) == (2, True)


def test_metrics_of_the_run_files_are_columns_and_can_be_tested(runs: list[Path], invoke: Invoke) -> None:
    mapl = [accuracy**2 for accuracy in (0.6, 0.71, 0.79)]
    local = [accuracy**2 for accuracy in (0.5, 0.6, 0.7)]
    head, *_, row = invoke("compare", *runs, "--format", "csv", "--metric", "f1").stdout.splitlines()
    found = dict(zip(head.split(","), row.split(","), strict=True))
    assert float(found["f1_mean"]) == pytest.approx(np.mean(mapl))
    assert float(found["f1_std"]) == pytest.approx(np.std(mapl, ddof=1))
    assert float(found["difference"]) == pytest.approx(np.mean(mapl) - np.mean(local))
    assert float(found["p"]) == pytest.approx(stats.ttest_rel(mapl, local).pvalue)
    table = invoke("compare", *runs, "--metric", "f1").stdout
    assert words(table.splitlines()[0]).startswith("algorithm seeds unmasked % worst 10 % f1 metric:time % at")
    assert f" {np.mean(mapl):.4f} ± {np.std(mapl, ddof=1):.4f} " in table
    assert f" {np.mean(mapl) - np.mean(local):+.4f} " in table
    assert "Δ: difference in f1 against local" in words(table)
    plain = json.loads(invoke("compare", *runs, "--json").stdout)
    assert [group["metrics"]["f1"]["n"] for group in plain["groups"]] == [3, 3]
    masked = invoke("compare", *runs, "--metric", "f1", "--masked")
    assert (masked.exit_code, "no run has metrics; they are recorded for" in words(masked.stderr)) == (1, True)
    wrong = invoke("compare", *runs, "--metric", "f2")
    assert (wrong.exit_code, wrong.stderr) == (1, "error: unknown metric 'f2'; known: f1, time\n")


def test_an_unknown_baseline_exits_with_1(runs: list[Path], invoke: Invoke) -> None:
    outcome = invoke("compare", *runs, "--baseline", "mapel")
    assert outcome.exit_code == 1
    assert "--baseline mapel: no such group; the groups are: local; mapl; did you mean 'mapl'?" in outcome.stderr


def test_single_runs_name_every_key_that_differs(make_folder: MakeFolder, invoke: Invoke) -> None:
    one, two = made(make_folder, "one", 0, 0.5), made(make_folder, "two", 0, 0.6)
    plain = yaml.safe_load(two.run_file.read_text())
    two.run_file.write_text(yaml.safe_dump({**plain, "transport": {"deadline": 3.0}}))
    outcome = invoke("compare", one.root, two.root)
    assert outcome.stdout.splitlines()[0].startswith("run ")
    assert outcome.stderr == "runs differ in transport.deadline: –; 3.0\n"


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
            versus=Comparison(-0.1, 3, 0.0001, 0.0002) if number else None,
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


def test_a_sweep_stands_for_its_runs(make_folder: MakeFolder, tmp_path: Path, invoke: Invoke) -> None:
    points = [{"name": f"x-seed={seed}", "labels": {"algorithm": "x"}, "seed": seed} for seed in (0, 1, 2)]
    plain = {"digest": "", "file": "", "simulate": True, "set": [], "grid": {"algorithm": ["x"]}, "runs": points}
    (tmp_path / "s").mkdir()
    (tmp_path / "s" / "sweep.yaml").write_text(yaml.safe_dump(plain))
    for seed in (0, 1):  # the third has not begun
        made(make_folder, f"s/runs/x-seed={seed}", seed, 0.5 + 0.1 * seed)
    outcome = invoke("compare", tmp_path / "s")
    assert outcome.exit_code == 0
    assert words(outcome.stdout.splitlines()[0]) == "algorithm seeds unmasked % worst 10 % f1 metric:time sent time"
    assert (
        words(outcome.stdout.splitlines()[1])
        == "x 2 55.0 ± 7.1 55.0 ± 7.1 0.3050 ± 0.0778 0.5500 ± 0.0707 300 B 0:04"
    )


def test_a_sweep_in_which_nothing_has_begun_exits_with_1(tmp_path: Path, invoke: Invoke) -> None:
    plain = {"digest": "", "file": "", "simulate": True, "set": [], "grid": {}, "runs": []}
    (tmp_path / "sweep.yaml").write_text(yaml.safe_dump(plain))
    outcome = invoke("compare", tmp_path)
    assert outcome.exit_code == 1
    assert outcome.stderr == f"no run of {tmp_path} has begun\n"
