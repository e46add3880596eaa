"""The command ``p2pfl collect``."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import click

from launcher.commands.group import JSON, FiniteNumber, open_run
from launcher.formatting.console import echo, make_console


@click.command()
@click.argument("into", type=click.Path(path_type=Path))
@click.argument("locations", metavar="[LOCATION]...", nargs=-1)
@click.option(
    "--compose",
    is_flag=False,
    flag_value=".",
    metavar="[FILE]",
    help="Collect from the containers of a compose project: that of FILE, or of the working directory.",
)
@click.option(
    "--k8s",
    is_flag=False,
    flag_value="",
    metavar="[[NAMESPACE/]NAME]",
    help="Collect from the pods of `p2pfl k8s`: those of run NAME, or all in kubectl's current namespace.",
)
@click.option(
    "--checkpoints", is_flag=True, help="Also collect checkpoints, which are large; later updates of INTO do too."
)
@click.option(
    "--max-gb",
    type=FiniteNumber(min=0, min_open=True),
    default=10.0,
    show_default=True,
    help="Maximum gigabytes to read from one LOCATION, which may be hostile.",
)
@JSON
def collect(
    into: Path,
    locations: tuple[str, ...],
    compose: str | None,
    k8s: str | None,
    checkpoints: bool,
    max_gb: float,
    as_json: bool,
) -> None:
    """Collect the files of peers on other hosts in a run folder.

    A LOCATION is a run folder or a folder of run folders, HOST:FOLDER (over ssh), container:NAME or
    pod:NAMESPACE/NAME. INTO is a new folder, or an earlier collection to update; without a LOCATION, it is updated
    from the previous ones. The run may still be going on. Exit with 1 if a location could not be read.
    """
    from launcher.collect.collection import collect as collect_folders
    from launcher.views.print_summary import failure_lines, print_summary

    console = make_console(err=as_json)
    for location in map(Path, locations):
        # A launched run may have newer files on its hosts. What cannot be read is reported below.
        if os.path.isfile(location / "run.yaml"):
            open_run(location)
    given = [
        *locations,
        *([] if compose is None else [f"compose:{compose}"]),
        *([] if k8s is None else [f"k8s:{k8s}"]),
    ]
    collected = collect_folders(into, given, console.print, checkpoints, int(max_gb * 1e9))
    if as_json:
        echo(json.dumps(collected.summary.to_dict()))
    else:
        print_summary(collected.summary, console)
    for line in failure_lines(collected.summary):
        echo(line, err=True)
    for name, reason in collected.unread.items():
        echo(f"{name}: cannot be read: {reason}", err=True)
    echo(f"run: {collected.folder.root}", err=as_json)
    sys.exit(1 if collected.unread else 0)
