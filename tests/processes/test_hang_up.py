"""A terminal that closes: what it runs stops with checkpoints, unless `nohup` has it go on."""

from __future__ import annotations

import os
import pty
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from p2pfl.run_folder.folder import RunFolder
from p2pfl.simulation.simulate import simulate
from tests.conftest import tree
from tests.fast_python.fixture import FastPython

HELD = 2
"""The round that no peer begins while the gate exists."""
PLUGIN = """
import asyncio
from pathlib import Path
from p2pfl import plugins
from p2pfl.session.session import Session

unhindered = Session._round

async def round(self, t):
    while t >= {held} and Path({gate!r}).exists():
        self.slot.release()
        self._enter("queued", t)
        await asyncio.sleep(0.005)
    await unhindered(self, t)

Session._round = round

@plugins.metric("half")
def half(scores, labels):
    return 0.5
"""
IGNORING = "import signal; signal.signal(signal.SIGHUP, signal.SIG_IGN); from launcher.cli import main; main()"
"""What `nohup` does to a command, which the one of ``fast_python`` does not inherit."""


class Terminal:
    """A pseudo-terminal, which controls one process, as that of a shell or of tmux does."""

    def __init__(self, command: Sequence[object], **environment: str) -> None:
        self._ours, theirs = pty.openpty()
        self.process = subprocess.Popen(
            ["setsid", "--ctty", *map(str, command)],
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            env={**os.environ, "TERM": "xterm-256color", "COLUMNS": "100", **environment},
        )
        os.close(theirs)
        self._open = True
        self.printed = False
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        """Drain what the process prints. No read may be under way when the terminal closes: it would stay open."""
        while self._open:
            try:
                if select.select([self._ours], [], [], 0.01)[0]:
                    self.printed = bool(os.read(self._ours, 1 << 16))
            except OSError:  # the process has ended
                return

    def close(self) -> None:
        if self._open:
            self._open = False
            self._reader.join()
            os.close(self._ours)


Start = Callable[..., Terminal]


@pytest.fixture
def start() -> Iterator[Start]:
    made: list[Terminal] = []

    def run(*command: object, **environment: str) -> Terminal:
        made.append(Terminal(command, **environment))
        return made[-1]

    yield run
    for terminal in made:
        terminal.process.kill()
        terminal.process.wait()
        terminal.close()


@pytest.fixture
def gate(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "gate"
    path.touch()
    yield path
    path.unlink(missing_ok=True)


CHANGES: dict[str, Any] = {"peers": 2, "rounds": 5, "checkpoint_every": 1}


@pytest.fixture
def file(tmp_path: Path, gate: Path) -> Path:
    """A run file whose runs wait before round HELD while the gate exists."""
    (tmp_path / "gated.py").write_text(PLUGIN.format(held=HELD, gate=str(gate)))
    path = tmp_path / "tiny.yaml"
    path.write_text(yaml.safe_dump(tree(**CHANGES, plugins=[str(tmp_path / "gated.py")])))
    return path


@pytest.fixture(scope="module")
def digests(make_run: Any) -> list[str]:
    """The digests of the run that nothing disturbs."""
    return [result.digest for result in simulate(make_run(**CHANGES))]


def rounds(root: Path) -> list[int]:
    """Completed rounds by peer."""
    if not (root / "run.yaml").exists():
        return [0]
    return [status.rounds_done if (status := files.status()) else 0 for files in RunFolder.open(root).peers()]


def reach(run: Path, terminal: Terminal, until: Any) -> None:
    """Wait until the peers of a run wait before round HELD."""
    until(lambda: rounds(run) == [HELD] * 2 or terminal.process.poll() is not None)
    assert terminal.process.poll() is None


def phases(root: Path) -> set[str]:
    return {result.phase if (result := files.result()) else "none" for files in RunFolder.open(root).peers()}


def found(root: Path) -> list[str]:
    return [result.digest if (result := files.result()) else "" for files in RunFolder.open(root).peers()]


def processes(root: Path) -> list[psutil.Process]:
    """What still belongs to a run or a sweep: every process of it has its folder in its title."""
    left = []
    for process in psutil.process_iter():
        try:
            if str(root) in " ".join(process.cmdline()) and process.pid != os.getpid():
                left.append(process)
        except psutil.Error:
            continue
    return left


COMMANDS = {
    "launch": (["launch", "--run-dir"], ["resume"], ""),
    "simulate": (["simulate", "--run-dir"], ["resume"], ""),
    "simulate with jobs": (["simulate", "--jobs", "2", "--run-dir"], ["resume"], ""),
    "sweep": (["sweep", "--seeds", "1", "--out"], ["sweep"], "runs/seed=3"),
    "sweep of simulations": (["sweep", "--seeds", "1", "--simulate", "--out"], ["sweep"], "runs/seed=3"),
}
"""How each is started and resumed, and where the folder of its run is."""


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] if name == "sweep" else []) for name in COMMANDS]
)
def test_a_run_whose_terminal_closes_stops_and_resumes_with_the_same_bits(
    name: str, file: Path, gate: Path, start: Start, fast_python: FastPython, until: Any, digests: Any, tmp_path: Path
) -> None:
    first, again, inside = COMMANDS[name]
    root, run = tmp_path / "run", tmp_path / "run" / inside
    cli = [fast_python.executable, "-m", "launcher.cli"]
    terminal = start(*cli, first[0], file, *first[1:], root)
    reach(run, terminal, until)
    terminal.close()
    terminal.process.wait(200)
    until(lambda: not processes(root))
    assert phases(run) == {"stopped"}
    assert rounds(run) == [HELD] * 2
    assert (run / "summary.json").exists()
    gate.unlink()
    assert subprocess.run([*cli, *again, root], stdout=subprocess.DEVNULL).returncode == 0
    assert found(run) == digests


