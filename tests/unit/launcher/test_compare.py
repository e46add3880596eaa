"""`p2pfl compare`."""

from __future__ import annotations

import io
import json
from dataclasses import replace

import pytest
import yaml
from rich.console import Console

from launcher.comparison.groups import ComparedRun
from launcher.comparison.lines import lines, table
from launcher.errors import CompareError
from launcher.facts.summary import summarize
from p2pfl.run_folder.folder import RunFolder
from tests.launcher_fixtures import Invoke, MakeFolder


def peers(accuracy: float, **more: object) -> dict[int, dict[str, object]]:
    sent = {"1": {"Shared": [3, 3000, 90]}}
    return {
        peer: {
            "accuracy": accuracy - 0.1 * peer,
            "unmasked_accuracies": {"personal": accuracy - 0.1 * peer},
            "masked_accuracies": {"personal": accuracy + 0.1 - 0.1 * peer},
            "best": 0.9,
            "sent": sent,
            "seconds": {"total": 4.0 + peer},
            **more,
        }
        for peer in range(2)
    }


def change(folder: RunFolder, **keys: object) -> None:
    plain = yaml.safe_load(folder.run_file.read_text())
    folder.run_file.write_text(yaml.safe_dump({**plain, **keys}))


def test_prints_one_run_per_row(make_folder: MakeFolder, invoke: Invoke) -> None:
    one, two = (
        make_folder("one", results=peers(0.8)),
        make_folder("two", results=peers(0.6, extra_metrics={"peak": 0.7})),
    )
    change(two, algorithm={"name": "dfml"})
    outcome = invoke("compare", one.root, two.root)
    assert outcome.exit_code == 0
    head, *rows = outcome.stdout.splitlines()
    assert " ".join(head.split()) == "run algorithm peers unmasked % worst 10 % best % masked % messages sent time"
    assert " ".join(rows[0].split()) == "one local 2 75.0 ± 5.0 70.0 90.0 ± 0.0 85.0 ± 5.0 6 6.2 kB 0:05"
    assert " ".join(rows[1].split()) == "two dfml 2 55.0 ± 5.0 50.0 90.0 ± 0.0 65.0 ± 5.0 6 6.2 kB 0:05"
    assert [row.split() for row in rows[2:]] == [[], ["%", "two"], ["peak", "70.0", "±", "0.0"]]
    assert outcome.stderr == ""


def test_accuracies_that_masking_does_not_change_are_shown_once(make_folder: MakeFolder, invoke: Invoke) -> None:
    same = {p: {**found, "masked_accuracies": found["unmasked_accuracies"]} for p, found in peers(0.8).items()}
    folders = [make_folder("one", results=same), make_folder("two", results=same)]
    head = invoke("compare", *[folder.root for folder in folders]).stdout.splitlines()[0]
    assert " ".join(head.split()) == "run algorithm peers unmasked % worst 10 % best % messages sent time"


def test_warns_about_other_differences(make_folder: MakeFolder, invoke: Invoke) -> None:
    one, two = make_folder("one", results=peers(0.8)), make_folder("two", results=peers(0.6))
    change(two, seed=7, data={"dataset": {"name": "mnist"}})
    outcome = invoke("compare", one.root, two.root)
    assert outcome.exit_code == 0
    assert "warning: runs differ in seed: 0; 7" in outcome.stderr
    assert "data.dataset.name: " in outcome.stderr
    plain = json.loads(invoke("compare", "--json", one.root, two.root).stdout)
    assert plain["different"] == {"seed": [0, 7], "data.dataset.name": ["digits", "mnist"]}
    assert [line["accuracy"]["mean"] for line in plain["runs"]] == pytest.approx([0.75, 0.55])


def test_warns_about_other_optimizers(make_folder: MakeFolder, invoke: Invoke) -> None:
    one, two, three = (make_folder(name, results=peers(0.8)) for name in ("one", "two", "three"))
    sgd = {"optimizer": "sgd", "batch": 64, "lr": 0.01, "momentum": 0.9, "betas": [0.9, 0.999], "warmup": 3}
    change(one, algorithm={"name": "local", **sgd})
    change(two, masked_test=False, algorithm={"name": "l2c", **sgd, "momentum": 0.0, "local_epochs": 5, "warmup": 7})
    change(three, algorithm={"name": "mapl", **sgd, "optimizer": "adam", "betas": [0.5, 0.999]})
    plain = json.loads(invoke("compare", "--json", one.root, two.root, three.root).stdout)
    assert plain["different"] == {
        "algorithm.local_epochs": [None, 5, None],
        "algorithm.optimizer": ["sgd", "sgd", "adam"],
        "algorithm.momentum": [0.9, 0.0, None],
        "algorithm.betas": [None, None, [0.5, 0.999]],
    }
    assert "warning: runs differ in algorithm.momentum: 0.9; 0.0\n" in invoke("compare", one.root, two.root).stderr


