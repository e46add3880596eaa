"""The command ``p2pfl compose``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from launcher.commands.group import FILE, SETS
from launcher.formatting.console import echo_file


@click.command()
@FILE
@SETS
@click.option("--keys", type=click.Path(path_type=Path), help="Folder with the peers' keys. Default: create keys.")
@click.option("--image", metavar="NAME", help="Image to run. Default: build one from the compose file's folder.")
def compose(file: Path, **options: Any) -> None:
    """Print a compose file for FILE: one container per peer.

    Save it as docker-compose.yml and start it with `docker compose up`.
    """
    from launcher.backends.compose import ComposeFile

    echo_file(ComposeFile(file, **options).render())
