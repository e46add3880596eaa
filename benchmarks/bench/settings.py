"""What the command line asks of every benchmark."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import click

from benchmarks.bench.rival import Rival


@dataclass(frozen=True)
class Settings:
    """Options of the command.

    Attributes:
        turns: how often runs that are compared take turns.
        quick: small sizes, to see that everything works; the figures mean nothing.
        most_peers: leave out runs of more peers that measure growth, e.g. for lack of memory.
        rival: where decentralizepy is; None leaves it out.
        fluke_python: a Python that has fluke; None leaves it out.
    """

    turns: int = 1
    quick: bool = False
    most_peers: int = 512
    rival: Rival | None = None
    fluke_python: Path | None = None

    def progress(self, text: str) -> None:
        click.echo(f"  {text}", err=True)
