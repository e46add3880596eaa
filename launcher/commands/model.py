"""The command that writes the weights of a peer for other programs."""

from __future__ import annotations

import os
from pathlib import Path

import click

from launcher.commands.group import RUN
from launcher.formatting.console import echo


@click.command()
@RUN
@click.option("--peer", type=click.IntRange(min=0), required=True, help="Whose weights.")
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path, dir_okay=False),
    required=True,
    help="The file, e.g. net.pt.",
)
@click.option("--force", is_flag=True, help="Replace the file if it exists.")
def model(run: Path, peer: int, output: Path, force: bool) -> None:
    """Write a peer's weights as a state_dict of PyTorch.

    They are from its last checkpoint. torch.load("net.pt", weights_only=True) returns them, and load_state_dict
    of the class that the run file names takes them. Models of p2pfl keep their names, backbone... and head...
    """
    if os.path.lexists(output) and not force:
        raise click.UsageError(f"{str(output)!r} exists; choose another file, or add --force to replace it")
    from launcher.commands.group import open_run
    from p2pfl.api import RecordedRun

    rounds = RecordedRun(open_run(run)).save_weights(peer, output)
    echo(f"{output}: weights of peer {peer}; rounds completed: {rounds}")