def test_keeps_the_time_measured_by_the_launcher(make_folder: MakeFolder, invoke: Invoke) -> None:
    folder = make_folder(results=peers(0.8))
    summarize(folder, seconds=77.0)
    for _ in range(2):
        assert invoke("compare", folder.root).stdout.splitlines()[1].endswith("1:17")


def test_leaves_the_summary_of_the_launcher_as_it_is(make_folder: MakeFolder, invoke: Invoke) -> None:
    folder = make_folder(results={**peers(0.8), 1: None})
    summarize(folder, {1: -9}, seconds=77.0)  # only the launcher knows of the signal
    before = folder.summary.read_bytes()
    assert b"killed by SIGKILL" in before
    invoke("compare", folder.root)
    assert folder.summary.read_bytes() == before


def test_an_unfinished_run_exits_with_1(make_folder: MakeFolder, invoke: Invoke) -> None:
    folder = make_folder(results={**peers(0.8), 1: {"phase": "failed", "error": "ValueError: nan"}})
    outcome = invoke("compare", folder.root)
    assert outcome.exit_code == 1
    assert "1 of 2" in outcome.stdout


# ---- one meaning of accuracy -------------------------------------------------------------------------------


def two_with_other_masks(make_folder: MakeFolder) -> tuple[RunFolder, RunFolder]:
    one, two = make_folder("one", results=peers(0.8)), make_folder("two", results=peers(0.6))
    change(one, masked_test=False)
    change(two, masked_test=True)
    for files in two.peers():
        result = files.result()
        assert result is not None
        files.write_result(replace(result, accuracy=result.masked_accuracies["personal"]))
    return one, two


def test_refuses_runs_that_differ_in_masked_test(make_folder: MakeFolder) -> None:
    one, two = two_with_other_masks(make_folder)
    with pytest.raises(CompareError, match="runs differ in masked_test") as caught:
        lines([ComparedRun.of(one, None), ComparedRun.of(two, None)])
    assert f"({one.root}: false; {two.root}: true)" in str(caught.value)
    assert "--masked or --unmasked" in str(caught.value)


def test_refusal_exits_with_1(make_folder: MakeFolder, invoke: Invoke) -> None:
    outcome = invoke("compare", *(folder.root for folder in two_with_other_masks(make_folder)))
    assert outcome.exit_code == 1
    assert outcome.stdout == ""
    assert "runs differ in masked_test" in outcome.stderr


@pytest.mark.parametrize(("flag", "means"), [("--masked", [0.85, 0.65]), ("--unmasked", [0.75, 0.55])])
def test_compares_the_same_accuracy_of_runs_that_differ(
    make_folder: MakeFolder, invoke: Invoke, flag: str, means: list[float]
) -> None:
    one, two = two_with_other_masks(make_folder)
    plain = json.loads(invoke("compare", "--json", flag, one.root, two.root).stdout)
    assert [line["accuracy"]["mean"] for line in plain["runs"]] == pytest.approx(means)
    best = [line["best"] is not None for line in plain["runs"]]
    assert best == ([False, True] if flag == "--masked" else [True, False])
    head = invoke("compare", flag, one.root, two.root).stdout.splitlines()[0].split()
    assert head[3] == flag.removeprefix("--")


def test_narrow_terminal_breaks_names_of_runs_but_truncates_no_number(make_folder: MakeFolder) -> None:
    name = "my-study-20261122-211401"
    output = io.StringIO()
    console = Console(width=100, file=output, highlight=False)
    console.print(table(lines([ComparedRun.of(make_folder(name, results=peers(0.8)), None)])))
    printed = output.getvalue()
    assert "…" not in printed
    head, *rows = printed.splitlines()
    assert head.split()[-3:] == ["messages", "sent", "time"]
    assert len(rows) > 1
    assert "".join(row[: row.find(" ")] for row in rows) == name
