"""What the checks of launches share: hosts.py, containers.py, slurm.py, ssh.py, ray_cluster.py, kubernetes.

A check has named scenarios. Each launches a run, often with a fault, and describes in a few words what happened. The
final states of its run must be equal to the states of `p2pfl simulate`. A Markdown table has a row per scenario.
"""

from __future__ import annotations

import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from time import monotonic
from typing import Any, TypeVar

import click

from benchmarks.namespaces import Unavailable
from launcher.facts.digests import compare
from p2pfl.run_folder.folder import RunFolder

TICK = 0.1
COMMAND = [sys.executable, "-P", "-m", "launcher.cli"]

T = TypeVar("T")

RUN: dict[str, Any] = {
    "name": "hosts20",
    "seed": 0,
    "rounds": 12,
    "peers": 20,
    "graph": {"name": "regular", "degree": 4},
    "data": {"dataset": "digits", "partition": {"name": "clusters", "per_class": 8, "test_per_class": 5}},
    "models": "tiny-cnn",
    "algorithm": {"name": "fedavg-dec", "lr": 0.01, "batch": 32},
    "device": "cpu",
    "checkpoint_every": 2,
    "transport": {"give_up": 300},
}
SLOW = {"rounds": 60, "chaos": {"link": {"delay": 0.5}}}
"""Longer than a minute, without more computation: at least a second for each round, whose messages are delayed."""


class NotInstalled(Unavailable):
    """What the check needs is not installed on this host."""

    exit_code = 3


def start(
    command: Sequence[object], log: Path, cwd: Path, env: Mapping[str, str] | None = None
) -> subprocess.Popen[bytes]:
    """Start a command in a session of its own: Ctrl-C must reach this process alone, which cleans up.

    Its output is appended to ``log``.
    """
    with log.open("ab") as output:
        return subprocess.Popen(
            list(map(str, command)),
            cwd=cwd, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True, env=env,
        )  # fmt: skip


def finish(process: subprocess.Popen[bytes], log: Path, limit: float, code: int = 0) -> str:
    """Wait for a started command; return its output. Raises click.ClickException if it ends with another code."""
    try:
        found = process.wait(limit)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        raise click.ClickException(f"not within {limit:.0f} s\n{tail(log)}") from None
    if found != code:
        raise click.ClickException(f"exit code {found}, expected {code}\n{tail(log)}")
    return log.read_text(encoding="utf-8")


def tail(log: Path, lines: int = 40) -> str:
    """Return the last lines of a file."""
    return "\n".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-lines:])


def run(
    *command: object,
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
    limit: float | None = None,
    text: str = "",
) -> str:
    """Run a command with ``text`` as its input; return its output. Raises click.ClickException if it fails."""
    words = list(map(str, command))
    try:
        done = subprocess.run(
            words, cwd=cwd, input=text, capture_output=True, text=True, timeout=limit, env=env, start_new_session=True
        )
    except subprocess.TimeoutExpired:
        raise click.ClickException(f"{shlex.join(words)}: not within {limit:.0f} s") from None
    if done.returncode:
        raise click.ClickException(
            f"{shlex.join(words)}: exit code {done.returncode}\n{done.stdout[-3000:]}{done.stderr}"
        )
    return done.stdout


