"""`p2pfl launch` and resumed runs, with fake peers."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from rich.console import Console

from launcher.backends.launch import resume
from launcher.backends.local import ThisHost
from launcher.errors import LaunchError
from launcher.facts.processes import find_process
from launcher.prepare import LaunchRequest
from p2pfl.run_folder.folder import RunFolder
from tests.launcher_fixtures import Invoke, MakeFolder, replace_peers

# ---- the command as a whole --------------------------------------------------------------------------------


def test_a_successful_launch(launch: Any) -> None:
    outcome, root = launch(["finishes", "finishes"])
    assert outcome.exit_code == 0
    first, *rest, last = outcome.stdout.splitlines()
    assert first == f"run: {root}"
    assert str(root) not in "".join(rest)
    assert last == f"report: p2pfl report {root}"
    assert outcome.stderr == ""
    assert (root / "summary.json").exists()


def test_a_launch_with_a_crashed_peer_exits_with_1(launch: Any) -> None:
    outcome, root = launch(["finishes", "crashes"])
    assert outcome.exit_code == 1
    assert outcome.stdout.splitlines()[0] == f"run: {root}"
    assert outcome.stderr == f"peer 1: killed by SIGSEGV; see {root}/peers/01/peer.log\n"


@pytest.mark.parametrize(("folder", "path"), [("", "run"), ("elsewhere", "{root}"), ("run", "{root}")])
def test_suggests_resume_after_a_stop(
    launch: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folder: str, path: str
) -> None:
    (tmp_path / folder).mkdir(exist_ok=True)
    monkeypatch.chdir(tmp_path / folder)
    outcome, root = launch(["finishes", "stops"])
    assert outcome.exit_code == 1
    hint = f"resume from the checkpoints with: p2pfl resume {path.format(root=root)}"
    assert outcome.stderr.splitlines() == ["peer 1: stopped", hint]


def test_json_is_the_only_output_on_stdout(launch: Any) -> None:
    outcome, root = launch(["finishes", "finishes"], "--json")
    summary = json.loads(outcome.stdout)
    assert summary["finished"] is True
    assert summary["run"] == str(root)
    assert outcome.stderr.splitlines()[0] == f"run: {root}"


def test_an_invalid_run_file_starts_no_peer(launch: Any) -> None:
    outcome, root = launch(["finishes"], "--set", "algorithm=mapel")
    assert outcome.exit_code == 2
    assert "unknown 'mapel'" in outcome.stderr
    assert not root.exists()


@pytest.mark.parametrize(
    ("transport", "expected"),
    [
        (
            "{port: 5700, hosts: {0-1: 192.0.2.1}}",
            "toy.yaml:6: transport.hosts: peer 0 has the address tcp://192.0.2.1:5700",
        ),
        (
            "{port: 5700, address: 'tcp://192.0.2.{id}:{port}'}",
            "toy.yaml:6: transport.address: peer 0 has the address",
        ),
    ],
)
def test_rejects_a_launch_of_peers_of_another_host(
    tmp_path: Path, fake_peers: Any, monkeypatch: pytest.MonkeyPatch, invoke: Invoke, transport: str, expected: str
) -> None:
    file = tmp_path / "toy.yaml"
    for key, value in fake_peers(["finishes"] * 2).items():
        monkeypatch.setenv(key, value)
    file.write_text(
        f"name: toy\nrounds: 2\npeers: 2\nalgorithm: local\ndata: {{dataset: digits}}\ntransport: {transport}\n"
    )
    outcome = invoke("launch", file, "--run-dir", tmp_path / "run")
    assert outcome.exit_code == 2
    assert expected in outcome.stderr
    assert not (tmp_path / "run").exists()


# ---- resumed runs


def test_rejects_joining_a_simulation(file: Path) -> None:
    request = LaunchRequest(file, rounds=1)
    folder = request.prepare(request.load(), simulated=True)
    with pytest.raises(LaunchError, match=r"simulated peers resume together: p2pfl resume /"):
        resume(folder, [1], Console(file=io.StringIO()))
    with pytest.raises(LaunchError, match=r"simulated peers resume together: p2pfl resume /"):
        resume(folder, (), Console(file=io.StringIO()), "always")


def test_resume_starts_only_peers_of_this_folder(
    make_folder: MakeFolder, fake_peers: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On one of several hosts, even if its address is that of a router."""
    folder = make_folder(peers=2, results={0: None, 1: None})
    network = {"peers": 5, "transport": {"port": 5700, "hosts": {"0-4": "192.0.2.1"}}}
    folder.run_file.write_text(yaml.safe_dump(yaml.safe_load(folder.run_file.read_text()) | network))
    replace_peers(fake_peers(["finishes", "finishes", *["crashes"] * 3]), monkeypatch)
    _, summary = resume(folder, (), Console(file=io.StringIO()))
    assert [(peer.peer, peer.ended) for peer in summary.peers] == [(0, "finished"), (1, "finished")]
    with pytest.raises(LaunchError, match="has no peer 4; it has 0-1"):
        resume(folder, [4], Console(file=io.StringIO()))


