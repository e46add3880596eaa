"""Compare D-PSGD on time-varying graphs with D-PSGD on a static random graph, for the same number of bytes.

    P2PFL_DATA=… python benchmarks/time_varying_graphs.py

Epidemic Learning (de Vos et al., NeurIPS 2023) reports that EL-Oracle is up to 1.7 times as fast as static and other
time-varying graphs, and 2.2 points more accurate: there 96 nodes on CIFAR-10; here 32 peers with 4 neighbors each on
Fashion-MNIST in shards with 2 classes a peer, and a small CNN. In a round, each peer takes gradient steps and sends
its model to 4 others.

Each line is one simulated run. The accuracy is of a peer's model on the whole test set, averaged over peers;
``spread`` is its standard deviation over peers. The last lines are mean ± standard deviation over seeds after the
last round, and the rounds (of those evaluated) that each graph needs for the final accuracy of the first.
"""

from __future__ import annotations

import json
import os
import statistics
import tempfile
from collections import defaultdict
from pathlib import Path
from time import perf_counter
from typing import Any

import click

import p2pfl

GRAPHS: dict[str, Any] = {
    "static": {"name": "regular", "degree": 4},
    "el-oracle": {"name": "el-oracle", "degree": 4},
    "el-local": {"name": "el-local", "receivers": 4},
    "base-k": {"name": "base-k", "degree": 4},
}
"""Each peer sends to 4 others in a round; in ``base-k`` to 4 at most, so to fewer on average."""


def run_file(graph: str, seed: int, rounds: int, eval_every: int) -> dict[str, Any]:
    return {
        "name": f"time-varying-{graph}",
        "seed": seed,
        "rounds": rounds,
        "peers": 32,
        "graph": GRAPHS[graph],
        "data": {
            "dataset": "fashion-mnist",
            "partition": {"name": "shards", "classes_per_peer": 2, "shards": 7, "validation": 0.0},
        },
        "models": "tiny-cnn",
        "algorithm": {"name": "dpsgd", "local_steps": 5, "batch": 16, "lr": 0.05},
        "global_test": True,
        "eval_every": eval_every,
        "device": "cpu",
    }


def measure(graph: str, seed: int, rounds: int, eval_every: int) -> dict[str, Any]:
    """Simulate a run; return its accuracy by round, in percent, and the megabytes that a peer has sent on average."""
    began = perf_counter()
    evaluated: defaultdict[int, list[float]] = defaultdict(list)
    with tempfile.TemporaryDirectory(prefix="p2pfl-graphs-") as scratch:
        run = p2pfl.load(run_file(graph, seed, rounds, eval_every)).simulate(Path(scratch, "run"))
        for record in run.records():
            if record["global"] is not None:
                evaluated[record["t"] + 1].append(100.0 * record["global"]["accuracy"])
        results = run.results()
    sent = sum(entry[1] for result in results for kinds in result.sent.values() for entry in kinds.values())
    return {
        "graph": graph,
        "seed": seed,
        "accuracy": {t: round(statistics.fmean(evaluated[t]), 2) for t in sorted(evaluated)},
        "spread": round(statistics.pstdev(evaluated[rounds]), 2),
        "megabytes": round(sent / len(results) / 1e6, 2),
        "seconds": round(perf_counter() - began, 1),
    }


def rounds_to(accuracy: dict[int, float], target: float) -> int | None:
    """Return the first round after which the accuracy has been evaluated to at least ``target``."""
    return next((t for t in sorted(accuracy) if accuracy[t] >= target), None)


@click.command()
@click.option("--seeds", default=3, show_default=True)
@click.option("--rounds", default=200, show_default=True)
@click.option("--eval-every", default=40, show_default=True)
@click.option("--graph", "graphs", type=click.Choice(list(GRAPHS)), multiple=True, default=("static", "el-oracle"))
def main(seeds: int, rounds: int, eval_every: int, graphs: tuple[str, ...]) -> None:
    click.echo(f"# {len(os.sched_getaffinity(0))} cores; {rounds} rounds")
    found: defaultdict[str, list[dict[str, Any]]] = defaultdict(list)
    for seed in range(seeds):
        for graph in graphs:
            found[graph].append(measure(graph, seed, rounds, eval_every))
            click.echo(json.dumps(found[graph][-1]))
    for graph in graphs:
        last = [line["accuracy"][rounds] for line in found[graph]]
        deviation = statistics.stdev(last) if seeds > 1 else 0.0
        needed = [
            rounds_to(line["accuracy"], first["accuracy"][rounds])
            for line, first in zip(found[graph], found[graphs[0]], strict=True)
        ]
        click.echo(
            f"# {graph:10} {statistics.fmean(last):.2f} ± {deviation:.2f} %, "
            f"spread over peers {statistics.fmean(line['spread'] for line in found[graph]):.2f}, "
            f"{statistics.fmean(line['megabytes'] for line in found[graph]):.2f} MB a peer; "
            f"rounds to the final accuracy of {graphs[0]}: {', '.join(map(str, needed))}"
        )


if __name__ == "__main__":
    main()
