"""Bare training: the local steps of all peers of a D-PSGD run in plain PyTorch, one process per core.

    python -m benchmarks.bench.bare RUN.yaml FOLDER

Nothing is sent, averaged, evaluated, recorded or saved. Networks, samples and optimizer are as in the run. FOLDER
gets a log with the end of each round for each process.
"""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path

import numpy as np
import torch
from torch.nn import functional as F

from benchmarks.bench.measuring import cores
from p2pfl.data import Dataset, Subset
from p2pfl.models import build
from p2pfl.run_file.load import load
from p2pfl.run_file.run import Run
from p2pfl.session.build import load_data


def train(run: Run, dataset: Dataset, subsets: list[Subset], log: logging.Logger) -> None:
    hyper = run.file.algorithm.given
    mean, std = (torch.tensor(values).reshape(1, -1, 1, 1) for values in (dataset.mean, dataset.std))
    stream = np.random.default_rng(0)
    models = [
        build(run.file.models.group, 0, dataset.channels, dataset.size, dataset.classes).train() for _ in subsets
    ]
    optimizers = [torch.optim.SGD(model.parameters(), lr=hyper["lr"]) for model in models]
    for t in range(run.rounds):
        for model, optimizer, subset in zip(models, optimizers, subsets, strict=True):
            for _ in range(hyper["local_steps"]):
                images, labels = dataset.train.take(stream.choice(subset.train, hyper["batch"]))
                F.cross_entropy(model((images.float() / 255 - mean) / std), labels).backward()  # type: ignore[no-untyped-call]
                optimizer.step()
                optimizer.zero_grad()
        log.info("round done t=%d", t)


def main(file: Path, folder: Path) -> None:
    torch.set_num_threads(1)
    run = load(file)
    dataset, subsets = load_data(run)
    workers = min(cores(), run.peers)
    folder.mkdir()
    pids = []
    for worker in range(workers):
        if not (pid := os.fork()):
            logging.basicConfig(
                filename=folder / f"{worker}.log",
                level=logging.INFO,
                format="%(asctime)s.%(msecs)03d %(levelname)-7s %(message)s",
                datefmt="%Y-%m-%dT%H:%M:%S",
            )
            train(run, dataset, list(subsets)[worker::workers], logging.getLogger())
            os._exit(0)
        pids.append(pid)
    sys.exit(max(status for _, status in [os.waitpid(pid, 0) for pid in pids]) != 0)


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
