"""The same work with decentralizepy, the closest system: one process per node over ZeroMQ, D-PSGD.

Needs a checkout (commit a5d46be was measured) and a Python with its requirements, which are not the project's: that
Python runs it, with `rival_images.py` as its dataset and models.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.bench import runs
from benchmarks.bench.measuring import Measurement, Slope, measure, scratch_folder

CONFIG = {
    "DATASET": {
        "dataset_package": "rival_images",
        "dataset_class": "FashionMnist",
        "train_dir": "",
        "test_dir": "",
        "sizes": "",
        "random_seed": "90",
    },
    "OPTIMIZER_PARAMS": {"optimizer_package": "torch.optim", "optimizer_class": "SGD", "lr": "0.01"},
    "TRAIN_PARAMS": {
        "training_package": "decentralizepy.training.Training",
        "training_class": "Training",
        "full_epochs": "False",
        "batch_size": "8",
        "shuffle": "True",
        "loss_package": "torch.nn",
        "loss_class": "CrossEntropyLoss",
    },
    "COMMUNICATION": {"comm_package": "decentralizepy.communication.TCP", "comm_class": "TCP"},
    "SHARING": {"sharing_package": "decentralizepy.sharing.Sharing", "sharing_class": "Sharing"},
}
MODELS = {runs.CNN: "Cnn", runs.MLP: "Mlp", runs.SMALL: "Small"}


@dataclass(frozen=True)
class Rival:
    """A decentralizepy checkout and the Python that runs it."""

    checkout: Path
    python: Path

    def slope(self, work: runs.Work, edges: Sequence[Sequence[int]], short: int) -> Slope:
        """Run ``work`` twice: with ``short`` rounds, and with its own number of rounds."""
        brief = self.measure(work._replace(rounds=short), edges)
        return Slope(brief, self.measure(work, edges), (work.rounds - short) * work.peers)

    def measure(self, work: runs.Work, edges: Sequence[Sequence[int]], timeout: float = 600.0) -> Measurement:
        """Run D-PSGD on a graph with the same networks and number of steps. Needs $P2PFL_DATA."""
        with scratch_folder() as folder:
            addresses, config, graph, run = (folder / name for name in ("ip.json", "config.ini", "edges", "run"))
            addresses.write_text(json.dumps({"0": "127.0.0.1"}))
            config.write_text(self._config(work, addresses))
            directed = [f"{a} {b}\n{b} {a}\n" for a, b in edges]
            graph.write_text(f"{work.peers}\n{''.join(directed)}")
            (run / "weights").mkdir(parents=True)
            shutil.copy(Path(__file__).with_name("rival_images.py"), folder)
            options: dict[str, object] = {
                "-cf": config,
                "-gf": graph,
                "-ps": work.peers,  # processes on this machine
                "-ms": 1,
                "-is": work.rounds,
                "-ld": run / "log",
                "-wsd": run / "weights",
                "-ta": 1000,  # evaluate every 1000th round only
                "-tea": 1000,
                "-ro": 0,
            }
            words = [str(word) for option in options.items() for word in option]
            return measure(
                [str(self.python), str(self.checkout / "eval" / "testing.py"), *words],
                folder,
                "log/**/*.log",
                "Starting training iteration",
                environment={"PYTHONPATH": f"{folder}:{self.checkout / 'src'}"},
                timeout=timeout,
            )

    @staticmethod
    def _config(work: runs.Work, addresses: Path) -> str:
        sections = {name: dict(values) for name, values in CONFIG.items()}
        sections["DATASET"].update(
            model_class=MODELS[work.model], train_dir=os.environ["P2PFL_DATA"], test_dir=os.environ["P2PFL_DATA"]
        )
        sections["TRAIN_PARAMS"]["rounds"] = str(work.steps)
        sections["COMMUNICATION"]["addresses_filepath"] = str(addresses)
        lines = [
            f"[{name}]\n" + "".join(f"{key} = {value}\n" for key, value in values.items())
            for name, values in sections.items()
        ]
        return "".join(lines)
