"""Measure how launches grow, fit a model, and predict larger ones; writes docs/scale.md.

    sudo python -m benchmarks.scale measure                    # all launches; hours on two cores
    sudo python -m benchmarks.scale measure 16x4-on-1 64x4-on-4
    python -m benchmarks.scale pairs                           # one connection per edge against one per pair of hosts
    python -m benchmarks.scale virtual 10000 --hosts 40        # the same launches in virtual time
    python -m benchmarks.scale fit                             # constants; writes machine.yaml and docs/scale.md

Figures go to benchmarks/results/scale/*.jsonl, one line for each launch or turn.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from benchmarks.bench import measuring, runs
from benchmarks.scale import machine, multiplex, page, plots
from benchmarks.scale.launches import LAUNCHES, chosen
from benchmarks.scale.measure import NotMeasured, measure
from benchmarks.scale.model import Model, quietest
from benchmarks.scenarios import COMMAND

PROJECT = Path(__file__).parents[2]
RESULTS = PROJECT / "benchmarks" / "results" / "scale"
LAUNCHED, PAIRS, VIRTUAL = RESULTS / "launches.jsonl", RESULTS / "pairs.jsonl", RESULTS / "virtual.jsonl"
MACHINE = RESULTS / "machine.yaml"
PAGE = PROJECT / "docs" / "scale.md"
HEAD = """Constants of p2pfl on a host of 2 cores, fitted to launches of 16 to 128 peers:
python -m benchmarks.scale fit; docs/scale.md has intervals and what they were compared with."""


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


@main.command("virtual")
@click.argument("peers", type=int)
@click.option("--degree", default=4, show_default=True)
@click.option("--hosts", default=1, show_default=True)
@click.option("--rounds", default=12, show_default=True)
def virtual_command(peers: int, degree: int, hosts: int, rounds: int) -> None:
    """Predict a launch by `p2pfl simulate --virtual` with machine.yaml, and append the figures to the results."""
    tree = runs.light(peers, {"name": "regular", "degree": degree}, rounds)
    with measuring.scratch_folder() as folder:
        (folder / "run.yaml").write_text(json.dumps(tree))
        (folder / "machine.yaml").write_text(MACHINE.read_text(encoding="utf-8") + f"hosts: {hosts}\ncores: 2\n")
        command = [*COMMAND, "simulate", "run.yaml", "--virtual", "--machine", "machine.yaml", "--json"]
        before = os.times()
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
        after = os.times()
    if done.returncode:
        raise click.ClickException(done.stderr)
    cpu = after.children_user + after.children_system - before.children_user - before.children_system
    append(VIRTUAL, {**json.loads(done.stdout), "degree": degree, "cpu_seconds": round(cpu, 1)})


@main.command("fit")
def fit_command() -> None:
    """Fit the model to the results; write machine.yaml, and the tables and pictures of docs/scale.md."""
    records, pairs = read(LAUNCHED), read(PAIRS)
    whole = quietest(records)
    model = Model(whole)
    MACHINE.write_text(machine.text(machine.constants(model, whole), HEAD), encoding="utf-8")
    PAGE.write_text(
        page.write(PAGE.read_text(encoding="utf-8"), page.blocks(records, pairs, read(VIRTUAL))), encoding="utf-8"
    )
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
