"""Measure memory and time of DFML's aggregator, by the number of models that hold activations at a time.

    python benchmarks/dfml_memory.py                                    # 26 ResNets a quarter as wide as ResNet-18
    python benchmarks/dfml_memory.py --model dfml-resnet-64             # 26 ResNet-18; minutes for each limit

Each line is a separate process that runs mutual learning of equal models on two batches of synthetic 32x32 images. It
shows the maximum resident memory less that before the models were made (on a GPU, the memory allocated by torch), the
seconds of the second batch, and a digest of all models: the limit must not change any bit.
"""

from __future__ import annotations

import multiprocessing  # noqa: TID251  # forks or communicates with its children
import resource
from concurrent.futures import ProcessPoolExecutor
from time import perf_counter

import click
import torch

from p2pfl.algorithms.dfml import DFML
from p2pfl.rng import Streams
from p2pfl.run_file.load import from_dict
from p2pfl.session.build import load_data, make_algorithm
from p2pfl.tensors import digest


def measure(name: str, models: int, batch: int, limit: int | None, device: str) -> tuple[float, float, str]:
    """Return MiB, seconds and digest."""
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
            "algorithm": {"name": "dfml", "batch": batch, "mutual_epochs": 1, "mutual_batch_models": limit},
        }
    )
    dfml = make_algorithm(run, 0, load_data(run), torch.device(device), Streams(0, 0))
    assert isinstance(dfml, DFML)
    before = _resident()
    ends = []
    dfml.after_batch = lambda: ends.append(perf_counter())
    torch.manual_seed(0)
    all_models = {n: dfml.build(n).train() for n in range(models)}
    dfml.mutual_learning(all_models, alpha=0.5)
    memory = torch.cuda.max_memory_allocated() / 2**20 if device == "cuda" else _resident() - before
    return memory, ends[1] - ends[0], digest({n: model.state_dict() for n, model in all_models.items()})[:12]


def _resident() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10


@click.command(help=__doc__)
@click.option("--model", default="dfml-resnet-16", show_default=True, help="Architecture of all models.")
@click.option("--models", default=26, show_default=True, help="Number of models at the aggregator.")
@click.option("--batch", default=64, show_default=True, help="Samples in a batch.")
@click.option("--limit", "limits", multiple=True, type=int, help="mutual_batch_models; 0: none. Default: 0, 4, 1.")
@click.option("--device", default="cpu", show_default=True, type=click.Choice(["cpu", "cuda"]))
def main(model: str, models: int, batch: int, limits: tuple[int, ...], device: str) -> None:
    click.echo(f"{models} x {model}, batches of {batch}, {device}")
    for limit in limits or (0, 4, 1):
        with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as process:
            memory, seconds, found = process.submit(measure, model, models, batch, limit or None, device).result()
        name = f"at most {limit}" if limit else "no limit"
        click.echo(f"{name:>10} | {memory:8.0f} MiB | {seconds:6.1f} s per batch | {found}")


if __name__ == "__main__":
    main()
