"""``p2pfl compare``: runs, and groups of runs over seeds, side by side."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from launcher.commands.group import JSON, MASKED, SECONDS_TO, FiniteNumber, Fraction, open_all
from launcher.formatting.console import echo, make_console, make_table

if TYPE_CHECKING:
    from launcher.comparison.groups import ComparedRun
    from launcher.comparison.lines import RunFigures
    from launcher.comparison.results import CompareOptions, Results
    from launcher.comparison.tables import TableFormat
    from launcher.facts.sweep_folder import SweepRun
    from p2pfl.run_folder.folder import RunFolder

FORMATS = ("table", "markdown", "latex", "csv", "json")


def _names(context: click.Context, option: click.Parameter, text: str | None) -> tuple[str, ...] | None:
    """Parse names of columns, separated by commas."""
    return None if text is None else tuple(name.strip() for name in text.split(","))


@click.command()
@click.argument("runs", nargs=-1, required=True, metavar="RUN...", type=click.Path(path_type=Path))
@MASKED
@click.option("--baseline", metavar="GROUP", help="Group to test the others against, e.g. local or lr=0.01.")
@click.option("--metric", metavar="NAME", help="Test this metric of the run files; default: accuracy.")
@click.option(
    "--test", type=click.Choice(["t", "wilcoxon"]), default="t", show_default=True, help="Paired test over seeds."
)
@click.option("--target", type=Fraction(), metavar="ACCURACY", help="Count the rounds to this accuracy, e.g. 0.8.")
@SECONDS_TO
@click.option(
    "--at-bytes",
    type=FiniteNumber(min=0),
    metavar="N",
    help="Compare after N bytes; default: what every run sent.",
)
@click.option(
    "--at-seconds",
    type=FiniteNumber(min=0),
    metavar="S",
    help="Compare after S seconds; default: what every run took.",
)
@click.option(
    "--columns",
    metavar="NAME,…",
    callback=_names,
    help="Only these, in this order: seeds, accuracy, worst, rounds, seconds, at-bytes, at-time, sent, time, "
    "difference, p, or metrics of the run files.",
)
@click.option("--format", "form", type=click.Choice(FORMATS), default="table", show_default=True)
@JSON
def compare(
    runs: tuple[Path, ...],
    masked: bool | None,
    form: TableFormat,
    as_json: bool,
    columns: tuple[str, ...] | None,
    **wanted: Any,
) -> None:
    """Compare accuracy, traffic and time of runs.

    A sweep stands for its runs. Runs that differ in nothing but the seed form a group, of which the table has mean
    and standard deviation; without such groups there is a row per run. Say which keys of the run files differ. Runs
    that differ in masked_test are compared only with --masked or --unmasked. Exit with 1 if a peer of a run did not
    finish.
    """
    from launcher.comparison.results import CompareOptions
    from launcher.facts.sweep_folder import is_sweep

    members = open_all(runs)
    if not members:
        echo(f"no run of {', '.join(map(str, runs))} has begun", err=True)
        sys.exit(1)
    options = CompareOptions(**wanted)
    if columns is not None and (as_json or form in ("csv", "json")):
        raise click.UsageError("--columns: csv and json have all columns")
    grouped = any(map(is_sweep, runs)) or options != CompareOptions() or columns is not None
    form = "json" if as_json else form
    sys.exit(0 if show(members, masked, options, form, grouped=grouped, columns=columns) else 1)


def show(
    members: Sequence[tuple[RunFolder, SweepRun | None]],
    masked: bool | None,
    options: CompareOptions,
    form: TableFormat,
    *,
    grouped: bool = False,
    columns: Sequence[str] | None = None,
    more: dict[str, Any] | None = None,
) -> bool:
    """Print a comparison of runs. Return whether every peer of them has finished.

    Args:
        grouped: show groups even if each has one run.
        columns: of the table of groups; None: all.
        more: further keys of the JSON object.
    """
    from launcher.comparison.groups import ComparedRun
    from launcher.comparison.lines import differences, lines
    from launcher.comparison.results import results
    from launcher.comparison.tables import texts

    found = [ComparedRun.of(folder, point) for folder, point in members]
    compared = lines(found, masked)
    if form == "table" and not grouped and not _has_groups(found):
        _show_runs(found, compared)
    else:
        grouped_results = results(found, compared, options)
        if form == "json":
            _show_json(compared, differences(found), grouped_results, more or {})
        elif form == "table":
            _show_groups(grouped_results, columns)
        else:
            for line in texts(form, grouped_results, columns):
                echo(line)
    return all(line.finished == line.peers for line in compared)


def _has_groups(members: Sequence[Any]) -> bool:
    """Whether several seeds of the same values are among the runs."""
    from launcher.comparison.groups import group

    return any(len({member.seed for member in part.members}) > 1 for part in group(members))


def _show_runs(members: Sequence[ComparedRun], compared: Sequence[RunFigures]) -> None:
    from launcher.comparison.groups import note_on_clock, varied, without_attackers
    from launcher.comparison.lines import differences, extra_metrics_table, metrics_table, table
    from launcher.comparison.tables import different_tests
    from launcher.comparison.test_sets import differing, names
    from launcher.formatting.labels import value_text

    console = make_console()
    sets = names([[member] for member in members], compared[0].masked)
    several = len(set(sets)) > 1
    console.print(table(compared, sets if several else None))
    for further in (metrics_table(compared), extra_metrics_table(compared)):
        if further is not None:
            console.print()
            console.print(further)
    notes = [
        different_tests(differing(members)) if several else "",
        without_attackers(members),
        note_on_clock(members),
    ]
    for note in filter(None, notes):
        console.print()
        console.print(note, style="dim")
    warned = differences(members)
    for key, values in warned.items():
        echo(f"warning: runs differ in {key}: {'; '.join(map(json.dumps, values))}", err=True)
    for key, values in varied([member.values for member in members]).items():
        if key not in warned and key != "algorithm.name":  # a column of the table
            echo(f"runs differ in {key}: {'; '.join(map(value_text, values))}", err=True)


def _show_json(
    compared: Sequence[RunFigures], different: dict[str, list[Any]], found: Results, more: dict[str, Any]
) -> None:
    plain = found.to_dict()
    groups = plain.pop("lines")
    runs = [line.to_dict() for line in compared]
    echo(json.dumps({**more, "runs": runs, "different": different, "groups": groups, "comparison": plain}))


def _show_groups(found: Results, columns: Sequence[str] | None) -> None:
    from launcher.comparison.tables import page

    shown = page(found, columns)
    table = make_table(shown.head, [], left=shown.head[: shown.left])
    for at, row in enumerate(shown.rows):
        table.add_row(*row, style="bold" if shown.bold and at == shown.bold[0] else "")
    console = make_console()
    console.print(table)
    console.print()
    for note in shown.notes:
        console.print(note, style="dim")
