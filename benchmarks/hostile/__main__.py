"""Measure attacks and rules of aggregation beside published results. Needs MNIST and Fashion-MNIST in P2PFL_DATA.

    python -m benchmarks.hostile byzfl --gamma 0 --attackers 2     # ByzFL's table, in part
    python -m benchmarks.hostile peers --graph complete            # rules without a server
    python -m benchmarks.hostile map --cpu-minutes 30              # methods x rules x attacks; continues later
    python -m benchmarks.hostile dumbbell                          # what crosses the one edge between two groups

Each run is simulated once: its result is a line of the file given by --results.
"""

from __future__ import annotations

from pathlib import Path

import click
import torch

from benchmarks.hostile import byzfl_table, map_picture, peers_table, robustness_map
from benchmarks.hostile import dumbbell as dumbbells
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


@main.command(name="map")
@click.option("--method", "names", multiple=True, type=click.Choice(list(robustness_map.METHODS)), help="All.")
@click.option("--fraction", "fractions", multiple=True, type=click.Choice(robustness_map.FRACTIONS), help="%")
@click.option("--attack", "attacks", multiple=True, type=click.Choice(list(robustness_map.ATTACKS)), help="All.")
@click.option("--rule", help="In place of the methods' robust rules; several with commas.")
@click.option("--seeds", default=3, show_default=True)
@click.option("--cpu-minutes", default=900.0, show_default=True, help="No run after these; 0: show what is there.")
@click.option("--picture", type=Path, help="Draw the map: an .svg or .png.")
@click.pass_obj
def map_(
    results: Results,
    names: tuple[str, ...],
    fractions: tuple[int, ...],
    attacks: tuple[str, ...],
    rule: str | None,
    seeds: int,
    cpu_minutes: float,
    picture: Path | None,
) -> None:
    """Methods x rules x attacks x fraction of attackers, on Fashion-MNIST."""
    shown = fractions or robustness_map.FRACTIONS
    methods = robustness_map.chosen(names, attacks, rule.split(",") if rule else None)
    robustness_map.measure(results, methods, shown, seeds, 60 * cpu_minutes)
    for fraction in shown:
        click.echo(f"\n{fraction} % attackers\n\n{robustness_map.table(results, methods, fraction)}")
    click.echo(f"\n{robustness_map.spent(results):.2f} CPU hours for all runs of the map in the file")
    if picture is not None:
        map_picture.draw(results, methods, picture)


@main.command()
@click.option("--rule", "rules", multiple=True, type=click.Choice(list(dumbbells.RULES)), help="All.")
@click.option("--attack", "attacks", multiple=True, type=click.Choice(list(dumbbells.ATTACKS)), help="All.")
@click.option("--seeds", default=3, show_default=True)
@click.option("--rounds", default=300, show_default=True)
@click.option("--cpu-minutes", default=60.0, show_default=True, help="No run after these; 0: show what is there.")
@click.pass_obj
def dumbbell(
    results: Results, rules: tuple[str, ...], attacks: tuple[str, ...], seeds: int, rounds: int, cpu_minutes: float
) -> None:
    """What crosses the one edge between two cliques with different classes of MNIST, with and without dissensus."""
    shown = rules or tuple(dumbbells.RULES), attacks or tuple(dumbbells.ATTACKS)
    dumbbells.measure(results, *shown, seeds, rounds, 60 * cpu_minutes)
    click.echo(dumbbells.table(results, *shown, rounds))


if __name__ == "__main__":
    main()
