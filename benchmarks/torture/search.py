"""Plays many schedules and says what went wrong: the command line."""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext

import click

from benchmarks.torture.mesh import Outcome, play
from benchmarks.torture.plants import PLANTS


@click.command(help=(__doc__ or "") + " Ends with 1 if a promise is broken; with --plant, if none is.")
@click.option("--schedules", default=2000, show_default=True, help="How many to play.")
@click.option("--seed", default=0, show_default=True, help="Of the first one; the next has the next.")
@click.option("--minutes", default=30.0, show_default=True, help="Real time after which no more are played.")
@click.option("--replay", type=int, metavar="SEED", help="Play this one alone, twice, and print all that happens.")
@click.option("--plant", type=click.Choice([*PLANTS, "all"]), help="Plant a bug, and search until it is found.")
def main(schedules: int, seed: int, minutes: float, replay: int | None, plant: str | None) -> None:
    if replay is not None:
        _replay(replay, plant)
    elif plant == "all":
        _find_all(schedules, seed)
    else:
        _search(schedules, seed, minutes, plant)


def planted(plant: str | None) -> AbstractContextManager[None]:
    return nullcontext() if plant is None else PLANTS[plant].planted()


def outcomes(schedules: int, seed: int, plant: str | None = None) -> Iterator[Outcome]:
    with planted(plant):
        for number in range(seed, seed + schedules):
            yield play(number)


def _search(schedules: int, seed: int, minutes: float, plant: str | None) -> None:
    began = time.perf_counter()
    counts: Counter[str] = Counter()
    played, patient, virtual, broken = 0, 0, 0.0, 0
    for outcome in outcomes(schedules, seed, plant):
        played += 1
        patient += outcome.schedule.patient
        virtual += outcome.seconds
        counts += outcome.counts
        if outcome.violations:
            broken += 1
            _show(outcome, plant)
            if plant is not None:
                break
        if sys.stderr.isatty() and played % 20 == 0:
            click.echo(f"\r{played} of {schedules} schedules, {broken} broken ", err=True, nl=False)
        if time.perf_counter() - began > 60.0 * minutes:
            break
    real = time.perf_counter() - began
    click.echo(
        f"{played} schedules, {patient} patient and {played - patient} with deadlines: {virtual:,.0f} s of virtual "
        f"time in {real:.0f} s"
    )
    for what, count in sorted(counts.items()):
        click.echo(f"  {count:8,} {what}")
    click.echo(f"{broken} schedules broke a promise")
    if (broken == 0) != (plant is not None):
        return
    sys.exit(1)


def _find_all(schedules: int, seed: int) -> None:
    missed = 0
    for plant in PLANTS:
        began = time.perf_counter()
        found = next((outcome for outcome in outcomes(schedules, seed, plant) if outcome.violations), None)
        seconds = time.perf_counter() - began
        missed += found is None
        where = "NOT FOUND" if found is None else f"seed {found.seed}, after {seconds:.1f} s: {found.violations[0]}"
        click.echo(f"{plant:18} {PLANTS[plant].says}: {where}")
    sys.exit(1 if missed else 0)


def _show(outcome: Outcome, plant: str | None) -> None:
    click.echo(f"seed {outcome.seed}, trace {outcome.digest[:16]}")
    for violation in outcome.violations[:5]:
        click.echo(f"    {violation}")
    more = "" if plant is None else f" --plant {plant}"
    click.echo(f"    python -m benchmarks.torture --replay {outcome.seed}{more}")


def _replay(seed: int, plant: str | None) -> None:
    first, second = (next(outcomes(1, seed, plant)) for _ in range(2))
    click.echo(first.schedule)
    for event in first.trace:
        click.echo(event)
    _show(first, plant)
    same = first.digest == second.digest
    click.echo("played twice: the same trace" if same else f"PLAYED TWICE: ANOTHER TRACE, {second.digest[:16]}")
    sys.exit(0 if same and not first.violations else 1)
