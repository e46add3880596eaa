"""Peers without a launcher: separate folders, nothing in common but the run file."""

from __future__ import annotations

import os
import random
import re
import socket
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from rich.console import Console

from launcher.backends.launch import resume
from launcher.errors import LaunchError
from launcher.facts.runs import find_runs
from p2pfl.errors import RunFolderError
from p2pfl.run_folder.folder import RunFolder, Status
from p2pfl.run_folder.peer_log import LogSettings
from p2pfl.simulation.simulate import simulate
from peers import runtime
from peers.__main__ import main
from peers.standalone import open_or_create


@pytest.fixture
def write(make_run: Any, tmp_path: Path) -> Any:
    def write(**changes: Any) -> Path:
        file = tmp_path / "mesh.yaml"
        file.write_text(make_run(**changes).to_yaml())
        return file

    return write


def free_network() -> tuple[str, int]:
    """Return unused loopback addresses, as if each peer had its own host, and a port."""
    network = f"127.{random.randrange(1, 255)}.{random.randrange(256)}"
    with socket.create_server((f"{network}.1", 0)) as server:
        return network, min(server.getsockname()[1], 60_000)


@pytest.mark.parametrize("name", ["dpsgd", "mapl"])
def test_peers_with_only_the_run_file_in_common_match_simulate(
    name: str, write: Any, make_run: Any, warm: Any, tmp_path: Path, monkeypatch: Any, until: Any
) -> None:
    network, port = free_network()
    there = {"port": port, "address": f"tcp://{network}.{{id}}:{{port}}"}
    run = make_run(rounds=4, algorithm={"name": name, "batch": 16}, transport=there)
    file = write(rounds=4, algorithm={"name": name, "batch": 16}, transport=there)
    folders: dict[int, RunFolder] = {}
    pids: dict[int, int] = {}
    for me in (2, 0, 3, 1):  # each waits for those that have not started
        monkeypatch.setenv("P2PFL_HOST", f"{network}.{me}")
        folders[me], _ = open_or_create(file, tmp_path / f"host{me}" / "run", me)
        pids |= warm.start(folders[me], [me])
        until(lambda me=me: (status := folders[me].peer(me).status()) and status.phase != "starting")
    assert warm.wait(pids) == dict.fromkeys(range(4), 0)
    for me, calm in enumerate(simulate(run)):
        result = folders[me].peer(me).result()
        assert result is not None
        assert (result.digest, result.sent, result.received) == (calm.digest, calm.sent, calm.received)
        assert [files.peer for files in folders[me].peers()] == [me]
        assert not list(folders[me].addresses.iterdir())
        listening = rf"listens at tcp://{network}.{me}:{port + me}\s+\|"
        assert re.search(listening, folders[me].peer(me).log.read_text())


def test_creates_a_folder_once_and_resumes_in_it(write: Any, tmp_path: Path) -> None:
    file, root = write(rounds=4), tmp_path / "run"
    folder, run = open_or_create(file, root, 2)
    about = folder.info
    folder.peer(2).log.write_text("what it has done\n")
    assert about["id"] == open_or_create(file, tmp_path / "other", 0)[0].info["id"]
    assert (about["config_hash"], folder.run_file.read_text()) == (run.config_hash(), run.to_yaml())

    file = write(rounds=4, transport={"give_up": 7}, slots=1)  # keys that do not affect the result may change
    again, _ = open_or_create(file, root, 2)
    assert again.info == about
    assert "give_up: 7" in again.run_file.read_text()
    assert again.peer(2).log.read_text() == "what it has done\n"


def test_completes_a_partly_created_folder(write: Any, tmp_path: Path) -> None:
    file, root = write(), tmp_path / "run"
    RunFolder.create(root, [1])
    folder, _ = open_or_create(file, root, 1)
    assert RunFolder.open(root).info == folder.info


