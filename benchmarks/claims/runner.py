"""Measure the papers' claims: ``make claims``, or ``python -m benchmarks.claims --only mapl --seeds 5``.

Each other module of this package has the claims of one paper. A claim is measured for several seeds; the table shows
for how many of them it holds, with mean and standard deviation of its figures. Fashion-MNIST, MNIST and USPS are read
from $P2PFL_DATA.
"""

from __future__ import annotations

import importlib
import json
import multiprocessing  # noqa: TID251  # forks or communicates with its children
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import click

from benchmarks.claims.claim import Claim, forget

PAPERS = tuple(
    sorted(file.stem for file in Path(__file__).parent.glob("[!_]*.py") if file.stem not in ("claim", "runner"))
)  # fmt: skip


def claims_of(paper: str) -> Sequence[Claim]:
    claims: Sequence[Claim] = importlib.import_module(f"benchmarks.claims.{paper}").CLAIMS
    return claims


def measure(paper: str, seed: int, name_part: str | None) -> list[dict[str, Any]]:
    """Measure all claims of one paper for one seed, in one process, so that they share runs."""
    os.nice(5)
    outcomes = []
    for claim in claims_of(paper):
        if name_part is not None and name_part.lower() not in claim.name.lower():
            continue
        began = time.perf_counter()
        try:
            figures = dict(claim.measure(seed))
            outcome: dict[str, Any] = {"figures": figures, "holds": bool(claim.holds(figures))}
        except Exception as error:
            outcome = {"error": f"{type(error).__name__}: {error}"}
        seconds = round(time.perf_counter() - began, 1)
        outcomes.append({"paper": paper, "claim": claim.name, "seed": seed, "seconds": seconds, **outcome})
    forget()
    return outcomes


def verdict(outcomes: Sequence[Mapping[str, Any]]) -> str:
    held = sum(outcome["holds"] for outcome in outcomes)
    if held == len(outcomes):
        return f"reproduced ({held} of {held} seeds)"
    return f"{'in some runs' if held else 'not reproduced'} ({held} of {len(outcomes)} seeds)"


def mean_and_std(values: Sequence[float]) -> str:
    digits = max(0, min(4, 2 - len(str(int(abs(fmean(values)))).lstrip("0")) + 1))
    spread = f" ± {stdev(values):.{digits}f}" if len(values) > 1 else ""
    return f"{fmean(values):.{digits}f}{spread}"


def table(outcomes: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Return Markdown lines: a section per paper, a row per claim."""
    for paper in dict.fromkeys(outcome["paper"] for outcome in outcomes):
        yield f"\n## {paper}\n"
        yield "| claim | paper | expected | measured | verdict |\n|---|---|---|---|---|"
        for claim in claims_of(paper):
            matching = [o for o in outcomes if (o["paper"], o["claim"]) == (paper, claim.name)]
            failed = [outcome["error"] for outcome in matching if "error" in outcome]
            done = [outcome for outcome in matching if "error" not in outcome]
            names = dict.fromkeys(name for outcome in done for name in outcome["figures"])  # some seeds have more
            values = {name: [o["figures"][name] for o in done if name in o["figures"]] for name in names}
            figures = "; ".join(f"{name} {mean_and_std(value)}" for name, value in values.items())
            if matching:
                result = f"failed: {failed[0]}" if failed else verdict(done)
                yield f"| {claim.name} | {claim.paper} | {claim.expects} | {figures} | {result} |"
        spent = sum(outcome["seconds"] for outcome in outcomes if outcome["paper"] == paper)
        yield f"\n{spent / 60:.1f} minutes of computing."


@click.command(help=__doc__)
@click.option("--only", multiple=True, type=click.Choice(PAPERS), help="Measure the claims of this paper.")
@click.option("--claim", help="Measure the claims whose name contains this.")
@click.option("--seeds", default=3, show_default=True, help="Seeds 0, 1, … for each claim.")
@click.option("--jobs", default=os.cpu_count(), show_default="cores", help="Parallel processes.")
@click.option("--out", type=click.Path(path_type=Path), help="Append each outcome to this file as a JSON line.")
@click.option("--show", type=click.Path(path_type=Path, exists=True), help="Only print the table of this file.")
def main(
    only: tuple[str, ...], claim: str | None, seeds: int, jobs: int, out: Path | None, show: Path | None
) -> None:
    if show is not None:
        lines = show.read_text(encoding="utf-8").splitlines()
        finish([outcome for outcome in map(json.loads, lines) if outcome["paper"] in (only or PAPERS)])
        return
    tasks = [(paper, seed) for seed in range(seeds) for paper in only or PAPERS]
    outcomes: list[dict[str, Any]] = []
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, mp_context=spawn, max_tasks_per_child=1) as pool:
        futures = [pool.submit(measure, paper, seed, claim) for paper, seed in tasks]
        for future in as_completed(futures):
            for outcome in future.result():
                click.echo(json.dumps(outcome), err=True)
                outcomes.append(outcome)
                if out is not None:
                    with out.open("a", encoding="utf-8") as file:
                        file.write(json.dumps(outcome) + "\n")
    finish(outcomes)


def finish(outcomes: list[dict[str, Any]]) -> None:
    """Print the table; exit with 1 if a claim could not be measured."""
    outcomes.sort(key=lambda outcome: (outcome["paper"], outcome["seed"]))
    for line in table(outcomes):
        click.echo(line)
    if any("error" in outcome for outcome in outcomes):
        sys.exit(1)
