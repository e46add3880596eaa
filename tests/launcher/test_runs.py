"""Which process is a peer; list and stop."""

from __future__ import annotations

import json
import os
from pathlib import Path

import psutil
import pytest

from launcher.processes import how_it_ended, living
from launcher.runs import find_runs, stop
from p2pfl.runfolder import Status


def test_a_peer_is_known_by_its_title_not_by_its_number(make_folder, make_process):
    folder, other = make_folder("one"), make_folder("other")
    process = make_process(folder, 0)
    found = living(folder, 0)
    assert found is not None
    assert found.pid == process.pid
    # This very process has a living number, but is no peer.
    folder.peer(1).write_status(Status(1, os.getpid(), "training"))
    assert living(folder, 1) is None
    # The same peer of another run, whose folder names that number.
    other.peer(0).write_status(Status(0, process.pid, "training"))
    assert living(other, 0) is None
    process.kill()
    process.wait()
    assert living(folder, 0) is None


def test_a_peer_without_status_does_not_live(make_folder):
    assert living(make_folder(results={0: None}), 0) is None


@pytest.mark.parametrize(
    ("changes", "code", "ended"),
    [
        ({}, 0, "finished"),
        ({}, None, "finished"),
        ({"phase": "stopped"}, 0, "stopped"),
        ({"phase": "failed", "error": "ValueError: nan\nmore"}, 1, "failed: ValueError: nan"),
        ({"phase": "failed"}, 1, "failed: no reason given"),
        ({}, -9, "killed by SIGKILL"),
        ({}, 3, "exit code 3"),
        (None, None, "never started"),
    ],
)
def test_how_it_ended(make_folder, changes, code, ended):
    assert how_it_ended(make_folder(results={0: changes}).peer(0), code) == ended


@pytest.mark.parametrize("result", [None, b""])
def test_a_peer_without_a_result_has_not_finished(make_folder, result):
    place = make_folder().peer(0)
    path = place.root / "result.json"
    path.unlink() if result is None else path.write_bytes(result)
    assert place.status().phase == "finished"
    assert how_it_ended(place) == "died"


def test_a_peer_that_vanished_has_died(make_folder):
    place = make_folder(results={0: None}).peer(0)
    place.write_status(Status(0, 1, "waiting"))
    assert how_it_ended(place) == "died"
    place.write_status(Status(0, 1, "failed", error="no such dataset"))
    assert how_it_ended(place, 1) == "failed: no such dataset"


def test_list(make_folder, make_process, tmp_path, invoke):
    make_folder("finished", results={0: {"accuracy": 0.5}, 1: {"accuracy": 0.75}})
    make_folder("stopped", results={0: {"phase": "stopped"}})
    make_folder("failed", results={0: {"phase": "failed"}, 1: {"phase": "stopped"}})
    make_folder("died", results={0: None, 1: {"phase": "stopped"}})
    make_process(make_folder("running", results={0: None}), 0)
    (tmp_path / "something else").mkdir()
    runs = {os.path.basename(line.run): line for line in find_runs(tmp_path)}
    assert {name: line.state for name, line in runs.items()} == {name: name for name in runs}
    assert len(runs) == 5
    assert runs["running"].alive == 1
    assert runs["finished"].accuracy == 0.625
    assert json.loads(invoke("list", tmp_path, "--json").stdout)[0]["rounds"] == 3
    text = invoke("list", tmp_path).stdout
    assert "running (1 of 2 peers)" in text
    assert "62.5" in text


def test_before_the_first_run_there_are_none(tmp_path, monkeypatch, invoke):
    monkeypatch.chdir(tmp_path)
    assert (invoke("list").stdout, invoke("list", "--json").stdout) == ("no runs yet in runs\n", "[]\n")
    assert invoke("list").exit_code == 0
    assert invoke("list", "runs").exit_code == 1  # who names a folder means one that is there
    (tmp_path / "runs").mkdir()
    assert invoke("list", "runs").stdout == "no runs yet in runs\n"


def test_stop_ends_those_that_live(make_folder, make_process, invoke):
    folder = make_folder()
    process = make_process(folder, 1)
    folder.peer(1).clear_result()
    outcome = invoke("stop", folder.root)
    assert outcome.stdout == "peer 1: died\n"  # this one knows nothing of checkpoints
    assert outcome.exit_code == 0
    assert not psutil.pid_exists(process.pid)
    assert invoke("stop", folder.root).stdout == "no peer of this run is running\n"


def test_stop_has_a_bound_and_kill_has_none_to_wait_for(make_folder, make_process, invoke):
    folder = make_folder()
    process = make_process(folder, 0, ignore_sigterm=True)
    (stubborn,) = stop(folder, kill=False, patience=0.1)
    assert stubborn.ended is None
    outcome = invoke("stop", folder.root, "--kill")
    assert outcome.stdout == "peer 0: killed by SIGKILL\n"
    assert not psutil.pid_exists(process.pid)


def test_a_damaged_run_does_not_hide_the_others(tmp_path: Path) -> None:
    for name, about in (("damaged", "{"), ("foreign", "{}")):
        (tmp_path / name / "peers").mkdir(parents=True)
        (tmp_path / name / "run.yaml").write_text("name: foreign\npeers: 2\nrounds: 3\nalgorithm: local\n")
        (tmp_path / name / "run.json").write_text(about)
    assert {Path(line.run).name: line.state for line in find_runs(tmp_path)} == {
        "damaged": "unreadable",
        "foreign": "unreadable",
    }
