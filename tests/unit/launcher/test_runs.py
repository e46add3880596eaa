"""How peers ended, and the list of runs."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest

from launcher.facts.processes import find_process, outcome
from launcher.facts.runs import find_runs
from p2pfl.run_folder.folder import Status
from tests.launcher_fixtures import Invoke, MakeFolder


def test_a_peer_without_status_has_no_process(make_folder: MakeFolder) -> None:
    assert find_process(make_folder(results={0: None}), 0) is None


@pytest.mark.parametrize(
    ("changes", "code", "ended"),
    [
        ({}, 0, "finished"),
        ({}, None, "finished"),
        ({"phase": "stopped"}, 0, "stopped"),
        ({"phase": "failed", "error": "ValueError: nan\nmore"}, 1, "failed: ValueError: nan"),
        ({"phase": "failed", "error": "peer 0: out of memory on cuda:1"}, 1, "failed: out of memory on cuda:1"),
        ({"phase": "failed"}, 1, "failed: no reason given"),
        ({}, -9, "killed by SIGKILL"),
        ({}, 3, "exit code 3"),
        (None, None, "never started"),
    ],
)
def test_describes_how_a_peer_ended(make_folder: MakeFolder, changes: Any, code: int | None, ended: str) -> None:
    assert outcome(make_folder(results={0: changes}).peer(0), code) == ended


@pytest.mark.parametrize("result", [None, b""])
def test_a_peer_without_a_valid_result_has_died(make_folder: MakeFolder, result: bytes | None) -> None:
    files = make_folder().peer(0)
    path = files.root / "result.json"
    path.unlink() if result is None else path.write_bytes(result)
    status = files.status()
    assert status is not None
    assert status.phase == "finished"
    assert outcome(files) == "died"


def test_a_peer_without_a_final_status_has_died(make_folder: MakeFolder) -> None:
    files = make_folder(results={0: None}).peer(0)
    files.write_status(Status(0, 1, "waiting"))
    assert outcome(files) == "died"
    files.write_status(Status(0, 1, "failed", error="no such dataset"))
    assert outcome(files, 1) == "failed: no such dataset"


def test_lists_runs_with_their_states(make_folder: MakeFolder, tmp_path: Path, invoke: Invoke) -> None:
    make_folder("finished", results={0: {"accuracy": 0.5}, 1: {"accuracy": 0.75}})
    make_folder("stopped", results={0: {"phase": "stopped"}})
    make_folder("failed", results={0: {"phase": "failed"}, 1: {"phase": "stopped"}})
    make_folder("died", results={0: None, 1: {"phase": "stopped"}})
    (tmp_path / "no run").mkdir()
    runs = {os.path.basename(line.run): line for line in find_runs(tmp_path)}
    assert {name: line.state for name, line in runs.items()} == {name: name for name in runs}
    assert len(runs) == 4
    assert runs["finished"].accuracy == 0.625
    assert json.loads(invoke("list", tmp_path, "--json").stdout)[0]["rounds"] == 3
    text = invoke("list", tmp_path).stdout
    assert "62.5" in text


def test_lists_nothing_before_the_first_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, invoke: Invoke) -> None:
    monkeypatch.chdir(tmp_path)
    assert (invoke("list").stdout, invoke("list", "--json").stdout) == ("no runs in runs\n", "[]\n")
    assert invoke("list").exit_code == 0
    assert invoke("list", "runs").exit_code == 1  # a folder named explicitly must exist
    (tmp_path / "runs").mkdir()
    assert invoke("list", "runs").stdout == "no runs in runs\n"


def test_lists_damaged_runs_as_unreadable(tmp_path: Path) -> None:
    for name, info in (("damaged", "{"), ("foreign", "{}")):
        (tmp_path / name / "peers").mkdir(parents=True)
        (tmp_path / name / "run.yaml").write_text("name: foreign\npeers: 2\nrounds: 3\nalgorithm: local\n")
        (tmp_path / name / "run.json").write_text(info)
    assert {Path(line.run).name: line.state for line in find_runs(tmp_path)} == {
        "damaged": "unreadable",
        "foreign": "unreadable",
    }


def test_a_folder_of_somebody_else_is_unreadable_and_hides_no_other_run(
    make_folder: MakeFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_folder("mine")
    (tmp_path / "theirs").mkdir()
    is_file = Path.is_file

    def refuse(path: Path) -> bool:
        if path.parent.name == "theirs":
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        return is_file(path)

    monkeypatch.setattr(Path, "is_file", refuse)
    assert {Path(line.run).name: line.state for line in find_runs(tmp_path)} == {
        "mine": "finished",
        "theirs": "unreadable",
    }
