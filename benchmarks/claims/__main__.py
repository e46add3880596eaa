"""Decide the papers' claims: execute runs, the cheapest undecided claim first, then write the pages of docs/claims.

    make claims                                                # until all are decided: days on two cores
    make claims MINUTES=60 JOBS=2 ONLY=l2c                     # as many as an hour decides
    make claims CLAIM="Table 2"                                # those whose table or name contains this
    make claims DEVICE=cuda MINUTES=600 JOBS=16                # also at the papers' own size; a job keeps a core busy
    make claims DEVICE=cuda MINUTES=600 SOCKETS=1              # the same with a process per peer; they share the GPU
    python -m benchmarks.claims --list                         # what would be run, with the expected minutes
    python -m benchmarks.claims --minutes 0                    # write the pages only
    python -m benchmarks.claims --minutes 0 --pack             # the same, and compress the runs that were added

Every finished run is kept in the store, so that an interrupted call continues where it ended. $P2PFL_DATA holds the
datasets; claims whose datasets are not there are left out. The exit status is 1 if a run failed.
"""

from __future__ import annotations

import signal
import sys
from contextlib import ExitStack
from pathlib import Path

import click
import torch

from benchmarks.claims import compare, dfml, fedstyle, fedtgp, l2c, mapl, pages, plan
from benchmarks.claims.claim import Claim, Paper
from benchmarks.claims.scheduler import Budget, Scheduler
from benchmarks.claims.store import Store

PROJECT = Path(__file__).parents[2]
PAPERS: tuple[Paper, ...] = (mapl.MODULE, l2c.MODULE, fedtgp.MODULE, dfml.MODULE, fedstyle.MODULE)
NAMES = (*(paper.key for paper in PAPERS), "compare")


def selected(only: tuple[str, ...], part: str) -> list[Claim]:
    """Return the claims of these papers (all, if none is named) whose table or name contains ``part``."""
    claims = [claim for paper in PAPERS if not only or paper.key in only for claim in paper.claims]
    claims += compare.CLAIMS if not only or "compare" in only else ()
    return [claim for claim in claims if part.lower() in f"{claim.where}: {claim.name}".lower()]


@click.command(help=__doc__)
@click.option(
    "--only", multiple=True, type=click.Choice(NAMES), help="Decide the claims of this paper; repeat it for several."
)
@click.option("--claim", "part", default="", help="Decide the claims whose table or name contains this.")
@click.option("--minutes", type=click.FloatRange(min=0), help="Time budget; default: none.")
@click.option(
    "--jobs",
    default=1,
    show_default=True,
    type=click.IntRange(min=1),
    help="Runs at the same time, a thread per peer.",
)
@click.option("--device", default="cpu", show_default=True, type=click.Choice(["cpu", "cuda"]))
@click.option("--sockets", is_flag=True, help="Run each peer as a process; on the CPU the records are the same.")
@click.option(
    "--store", "folder", default=PROJECT / "benchmarks" / "results" / "claims", type=click.Path(path_type=Path)
)
@click.option("--page", default=PROJECT / "docs" / "claims.md", type=click.Path(exists=True, path_type=Path))
@click.option("--list", "listed", is_flag=True, help="Print what would be run.")
@click.option("--pack", is_flag=True, help="At the end, compress the runs that were added.")
def main(
    only: tuple[str, ...],
    part: str,
    minutes: float | None,
    jobs: int,
    device: str,
    sockets: bool,
    folder: Path,
    page: Path,
    listed: bool,
    pack: bool,
) -> None:
    if device == "cuda" and not torch.cuda.is_available():
        raise click.UsageError("--device cuda, but torch finds no GPU on this host")
    store = Store(folder)
    claims = selected(only, part)
    without = sorted({file for claim in claims if not claim.dear for file in plan.missing_files(claim)})
    if without:
        click.echo(f"claims are left out that need {', '.join(without)} in $P2PFL_DATA", err=True)
    if listed:
        for seconds, claim, tasks in plan.undecided(claims, store, device):
            click.echo(f"{seconds / 60:7.1f} minutes, {len(tasks):3} runs: {claim.where}, {claim.name}")
        return
    scheduler = Scheduler(claims, store, Budget(minutes, jobs, device, sockets))
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # ends workers, writes the pages
    with ExitStack() as stack:
        try:
            stack.enter_context(store.locked())
        except BlockingIOError:
            raise click.ClickException(
                f"{folder}: another process adds runs; --jobs runs several at a time"
            ) from None
        try:
            if minutes != 0:
                scheduler.run()
            if pack:
                store.pack()
        finally:
            pages.write(PAPERS, store, page)
    if scheduler.failed:
        sys.exit(1)


if __name__ == "__main__":
    main()
