"""Attacks over sockets: the bits of `simulate`, also if attackers and their neighbors are killed."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from p2pfl.adversaries import ADVERSARIES
from p2pfl.run_file.load import load
from p2pfl.run_folder.folder import RunFolder
from p2pfl.simulation.simulate import simulate
from tests.conftest import tree
from tests.fast_python.fixture import FastPython
from tests.simulation.test_attacks import OPTIONS

EL_LOCAL = {"name": "el-local", "receivers": 2}
MAPL = {"name": "mapl", "warmup": 1, "batch": 16, "lr": 0.01, "projector_hidden": 16}
BY_CLASS = ("prototype-swap", "random-prototypes", "head-swap")


def alone(name: str) -> Any:
    """A run in which two of five peers attack, over another graph in each round, and every peer is killed once."""
    method = {"algorithm": MAPL} if name in BY_CLASS else {"algorithm": {"name": "fedavg", "batch": 16}}
    graph = "complete" if name in BY_CLASS else EL_LOCAL
    attacks = [{"peers": [1, 3], "name": name, **OPTIONS.get(name, {})}]
    kills = [{"peer": peer, "round": 1 + peer % 3} for peer in range(5)]
    settings = {**method, "graph": graph, "adversaries": attacks, "chaos": {"kill": kills, "seed": 1}}
    return pytest.param(settings, marks=pytest.mark.slow, id=name)


TOGETHER = {
    "algorithm": {"name": "dpsgd", "batch": 16, "local_steps": 2},
    "graph": EL_LOCAL,
    "joins_at": {4: 1},
    "adversaries": [
        {"peers": [1, 3], "name": "equivocate", "attacks": ["alie", "dissensus", "sign-flip"]},
        {"peers": [3], "name": "label-flip"},
        {"peers": [4], "name": "free-rider", "from": 2},
    ],
    "chaos": {"kill": [{"peer": 1, "round": 2}, {"peer": 2, "round": 3}], "seed": 1},
}
"""Rushing attackers, of which one is killed, and one of their honest neighbors; a late joiner; poison; memory."""


@pytest.mark.parametrize(
    "settings", [pytest.param(TOGETHER, id="together"), *(alone(name) for name in ADVERSARIES if name != "none")]
)
def test_peers_that_are_killed_end_with_the_bits_of_simulate(
    settings: dict[str, Any], tmp_path: Path, fast_python: FastPython
) -> None:
    file = tmp_path / "attacked.yaml"
    file.write_text(yaml.safe_dump(tree(peers=5, rounds=5, models="tiny-cnn", checkpoint_every=2, **settings)))
    command = [fast_python.executable, "-P", "-m", "launcher.cli", "launch", file.name, "--run-dir", "run"]
    done = subprocess.run(command, cwd=tmp_path, env=os.environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    folder = RunFolder(tmp_path / "run")
    killed = {kill["peer"] for kill in settings["chaos"]["kill"]}
    assert {peer for peer in range(5) if list(folder.peer(peer).injected())} == killed
    found = [folder.peer(peer).result() for peer in range(5)]
    expected = simulate(load(file))
    assert [(r.digest, r.sent, r.received, r.missing) for r in found if r is not None] == [
        (r.digest, r.sent, r.received, r.missing) for r in expected
    ]
