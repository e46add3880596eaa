"""`p2pfl compare` of groups of runs over seeds: their rows, columns, budgets and baselines, and sweeps."""

from __future__ import annotations

import csv
import io
import json
import re
from pathlib import Path

import numpy as np
import pytest
import yaml
from scipy import stats

from p2pfl.run_folder.folder import RunFolder
from tests.launcher_fixtures import Invoke, MakeFolder
from tests.records import record, write_records


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


def test_seconds_to_an_accuracy_are_counted(runs: list[Path], invoke: Invoke) -> None:
    outcome = invoke("compare", *runs, "--seconds-to", "60%", "--columns", "seconds")
    head, local, mapl, *_ = map(words, outcome.stdout.splitlines())
    assert head == "algorithm seconds to 60.0 %"
    assert (local, mapl) == ("local 2.0 ± 0.0 (2 of 3)", "mapl 2.0 ± 0.0")
    plain = json.loads(invoke("compare", *runs, "--seconds-to", "60%", "--json").stdout)
    assert plain["comparison"]["seconds_target"] == 0.6
    assert plain["groups"][1]["seconds_to_target"]["mean"] == 2.0


def test_runs_on_a_simulated_clock_are_a_group_of_their_own(runs: list[Path], invoke: Invoke) -> None:
    for root in runs[:3]:
        info = json.loads((root / "run.json").read_text())
        (root / "run.json").write_text(json.dumps({**info, "clock": "simulated"}))
        plain = yaml.safe_load((root / "run.yaml").read_text())
        (root / "run.yaml").write_text(yaml.safe_dump({**plain, "algorithm": {"name": "mapl"}}))
    names = [line["name"] for line in json.loads(invoke("compare", *runs, "--json").stdout)["groups"]]
    assert names == ["clock=simulated", "clock=real"]
    note = "Seconds are those of a simulated clock."
    assert note not in words(invoke("compare", *runs).stdout)
    assert note in words(invoke("compare", *runs[:3]).stdout)
    assert note in words(invoke("compare", runs[0]).stdout)  # without groups


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
    assert f"{text!r} is not an accuracy; expected a fraction above 0" in words(outcome.stderr)


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
