"""Compare MAPL, with and without CGL, to local training on the same partition, networks and augmentation.

    python benchmarks/mapl_vs_local.py --dataset digits --seeds 5
    python benchmarks/mapl_vs_local.py --dataset fashion-mnist --seeds 5

Each line is one simulated run. The last lines are mean ± standard deviation over seeds of the personal accuracy after
the last round, averaged over peers.

Scaled down from the paper's setting (20 peers, 300 samples per class, full-size networks, 400 rounds) to minutes on
two cores: small networks (`tiny4`), few samples, few rounds, CGL from half of them on.
"""

from __future__ import annotations

import json
import os
import statistics
from collections import defaultdict
from time import perf_counter
from typing import Any

import click

from p2pfl.run_file.load import from_dict
from p2pfl.session.run_folder import Result
from p2pfl.session.simulate import simulate

SETTINGS: dict[str, dict[str, Any]] = {
    "digits": {"peers": 20, "rounds": 80, "per_class": 14, "warmup": 40, "batch": 32},
    "fashion-mnist": {"peers": 10, "rounds": 30, "per_class": 30, "warmup": 15, "batch": 32},
}
"""``per_class``: training samples per class and peer. 15 test samples per class and peer, as in the paper."""

METHODS = ("local", "mapl-no-cgl", "mapl", "local-unaugmented", "mapl-unaugmented")


def run_file(dataset: str, method: str, overlap: int, seed: int) -> dict[str, Any]:
    setting = SETTINGS[dataset]
    mapl = {
        "name": "mapl",
        "lr": 0.001,
        "batch": setting["batch"],
        "warmup": setting["warmup"],
        "projector_hidden": 128,
        "cgl": method != "mapl-no-cgl",
    }
    local = {"name": "local", "optimizer": "adam", "lr": 0.001, "batch": setting["batch"]}
    return {
        "name": f"{dataset}-{method}",
        "seed": seed,
        "rounds": setting["rounds"],
        "peers": setting["peers"],
        "graph": "complete",
        "data": {
            "dataset": dataset,
            "partition": {
                "name": "clusters",
                "clusters": 2,
                "overlap": overlap,
                "per_class": setting["per_class"],
                "test_per_class": 15,
            },
            "augment": "none" if method.endswith("unaugmented") else "mapl",
        },
        "models": "tiny4",
        "algorithm": local if method.startswith("local") else mapl,
        "device": "cpu",
        "eval_every": setting["rounds"],
    }


def weight_ratio(results: list[Result]) -> tuple[float, float]:
    """Return the mean learned weight between different peers, inside groups and across them."""
    inside: list[float] = []
    across: list[float] = []
    for result in results:
        for other in results:
            if other.peer != result.peer:
                weight = (result.weights or {}).get(str(other.peer), 0.0)
                (inside if other.group == result.group else across).append(weight)
    return statistics.mean(inside), statistics.mean(across)


@click.command()
@click.option("--dataset", type=click.Choice(list(SETTINGS)), default="digits", show_default=True)
@click.option("--overlap", default=0, show_default=True, help="Classes in both clusters (scenario 2: 4).")
@click.option("--seeds", default=5, show_default=True)
@click.option("--method", "methods", multiple=True, default=METHODS)
def main(dataset: str, overlap: int, seeds: int, methods: tuple[str, ...]) -> None:
    click.echo(f"# {len(os.sched_getaffinity(0))} cores; {dataset}: {SETTINGS[dataset]}, overlap {overlap}")
    accuracy: defaultdict[str, list[float]] = defaultdict(list)
    messages: defaultdict[str, list[int]] = defaultdict(list)
    for seed in range(seeds):
        for method in methods:
            began = perf_counter()
            results = simulate(from_dict(run_file(dataset, method, overlap, seed)))
            accuracy[method].append(statistics.mean(r.accuracy or 0.0 for r in results))
            sent = [kinds["Prototypes"][0] for r in results for kinds in r.sent.values() if "Prototypes" in kinds]
            messages[method].append(sum(sent))
            inside, across = weight_ratio(results)
            line = {
                "seed": seed,
                "method": method,
                "accuracy": round(accuracy[method][-1], 4),
                "std_over_peers": round(statistics.pstdev(r.accuracy or 0.0 for r in results), 4),
                "prototype_messages": messages[method][-1],
                "weight_inside": round(inside, 4),
                "weight_across": round(across, 4),
                "seconds": round(perf_counter() - began, 1),
            }
            click.echo(json.dumps(line))
    for method in methods:
        spread = statistics.stdev(accuracy[method]) if seeds > 1 else 0.0
        sent_mean = statistics.mean(messages[method])
        click.echo(f"# {method:18} {100 * statistics.mean(accuracy[method]):.2f} ± {100 * spread:.2f} %, "
                   f"{sent_mean:.0f} prototype messages")  # fmt: skip


if __name__ == "__main__":
    main()