def test_does_not_touch_the_folder_of_another_run(write: Any, tmp_path: Path) -> None:
    root = tmp_path / "run"
    open_or_create(write(rounds=4), root, 0)
    before = (root / "run.yaml").read_text()
    file = write(rounds=5, seed=99)
    with pytest.raises(
        RunFolderError, match=r"run: contains a run that differs from .*mesh.yaml in seed, rounds; use"
    ):
        open_or_create(file, root, 0)
    with pytest.raises(RunFolderError, match=r"run: contains run [0-9a-f]{16}, not 0123456789abcdef; use another"):
        open_or_create(write(rounds=4), root, 0, "0123456789abcdef")
    assert (root / "run.yaml").read_text() == before


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--me", "4"], "no peer 4; the 4 peers are 0 to 3"),
        (["--run-id", "mine"], "run id 'mine' should be 16 hex digits"),
        (["--file", "{tmp}/nothing.yaml"], "nothing.yaml: cannot be read: No such file"),
        (["--run", "{tmp}/mesh.yaml/run"], "run: cannot be created: Not a directory"),
    ],
)
def test_reports_wrong_arguments(write: Any, tmp_path: Path, arguments: list[str], expected: str) -> None:
    given = ["--file", str(write()), "--run", str(tmp_path / "run"), "--me", "1", *arguments]
    outcome = CliRunner().invoke(main, [argument.format(tmp=tmp_path) for argument in given])
    assert outcome.exit_code == 1
    assert expected in outcome.output
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("option", [("--set", "rounds=9"), ("--run-id", "0" * 16)])
def test_options_of_a_new_run_need_a_run_file(write: Any, tmp_path: Path, option: tuple[str, str]) -> None:
    open_or_create(write(), tmp_path / "run", 1)
    outcome = CliRunner().invoke(main, ["--run", str(tmp_path / "run"), "--me", "1", *option])
    assert outcome.exit_code == 2
    assert "--set and --run-id need --file" in outcome.output


def test_takes_options_from_the_environment(write: Any, tmp_path: Path, monkeypatch: Any) -> None:
    ran: list[tuple[Path, int, str, int | None]] = []

    def run_peer(folder: RunFolder, me: int, run: Any, **_: Any) -> int:
        ran.append((folder.root, me, folder.info["id"], run.file.transport.port))
        return 0

    monkeypatch.setattr(runtime, "run_peer", run_peer)
    given = {"RUN": tmp_path / "run", "ME": 3, "FILE": write(), "RUN_ID": "0123456789abcdef", "PORT": 5700}
    environment = {f"P2PFL_{name}": str(value) for name, value in given.items()}
    monkeypatch.setattr(os, "environ", {**os.environ, **environment})
    outcome = CliRunner().invoke(main, [])
    assert outcome.exit_code == 0, outcome.output
    assert ran == [(tmp_path / "run", 3, "0123456789abcdef", 5700)]


def test_overrides_a_key_of_the_run_file(write: Any, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(runtime, "run_peer", lambda folder, me, run, **_: run.rounds)
    given = ["--file", str(write(rounds=4)), "--run", str(tmp_path / "run"), "--me", "1", "--set", "rounds=9"]
    assert CliRunner().invoke(main, given).exit_code == 9


def test_log_options_are_kept_in_run_json(write: Any, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(runtime, "run_peer", lambda folder, me, run, **_: 0)
    given = ["--file", str(write()), "--run", str(tmp_path / "run"), "--me", "1"]
    options = ["--log-format", "json", "--log-level", "warning", "--log-level", "1=debug", "--log-size", "2"]
    assert CliRunner().invoke(main, [*given, *options]).exit_code == 0
    settings = LogSettings.of(RunFolder.open(tmp_path / "run").info, 1)
    assert settings == LogSettings("json", "debug", 2 << 20)
    refused = CliRunner().invoke(main, [*given, "--log-level", "4=info"])
    assert refused.exit_code == 2
    assert "--log-level 4=info: should be LEVEL or PEER=LEVEL" in refused.output
    refused = CliRunner().invoke(main, [*given[2:], "--log-size", "2"])
    assert "need --file" in refused.output


def test_lists_and_resumes_folders_of_single_peers(write: Any, warm: Any, tmp_path: Path) -> None:
    partition = {"partition": "iid"}
    folder, _ = open_or_create(write(peers=1, data=partition), tmp_path / "runs" / "alone", 0)
    assert warm.run(folder) == {0: 0}
    (line,) = find_runs(tmp_path / "runs")
    assert (line.state, line.peers, line.rounds_done) == ("finished", 1, line.rounds)
    of_four, _ = open_or_create(write(), tmp_path / "runs" / "third", 3)
    of_four.peer(3).write_status(Status(3, 1, "stopped", rounds_done=1))
    line = list(find_runs(tmp_path / "runs"))[-1]
    assert (line.state, line.peers, line.rounds_done) == ("stopped", 1, 1)
    with pytest.raises(LaunchError, match=r"third has no peer 0-1; it has 3"):
        resume(of_four, [0, 1], Console())
