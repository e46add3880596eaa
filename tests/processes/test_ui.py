"""The live view in a terminal: that of a finished run, and that of a launch."""

from __future__ import annotations

import io
import os
import pty
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from rich.console import Console

from launcher.facts.snapshot import Snapshot
from launcher.ui.progress import UiProgress
from p2pfl.run_folder.folder import RunFolder
from tests.launcher_fixtures import MakeFolder

pytest.importorskip("textual")

ENTERS, LEAVES = b"\x1b[?1049h", b"\x1b[?1049l"
"""Sequences of the alternate screen."""


class Terminal:
    """A process with a pseudo-terminal, whose output is collected."""

    def __init__(self, *arguments: object) -> None:
        self._ours, theirs = pty.openpty()
        self.output = b""
        self.process = subprocess.Popen(
            [sys.executable, "-m", "launcher.cli", *map(str, arguments)],
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            start_new_session=True,
            env={**os.environ, "TERM": "xterm-256color", "COLUMNS": "100", "LINES": "30"},
        )
        os.close(theirs)
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        while True:
            try:
                chunk = os.read(self._ours, 1 << 16)
            except OSError:  # every process has closed its end
                return
            if not chunk:
                return
            self.output += chunk

    def press(self, keys: bytes) -> None:
        os.write(self._ours, keys)

    def close(self) -> int:
        code = self.process.wait(200)
        self._reader.join()
        os.close(self._ours)
        return code


Start = Callable[..., Terminal]


@pytest.fixture
def start() -> Iterator[Start]:
    made: list[Terminal] = []

    def run(*arguments: object) -> Terminal:
        made.append(Terminal(*arguments))
        return made[-1]

    yield run
    for terminal in made:
        terminal.process.kill()


def test_a_key_closes_the_view_of_a_run(make_folder: MakeFolder, start: Start, until: Callable[..., object]) -> None:
    terminal = start("ui", make_folder().root)
    until(lambda: b"finished" in terminal.output)
    terminal.press(b"q")
    assert terminal.close() == 0
    assert terminal.output.index(ENTERS) < terminal.output.index(LEAVES)


@pytest.mark.parametrize("close", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_launch_with_the_view_ends_with_its_summary(
    tmp_path: Path, file: Path, start: Start, until: Callable[..., object], close: bool
) -> None:
    terminal = start("launch", file, "--run-dir", tmp_path / "run", "--ui", "--rounds", 20)
    until(lambda: ENTERS in terminal.output)
    if close:
        terminal.press(b"q")
        until(lambda: LEAVES in terminal.output)
    assert terminal.close() == 0
    assert b"accuracy: " in terminal.output.partition(LEAVES)[2]
    assert b"live view failed" not in terminal.output
    statuses = [files.status() for files in RunFolder.open(tmp_path / "run").peers()]
    assert [status.phase for status in statuses if status is not None] == ["finished"] * 3


def test_ctrl_c_in_the_view_stops_the_peers(
    tmp_path: Path, file: Path, start: Start, until: Callable[..., object]
) -> None:
    terminal = start("launch", file, "--run-dir", tmp_path / "run", "--ui", "--rounds", 100000)
    folder = RunFolder(tmp_path / "run")
    until(lambda: ENTERS in terminal.output)

    def computing() -> bool:
        return (tmp_path / "run" / "peers" / "02" / "metrics.jsonl").exists()

    until(computing)
    terminal.press(b"\x03")
    assert terminal.close() == 1
    assert b"stopping: each peer ends its batch" in terminal.output.partition(LEAVES)[2]
    statuses = [files.status() for files in folder.peers()]
    assert {status.phase for status in statuses if status is not None} == {"stopped"}


def test_a_view_that_fails_leaves_the_run_alone(make_folder: MakeFolder, capfd: pytest.CaptureFixture[str]) -> None:
    folder = make_folder()
    folder.run_file.write_text("[")  # the view cannot read it
    console = Console(file=io.StringIO(), width=200)
    with UiProgress(console, folder) as display:
        assert display._process is not None
        display._process.wait(200)
        display.print("peer 1: killed")
        display.update(Snapshot.take(folder, range(2), 3))
        display.print("peer 0: killed")
    assert isinstance(console.file, io.StringIO)
    lines = console.file.getvalue().splitlines()
    assert lines[:2] == ["peer 1: killed", "the live view failed with exit code 1; the run is not affected"]
    assert lines[-1] == "peer 0: killed"
    assert "Error" in capfd.readouterr().err
