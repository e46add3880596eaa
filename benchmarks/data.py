"""What a dataset costs 100 peers: time to decode it once, time to open it, memory.

    python benchmarks/data.py                          # Fashion-MNIST, 100 peers, shards as in L2C
    python benchmarks/data.py --dataset cifar10 --peers 20 --partition '{name: dirichlet}'

Peers are forks of one process that has opened the dataset and split it, as `p2pfl launch` makes them; no network.
Each takes all of its training samples once, in batches.

    decoded     one process found nothing in the cache and decoded the source files (seconds)
    opened      one process found it decoded (seconds, median of 5)
    split       who gets which samples (seconds)
    taken       all peers together have taken all of their samples
    opened_all  all peers together have opened the dataset again, each for itself, as peers do that are not forked
    pss_mb      proportional set size of all peers together after `taken`: pages that several of them have mapped,
                the images among them, are divided among these. `base` is what it was when every peer had made
                one batch of zeros and summed it up, which copies pages of the process it was forked from.
    copied_mb   what the images would take if every peer had them in memory of its own
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
from pathlib import Path
from time import monotonic

import click
import numpy as np
import psutil
import torch
import yaml

from p2pfl.config import Run, from_dict
from p2pfl.data import Dataset, Share, open_dataset
from p2pfl.session import load_data
from p2pfl.training import PeerData

BATCH = 64


def one_peer(run: Run, me: int, prepared: tuple[Dataset, list[Share]], ready: int, go: int, ended: int) -> None:
    """Say when a step is done, and wait for the word to go on with the next."""
    dataset, shares = prepared
    torch.zeros((BATCH, dataset.channels, *dataset.size), dtype=torch.uint8).sum()
    os.write(ready, b".")
    os.read(go, 1)
    data = PeerData(dataset, shares[me], lambda images: images, torch.device("cpu"))
    for images, _ in data.batches(BATCH, np.random.default_rng(me)):
        images.sum()
    os.write(ready, b".")
    os.read(go, 1)
    file = run.file.data
    open_dataset(file.dataset.name, run.source, file.root, download=False)
    os.write(ready, b".")
    os.read(ended, 1)


def wait_for_all(ready: int, peers: int) -> None:
    heard = 0
    while heard < peers:
        heard += len(os.read(ready, peers))


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
        images, shares = load_data(run)
        decoded = monotonic() - began
        began = monotonic()
        run.partition.split(images.labelled, run.peers, run.seed)
        split = monotonic() - began
        opened = []
        for _ in range(5):
            began = monotonic()
            open_dataset(images.name, run.source, run.file.data.root, download=False)
            opened.append(monotonic() - began)
        size = images.train.images.nbytes + images.test.images.nbytes
        trained = sum(len(share.train) for share in shares)

        (ready, say), (hear, go), (last, ended) = os.pipe(), os.pipe(), os.pipe()
        pids = []
        for me in range(peers):
            if not (pid := os.fork()):
                one_peer(run, me, (images, shares), say, hear, last)
                os._exit(0)
            pids.append(pid)
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
        for pid in pids:
            os.waitpid(pid, 0)
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
