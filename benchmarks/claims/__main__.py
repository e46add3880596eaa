"""The papers' claims: write their pages from the packed runs, or execute a claim's runs again.

    python -m benchmarks.claims pages                               # docs/claims.md, docs/claims/*.md and the sheets
    python -m benchmarks.claims list --only l2c                     # the runs that undecided claims need
    python -m benchmarks.claims run --claim "Table 2" --store mine  # execute them, and print the claims' rows

Every finished run is kept in the store: an interrupted call continues where it ended, and a decided claim needs no
more runs. Give ``run`` an empty folder as ``--store`` to execute all of them again. $P2PFL_DATA holds the datasets;
claims whose datasets are missing are left out. The exit status is 1 if a run failed.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import torch

from benchmarks.claims import compare, ledger, pages, plan
from benchmarks.claims.claim import Claim
from benchmarks.claims.declared import PAPERS
from benchmarks.claims.execute import execute
from benchmarks.claims.store import RESULTS, Store
from p2pfl.data.cache_folder import data_root
from p2pfl.errors import P2pflError

PROJECT = Path(__file__).parents[2]


def selected(only: tuple[str, ...], part: str) -> list[Claim]:
    """Return the claims of these papers (all, if none is named) whose table or name contains ``part``."""
    claims = [claim for paper in PAPERS if not only or paper.key in only for claim in paper.claims]
    claims += compare.CLAIMS if not only or "compare" in only else ()
    return [claim for claim in claims if part.lower() in f"{claim.where}: {claim.name}".lower()]


def possible(only: tuple[str, ...], part: str, device: str) -> list[Claim]:
    """Return the selected claims whose datasets are there, without those that need a GPU if ``device`` is not one."""
    claims = [claim for claim in selected(only, part) if device == "cuda" or not claim.dear]
    missing = {file for claim in claims for file in plan.files(claim) if not (data_root(None) / file).exists()}
    if missing:
        click.echo(f"claims are left out that need {', '.join(sorted(missing))} in $P2PFL_DATA", err=True)
    return [claim for claim in claims if not missing.intersection(plan.files(claim))]


STORE = click.option(
    "--store", "folder", default=RESULTS, type=click.Path(path_type=Path), help="Folder of the runs."
)
SELECTION = (
    click.option(
        "--only",
        multiple=True,
        type=click.Choice([*(paper.key for paper in PAPERS), "compare"]),
        help="Take the claims of this paper; repeat it for several.",
    ),
    click.option("--claim", "part", default="", help="Take the claims whose table or name contains this."),
    click.option("--device", default="cpu", show_default=True, type=click.Choice(["cpu", "cuda"])),
)


def of_claims(command: Callable[..., Any]) -> Callable[..., Any]:
    for option in (*SELECTION, STORE):
        command = option(command)
    return command


@click.group(help=__doc__.replace("\n\n    python", "\n\n\b\n    python"))
def main() -> None:
    pass


@main.command("pages")
@STORE
@click.option("--page", default=PROJECT / "docs" / "claims.md", type=click.Path(exists=True, path_type=Path))
def write_pages(folder: Path, page: Path) -> None:
    """Write docs/claims.md, a page for each paper, and their sheets of pictures."""
    pages.write(PAPERS, Store(folder), page)


@main.command("list")
@of_claims
def list_runs(only: tuple[str, ...], part: str, device: str, folder: Path) -> None:
    """Print how many runs each undecided claim needs next."""
    store = Store(folder)
    for claim in possible(only, part, device):
        if tasks := plan.remaining(claim, store, device):
            click.echo(f"{len(tasks):3} runs: {claim.where}, {claim.name}")


@main.command()
@of_claims
@click.option("--sockets", is_flag=True, help="Run each peer as a process; on the CPU the records are the same.")
@click.option("--pack", is_flag=True, help="At the end, compress the runs that were added.")
def run(only: tuple[str, ...], part: str, device: str, folder: Path, sockets: bool, pack: bool) -> None:
    """Execute the runs that undecided claims need, one after the other, and print the claims' rows."""
    if device == "cuda" and not torch.cuda.is_available():
        raise click.UsageError("--device cuda, but torch finds no GPU on this host")
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # stops the peers of a launched run
    store, failed = Store(folder), False
    try:
        with store.locked():
            for claim in possible(only, part, device):
                failed |= not decide(claim, store, device, sockets)
                click.echo(ledger.row_of_claim(ledger.entry(claim, store)))
            if pack:
                store.pack()
    except BlockingIOError:
        raise click.ClickException(f"{folder}: another process adds runs; give each its own --store") from None
    if failed:
        sys.exit(1)


def decide(claim: Claim, store: Store, device: str, sockets: bool) -> bool:
    """Execute the runs that a claim needs until there are none. Returns False if one failed."""
    while tasks := plan.remaining(claim, store, device):
        task = tasks[0]
        name = f"{claim.where}, {claim.name}: {task.tree['algorithm']['name']}, seed {task.seed}"
        try:
            record = execute(task, sockets)
        except P2pflError as error:
            click.echo(f"{name}: failed: {error}", err=True)
            return False
        store.add(record)
        click.echo(f"{name}: {record['seconds']:.0f} s", err=True)
    return True


if __name__ == "__main__":
    main()
