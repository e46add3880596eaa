"""Simulate many schedules and report violations."""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext

import click

from tests.simulation.planted_bugs import PLANTED_BUGS
from tests.simulation.run_schedule import Outcome, run_schedule


@click.command(help=(__doc__ or "") + " Exits with 1 if a promise is broken; with --bug, if none is.")
@click.option("--schedules", default=2000, show_default=True, help="Number of schedules to simulate.")
@click.option("--seed", default=0, show_default=True, help="Seed of the first schedule; each next one adds 1.")
@click.option("--minutes", default=30.0, show_default=True, help="Real time after which the search ends.")
@click.option("--replay", type=int, metavar="SEED", help="Simulate one schedule twice and print its events.")
@click.option("--bug", type=click.Choice([*PLANTED_BUGS, "all"]), help="Plant a bug and search until it is found.")
@click.option("--time-varying", is_flag=True, help="Another graph in every round.")
@click.option("--without-waits", is_flag=True, help="Rounds do not wait for one another.")
def main(schedules: int, seed: int, minutes: float, replay: int | None, bug: str | None, **variant: bool) -> None:
    if bug == "all":
        _find_all(schedules, seed)
    elif replay is not None:
        _replay(replay, bug, variant)
    else:
        _search(schedules, seed, minutes, bug, variant)


def outcomes(schedules: int, seed: int, bug: str | None = None, **variant: bool) -> Iterator[Outcome]:
    """Simulate schedules one after the other, with a planted bug or without.

    Args:
        variant: further arguments of ``run_schedule``.
    """
    with _planted(bug):
        for number in range(seed, seed + schedules):
            yield run_schedule(number, **variant)


def _planted(bug: str | None) -> AbstractContextManager[None]:
    return nullcontext() if bug is None else PLANTED_BUGS[bug].planted()


def _search(schedules: int, seed: int, minutes: float, bug: str | None, variant: Mapping[str, bool]) -> None:
    began = time.perf_counter()
    counts: Counter[str] = Counter()
    done, without_deadlines, virtual, failed = 0, 0, 0.0, 0
    for outcome in outcomes(schedules, seed, bug, **variant):
        done += 1
        without_deadlines += outcome.schedule.waits_forever
        virtual += outcome.seconds
        counts += outcome.counts
        if outcome.violations:
            failed += 1
            _show(outcome, bug, variant)
            if bug is not None:
                break
        if sys.stderr.isatty() and done % 20 == 0:
            click.echo(f"\r{done} of {schedules} schedules, {failed} with violations ", err=True, nl=False)
        if time.perf_counter() - began > 60.0 * minutes:
            break
    real = time.perf_counter() - began
    click.echo(
        f"{done} schedules, {without_deadlines} without deadlines and {done - without_deadlines} with: "
        f"{virtual:,.0f} s of virtual time in {real:.0f} s"
    )
    for event, count in sorted(counts.items()):
        click.echo(f"  {count:8,} {event}")
    click.echo(f"{failed} schedules with violations")
    if (failed == 0) == (bug is not None):
        sys.exit(1)


def _find_all(schedules: int, seed: int) -> None:
    missed = 0
    for name, bug in PLANTED_BUGS.items():
        began = time.perf_counter()
        variant = {"without_waits": bug.without_waits}
        found = next((outcome for outcome in outcomes(schedules, seed, name, **variant) if outcome.violations), None)
        seconds = time.perf_counter() - began
        missed += found is None
        result = "NOT FOUND" if found is None else f"seed {found.seed}, after {seconds:.1f} s: {found.violations[0]}"
        click.echo(f"{name:18} {bug.summary}: {result}")
    sys.exit(1 if missed else 0)


def _show(outcome: Outcome, bug: str | None, variant: Mapping[str, bool]) -> None:
    click.echo(f"seed {outcome.seed}, trace {outcome.trace_digest[:16]}")
    for violation in outcome.violations[:5]:
        click.echo(f"    {violation}")
    option = ("" if bug is None else f" --bug {bug}") + "".join(
        f" --{name.replace('_', '-')}" for name, on in variant.items() if on
    )
    click.echo(f"    python -m tests.simulation --replay {outcome.seed}{option}")


def _replay(seed: int, bug: str | None, variant: Mapping[str, bool]) -> None:
    first, second = (next(outcomes(1, seed, bug, **variant)) for _ in range(2))
    click.echo(first.schedule)
    for event in first.trace:
        click.echo(event)
    _show(first, bug, variant)
    same = first.trace_digest == second.trace_digest
    click.echo(
        "simulated twice: same trace" if same else f"simulated twice: TRACES DIFFER, {second.trace_digest[:16]}"
    )
    sys.exit(0 if same and not first.violations else 1)
