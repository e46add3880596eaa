"""The command that writes a page about runs."""

from __future__ import annotations

import os
import shlex
from pathlib import Path

import click

from launcher.commands.group import SECONDS_TO, open_all
from launcher.formatting.console import echo

HTML = (".html", ".htm")


def _replaceable(context: click.Context, option: click.Parameter, file: Path | None) -> Path | None:
    """Refuse to overwrite an existing file that is not of the kind to write, e.g. a run file."""
    if file is not None and os.path.exists(file) and file.suffix.lower() not in HTML:
        raise click.BadParameter(f"{str(file)!r} exists and its name does not end in {HTML[0]}; choose another")
    return file


@click.command()
@click.argument("runs", nargs=-1, required=True, metavar="RUN...", type=click.Path(path_type=Path))
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path, dir_okay=False),
    callback=_replaceable,
    help="The page; default: report.html in RUN, or in the working directory if there are several.",
)
@click.option("--png", type=click.Path(path_type=Path, file_okay=False), help="Also write a PNG per figure here.")
@click.option("--pdf", type=click.Path(path_type=Path, file_okay=False), help="Also write a PDF per figure here.")
@click.option(
    "--without-models", is_flag=True, help="Load neither data nor checkpoints: faster, but shows less of a run."
)
@SECONDS_TO
def report(
    runs: tuple[Path, ...],
    output: Path | None,
    png: Path | None,
    pdf: Path | None,
    without_models: bool,
    seconds_to: float | None,
) -> None:
    """Write one HTML page about RUN, or about how several compare. A sweep stands for its runs.

    The page needs no network and no other file. Needs the extra `report`.
    """
    from launcher.report.command import NAME, write

    members = open_all(runs)
    if not members:
        raise click.UsageError(f"no run of {', '.join(map(str, runs))} has begun")
    if seconds_to is not None and len(members) == 1:
        raise click.UsageError("--seconds-to is a column of the page about several runs; name more runs")
    page = output or (runs[0] if len(runs) == 1 else Path()) / NAME
    for file in write(members, page, models=not without_models, png=png, pdf=pdf, seconds_to=seconds_to):
        echo(str(file))
    echo(f"open it: {opener(page)}", err=True)


def opener(page: Path) -> str:
    """Return a command that opens a page in a browser."""
    return f"python -m webbrowser {shlex.quote(page.absolute().as_uri())}"
