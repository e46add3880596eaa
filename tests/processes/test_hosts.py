"""Runs on several hosts, which are folders here: a fake ssh executes the command of the host process on this host."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from launcher.facts.host_state import HostState
from p2pfl.run_file.load import load
from p2pfl.run_folder.folder import RunFolder
from p2pfl.simulation.simulate import simulate
from tests.fast_python.fixture import FastPython

SSH = """#!/bin/sh
while [ "$1" != -- ]; do shift; done
[ "$2" = nowhere ] && { echo "ssh: connect to host nowhere port 22: No route to host" >&2; exit 255; }
shift 2
exec sh -c "$*"
"""
SLOW = {"rounds": 40, "checkpoint_every": 2, "chaos": {"link": {"delay": 0.3}}}


@dataclass
class Lab:
    """Hosts alpha and beta, each with a folder, and a run file."""

    root: Path
    environment: dict[str, str]
    python: str
    """What executes the commands here, and the host processes unless the hosts file names another."""

    @property
    def folder(self) -> RunFolder:
        return RunFolder(self.root / "run")

    def write(self, tree: dict[str, Any], *, apart: bool = True, beta: dict[str, Any] | None = None) -> None:
        (self.root / "run.yaml").write_text(yaml.safe_dump(tree))
        entries = [
            {"name": name, "address": "127.0.0.1", **({"folder": str(self.root / name)} if apart else {})}
            for name in ("alpha", "beta")
        ]
        entries[1] |= beta or {}
        (self.root / "hosts.yaml").write_text(yaml.safe_dump(entries))

    def start(self, *arguments: object) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [self.python, "-P", "-m", "launcher.cli", *map(str, arguments)],
            cwd=self.root, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            env=self.environment,
        )  # fmt: skip

    def launch(self) -> subprocess.Popen[str]:
        return self.start("launch", "run.yaml", "--backend", "ssh", "--hosts", "hosts.yaml", "--run-dir", "run")

    def run(self, *arguments: object) -> str:
        """Run a command to its end; it must succeed."""
        process = self.launch() if arguments == ("launch",) else self.start(*arguments)
        return ended(process)

    def rounds_done(self) -> int:
        if not (self.root / "run" / "peers").is_dir():
            return 0
        statuses = [files.status() for files in self.folder.peers()]
        return min((0 if status is None else status.rounds_done for status in statuses), default=0)

    def digests(self) -> list[str]:
        results = [files.result() for files in self.folder.peers()]
        return [result.digest for result in results if result is not None]

    def expected(self) -> list[str]:
        return [result.digest for result in simulate(load(self.root / "run.yaml"))]


def ended(process: subprocess.Popen[str], code: int = 0) -> str:
    output, _ = process.communicate(timeout=200)
    assert process.returncode == code, output
    return output


def host_process(root: Path) -> psutil.Process:
    """Return the host process whose run folder is ``root``."""
    found = []
    for process in psutil.process_iter():
        try:
            title = " ".join(process.cmdline()).rstrip()
        except psutil.Error:
            continue
        if title in (f"p2pfl host {root}", f"p2pfl warm {root}"):
            found.append(process)
    (only,) = found
    return only


@pytest.fixture
def lab(tmp_path: Path, fast_python: FastPython) -> Lab:
    programs = tmp_path / "bin"
    programs.mkdir()
    (programs / "ssh").write_text(SSH)
    (programs / "ssh").chmod(0o755)
    path = f"{programs}{os.pathsep}{os.environ['PATH']}"
    python_path = os.pathsep.join([str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")])
    return Lab(tmp_path, {**os.environ, "PATH": path, "PYTHONPATH": python_path}, fast_python.executable)


@pytest.fixture
def tree(make_run: Callable[..., Any]) -> Callable[..., dict[str, Any]]:
    def make(**changes: Any) -> dict[str, Any]:
        found: dict[str, Any] = yaml.safe_load(make_run(**changes).to_yaml())
        return found

    return make


def test_a_run_on_hosts_without_a_shared_folder_ends_with_the_digests_of_simulate(lab: Lab, tree: Any) -> None:
    lab.python = sys.executable
    lab.write(tree(peers=6, graph="ring"))
    output = lab.run("launch")
    assert "host alpha: peers 0-2" in output
    assert lab.digests() == lab.expected()
    # Each host has its peers, their keys, and the addresses of neighbors only.
    assert sorted(path.name for path in (lab.root / "alpha" / "peers").iterdir()) == ["00", "01", "02"]
    keys = {path.name: path.stat().st_mode & 0o777 for path in (lab.root / "beta" / "keys").iterdir()}
    assert keys == {"03.key": 0o600, "04.key": 0o600, "05.key": 0o600, "public.yaml": 0o644}
    assert not (lab.root / "alpha" / "addresses" / "04").exists()
    # The launcher's folder has what status, logs and reports read.
    for files in lab.folder.peers():
        assert len(files.metrics.read_text().splitlines()) == 3
        host = "alpha" if files.peer < 3 else "beta"
        assert files.log.read_text() == (lab.root / host / "peers" / files.root.name / "peer.log").read_text()


def test_hosts_that_share_the_run_folder_need_no_copies(lab: Lab, tree: Any) -> None:
    lab.write(tree(), apart=False)
    lab.run("launch")
    assert lab.digests() == lab.expected()
    assert (lab.folder.peer(0).root / "checkpoint.pt").exists()  # written there by the peer itself


def test_killed_peers_and_host_processes_do_not_change_the_digests(lab: Lab, tree: Any, until: Any) -> None:
    lab.write(tree(**SLOW))
    launcher = lab.launch()
    until(lambda: lab.rounds_done() >= 3)
    status = lab.folder.peer(1).status()
    assert status is not None
    os.kill(status.pid, signal.SIGKILL)
    until(lambda: lab.rounds_done() >= 5)
    host_process(lab.root / "beta").kill()
    output = ended(launcher)
    assert "peer 1: killed by SIGKILL; restarting" in output
    assert "host beta: its process has ended" in output
    assert "host beta is back; 2 of its peers still run" in output
    assert lab.digests() == lab.expected()


@pytest.mark.slow
def test_peers_on_a_host_that_lost_all_processes_resume_from_their_checkpoints(
    lab: Lab, tree: Any, until: Any
) -> None:
    lab.write(tree(**SLOW))
    launcher = lab.launch()
    until(lambda: lab.rounds_done() >= 4)
    process = host_process(lab.root / "beta")
    for victim in (process, *process.children()):
        victim.kill()
    output = ended(launcher)
    assert "host beta is back; none of its peers runs" in output
    assert lab.digests() == lab.expected()


BUG = """
from p2pfl import plugins
from p2pfl.algorithms.dpsgd import DPSGD

