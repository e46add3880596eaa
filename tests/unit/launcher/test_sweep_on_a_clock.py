"""`p2pfl sweep --clock`: runs without checkpoints begin again."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest

from launcher.facts.sweep_folder import Sweep, SweepFolder, SweepRun
from launcher.sweep.jobs import Job
from tests.launcher_fixtures import MakeFolder


def test_a_run_on_a_simulated_clock_begins_again_unless_it_has_finished(
    tmp_path: Path, make_folder: MakeFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = SweepFolder(tmp_path)
    folder.write(Sweep("", "x.yaml", True, points=tuple(SweepRun(name, {"graph": name}, 0) for name in "ab")))
    (folder.root / "runs").mkdir()
    for name, results in {"a": {0: None}, "b": {}}.items():
        make_folder(f"made-{name}", results=results).root.rename(folder.run(name).root)
    folder.clear_unresumable("a")
    assert folder.state("a") == "interrupted"  # it has checkpoints
    folder.write(replace(folder.sweep, clock=True))
    command = Mock()
    monkeypatch.setattr("launcher.sweep.jobs.subprocess.Popen", command)
    monkeypatch.setattr("launcher.sweep.jobs.ProcessEnd", Mock())
    for name in "ab":
        Job(folder, name)
    again, finished = ([word for word in call.args[0][4:] if word[0] != "/"] for call in command.call_args_list)
    assert again == ["simulate", "--clock", "--run-dir", "--json"]
    assert finished == ["resume", "--json"]
    assert not folder.run("a").root.exists()
    assert folder.state("b") == "finished"