def p2pfl(*arguments: object, cwd: Path | None = None, limit: float | None = None) -> str:
    """Run a p2pfl command. Raises as ``run``."""
    return run(*COMMAND, *arguments, cwd=cwd, limit=limit)


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Ignore further signals during the cleanup."""
    before = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def wait(what: str, condition: Callable[[], object], limit: float = 60.0) -> float:
    """Wait for ``condition()`` and return the seconds it took; raise click.ClickException after ``limit``."""
    began = monotonic()
    while not condition():
        if monotonic() - began > limit:
            raise click.ClickException(f"{what}: not within {limit:.0f} s")
        time.sleep(TICK)
    return monotonic() - began


def rounds_done(folder: RunFolder) -> int:
    """Return the completed rounds of the slowest peer."""
    try:
        statuses = [files.status() for files in folder.peers()]
    except Exception:  # there is no folder yet
        return 0
    return min((0 if status is None else status.rounds_done for status in statuses), default=0)


def simulate(file: Path, *options: object) -> RunFolder:
    """Run a run file without a network, unless that was done. Return the run folder, which is next to the file."""
    folder = file.with_name(f"{file.stem}-simulated")
    if not folder.exists():
        p2pfl("simulate", file, *options, "--run-dir", folder)
    return RunFolder(folder)


def waits(folder: RunFolder) -> bool:
    """Return whether the rounds of a run wait for one another."""
    return folder.settings.get("synchrony") is None


def check_messages(folder: RunFolder, expected: RunFolder | None = None) -> None:
    """Raise click.ClickException unless all peers have finished, and none has missed a message or skipped a round.

    Args:
        expected: a run with the same messages and bytes, by peer, neighbor and kind; None: they are not compared.
            Where rounds do not wait, what was sent to a neighbor that drops this peer depends on when it has said so.
    """
    for files in folder.peers():
        result, right = files.result(), expected and expected.peer(files.peer).result()
        if result is None or result.phase != "finished" or result.missing or result.skipped_rounds:
            raise click.ClickException(f"peer {files.peer} has not finished, or missed messages: {result}")
        if right and (result.received != right.received or (result.sent != right.sent and waits(folder))):
            raise click.ClickException(f"peer {files.peer}: byte counts differ from the simulation")


def command(
    scenarios: Mapping[str, Callable[[T], str]],
    start: Callable[..., AbstractContextManager[T]],
    same: Callable[[T, str], bool | None],
    doc: str | None,
    prefix: str,
    options: Sequence[click.Option] = (),
) -> click.Command:
    """Make the command that runs all scenarios, or those named.

    Args:
        scenarios: return what was done, for the table; raise click.ClickException.
        start: start what the scenarios run on, with all files in an empty folder. It is called with the folder, and
            with the values of ``options`` as keyword arguments. Raises Unavailable.
        same: return whether the run of a scenario has ended as simulated; None if it is not compared.
        doc: help text.
        prefix: of temporary folders.
        options: further options of the command.
    """

    def check(started: T, name: str) -> bool:
        """Run a scenario and print its row; return whether it passed."""
        began = monotonic()
        try:
            did = scenarios[name](started)
            seconds = monotonic() - began
            equal = same(started, name)
        except click.ClickException as error:
            click.echo(f"{name}: {error.message}", err=True)
            return False
        click.echo(f"| {name} | {did} | {seconds:.0f} | {'-' if equal is None else 'yes' if equal else 'NO'} |")
        return equal is not False

    @click.command(help=doc, context_settings={"help_option_names": ["-h", "--help"]})
    @click.argument("names", nargs=-1, type=click.Choice(list(scenarios)))
    @click.option("--keep", type=click.Path(path_type=Path), help="New folder for all files; kept.")
    def main(names: tuple[str, ...], keep: Path | None, **given: Any) -> None:
        for number in (signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, lambda number, frame: sys.exit(128 + number))
        with ExitStack() as stack:
            root = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix=prefix))) if keep is None else keep
            root.mkdir(parents=True, exist_ok=keep is None)
            try:
                started = stack.enter_context(start(root.resolve(), **given))
            except Unavailable as reason:
                click.echo(f"not available here: {reason.message}", err=True)
                sys.exit(reason.exit_code)
            click.echo("| scenario | | seconds | digests of `p2pfl simulate` |\n|---|---|---|---|")
            passed = [check(started, name) for name in names or scenarios]
        sys.exit(0 if all(passed) else 1)

    main.params.extend(options)
    return main


def compared(file: Path, folder: RunFolder) -> bool:
    """Return whether a run has ended as a simulation of its run file."""
    return compare(folder, simulate(file)).same
