"""Plug-ins in commands and processes: what peers import, whom they refuse, and what is never executed."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from launcher.backends.compose import ComposeFile
from p2pfl import api
from p2pfl.errors import RunFileError, RunFolderError
from p2pfl.run_file.load import load
from p2pfl.run_folder.folder import RunFolder
from p2pfl.simulation.simulate import simulate
from tests.fast_python.fixture import FastPython
from tests.launcher_fixtures import Invoke
from tests.plugin_fixtures import HELPERS, METHOD, RUN, Project

Command = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def p2pfl(fast_python: FastPython) -> Command:
    """``p2pfl(folder, "launch", …)``: run a command in ``folder``."""

    def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
        command = [fast_python.executable, "-P", "-m", "launcher.cli", *arguments]
        return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False, timeout=200)

    return run


# ---- commands --------------------------------------------------------------------------------------------------


def test_commands_know_the_names_of_plugins(
    project: Project, invoke: Invoke, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = project()
    monkeypatch.chdir(file.parent)
    outcome = invoke("algorithms", "head-mean", "--plugin", "my_method.py", "--json")
    (*_, note) = json.loads(outcome.stdout)["hyper"]
    assert note == {"name": "own_weight", "type": "float", "default": 1.0, "text": "Weight of the local head."}
    assert "head-mean" in invoke("algorithms", "--plugin", "my_method.py").stdout
    outcome = invoke("models", "my-cnn+two-layers", "--plugin", "my_parts.py", "--json")
    assert json.loads(outcome.stdout)["members"][0]["features"] == 16
    assert "edges         2" in invoke("graph", "mine.yaml").stdout
    assert "partition in-order" in invoke("data", "show", "mine.yaml").stdout
    outcome = invoke("algorithms", "head-mean")
    assert outcome.exit_code == 2
    assert "unknown 'head-mean'" in outcome.stderr
    outcome = invoke("models", "my_netz.Net")
    assert outcome.exit_code == 2
    assert "command line: models.module: no module 'my_netz' in" in outcome.stderr


def test_launch_reports_a_mistake_in_one_line(project: Project, p2pfl: Command) -> None:
    file = project(my_method=METHOD.replace("async def round(self, t", "async def round(self, q, t"))
    line = METHOD[: METHOD.index("    async def round")].count("\n") + 1
    for command in ("launch", "simulate"):
        done = p2pfl(file.parent, command, "mine.yaml")
        assert done.returncode == 2
        (shown,) = done.stderr.splitlines()
        assert shown.startswith(f"error: my_method.py:{line}: round(self, q")
    assert not (file.parent / "runs").exists()


@pytest.mark.parametrize("failing", ["True", "self.me == 1"])
def test_launch_does_not_wait_for_peers_that_fail_again_and_again(
    failing: str, project: Project, p2pfl: Command
) -> None:
    begin = "        self.train_or_roll_back"
    buggy = f"        if t == 1 and {failing}:\n            raise ValueError('a bug')\n{begin}"
    file = project(my_method=METHOD.replace(begin, buggy))
    done = p2pfl(file.parent, "launch", "mine.yaml", "--run-dir", "run")
    assert done.returncode == 1
    line = METHOD[: METHOD.index(begin)].count("\n") + 2
    assert f"my_method.py:{line}: round 1: ValueError: a bug; not restarted: failed 3 times" in done.stdout
    folder = RunFolder(file.parent / "run")
    ended = [status.phase for files in folder.peers() if (status := files.status())]
    if failing == "True":
        assert ended == ["failed"] * 4
    else:
        assert ended == ["finished", "failed", "finished", "finished"]
        text = "neighbor declared dead peer=1: it has failed repeatedly and is not restarted"
        assert text in folder.peer(0).log.read_text()


# ---- what peers import -----------------------------------------------------------------------------------------


def test_resumed_peers_import_the_copy_in_the_run_folder(project: Project, p2pfl: Command, tmp_path: Path) -> None:
    file = project()
    expected = [result.digest for result in simulate(load(file))]
    with api.load(file, chaos={"kill": [{"peer": 1, "round": 1, "restart": False}]}).launch(tmp_path / "run") as run:
        for record in run.records(follow=True):
            if record["peer"] == 0 and record["t"] == 0:
                break
        run.stop()
    for source in file.parent.glob("*.py"):
        source.write_text("raise AssertionError('not the copy')")
    chaos = RunFolder(tmp_path / "run").run_file
    chaos.write_text(yaml.safe_dump({**yaml.safe_load(chaos.read_text()), "chaos": {}}))
    done = p2pfl(file.parent, "resume", str(tmp_path / "run"))
    assert done.returncode == 0, done.stderr
    assert [result.digest for result in api.open_run(tmp_path / "run").results()] == expected


def test_changed_copy_stops_a_resume(project: Project, tmp_path: Path) -> None:
    api.load(project()).simulate(tmp_path / "run")
    copy = tmp_path / "run" / "plugins" / "my_method.py"
    copy.write_text(f"{copy.read_text()}\nraise AssertionError\n")
    with pytest.raises(
        RunFileError, match=r"plugins\.0: my_method has changed: this run needs the version \w{12}…, f"
    ):
        api.open_run(tmp_path / "run").plan()


PEER = """
from peers import __main__, io_loop
io_loop.REFUSAL_PERIOD = 5.0  # a peer that is refused leaves after it, even if the other has not read its message
__main__.main()
"""


@pytest.mark.usefixtures("fast_children")
def test_peers_with_another_version_refuse_each_other(project: Project, tmp_path: Path) -> None:
    settings = f"{RUN.replace('peers: 4', 'peers: 2')}transport: {{give_up: 5, deadline: 60}}\n"
    ours = project(settings)
    theirs = project(settings, tmp_path / "other", helpers=f"{HELPERS}\n")
    addresses = tmp_path / "run" / "addresses"
    processes = []
    for me, file in enumerate((ours, theirs)):
        folder = tmp_path / f"run{me}"
        folder.mkdir()
        addresses.mkdir(parents=True, exist_ok=True)
        (folder / "addresses").symlink_to(addresses)
        command = [sys.executable, "-P", "-c", PEER, "--file", str(file), "--run", str(folder), "--me", str(me)]
        processes.append(subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True))
    outputs = [process.communicate(timeout=200)[0] for process in processes]
    assert [process.returncode for process in processes] == [1, 1], outputs
    assert any(
        "plug-ins differ: peer" in output and "my_parts" in output and "give all peers the same files" in output
        for output in outputs
    ), outputs


def test_peer_by_hand_keeps_a_copy_and_refuses_an_edited_plugin(project: Project, tmp_path: Path) -> None:
    from peers.standalone import open_or_create

    file = project()
    folder, run = open_or_create(file, tmp_path / "run", 0)
    assert sorted(path.name for path in (folder.root / "plugins").iterdir()) == [
        *("helpers.py", "my_method.py", "my_parts.py")
    ]
    assert open_or_create(file, tmp_path / "run", 0)[1].config_hash() == run.config_hash()
    (file.parent / "helpers.py").write_text(f"{HELPERS}\n")
    with pytest.raises(RunFolderError, match=r"contains a run that differs from .* in plugins"):
        open_or_create(file, tmp_path / "run", 0)


# ---- what is never executed ------------------------------------------------------------------------------------


def test_code_in_a_collection_is_neither_copied_nor_executed(
    project: Project, tmp_path: Path, invoke: Invoke
) -> None:
    api.load(project()).simulate(tmp_path / "run")
    marker = tmp_path / "executed"
    (tmp_path / "run" / "plugins" / "my_method.py").write_text(f"open({str(marker)!r}, 'w')")
    assert invoke("collect", tmp_path / "all", tmp_path / "run").exit_code == 0
    assert not (tmp_path / "all" / "plugins").exists()
    shutil.copytree(tmp_path / "run" / "plugins", tmp_path / "all" / "plugins")
    collected = api.open_run(tmp_path / "all")
    assert len(collected.metrics()) == 12
    assert invoke("digest", tmp_path / "all").exit_code == 0
    for use in (collected.plan, collected.partition, lambda: collected.model(0)):
        with pytest.raises(RunFolderError, match="a collection; its peers run on other hosts"):
            use()
    assert not marker.exists()


# ---- containers ------------------------------------------------------------------------------------------------


def test_compose_mounts_all_files_of_plugins(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    file = project()
    monkeypatch.chdir(file.parent)
    service: Any = yaml.safe_load(ComposeFile(Path("mine.yaml")).render())["services"]["peer-0"]
    mounts = {mount["target"]: mount["source"] for mount in service["volumes"] if isinstance(mount, dict)}
    names = ("helpers.py", "my_method.py", "my_parts.py")
    assert mounts == {
        "/etc/p2pfl/mine.yaml": "./mine.yaml",
        **{f"/etc/p2pfl/plugins/{name}": f"./{name}" for name in names},
    }
    container = file.parent / "container"
    for target, source in mounts.items():
        path = container / target.removeprefix("/")
        path.parent.mkdir(parents=True, exist_ok=True)
        os.link(source, path)
    inside = load(container / "etc" / "p2pfl" / "mine.yaml")
    assert inside.config_hash() == load(Path("mine.yaml")).config_hash()


# ---- what plug-ins print and raise -----------------------------------------------------------------------------


def test_a_plugin_may_print_anywhere(project: Project, p2pfl: Command) -> None:
    text = METHOD.replace("        self.optimizer", "        print('in setup')\n        self.optimizer")
    text = text.replace("        local =", "        print('in round', t)\n        local =")
    file = project(my_method=f"{text}\nprint('imported')\n")
    done = p2pfl(file.parent, "launch", "mine.yaml", "--run-dir", "run")
    assert done.returncode == 0, done.stderr
    assert "imported" in done.stdout
    for peer in RunFolder.open(file.parent / "run").peers():
        printed = peer.output.read_text().splitlines()
        assert [line for line in printed if line.startswith("in round")] == [f"in round {t}" for t in range(3)]


def test_error_in_a_round_of_a_peer_names_the_file_that_the_user_edits(project: Project, p2pfl: Command) -> None:
    text = METHOD.replace(
        "        local =", "        if t == 1 and self.me == 2:\n            {}[7]\n        local ="
    )
    line = text[: text.index("{}[7]")].count("\n") + 1
    file = project(RUN + "transport: {give_up: 1}\n", my_method=text)
    done = p2pfl(file.parent, "launch", "mine.yaml", "--run-dir", "run", "--restart", "never")
    assert done.returncode == 1
    assert f"peer 2: failed: my_method.py:{line}: round 1: KeyError: 7; see " in done.stdout + done.stderr
    assert "Traceback" not in done.stdout + done.stderr
    assert "Traceback" in RunFolder.open(file.parent / "run").peer(2).log.read_text()
