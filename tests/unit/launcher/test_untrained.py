"""A run without training says everywhere that it has no accuracy."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.conftest import tree
from tests.launcher_fixtures import Invoke

SAYS_SO = "no accuracy: `time.train: false` trains and evaluates nothing"


@pytest.fixture
def runs(invoke: Invoke, tmp_path: Path) -> list[Path]:
    """One run without training, and one with."""
    file = tmp_path / "run.yaml"
    file.write_text(json.dumps(tree(peers=2, rounds=1, time={"train": False})))
    found = [tmp_path / "without", tmp_path / "trained"]
    assert SAYS_SO in invoke("simulate", file, "--clock", "--run-dir", found[0]).stdout
    invoke("simulate", file, "--clock", "--run-dir", found[1], "--set", "time.train=true")
    return found


def test_summary_comparison_and_report_say_so(invoke: Invoke, runs: list[Path], tmp_path: Path) -> None:
    without, trained = (json.loads(invoke("show", run, "--json").stdout) for run in runs)
    assert without["trained"] is False
    assert without["accuracy"] is None
    assert "trained" not in trained
    assert SAYS_SO in invoke("show", runs[0]).stdout
    compared = invoke("compare", *runs).output
    assert "No accuracy: `time.train: false` trains and evaluates nothing (without)." in compared
    invoke("report", runs[0], "-o", tmp_path / "one.html")
    invoke("report", *runs, "-o", tmp_path / "two.html")
    one, two = ((tmp_path / f"{name}.html").read_text() for name in ("one", "two"))
    assert "simulated on a clock without training" in one
    assert SAYS_SO in one
    assert "trains and evaluates nothing (without)" in two


@pytest.mark.parametrize("command", ["simulate", "launch"])
def test_without_a_clock_no_folder_is_made(invoke: Invoke, tmp_path: Path, command: str) -> None:
    file, folder = tmp_path / "run.yaml", tmp_path / "run"
    file.write_text(json.dumps(tree(peers=2, rounds=1, time={"train": False})))
    outcome = invoke(command, file, "--run-dir", folder)
    assert outcome.exit_code != 0
    assert "time.train: false leaves training out" in outcome.stderr
    assert not folder.exists()