@plugins.algorithm("buggy")
class Buggy(DPSGD):
    async def round(self, t, net):
        if t == 1 and self.me == 1:
            raise ValueError("a bug")
        await super().round(t, net)
"""


@pytest.mark.slow
@pytest.mark.parametrize("apart", [True, False])
def test_peers_on_all_hosts_continue_without_one_that_fails_again_and_again(apart: bool, lab: Lab, tree: Any) -> None:
    (lab.root / "bug.py").write_text(BUG)
    lab.write({**tree(graph="complete"), "plugins": ["bug.py"], "algorithm": {"name": "buggy"}}, apart=apart)
    output = ended(lab.launch(), code=1)
    assert "ValueError: a bug; not restarted: failed 3 times without completing a further round" in output
    dead = "neighbor declared dead peer=1: it has failed repeatedly and is not restarted"
    assert [dead in files.log.read_text() for files in lab.folder.peers()] == [True, False, True, True]


@pytest.mark.slow
def test_training_goes_on_without_the_launcher_and_others_can_stop_and_resume_it(
    lab: Lab, tree: Any, until: Any
) -> None:
    lab.write(tree(**SLOW))
    launcher = lab.launch()
    until(lambda: lab.rounds_done() >= 2)
    launcher.kill()
    launcher.communicate()
    before = lab.rounds_done()

    def further() -> bool:
        states = json.loads(lab.run("status", "run", "--json"))["peers"]
        assert {peer["state"] for peer in states} <= {"running on host alpha", "running on host beta", "finished"}
        return lab.rounds_done() >= before + 2

    until(further)
    assert "peer 3: stopped" in lab.run("stop", "run")
    assert "nothing" not in lab.run("resume", "run")
    assert lab.digests() == lab.expected()


@pytest.mark.slow
def test_sigterm_of_the_launcher_stops_the_peers_with_checkpoints(lab: Lab, tree: Any, until: Any) -> None:
    lab.write(tree(**SLOW))
    launcher = lab.launch()
    until(lambda: lab.rounds_done() >= 2)
    assert "4 of 4 peers alive" in lab.run("status", "run")
    output = lab.run("stop", "run")
    assert output.count("stopped") == 4
    assert "resume from the checkpoints" in ended(launcher, 1)
    lab.run("resume", "run")
    assert lab.digests() == lab.expected()


def test_stop_ends_a_launcher_that_has_not_started_the_peers(lab: Lab, tree: Any, until: Any) -> None:
    lab.write(tree(chaos={"link": {"delay": 1.0}}))  # the peers must not finish before the launcher is told to stop
    launcher = lab.launch()
    until(lambda: (state := HostState.read(lab.root / "run")) is not None and state.answered < 0)
    lab.run("stop", "run")
    ended(launcher, 1)
    state = HostState.read(lab.root / "run")
    assert state is not None
    assert (state.launcher, state.running) == (0, {})
    lab.run("resume", "run")
    assert lab.digests() == lab.expected()


def test_resume_of_a_refused_launch_is_refused_too(lab: Lab, tree: Any) -> None:
    lab.write(tree(), beta={"address": "127.255.255.255"})
    error = "host alpha: cannot connect to host beta at 127.255.255.255, port "
    output = ended(lab.launch(), 1)
    assert error in output
    assert "open the TCP ports between the hosts" in output
    assert error in ended(lab.start("resume", "run"), 1)


def test_host_dir_takes_precedence_and_knows_one_placeholder(lab: Lab, tree: Any) -> None:
    lab.write(tree(rounds=1))
    command = ["launch", "run.yaml", "--backend", "ssh", "--hosts", "hosts.yaml", "--run-dir", "run", "--host-dir"]
    error = "--host-dir at/{name}: unknown {name}; {host} is replaced by the host's name"
    assert error in ended(lab.start(*command, "at/{name}"), 1)
    lab.run(*command, f"{lab.root}/at/{{host}}")
    assert sorted(path.name for path in (lab.root / "at").iterdir()) == ["alpha", "beta"]
    assert not (lab.root / "alpha").exists()


@pytest.mark.parametrize(
    ("beta", "error"),
    [
        ({"name": "nowhere"}, "host nowhere: ssh: connect to host nowhere port 22: No route to host"),
        ({"python": "/opt/none/python"}, "install p2pfl for /opt/none/python there, or name the Python that has it"),
        ({"environment": {"PYTHONPATH": "/nowhere"}, "python": "/usr/bin/python3"}, "No module named"),
    ],
)
def test_names_the_host_that_cannot_be_used(beta: dict[str, Any], error: str, lab: Lab, tree: Any) -> None:
    lab.write(tree(), beta=beta)
    assert error in ended(lab.launch(), 1)


def test_rejects_a_host_with_another_version(lab: Lab, tree: Any) -> None:
    other = lab.root / "other"
    other.mkdir()
    for package in ("p2pfl", "peers"):
        source = Path(__file__).parents[2] / package
        (other / package).symlink_to(source) if package == "p2pfl" else None
    (other / "peers").mkdir()
    for path in (Path(__file__).parents[2] / "peers").glob("*.py"):
        (other / "peers" / path.name).write_bytes(path.read_bytes())
    (other / "peers" / "added.py").write_text("# another version\n")
    lab.write(tree(), beta={"environment": {"PYTHONPATH": str(other)}, "python": sys.executable})
    output = ended(lab.launch(), 1)
    assert "host beta: has p2pfl" in output
    assert "install the same version on all hosts" in output
    assert not lab.folder.root.exists()
