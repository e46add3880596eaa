"""The command ``p2pfl collect``."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import click

from launcher.commands.group import JSON, open_run
from launcher.formatting.console import echo, make_console


@click.command()
@click.argument("into", type=click.Path(path_type=Path))
@click.argument("locations", metavar="[LOCATION]...", nargs=-1)
@click.option(
    "--checkpoints", is_flag=True, help="Also collect checkpoints, which are large; later updates of INTO do too."
)
@JSON
def collect(into: Path, locations: tuple[str, ...], checkpoints: bool, as_json: bool) -> None:
    """Combine run folders of peers on other hosts into one.

    A LOCATION is a copy of a run folder, or a folder of such copies: copy them with rsync or scp, `docker cp` or
    `kubectl cp`. INTO is a new folder, or an earlier collection to update; without a LOCATION, it is updated from the
    previous ones. The run may still be going on. Exit with 1 if a location could not be read.
    """
    from launcher.collect.collection import collect as collect_folders
    from launcher.views.print_summary import show_summary

    console = make_console(err=as_json)
    for location in map(Path, locations):
        # A launched run may have newer files on its hosts. What cannot be read is reported below.
        if os.path.isfile(location / "run.yaml"):
            open_run(location)
    collected = collect_folders(into, locations, console.print, checkpoints)
    show_summary(collected.summary, console, as_json=as_json)
    for name, reason in collected.unread.items():
        echo(f"{name}: cannot be read: {reason}", err=True)
    echo(f"run: {collected.folder.root}", err=as_json)
    sys.exit(1 if collected.unread else 0)