@pytest.mark.parametrize("simulated", [False, True])
def test_resume_refuses_a_run_without_the_folder_of_a_peer(
    make_folder: MakeFolder, fake_peers: Any, monkeypatch: pytest.MonkeyPatch, simulated: bool
) -> None:
    folder = make_folder(peers=3, results=dict.fromkeys(range(3)))
    folder.write_info({**folder.info, "simulated": simulated})
    lost = folder.peer(2).root
    lost.rmdir()
    replace_peers(fake_peers(["finishes"] * 3), monkeypatch)
    advice = "launch the run again" if simulated else f"start from round 0: mkdir {lost}"
    with pytest.raises(LaunchError, match=re.escape(f"{lost}: missing") + ".*; restore it, or " + re.escape(advice)):
        resume(folder, (), Console(file=io.StringIO()))
    if not simulated:
        lost.mkdir()
        _, summary = resume(folder, (), Console(file=io.StringIO()))
        assert summary.finished


def test_a_peer_that_is_named_twice_starts_once(
    make_folder: MakeFolder, fake_peers: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_folder(peers=2, results={0: None, 1: None})
    started: list[list[int]] = []
    fork = ThisHost.fork

    def record(host: ThisHost, peers: list[int]) -> None:
        started.append(peers)
        fork(host, peers)

    monkeypatch.setattr(ThisHost, "fork", record)
    replace_peers(fake_peers(["finishes", "finishes"]), monkeypatch)
    resume(folder, [0, 0], Console(file=io.StringIO()))
    assert started == [[0]]


def test_a_peer_that_a_second_launcher_has_resumed_ends_as_it_did_there(
    fake_peers: Any, until: Any, tmp_path: Path
) -> None:
    file = tmp_path / "toy.yaml"
    file.write_text("name: toy\nrounds: 3\npeers: 2\nalgorithm: local\ndata: {dataset: digits}\n")
    folder = RunFolder(tmp_path / "run")

    def start(peers: list[str], *arguments: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-P", "-m", "launcher.cli", *arguments]
        return subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=os.environ | fake_peers(peers))

    def ended() -> list[str]:
        return [peer["ended"] for peer in json.loads(folder.summary.read_text())["peers"]]

    options = [str(file), "--run-dir", str(folder.root), "--restart", "never"]
    with start(["finishes on SIGUSR1", "crashes"], "launch", *options) as first:
        until(lambda: all(folder.peer(peer).status() for peer in range(2)))
        until(lambda: find_process(folder, 1) is None)
        with start(["crashes", "finishes"], "resume", str(folder.root)) as second:
            assert second.wait(200) == 1  # the run has not finished
        assert ended() == ["running", "finished"]
        status = folder.peer(0).status()
        assert status is not None
        os.kill(status.pid, signal.SIGUSR1)
        assert first.wait(200) == 0
        assert first.stderr is not None
        assert first.stderr.read() == ""
    assert ended() == ["finished", "finished"]


@pytest.mark.parametrize("written", ['{"seconds": 1000.0}', '{"seconds": null}', "damaged"])
def test_the_time_of_a_resumed_run_includes_earlier_parts(
    make_folder: MakeFolder, fake_peers: Any, monkeypatch: pytest.MonkeyPatch, written: str
) -> None:
    folder = make_folder(peers=2, results={0: {"seconds": {"total": 700.0}}, 1: {"phase": "stopped"}})
    folder.summary.write_text(written)
    replace_peers(fake_peers(["waits", "finishes"]), monkeypatch)
    _, summary = resume(folder, [1], Console(file=io.StringIO()))
    assert summary.finished
    # Without a measured first part, the time is at least that of the slowest peer.
    minimum = 1000 if "1000" in written else 700
    assert summary.seconds is not None
    assert minimum <= summary.seconds < minimum + 200
    assert json.loads(folder.summary.read_text())["seconds"] == summary.seconds
