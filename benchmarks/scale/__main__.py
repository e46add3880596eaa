"""Measure how launches grow, fit a model, and predict larger ones; writes docs/scale.md.

    sudo python -m benchmarks.scale measure                    # all launches; hours on two cores
    sudo python -m benchmarks.scale measure 16x4-on-1 64x4-on-4
    python -m benchmarks.scale pairs                           # one connection per edge against one per pair of hosts
    python -m benchmarks.scale clock 10000                     # on a simulated clock, without training
    python -m benchmarks.scale fit                             # constants; writes docs/scale.md

Figures go to benchmarks/results/scale/*.jsonl, one line for each launch or turn.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from benchmarks.bench import measuring, runs
from benchmarks.scale import multiplex, page, plots
from benchmarks.scale.launches import LAUNCHES, chosen
from benchmarks.scale.measure import NotMeasured, measure
from benchmarks.scale.model import Model, quietest
from benchmarks.scenarios import COMMAND

PROJECT = Path(__file__).parents[2]
RESULTS = PROJECT / "benchmarks" / "results" / "scale"
LAUNCHED, PAIRS, CLOCK = RESULTS / "launches.jsonl", RESULTS / "pairs.jsonl", RESULTS / "clock.jsonl"
PAGE = PROJECT / "docs" / "scale.md"
TIME = {"train": False, "devices": {"lognormal": {"ratio": 10}}, "network": {"interface": 1e7}}
"""Of runs on a simulated clock: uneven devices, and interfaces of 10 MB/s."""


@click.group(help=__doc__, context_settings={"help_option_names": ["-h", "--help"]})
def main() -> None:
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, _: sys.exit(128 + number))


@main.command("measure")
@click.argument("names", nargs=-1, type=click.Choice([launch.name for launch in LAUNCHES]))
@click.option("--limit", default=900.0, show_default=True, help="Maximum seconds of one launch.")
@click.option("--results", type=click.Path(path_type=Path), default=LAUNCHED, show_default=True)
def measure_command(names: tuple[str, ...], limit: float, results: Path) -> None:
    """Measure launches, and append a line of JSON for each to the results."""
    failed = False
    for launch in chosen(names):
        if launch.hosts > 1 and os.geteuid():
            raise click.ClickException(f"{launch.name}: only root can create network namespaces")
        try:
            record = measure(launch, limit, lambda text: click.echo(f"  {text}", err=True))
        except NotMeasured as error:
            failed = True
            click.echo(error.message, err=True)
            continue
        append(results, record)
    sys.exit(1 if failed else 0)


@main.command("pairs")
@click.option("--peers", default=64, show_default=True, help="Peers on each of the two hosts.")
@click.option("--turns", default=2, show_default=True)
@click.option("--results", type=click.Path(path_type=Path), default=PAIRS, show_default=True)
def pairs_command(peers: int, turns: int, results: Path) -> None:
    """Measure one connection per edge and one per pair of hosts in turns, over plain pyzmq."""
    for _ in range(turns):
        for size, rounds in ((2_400, 200), (144_000, 20)):
            for degree in (1, 2, 4, 8, 16):
                for kind in multiplex.KINDS:
                    record = multiplex.exchange(kind, peers, degree, size, rounds)
                    click.echo(f"  {record}", err=True)
                    append(results, record)


@main.command("clock")
@click.argument("peers", type=int)
@click.option("--degree", default=4, show_default=True)
@click.option("--rounds", default=12, show_default=True)
def clock_command(peers: int, degree: int, rounds: int) -> None:
    """Run peers by `p2pfl simulate --clock` without training, and append what that takes to the results."""
    tree = {**runs.light(peers, {"name": "regular", "degree": degree}, rounds), "time": TIME}
    with measuring.scratch_folder() as folder:
        (folder / "run.yaml").write_text(json.dumps(tree))
        command = [*COMMAND, "simulate", "run.yaml", "--clock", "--run-dir", "run", "--json"]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    if done.returncode:
        raise click.ClickException(done.stderr)
    used, summary = resource.getrusage(resource.RUSAGE_CHILDREN), json.loads(done.stdout)
    record = {"peers": peers, "degree": degree, "rounds": rounds, "seconds": summary["seconds"]}
    record |= {"bytes": sum(peer["bytes_out"] for peer in summary["peers"])}
    append(CLOCK, {**record, "cpu": round(used.ru_utime + used.ru_stime, 1), "memory": 1024 * used.ru_maxrss})


@main.command("fit")
def fit_command() -> None:
    """Fit the model to the results; write the tables and pictures of docs/scale.md."""
    records, pairs = read(LAUNCHED), read(PAIRS)
    whole = quietest(records)
    model = Model(whole)
    blocks = page.blocks(records, pairs, read(CLOCK))
    PAGE.write_text(page.write(PAGE.read_text(encoding="utf-8"), blocks), encoding="utf-8")
    plots.write(model, whole, PAGE.parent)
    click.echo(page.constants(model) + "\n\n" + page.errors(model, whole))


def append(path: Path, record: Mapping[str, Any]) -> None:
    """Append a line of JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.write(json.dumps(record) + "\n")


def read(path: Path) -> list[dict[str, Any]]:
    """Read lines of JSON."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


if __name__ == "__main__":
    main()
