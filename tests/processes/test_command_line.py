"""The command line as a process: what it imports, and how it is started."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.launcher_fixtures import MakeFolder


@pytest.mark.parametrize(
    "arguments", [["--help"], ["list", "."], ["digest", "RUN"], ["logs", "RUN"], ["stop", "RUN"]]
)
def test_commands_without_computation_do_not_import_torch(make_folder: MakeFolder, arguments: list[str]) -> None:
    root = str(make_folder().root)
    code = (
        "import sys\nfrom launcher.cli import main\n"
        "try: main()\n"
        "finally: assert not {'torch', 'zmq', 'pydantic', 'matplotlib', 'importlib.metadata'} & sys.modules.keys()"
    )
    given = [root if argument == "RUN" else argument for argument in arguments]
    done = subprocess.run([sys.executable, "-c", code, *given], capture_output=True, text=True)
    assert done.stderr == ""
    assert done.returncode == 0


def test_peer_runs_the_peers_package() -> None:
    done = subprocess.run([sys.executable, "-m", "launcher.cli", "peer", "--help"], capture_output=True, text=True)
    assert done.returncode == 0
    assert done.stdout.startswith("Usage: p2pfl peer [OPTIONS]\n")
    assert "--me" in done.stdout


def test_cli_runs_as_a_module(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "launcher.cli", "list", tmp_path / "no"], capture_output=True, text=True
    )
    assert done.returncode == 1
    assert done.stderr == f"error: {tmp_path / 'no'}: cannot be read: No such file or directory\n"


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_output_to_a_full_disk_ends_without_a_traceback(unbuffered: str, tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONUNBUFFERED": unbuffered}
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "launcher.cli", "list", tmp_path],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )
    assert done.stderr == "error: the output cannot be written: No space left on device\n"
    assert done.returncode == 1
