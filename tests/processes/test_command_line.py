"""The command line as a process: what it imports, and how it is started."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from p2pfl.run_folder.folder import RunFolder
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


@pytest.mark.parametrize("closed", ["<&-", "<&- >&- 2>&-"])
def test_launches_with_closed_standard_streams(closed: str, file: Path, tmp_path: Path) -> None:
    launch = [sys.executable, "-m", "launcher.cli", "launch", str(file), "--run-dir", str(tmp_path / "run")]
    done = subprocess.run(["sh", "-c", f'exec "$@" {closed}', "sh", *launch], capture_output=True, text=True)
    assert done.stderr == ""
    assert done.returncode == 0
    for files in RunFolder.open(tmp_path / "run").peers():
        result = files.result()
        assert result is not None
        assert result.phase == "finished"


@pytest.mark.parametrize("arguments", [["list"], ["launch", "run.yaml"], ["peer", "--help"]])
def test_a_deleted_working_directory_is_named(arguments: list[str], tmp_path: Path) -> None:
    command = [sys.executable, "-P", "-m", "launcher.cli", *arguments]
    code = 'cd "$0" && rmdir "$0" && exec "$@"'
    (tmp_path / "gone").mkdir()
    done = subprocess.run(["sh", "-c", code, str(tmp_path / "gone"), *command], capture_output=True, text=True)
    assert done.stderr == "error: the working directory was deleted; change to one that exists, e.g. `cd ~`\n"
    assert done.returncode == 1


def test_a_peer_opens_no_file_as_a_closed_standard_stream(tmp_path: Path) -> None:
    code = (
        "import os, sys\n"
        "from peers.__main__ import main\n"
        "try: main()\n"
        "finally: open(os.environ['OUT'], 'w').write(' '.join(os.readlink(f'/proc/self/fd/{n}') for n in range(3)))"
    )
    out = tmp_path / "streams"
    peer = [sys.executable, "-c", code, "--run", str(tmp_path / "no"), "--me", "0"]
    closed = ["sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh"]
    done = subprocess.run([*closed, *peer], env={**os.environ, "OUT": str(out)})
    assert done.returncode == 1
    assert out.read_text() == "/dev/null /dev/null /dev/null"
