from __future__ import annotations

import os

import pytest
import yaml

from launcher import prepare
from launcher.prepare import Order
from p2pfl.config import load
from p2pfl.errors import RunFolderError
from p2pfl.runfolder import RunFolder


def test_short_options_win_over_set(file):
    run = Order(file, sets=["seed=1", "rounds=2", "peers=4"], seed=7, rounds=9).load()
    assert (run.seed, run.rounds, run.peers) == (7, 9, 4)
    assert Order(file).load().rounds == 1


def test_the_folder_says_what_runs_in_it(file, tmp_path):
    order = Order(file, run_dir=tmp_path / "here")
    run = order.load()
    folder = order.prepare(run)
    assert folder.root == tmp_path / "here"
    assert [place.peer for place in folder.peers()] == [0, 1, 2]
    about = RunFolder.open(folder.root).about
    assert about.keys() >= {"started", "command", "host", "cores"}
    assert len(bytes.fromhex(about["id"])) == 8
    assert about["digest"] == run.digest()
    assert about["launcher_pid"] == os.getpid()
    assert about["versions"].keys() == {"python", "torch", "numpy", "pyzmq", "p2pfl-mesh"}


def test_the_run_file_in_the_folder_can_be_launched_again(file, tmp_path):
    order = Order(file, sets=["algorithm.lr=0.25"], run_dir=tmp_path / "here")
    run = order.load()
    again = load(order.prepare(run).run_file)
    assert again.resolved() == run.resolved()
    assert again.digest() == run.digest()


def test_two_runs_have_different_ids(file, tmp_path):
    orders = [Order(file, run_dir=tmp_path / name) for name in ("a", "b")]
    one, other = (order.prepare(order.load()).about["id"] for order in orders)
    assert one != other


def test_a_folder_in_use_is_refused(file, tmp_path):
    (tmp_path / "here").mkdir()
    order = Order(file, run_dir=tmp_path / "here")
    order.prepare(order.load())  # empty is fine
    with pytest.raises(RunFolderError, match="not empty"):
        order.prepare(order.load())


def test_the_default_folder_has_name_and_time_and_never_collides(file, tmp_path, monkeypatch):
    class Noon(prepare.datetime):
        @classmethod
        def now(cls):
            return cls(2026, 11, 21, 12, 0, 0)

    monkeypatch.setattr(prepare, "datetime", Noon)
    run = Order(file).load()
    names = [Order(file).prepare(run).root.name for _ in range(3)]
    assert names == ["toy-20261121-120000", "toy-20261121-120000-2", "toy-20261121-120000-3"]
    resolved = yaml.safe_load((tmp_path / "runs" / names[0] / "run.yaml").read_text())
    assert resolved["graph"] == {"name": "ring", "allow_disconnected": False}
