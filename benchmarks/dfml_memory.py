"""What the aggregator of DFML needs in memory and time, with bounds on the models that hold their activations.

    python benchmarks/dfml_memory.py                                    # 26 ResNets a quarter as wide as ResNet-18
    python benchmarks/dfml_memory.py --model dfml-resnet-64             # 26 ResNet-18; minutes for each bound

Each line is a process of its own that lets so many equal models teach one another on two batches of made-up images of
32x32: its largest resident memory, less that before the models were made (on a GPU what torch has allocated); the
seconds of the second batch; and a digest of all models, which shows that the bound changes no bit of them.
"""

from __future__ import annotations

import multiprocessing
import resource
from concurrent.futures import ProcessPoolExecutor
from time import perf_counter

import click
import torch

from p2pfl.algorithms.dfml import DFML
from p2pfl.config import from_dict
from p2pfl.rng import Streams
from p2pfl.session import load_data, make_algorithm
from p2pfl.tensors import digest


def measure(name: str, models: int, batch: int, bound: int | None, device: str) -> tuple[float, float, str]:
    """MiB, seconds, digest."""
    torch.set_num_threads(1)
    run = from_dict(
        {
            "name": "memory",
            "rounds": 1,
            "peers": 1,
            "data": {
                "dataset": {"name": "synthetic", "size": 32, "channels": 3, "train": 2 * batch, "test": 10},
                "partition": {"name": "iid-train", "validation": 0.0},
            },
            "models": name,
            "algorithm": {"name": "dfml", "batch": batch, "mutual_epochs": 1, "mutual_batch_models": bound},
        }
    )
    dfml = make_algorithm(run, 0, load_data(run), torch.device(device), Streams(0, 0))
    assert isinstance(dfml, DFML)
    before = _resident()
    ends = []
    dfml.after_batch = lambda: ends.append(perf_counter())
    torch.manual_seed(0)
    everyone = {n: dfml.build(n).train() for n in range(models)}
    dfml.mutual_learning(everyone, alpha=0.5)
    used = torch.cuda.max_memory_allocated() / 2**20 if device == "cuda" else _resident() - before
    return used, ends[1] - ends[0], digest({n: model.state_dict() for n, model in everyone.items()})[:12]


def _resident() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10


@click.command(help=__doc__)
@click.option("--model", default="dfml-resnet-16", show_default=True, help="Architecture of all models.")
@click.option("--models", default=26, show_default=True, help="How many there are at the aggregator.")
@click.option("--batch", default=64, show_default=True, help="Samples in a batch.")
@click.option("--bound", multiple=True, type=int, help="mutual_batch_models; 0 is no bound. Default: 0, 4 and 1.")
@click.option("--device", default="cpu", show_default=True, type=click.Choice(["cpu", "cuda"]))
def main(model: str, models: int, batch: int, bound: tuple[int, ...], device: str) -> None:
    click.echo(f"{models} x {model}, batches of {batch}, {device}")
    for most in bound or (0, 4, 1):
        with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as process:
            used, seconds, found = process.submit(measure, model, models, batch, most or None, device).result()
        name = f"at most {most}" if most else "no bound"
        click.echo(f"{name:>10} | {used:8.0f} MiB | {seconds:6.1f} s a batch | {found}")


if __name__ == "__main__":
    main()
