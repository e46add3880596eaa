"""What watching costs a run: `python -m benchmarks.watching --pairs 5`.

Runs of one run file take turns: plain, with the live view, with a tracker, with the endpoint that is scraped once a
second. Printed are medians over the pairs of the ratio to the plain run next to it: of the wall time of the rounds
(from summary.json), of the whole command, and of the CPU time of all its processes. The spread of plain runs among
each other is the noise. ``own CPU`` is what the added process used itself, as a fraction of all CPU time of that run:
it hardly depends on what else the machine does.
"""

from __future__ import annotations

import json
import os
import pty
import re
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from contextlib import suppress
from pathlib import Path
from statistics import median

import click
import psutil

from benchmarks.bench import measuring

OPTIONS: dict[str, list[str]] = {
    "plain": [],
    "ui": ["--ui"],
    "tensorboard": ["--set", "track=[tensorboard]"],
    "metrics-port": ["--metrics-port", "0"],
}
WATCHERS = ("p2pfl ui", "p2pfl tracker")
URL = re.compile(rb"metrics: (http://\S+)")


def launch(file: Path, rounds: int, options: list[str]) -> tuple[float, float, float, float]:
    """Run once in a pseudo-terminal. Return seconds of the run and of the command, of CPUs, and of what watches."""
    with tempfile.TemporaryDirectory() as scratch:
        root = Path(scratch, "run")
        command = [sys.executable, "-m", "launcher.cli", "launch", str(file), "--rounds", str(rounds)]
        ours, theirs = pty.openpty()
        began = time.monotonic()
        process = subprocess.Popen(
            [*command, "--run-dir", str(root), *options],
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            start_new_session=True,
            env={**os.environ, "TERM": "xterm-256color", "COLUMNS": "160", "LINES": "50"},
        )
        os.close(theirs)
        output = bytearray()
        reader = threading.Thread(target=_read, args=(ours, output))
        reader.start()
        own: dict[int, float] = {}
        try:
            _watch(process.pid, own)
            _, status, usage = os.wait4(process.pid, 0)
            took = time.monotonic() - began
            process.returncode = os.waitstatus_to_exitcode(status)
        finally:
            measuring.kill_tree(process)
            reader.join()
        os.close(ours)
        if process.returncode:
            raise SystemExit(bytes(output).decode(errors="replace"))
        seconds: float = json.loads((root / "summary.json").read_text())["seconds"]
        return seconds, took, usage.ru_utime + usage.ru_stime, sum(own.values())


def _read(terminal: int, output: bytearray) -> None:
    """Collect what the command prints, and scrape the endpoint if it names one."""
    scraping = False
    with suppress(OSError):  # every process has closed its end
        while chunk := os.read(terminal, 1 << 16):
            output += chunk
            if not scraping and (found := URL.search(output)):
                scraping = True
                threading.Thread(target=_scrape, args=(found[1].decode(),), daemon=True).start()


def _watch(launcher: int, own: dict[int, float]) -> None:
    """Keep the CPU time of the launcher's children that watch, until it exits."""
    with suppress(psutil.NoSuchProcess):
        process = psutil.Process(launcher)
        while process.status() != psutil.STATUS_ZOMBIE:
            for child in process.children():
                with suppress(psutil.NoSuchProcess):
                    if child.pid in own or " ".join(child.cmdline()).startswith(WATCHERS):
                        own[child.pid] = sum(child.cpu_times()[:4])
            time.sleep(0.2)


def _scrape(url: str) -> None:
    with suppress(OSError):
        while True:
            with urllib.request.urlopen(url, timeout=10) as answer:
                answer.read()
            time.sleep(1)


@click.command(help=__doc__)
@click.option("--file", default="topologies/mesh20.yaml", show_default=True, type=click.Path(path_type=Path))
@click.option("--rounds", default=60, show_default=True)
@click.option("--pairs", default=5, show_default=True)
@click.option("--only", multiple=True, type=click.Choice([name for name in OPTIONS if name != "plain"]))
def main(file: Path, rounds: int, pairs: int, only: tuple[str, ...]) -> None:
    names = only or [name for name in OPTIONS if name != "plain"]
    ratios: dict[str, list[list[float]]] = {name: [] for name in names}
    plain: list[tuple[float, float, float, float]] = []
    for pair in range(pairs):
        # Every second time in reverse order, so that a drift of the machine's speed cancels.
        for name in names:
            runs = ["plain", name] if pair % 2 == 0 else [name, "plain"]
            found = {run: launch(file, rounds, OPTIONS[run]) for run in runs}
            plain.append(found["plain"])
            one, other = found["plain"], found[name]
            ratios[name].append([other[k] / one[k] for k in range(3)] + [other[3] / other[2]])
            click.echo(" ".join([name, *(f"{ratio:.3f}" for ratio in ratios[name][-1])]), err=True)
    click.echo(f"{'ratio to a plain run':24} {'run':>7} {'command':>8} {'CPU':>7} {'own CPU':>8}   ({pairs} pairs)")
    for name, rows in ratios.items():
        middle = [median(column) for column in zip(*rows, strict=True)]
        click.echo(f"{name:24} {middle[0]:7.3f} {middle[1]:8.3f} {middle[2]:7.3f} {middle[3]:8.4f}")
    spread = [max(column) / min(column) for column in list(zip(*plain, strict=True))[:3]]
    click.echo(f"{'plain, slowest/fastest':24} {spread[0]:7.3f} {spread[1]:8.3f} {spread[2]:7.3f}")
    click.echo(
        f"a plain run: {median(row[0] for row in plain):.1f} s, {median(row[2] for row in plain):.1f} s of CPU"
    )


if __name__ == "__main__":
    main()
