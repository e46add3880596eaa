"""Commands that inspect runs: list, logs, digest, evaluate."""

from __future__ import annotations

import json
import re
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from launcher.commands.group import JSON, MASKED, RUN, open_run
from launcher.formatting.console import echo, make_console, print_table

if TYPE_CHECKING:
    from launcher.facts.logs import LogEntry
    from launcher.facts.runs import RunLine
    from p2pfl.run_folder.folder import RunFolder


@click.command("list")
@click.argument("folder", metavar="[DIR]", required=False, type=click.Path(path_type=Path))
@JSON
def list_runs(folder: Path | None, as_json: bool) -> None:
    """List the runs in DIR (default: runs) and their state.

    DIR may be the folder of a sweep.
    """
    from launcher.facts.runs import find_runs
    from launcher.formatting import percent

    root = folder or Path("runs")
    # The default folder does not exist before the first launch. That is not an error.
    lines = list(find_runs(root)) if folder is not None or root.exists() else []
    if as_json:
        echo(json.dumps([vars(line) for line in lines]))
        return
    if not lines:
        echo(f"no runs in {root}")
        return
    rows = [
        [line.run, _state(line), f"{line.rounds_done}/{line.rounds}", percent(line.accuracy), line.started]
        for line in lines
    ]
    print_table(["run", "state", "rounds", "acc %", "started"], rows)


def _state(line: RunLine) -> str:
    if line.alive:
        return f"running ({line.alive} of {line.peers} peers)"
    if line.state == "unknown":
        return "unknown: p2pfl status asks its hosts"
    return f"{line.state} (collected {line.collected[:16]})" if line.collected else line.state


@click.command()
@RUN
@click.option("--peer", "peers", type=click.IntRange(min=0), multiple=True, help="Show only this peer; repeatable.")
@click.option("-f", "--follow", "follow", is_flag=True, help="Keep printing new entries until the peers exit.")
@click.option("--grep", "pattern", metavar="REGEX", default="", help="Show only entries that match.")
@click.option("-i", "--ignore-case", is_flag=True, help="Ignore case in --grep.")
@click.option(
    "--level", type=click.Choice(["debug", "info", "warning", "error"]), default="debug", help="Minimum level."
)
@click.option("--round", "t", type=click.IntRange(min=0), help="Show only entries about this round.")
@click.option(
    "--since",
    metavar="WHEN",
    help="Show only entries since then: a timestamp, e.g. 2026-11-22T21:46, or 90s, 10m, 2h before the newest entry.",
)
@click.option("-n", "--lines", type=click.IntRange(min=0), help="Start with the last N entries.")
def logs(
    run: Path,
    peers: tuple[int, ...],
    follow: bool,
    pattern: str,
    ignore_case: bool,
    level: str,
    t: int | None,
    since: str | None,
    lines: int | None,
) -> None:
    """Print the logs of RUN's peers, merged by time."""
    from launcher.facts.logs import Selection, last, open_logs, read_all, since_newest
    from launcher.facts.logs import follow as follow_logs

    try:
        compiled = re.compile(pattern, re.IGNORECASE if ignore_case else 0)
    except re.error as error:
        raise click.BadParameter(f"{pattern!r} is not a regular expression: {error}", param_hint="--grep") from None
    folder = open_run(run)
    files = open_logs(folder, peers)
    if since and (ago := re.fullmatch(r"(\d{1,15})([smh])", since)):
        since = since_newest(files, int(ago[1]) * {"s": 1, "m": 60, "h": 3600}[ago[2]])
    elif since and not re.fullmatch(r"\d{4}-\d\d(-\d\d(T\d\d(:\d\d(:\d\d([.]\d+)?)?)?)?)?", since):
        problem = f"{since!r} is neither a timestamp like 2026-11-22T21:46 nor a time like 90s, 10m or 2h"
        raise click.BadParameter(problem, param_hint="--since")
    matches = Selection(compiled, level, t, since or "")
    several = len(files) > 1
    for entry in last(read_all(files, matches), lines):
        _print_entry(entry, several)
    if follow and "collected" in folder.info:
        echo(f"end of the collected logs; for newer entries, copy them again: p2pfl collect {run}", err=True)
    elif follow:
        try:
            for entry in follow_logs(folder, files, matches):
                _print_entry(entry, several)
        except KeyboardInterrupt:  # the usual way to end it: do not print "Aborted!"
            echo(err=True)  # after the terminal's ^C
            sys.exit(128 + signal.SIGINT)


def _print_entry(entry: LogEntry, several: bool) -> None:
    colors = ("cyan", "green", "yellow", "magenta", "blue", "red")
    prefix = click.style(f"{entry.peer:>3} │ ", fg=colors[entry.peer % len(colors)]) if several else ""
    for line in entry.text.split("\n"):
        echo(line, prefix=prefix)


@click.command()
@RUN
@click.argument("other", metavar="[RUN2]", required=False, type=click.Path(path_type=Path))
@JSON
def digest(run: Path, other: Path | None, as_json: bool) -> None:
    """Print the digests of final states, or compare two runs.

    A digest is the SHA-256 of a peer's final state. With RUN2, list the peers whose states differ or cannot be
    compared yet, and exit with 1 if there are any.
    """
    if other is None:
        _print_digests(open_run(run), as_json)
    else:
        _compare_digests(run, other, as_json)


def _print_digests(folder: RunFolder, as_json: bool) -> None:
    from launcher.facts.digests import digests, unfinished

    found = digests(folder)
    if as_json:
        echo(json.dumps([vars(found[peer]) for peer in sorted(found)]))
    else:
        rows = [[str(peer), str(found[peer].rounds_done), found[peer].digest] for peer in sorted(found)]
        print_table(["peer", "rounds", "digest"], rows)
    if remaining := unfinished(folder):
        echo(str(remaining), err=True)


def _compare_digests(run: Path, other: Path, as_json: bool) -> None:
    from dataclasses import asdict

    from launcher.facts.digests import compare
    from launcher.formatting import ids

    compared = compare(open_run(run), open_run(other))
    if as_json:
        echo(json.dumps({"same": compared.same, **asdict(compared)}))
        sys.exit(0 if compared.same else 1)
    if compared.same:
        echo("identical: all peers ended with the same digests")
        return
    if compared.peers[0] != compared.peers[1]:
        echo(f"different: {run} has {compared.peers[0]} peers, {other} has {compared.peers[1]}")
    if compared.differ:
        echo(f"different: peers {ids(compared.differ, most=len(compared.differ))}")
    for path, remaining, absent in zip((run, other), compared.unfinished, compared.absent, strict=True):
        if remaining:
            echo(f"{path}: {remaining}")
        if absent:
            echo(f"{path}: no files of peers {ids(absent)}")
    if compared.agree and not compared.differ:
        echo(f"identical: peers {ids(compared.agree)}")
    sys.exit(1)


@click.command()
@RUN
@MASKED
@click.option("--device", type=click.Choice(["cpu", "cuda"]), default="cpu", show_default=True)
@JSON
def evaluate(run: Path, masked: bool | None, device: str, as_json: bool) -> None:
    """Evaluate a finished RUN again from its checkpoints.

    Show the masked and the unmasked accuracy of each peer. Nothing in RUN changes.
    """
    from launcher.views.evaluation import evaluate_run, table
    from launcher.views.print_summary import accuracy_lines

    evaluation = evaluate_run(open_run(run), masked, device)
    if as_json:
        echo(json.dumps(evaluation.to_dict()))
        return
    console = make_console()
    console.print(table(evaluation))
    for line in accuracy_lines(evaluation):
        console.print(line)
