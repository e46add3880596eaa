"""Measure speed, memory and disk, and write docs/benchmarks.md.

    make bench                                               # everything, 30 to 40 minutes on two cores
    python -m benchmarks.bench --only gpu                    # on a host with a GPU
    python -m benchmarks.bench --only launch --only scale    # some of it; the rest of the page stays
    python -m benchmarks.bench --quick                       # small sizes, writes nothing: does it work?
    P2PFL_DATA=… python -m benchmarks.bench --only work --turns 3 --rival DECENTRALIZEPY --rival-python PYTHON
    P2PFL_DATA=… python -m benchmarks.bench --only simulate --turns 5 --fluke-python PYTHON

Figures go to benchmarks/results/*.json and from there into the page, with the goals beside them. The exit status is 0
if a goal is missed: figures depend on the machine and on what else it does. For each missed goal of a run of peers,
--profile writes a flame graph of a peer (needs the extra `bench`).
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import click

from benchmarks.bench import gpu, messages, rules, simulate, sizes, transports, work
from benchmarks.bench.flame import file_name, find_py_spy, profile_peer
from benchmarks.bench.report import Report, describe_machine, goals_table, markdown_table, write
from benchmarks.bench.rival import Rival
from benchmarks.bench.settings import Settings
from p2pfl.session.gpus import NO_GPU, find_gpus

PROJECT = Path(__file__).parents[2]
BENCHMARKS: dict[str, Callable[[Settings], Report]] = {
    "work": work.side_by_side,
    "overhead": work.overhead,
    "messages": messages.messages,
    "simulate": simulate.simulate,
    "transports": transports.transports,
    "launch": sizes.launch,
    "scale": sizes.scale,
    "memory": sizes.memory,
    "checkpoints": work.checkpoints,
    "rules": rules.rules,
    "gpu": gpu.gpu,
}
NEED_A_GPU = {"gpu"}
EXISTING = click.Path(exists=True, path_type=Path, resolve_path=True)


@click.command(help=__doc__)
@click.option("--only", multiple=True, type=click.Choice(list(BENCHMARKS)), help="Repeat it for several.")
@click.option("--turns", default=1, show_default=True, type=click.IntRange(min=1), help="Turns of paired runs.")
@click.option("--quick", is_flag=True, help="Small sizes; print only.")
@click.option("--most-peers", default=512, show_default=True, help="Leave out larger runs of launch and scale.")
@click.option("--rival", type=EXISTING, help="Checkout of decentralizepy.")
@click.option("--rival-python", type=click.Path(exists=True, path_type=Path), help="The Python that runs it.")
@click.option("--fluke-python", type=click.Path(exists=True, path_type=Path), help="A Python that has fluke.")
@click.option("--profile", is_flag=True, help="Write a flame graph for each missed goal; needs py-spy.")
@click.option("--results", type=click.Path(path_type=Path), default=PROJECT / "benchmarks" / "results")
@click.option("--page", type=EXISTING, default=PROJECT / "docs" / "benchmarks.md")
def main(
    only: tuple[str, ...],
    turns: int,
    quick: bool,
    most_peers: int,
    rival: Path | None,
    rival_python: Path | None,
    fluke_python: Path | None,
    profile: bool,
    results: Path,
    page: Path,
) -> None:
    if (rival is None) != (rival_python is None):
        raise click.UsageError("give both --rival and --rival-python, or neither")
    if profile:
        find_py_spy()
    if not find_gpus():
        if missing := NEED_A_GPU & set(only):
            raise click.UsageError(f"--only {', '.join(missing)}: {NO_GPU.partition(';')[0]}")
        only = only or tuple(name for name in BENCHMARKS if name not in NEED_A_GPU)
    other = Rival(rival, rival_python.absolute()) if rival and rival_python else None
    fluke = fluke_python.absolute() if fluke_python else None
    settings = Settings(turns, quick, min(most_peers, 20) if quick else most_peers, other, fluke)
    reports = []
    for name in only or BENCHMARKS:
        click.echo(name, err=True)
        machine = describe_machine(turns)
        report = BENCHMARKS[name](settings)
        report.machine = machine
        reports.append(report)
        for table in report.tables:
            click.echo(markdown_table(table.columns, table.rows) + "\n")
        if not quick:  # each at once: a later one may be interrupted
            write(report, list(BENCHMARKS), results, page)
        for goal in report.missed if profile else ():
            if goal.what in report.runs:
                svg = results / file_name(goal.what)
                problem = profile_peer(report.runs[goal.what], svg)
                click.echo(f"  {problem or svg}", err=True)
    click.echo(goals_table(reports))


if __name__ == "__main__":
    main()
