"""FedAvg as a plain PyTorch loop: what `p2pfl simulate` is measured against (simulate.py).

    python -m benchmarks.bench.plain_fedavg FOLDER

FOLDER holds `work.json` and `samples.npz` (``read``); it gets `run/rounds.log` with the end of each round. Nothing of
p2pfl is imported, so that the start of the process is that of a plain program.
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

Samples = tuple[Tensor, Tensor]
"""Network input, float32 [N, 1, 28, 28], and labels, int64 [N]."""


def cnn() -> nn.Sequential:
    """As htcnn-2: 582,026 parameters."""
    convolutions = (nn.Conv2d(1, 32, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(32, 64, 5), nn.ReLU(), nn.MaxPool2d(2))
    return nn.Sequential(*convolutions, nn.Flatten(), nn.Linear(1024, 512), nn.ReLU(), nn.Linear(512, 10))


def read(folder: Path) -> tuple[Mapping[str, Any], list[Samples], list[Samples]]:
    """Return the settings of the run, and the training and test samples of each client."""
    work = json.loads((folder / "work.json").read_text())
    with np.load(folder / "samples.npz") as arrays:  # noqa: TID251  # holds no pickles
        train, test = (
            [
                (torch.from_numpy(arrays[f"{split}_x_{k}"]), torch.from_numpy(arrays[f"{split}_y_{k}"]))
                for k in range(work["peers"])
            ]
            for split in ("train", "test")
        )
    return work, train, test


def log_rounds(folder: Path) -> logging.Logger:
    """Return a log whose lines `measuring.log_times` reads."""
    (folder / "run").mkdir()
    log = logging.getLogger("rounds")
    log.setLevel(logging.INFO)
    handler = logging.FileHandler(folder / "run" / "rounds.log")
    handler.setFormatter(logging.Formatter("%(asctime)s.%(msecs)03d %(message)s", "%Y-%m-%dT%H:%M:%S"))
    log.addHandler(handler)
    return log


def train(model: nn.Module, optimizer: torch.optim.Optimizer, samples: Samples, batch: int) -> float:
    """Train for one epoch; return the mean loss."""
    x, labels = samples
    total = 0.0
    model.train()
    for chosen in torch.split(torch.randperm(len(x)), batch):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x[chosen]), labels[chosen])
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        total += loss.item() * len(chosen)
    return total / len(x)


@torch.no_grad()
def evaluate(model: nn.Module, samples: Samples, batch: int = 64) -> float:
    """Return the accuracy."""
    x, labels = samples
    model.eval()
    scores = torch.cat([model(part) for part in torch.split(x, batch)])
    return float((scores.argmax(1) == labels).float().mean())


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    work, train_sets, test_sets = read(folder)
    log = log_rounds(folder)
    torch.manual_seed(1)
    models = [cnn() for _ in train_sets]
    optimizers = [torch.optim.SGD(model.parameters(), lr=work["lr"]) for model in models]
    shared = models[0].state_dict()
    samples = sum(len(labels) for _, labels in train_sets)
    for t in range(work["rounds"]):
        for model in models:
            model.load_state_dict(shared)
        losses = [train(*each, work["batch"]) for each in zip(models, optimizers, train_sets, strict=True)]
        states = [
            (len(labels) / samples, model.state_dict()) for model, (_, labels) in zip(models, train_sets, strict=True)
        ]
        shared = {name: sum(weight * state[name] for weight, state in states) for name in shared}
        models[0].load_state_dict(shared)
        accuracies = [evaluate(models[0], test_set) for test_set in test_sets]
        log.info("round done t=%d loss=%.4f accuracy=%.4f", t, np.mean(losses), np.mean(accuracies))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
