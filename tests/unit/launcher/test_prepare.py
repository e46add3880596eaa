"""From a run file to a run folder."""

from __future__ import annotations

import json
import os
from datetime import datetime, tzinfo
from pathlib import Path

import pytest
import yaml

from launcher.prepare import LaunchRequest
from p2pfl.errors import RunFolderError
from p2pfl.run_file.load import load
from p2pfl.run_folder import new_run
from p2pfl.run_folder.folder import RunFolder
from tests.dataset_files import photo
from tests.launcher_fixtures import Invoke


def test_seed_and_rounds_take_precedence_over_set(file: Path) -> None:
    run = LaunchRequest(file, sets=["seed=1", "rounds=2", "peers=4"], seed=7, rounds=9).load()
    assert (run.seed, run.rounds, run.peers) == (7, 9, 4)
    assert LaunchRequest(file).load().rounds == 1


def test_writes_run_json(file: Path, tmp_path: Path) -> None:
    request = LaunchRequest(file, run_dir=tmp_path / "run")
    run = request.load()
    folder = request.prepare(run)
    assert folder.root == tmp_path / "run"
    assert [files.peer for files in folder.peers()] == [0, 1, 2]
    info = RunFolder.open(folder.root).info
    assert info.keys() >= {"started", "command", "host", "cores"}
    assert len(bytes.fromhex(info["id"])) == 8
    assert info["config_hash"] == run.config_hash()
    assert info["launcher_pid"] == os.getpid()
    assert info["versions"].keys() == {"python", "torch", "numpy", "pyzmq", "p2pfl-mesh"}


def test_the_run_file_in_the_folder_gives_the_same_run(file: Path, tmp_path: Path) -> None:
    request = LaunchRequest(file, sets=["algorithm.lr=0.25"], run_dir=tmp_path / "run")
    run = request.load()
    again = load(request.prepare(run).run_file)
    assert again.resolved() == run.resolved()
    assert again.config_hash() == run.config_hash()


def test_runs_have_different_ids(file: Path, tmp_path: Path) -> None:
    requests = [LaunchRequest(file, run_dir=tmp_path / name) for name in ("a", "b")]
    one, other = (request.prepare(request.load()).info["id"] for request in requests)
    assert one != other


def test_rejects_a_folder_in_use(file: Path, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    request = LaunchRequest(file, run_dir=tmp_path / "run")
    request.prepare(request.load())  # an empty folder is allowed
    with pytest.raises(RunFolderError, match="not empty"):
        request.prepare(request.load())


def test_the_default_folder_is_unique(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Noon(datetime):
        @classmethod
        def now(cls, tz: tzinfo | None = None) -> Noon:
            return cls(2026, 11, 21, 12, 0, 0)

    monkeypatch.setattr(new_run, "datetime", Noon)
    run = LaunchRequest(file).load()
    names = [LaunchRequest(file).prepare(run).root.name for _ in range(3)]
    assert names == ["toy-20261121-120000", "toy-20261121-120000-2", "toy-20261121-120000-3"]
    resolved = yaml.safe_load((tmp_path / "runs" / names[0] / "run.yaml").read_text())
    assert resolved["graph"] == {"name": "ring", "allow_disconnected": False}


def test_a_broken_link_in_the_place_of_out_is_an_error(file: Path, tmp_path: Path) -> None:
    (tmp_path / "runs").symlink_to(tmp_path / "unmounted")
    run = LaunchRequest(file).load()
    with pytest.raises(RunFolderError, match=f"{tmp_path}/runs is a broken symbolic link to {tmp_path}/unmounted"):
        LaunchRequest(file).prepare(run)


def test_names_image_files_that_are_not_read(
    tmp_path: Path, file: Path, invoke: Invoke, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("P2PFL_CACHE", str(tmp_path / "cache"))
    for name in ("cat", "dog"):
        for number in range(20):
            photo(tmp_path / "pics" / name / f"{number}.png", number)
    (tmp_path / "pics" / "dog" / "20.heic").touch()
    dataset = f"data.dataset={{name: folder, path: {tmp_path}/pics, test: 0.5, size: 8}}"
    note = f"note: {tmp_path}/pics: not read: .heic in dog (1); convert images among them to PNG or JPEG"
    for _ in range(2):  # the second time from the cache
        assert invoke("data", "show", file, "--set", dataset).stdout.splitlines()[-1] == note
    found = json.loads(invoke("data", "show", file, "--set", dataset, "--json").stdout)
    assert [f"note: {line}" for line in found["dataset"]["notes"]] == [note]
    LaunchRequest(file, sets=[dataset]).load()
    assert capsys.readouterr().err == f"{note}\n"
