"""What the checks of launches on several hosts share: slurm.py, ssh.py, ray_cluster.py, kubernetes.

A check has named scenarios. Each launches a run, often with a fault, and describes in a few words what happened. The
final states of its run must be those of `p2pfl simulate`. A Markdown table has a row per scenario.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from time import monotonic
from typing import Any, TypeVar

import click

from benchmarks.hosts import Unavailable
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


def simulate(file: Path) -> RunFolder:
    """Run a run file without a network, unless that was done. Return the run folder, which is next to the file."""
    folder = file.with_name(f"{file.stem}-simulated")
    if folder.exists():
        return RunFolder(folder)
    command = [*COMMAND, "simulate", str(file), "--run-dir", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    if done.returncode:
        raise click.ClickException(f"p2pfl simulate failed:\n{done.stdout}{done.stderr}")
    return RunFolder(folder)


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
        signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(1))
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
