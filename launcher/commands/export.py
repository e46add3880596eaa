"""``p2pfl export``: the records of runs for other programs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from launcher.commands.group import open_all
from launcher.formatting.console import echo

if TYPE_CHECKING:
    from launcher.export import ExportFormat


@click.command()
@click.argument("runs", nargs=-1, required=True, metavar="RUN...", type=click.Path(path_type=Path))
@click.option(
    "--format",
    "form",
    type=click.Choice(["tensorboard", "csv", "parquet"]),
    required=True,
    help="tensorboard and parquet need the extras of these names.",
)
@click.option(
    "-o",
    "--out",
    type=click.Path(path_type=Path, file_okay=False),
    default=Path("exported"),
    show_default=True,
    help="Folder for the files; files of an earlier export are replaced.",
)
def export(runs: tuple[Path, ...], form: ExportFormat, out: Path) -> None:
    """Write the records of runs for other programs.

    A sweep stands for its runs. csv and parquet have a row for each peer and round, and the columns of `metrics()` of
    the Python API. For TensorBoard, each peer is a separate run beside the mean over the peers: tensorboard
    --logdir exported
    """
    from launcher.export import export as write

    for file in write([folder for folder, _ in open_all(runs)], form, out):
        echo(str(file))
