"""Codecs and attacks of plug-ins over sockets: the same bits as `simulate`, also after kills."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
import yaml

from p2pfl.run_file.load import load
from p2pfl.run_folder import records
from p2pfl.run_folder.folder import RunFolder
from p2pfl.run_folder.new_run import create
from p2pfl.simulation.simulate import simulate
from tests.fast_python.fixture import FastPython
from tests.guide_pages import files

KILLS = {"kill": [{"peer": 1, "round": 2}, {"peer": 3, "round": 3}], "seed": 1}


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({"codec": {"Head": "levels", "Prototypes": "levels"}, "algorithm": "mapl"}, id="codec"),
        pytest.param(
            {"adversaries": [{"peers": [1, 3], "name": "two-faced", "from": 1}]}, id="attack", marks=pytest.mark.slow
        ),
    ],
)
def test_peers_that_are_killed_end_with_the_bits_of_simulate(
    settings: dict[str, object], tmp_path: Path, fast_python: FastPython
) -> None:
    texts = files("own-codec.md")
    (tmp_path / "my_parts.py").write_text(texts["my_parts.py"])
    tree = yaml.safe_load(texts["mine.yaml"])
    del tree["codec"], tree["adversaries"]
    tree |= {"rounds": 5, "checkpoint_every": 2, "chaos": KILLS, **settings}
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(tree))
    command = [fast_python.executable, "-P", "-m", "launcher.cli", "launch", "mine.yaml", "--run-dir", "run"]
    done = subprocess.run(command, cwd=tmp_path, env=os.environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    folder = RunFolder(tmp_path / "run")
    assert [len(list(folder.peer(peer).injected())) for peer in range(4)] == [0, 1, 0, 1]
    found = [folder.peer(peer).result() for peer in range(4)]
    run = load(tmp_path / "mine.yaml")
    simulated = create(run, tmp_path / "simulated")
    expected = simulate(run, simulated)
    assert [(r.digest, r.sent, r.received, r.missing) for r in found if r is not None] == [
        (r.digest, r.sent, r.received, 0) for r in expected
    ]
    distances = [
        [(one.peer, one.t, one.plain.get("combined")) for one in records.read(of)] for of in (folder, simulated)
    ]
    assert distances[0] == distances[1]
    assert all(combined for _, _, combined in distances[0]) == ("adversaries" in settings)
