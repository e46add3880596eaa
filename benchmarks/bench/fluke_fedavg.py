"""The same FedAvg with fluke, a simulator of federated learning, which a Python of its own runs (simulate.py).

    PYTHON -m benchmarks.bench.fluke_fedavg FOLDER      # PYTHON has fluke-fl; 0.8.1 was measured

One server with the clients of `plain_fedavg.py`; it evaluates on all clients' test samples.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from fluke import DDict, FlukeENV
from fluke.algorithms.fedavg import FedAVG
from fluke.data import DataSplitter, DummyDataContainer, FastDataLoader
from fluke.evaluation import ClassificationEval
from fluke.utils import FederationObserver, ServerObserver

from benchmarks.bench.plain_fedavg import Samples, cnn, log_rounds, read


class Rounds(FederationObserver, ServerObserver):  # type: ignore[misc]
    """Logs the end of each round."""

    def __init__(self, folder: Path) -> None:
        self.log = log_rounds(folder)
        self.accuracy = 0.0

    def server_evaluation(self, round: int, eval_type: str, evals: dict[str, float], **keywords: Any) -> None:
        self.accuracy = evals["accuracy"]

    def end_round(self, round: int) -> None:
        self.log.info("round done t=%d accuracy=%.4f", round - 1, self.accuracy)


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    work, train_sets, test_sets = read(folder)
    environment = FlukeENV()
    environment.set_seed(1)
    environment.set_evaluator(ClassificationEval(eval_every=1, n_classes=10))
    environment.set_eval_cfg(server=True, locals=False, pre_fit=False, post_fit=False)

    def loader(samples: Samples, size: int, shuffle: bool) -> FastDataLoader:
        return FastDataLoader(*samples, num_labels=10, batch_size=size, shuffle=shuffle)

    tests = torch.cat([x for x, _ in test_sets]), torch.cat([labels for _, labels in test_sets])
    container = DummyDataContainer(
        [loader(samples, work["batch"], True) for samples in train_sets],
        [None] * work["peers"],
        loader(tests, 64, False),
        num_classes=10,
    )
    client = {
        "batch_size": work["batch"],
        "local_epochs": 1,
        "loss": "CrossEntropyLoss",
        "optimizer": {"name": "SGD", "lr": work["lr"]},
        "scheduler": {"name": "StepLR", "step_size": 1, "gamma": 1},
    }
    hyper = DDict(model=cnn(), client=DDict(client), server=DDict(weighted=True))
    algorithm = FedAVG(work["peers"], DataSplitter(container), hyper)
    algorithm.set_callbacks([Rounds(folder)])
    algorithm.run(work["rounds"], 1.0)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
