"""Measure what a dataset costs 100 peers: decoding, opening, memory.

    python benchmarks/data.py                          # Fashion-MNIST, 100 peers, shards as in L2C
    python benchmarks/data.py --dataset cifar10 --peers 20 --partition '{name: dirichlet}'

Peers are forked from a process that has opened and split the dataset, as `p2pfl launch` does; nothing is sent.
Each reads all of its training samples once, in batches.

    decoded     decode the source files, with an empty cache (seconds)
    opened      open the decoded dataset (seconds, median of 5)
    split       partition the samples among the peers (seconds)
    taken       all peers read all of their samples (seconds)
    opened_all  all peers open the dataset again, as peers do that are not forked (seconds)
    pss_mb      proportional set size of all peers after `taken`: shared pages, like those of the images, count in
                parts. `base` is the same after every peer has summed one batch of zeros, which copies pages of the
                parent process.
    copied_mb   what the images would take if every peer had its own copy
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
import traceback
from pathlib import Path
from time import monotonic

import click
import numpy as np
import psutil
import torch
import yaml

from p2pfl.data import Dataset, Subset, open_dataset
from p2pfl.learning.peer_data import PeerData
from p2pfl.run_file.load import from_dict
from p2pfl.run_file.run import Run
from p2pfl.session.build import load_data

BATCH = 64


def one_peer(run: Run, me: int, prepared: tuple[Dataset, list[Subset]], ready: int, go: int, ended: int) -> None:
    """Perform the steps of one peer; announce the end of each and wait for the signal to continue."""
    dataset, subsets = prepared
    torch.zeros((BATCH, dataset.channels, *dataset.size), dtype=torch.uint8).sum()
    os.write(ready, b".")
    os.read(go, 1)
    data = PeerData(dataset, subsets[me], lambda images: images, torch.device("cpu"))
    for images, _ in data.batches(BATCH, np.random.default_rng(me)):
        images.sum()
    os.write(ready, b".")
    os.read(go, 1)
    file = run.file.data
    open_dataset(file.dataset.name, run.loader, file.root, download=False)
    os.write(ready, b".")
    os.read(ended, 1)


def wait_for_all(ready: int, peers: int) -> None:
    arrived = 0
    while arrived < peers:
        if not (signs := os.read(ready, peers)):
            raise click.ClickException("the peers have failed")
        arrived += len(signs)


def pss(pids: list[int]) -> float:
    return float(sum(psutil.Process(pid).memory_full_info().pss for pid in pids)) / 1e6


@click.command()
@click.option("--dataset", default="fashion-mnist", show_default=True)
@click.option("--partition", default="{name: shards}", show_default=True)
@click.option("--peers", default=100, show_default=True)
def main(dataset: str, partition: str, peers: int) -> None:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as cache:
        os.environ["P2PFL_CACHE"] = cache
        run = from_dict(
            {
                "name": "data",
                "rounds": 1,
                "peers": peers,
                "data": {"dataset": yaml.safe_load(dataset), "partition": yaml.safe_load(partition)},
                "algorithm": "local",
            }
        )
        began = monotonic()
        images, subsets = load_data(run)
        decoded = monotonic() - began
        began = monotonic()
        run.partition.split(images.labels, run.peers, run.seed)
        split = monotonic() - began
        opened = []
        for _ in range(5):
            began = monotonic()
            open_dataset(images.name, run.loader, run.file.data.root, download=False)
            opened.append(monotonic() - began)
        size = images.train.images.nbytes + images.test.images.nbytes
        trained = sum(len(subset.train) for subset in subsets)

        (ready, announce), (proceed, go), (last, ended) = os.pipe(), os.pipe(), os.pipe()
        pids = []
        for me in range(peers):
            if not (pid := os.fork()):
                status = 1
                try:
                    one_peer(run, me, (images, subsets), announce, proceed, last)
                    status = 0
                except BaseException:
                    traceback.print_exc()
                finally:
                    os._exit(status)
            pids.append(pid)
        os.close(announce)  # so that reading ends if the peers do
        wait_for_all(ready, peers)
        base = pss(pids)
        times, memory = [], []
        for _ in range(2):
            began = monotonic()
            os.write(go, b"." * peers)
            wait_for_all(ready, peers)
            times.append(monotonic() - began)
            memory.append(pss(pids))
        entries = [path for path in Path(cache).iterdir() if path.is_dir()]
        os.write(ended, b"." * peers)
        if [status for pid in pids if (status := os.waitpid(pid, 0)[1])]:
            raise click.ClickException("a peer has failed")
    figures = {
        "dataset": dataset,
        "peers": peers,
        "training_samples": trained,
        "cache_entries": len(entries),
        "decoded": round(decoded, 2),
        "opened": round(statistics.median(opened), 4),
        "split": round(split, 3),
        "taken": round(times[0], 2),
        "opened_all": round(times[1], 2),
        "base_mb": round(base),
        "pss_mb": round(memory[0]),
        "pss_mb_per_peer_of_data": round((memory[0] - base) / peers, 2),
        "images_mb": round(size / 1e6, 1),
        "copied_mb": round(size * peers / 1e6),
    }
    cores = len(os.sched_getaffinity(0))
    click.echo(f"# {cores} cores, {psutil.virtual_memory().total / 2**30:.0f} GiB, Python {sys.version.split()[0]}")
    click.echo(json.dumps(figures))


if __name__ == "__main__":
    main()
