"""`p2pfl simulate --virtual`: what it prints, and which options it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.launcher_fixtures import Invoke

MACHINE = "hosts: 3\ncores: 1\ntasks: 8\ntraining_seconds: 0.5\nevaluation_seconds: 0\n"
"""With fewer tasks than one peer needs."""


@pytest.fixture
def machine(tmp_path: Path) -> Path:
    path = tmp_path / "machine.yaml"
    path.write_text(MACHINE)
    return path


def test_predicts_as_json_and_writes_no_run(file: Path, machine: Path, tmp_path: Path, invoke: Invoke) -> None:
    found = json.loads(invoke("simulate", file, "--virtual", "--machine", machine, "--json").stdout)
    assert (found["peers"], found["hosts"], found["rounds"], found["missing"]) == (3, 3, 1, 0)
    assert found["phases"]["training"] == pytest.approx(0.5 * round(found["phases"]["training"] / 0.5))
    assert found["limits"][0]["name"] == "processes and threads of a host"
    assert found["limits"][0]["exceeded"]
    assert not (tmp_path / "runs").exists()


def test_prints_times_footprints_and_limits(file: Path, machine: Path, invoke: Invoke) -> None:
    lines = invoke("simulate", file, "--virtual", "--machine", machine, "--rounds", 2).stdout.splitlines()
    assert lines[0] == "toy: local, 3 peers on 3 hosts, 2 rounds"
    assert any(line.startswith("a round ") and "training" in line for line in lines)
    assert any(line.startswith("memory ") and " MB" in line for line in lines)
    (exceeded,) = [line for line in lines if line.endswith("EXCEEDED")]
    assert exceeded.split() == ["processes", "and", "threads", "of", "a", "host", "9", "8", "0:", "EXCEEDED"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--machine", "m.yaml"], "--machine is for --virtual"),
        (["--virtual", "--jobs", "2"], "--jobs has no effect with --virtual"),
        (["--virtual", "--ui"], "--ui has no effect with --virtual"),
        (["--virtual", "--run-dir", "x"], "--run-dir has no effect with --virtual"),
        (["--virtual", "--log-level", "debug"], "--log-level has no effect with --virtual"),
    ],
)
def test_refuses_options_that_have_no_effect(file: Path, invoke: Invoke, arguments: list[str], message: str) -> None:
    outcome = invoke("simulate", file, *arguments)
    assert outcome.exit_code == 2
    assert message in outcome.stderr


def test_mistakes_in_the_machine_are_located(file: Path, machine: Path, invoke: Invoke) -> None:
    machine.write_text("hosts: 0\n")
    outcome = invoke("simulate", file, "--virtual", "--machine", machine)
    assert outcome.exit_code == 2
    assert outcome.stderr.startswith(f"error: {machine}:1: hosts: should be")