@pytest.mark.parametrize(
    "name", [*(pytest.param(name, marks=pytest.mark.slow) for name in ("launch", "simulate")), "simulate with jobs"]
)
def test_a_run_that_ignores_hang_ups_ends_without_its_terminal(
    name: str, file: Path, gate: Path, start: Start, fast_python: FastPython, until: Any, digests: Any, tmp_path: Path
) -> None:
    (command, *options), _, _ = COMMANDS[name]
    root = tmp_path / "run"
    file.write_text(f"{file.read_text()}report: true\n")
    terminal = start(fast_python.executable, "-c", IGNORING, command, file, *options, root)
    reach(root, terminal, until)
    running = [process for process in processes(root) if process.pid != terminal.process.pid]  # fast_python's client
    assert running
    for process in running:
        assert ignores_hang_ups(process), process.cmdline()
    terminal.close()
    gate.unlink()
    assert terminal.process.wait(200) == 0
    assert found(root) == digests
    assert (root / "report.html").exists()  # it is written after the first line that no terminal takes


def ignores_hang_ups(process: psutil.Process) -> bool:
    (line,) = (
        line for line in Path(f"/proc/{process.pid}/status").read_text().splitlines() if line.startswith("SigIgn")
    )
    return bool(int(line.split()[1], 16) & 1 << (signal.SIGHUP - 1))


def test_nohup_protects_a_sweep_and_the_runs_that_it_launches(
    file: Path, gate: Path, start: Start, until: Any, digests: Any, tmp_path: Path
) -> None:
    run = tmp_path / "sweep/runs/seed=3"
    command = 'cd "$0" && exec nohup "$@" > nohup.out 2>&1'
    cli = [sys.executable, "-P", "-m", "launcher.cli", "sweep", file, "--seeds", 1, "--out", tmp_path / "sweep"]
    terminal = start("sh", "-c", command, tmp_path, *cli)
    reach(run, terminal, until)
    running = processes(run)
    assert len(running) >= 4  # the launcher, the warm process and two peers
    for process in running:
        assert ignores_hang_ups(process), process.cmdline()
    terminal.close()
    gate.unlink()
    assert terminal.process.wait(200) == 0
    assert found(run) == digests
    assert "seed=3: finished" in (tmp_path / "nohup.out").read_text()


def test_a_terminal_that_closes_before_the_run_has_a_folder_leaves_nothing(
    file: Path, start: Start, until: Any, tmp_path: Path
) -> None:
    os.mkfifo(tmp_path / "imported")
    waits = f"import time\nopen({str(tmp_path / 'imported')!r}, 'w').close()\nwhile True: time.sleep(0.01)\n"
    (tmp_path / "gated.py").write_text(waits)
    root = tmp_path / "run"
    terminal = start(sys.executable, "-P", "-m", "launcher.cli", "launch", file, "--run-dir", root)
    (tmp_path / "imported").read_text()  # until the plug-in is imported
    terminal.close()
    terminal.process.wait(200)
    until(lambda: not processes(tmp_path))
    assert not root.exists()


@pytest.mark.parametrize("command", [["logs", "--follow"], ["status", "--watch"]])
def test_a_command_that_follows_a_run_ends_with_its_terminal(
    command: list[str], file: Path, gate: Path, start: Start, fast_python: FastPython, until: Any, tmp_path: Path
) -> None:
    root = tmp_path / "run"
    cli = [fast_python.executable, "-m", "launcher.cli"]
    run = start(*cli, "simulate", file, "--run-dir", root)
    reach(root, run, until)
    follower = start(*cli, command[0], root, *command[1:])
    until(lambda: follower.printed)
    follower.close()
    assert follower.process.wait(200) in (1, 128 + signal.SIGINT)  # a line may have come before the signal
    gate.unlink()
    assert run.process.wait(200) == 0
