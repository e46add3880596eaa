"""Measure attacks and rules of aggregation beside published results. Needs MNIST in P2PFL_DATA.

    python -m benchmarks.hostile byzfl --gamma 0 --attackers 2     # ByzFL's table, in part
    python -m benchmarks.hostile peers --graph complete            # rules without a server

Each run is simulated once: its result is a line of the file given by --results.
"""

from __future__ import annotations

from pathlib import Path

import click
import torch

from benchmarks.hostile import byzfl_table, peers_table
from benchmarks.hostile.byzfl_table import SERVER
from benchmarks.hostile.peers_table import GRAPHS
from benchmarks.hostile.runs import Results


@click.group(help=__doc__)
@click.option("--results", type=Path, default=Path("hostile.jsonl"), show_default=True, help="Results of runs.")
@click.pass_context
def main(context: click.Context, results: Path) -> None:
    torch.set_num_threads(1)
    context.obj = Results(results)


@main.command()
@click.option("--gamma", type=float, multiple=True, default=(0.0, 1.0), show_default=True, help="Similarity of data.")
@click.option("--attackers", type=click.IntRange(1, 4), multiple=True, default=(1, 2, 3, 4), show_default=True)
@click.option("--rule", "rules", multiple=True, type=click.Choice(SERVER), default=SERVER)
@click.option("--seeds", default=3, show_default=True)
@click.option("--rounds", default=800, show_default=True)
@click.pass_obj
def byzfl(
    results: Results,
    rules: tuple[str, ...],
    gamma: tuple[float, ...],
    attackers: tuple[int, ...],
    seeds: int,
    rounds: int,
) -> None:
    """The heat map on MNIST: trimmed mean and geometric median after clipping and NNM."""
    click.echo(byzfl_table.table(results, rules, gamma, attackers, seeds, rounds))


@main.command()
@click.option("--rule", "rules", multiple=True, type=click.Choice(peers_table.RULES), default=peers_table.RULES)
@click.option("--graph", "graphs", multiple=True, type=click.Choice(list(GRAPHS)), default=tuple(GRAPHS))
@click.option("--attackers", type=click.IntRange(1, 4), default=2, show_default=True)
@click.option("--seeds", default=3, show_default=True)
@click.option("--rounds", default=800, show_default=True)
@click.pass_obj
def peers(
    results: Results, rules: tuple[str, ...], graphs: tuple[str, ...], attackers: int, seeds: int, rounds: int
) -> None:
    """Rules for peers without a server, at γ = 0."""
    click.echo(peers_table.table(results, rules, graphs, attackers, seeds, rounds))


if __name__ == "__main__":
    main()
