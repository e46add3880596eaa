"""Measure how launches grow, fit a model, and predict larger ones; writes docs/scale.md.

    sudo python -m benchmarks.scale measure                    # all launches; hours on two cores
    sudo python -m benchmarks.scale measure 16x4-on-1 64x4-on-4
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

import click

from benchmarks.scale.launches import LAUNCHES, chosen
from benchmarks.scale.measure import NotMeasured, measure

PROJECT = Path(__file__).parents[2]
RESULTS = PROJECT / "benchmarks" / "results" / "scale"


@click.group(help=__doc__, context_settings={"help_option_names": ["-h", "--help"]})
def main() -> None:
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, _: sys.exit(128 + number))


@main.command("measure")
@click.argument("names", nargs=-1, type=click.Choice([launch.name for launch in LAUNCHES]))
@click.option("--limit", default=900.0, show_default=True, help="Maximum seconds of one launch.")
@click.option("--results", type=click.Path(path_type=Path), default=RESULTS / "launches.jsonl", show_default=True)
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
        results.parent.mkdir(parents=True, exist_ok=True)
        with results.open("a") as file:
            file.write(json.dumps(record) + "\n")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
