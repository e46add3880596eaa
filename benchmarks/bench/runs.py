"""The run files of the benchmarks."""

from __future__ import annotations

import os
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import networkx as nx

from benchmarks.bench.measuring import RunTree


class Work(NamedTuple):
    """D-PSGD on a random 4-regular graph: SGD with lr 0.01, batches of 8, evaluation after the last round."""

    peers: int
    model: str
    steps: int
    rounds: int


CNN = "htcnn-2"
"""582,026 parameters at 1x28x28, 2.3 MB."""
MLP = "mlp-3072-2944"
"""11,487,882 parameters at 1x28x28, 46 MB."""
SMALL = "mlp-8"
"""610 parameters at 1x8x8, 2.4 kB."""

WORK = {
    "W1": Work(16, CNN, 3, 50),
    "W2": Work(8, MLP, 1, 10),
    "W3": Work(64, CNN, 3, 10),
    "W4": Work(128, CNN, 3, 10),
}
QUICK = {"W1": Work(6, CNN, 1, 6)}


def regular_edges(peers: int, degree: int = 4) -> list[list[int]]:
    return sorted(sorted(edge) for edge in nx.random_regular_graph(degree, peers, seed=1).edges)


def fashion_mnist() -> dict[str, Any] | str:
    """Fashion-MNIST if $P2PFL_DATA has it, or else generated images of its size."""
    if (Path(os.environ.get("P2PFL_DATA", "")) / "FashionMNIST" / "raw").is_dir():
        return "fashion-mnist"
    return {"name": "synthetic", "size": 28, "train": 6000, "test": 1000}


def small_images(peers: int) -> dict[str, Any]:
    """Generated 1x8x8 images, 20 training samples for each peer."""
    return {"name": "synthetic", "size": 8, "train": 20 * peers + 40, "test": 5 * peers + 10}


def work(name: str, work: Work) -> RunTree:
    return {
        "name": name.lower(),
        "seed": 1,
        "rounds": work.rounds,
        "peers": work.peers,
        "graph": {"name": "edges", "edges": regular_edges(work.peers)},
        "data": {"dataset": fashion_mnist(), "partition": "iid"},
        "models": work.model,
        "algorithm": {"name": "dpsgd", "local_steps": work.steps, "lr": 0.01, "batch": 8},
        "device": "cpu",
        "eval_every": 1000,
    }


def light(peers: int, graph: Any, rounds: int, model: str = "tiny-cnn") -> RunTree:
    """A run whose training takes next to nothing: one step of a batch of 1 in each round."""
    return {
        "name": f"light{peers}",
        "seed": 1,
        "rounds": rounds,
        "peers": peers,
        "graph": graph,
        "data": {"dataset": small_images(peers), "partition": "iid"},
        "models": model,
        "algorithm": {"name": "dpsgd", "local_steps": 1, "lr": 0.01, "batch": 1},
        "device": "cpu",
        "eval_every": 1000,
    }


def without_messages(tree: RunTree) -> RunTree:
    """The same run without neighbors: the same training, rounds and files, and no messages."""
    return {**tree, "graph": {"name": "edges", "edges": [], "allow_disconnected": True}}


CHECKPOINTED: dict[str, dict[str, Any]] = {
    "mapl": {
        "data": {
            "dataset": "digits",
            "partition": {"name": "clusters", "clusters": 2, "per_class": 14, "test_per_class": 15},
            "augment": "mapl",
        },
        "algorithm": {"name": "mapl", "warmup": 10, "batch": 32, "projector_hidden": 128},
    },
    "dfml": {
        "data": {"dataset": "digits", "partition": {"name": "dirichlet-train", "beta": 0.5, "validation": 0.2}},
        "algorithm": {
            "name": "dfml",
            "batch": 32,
            "lr": 0.01,
            "mutual_epochs": 1,
            "period": 5,
            "period_increment": 5,
        },
    },
}
"""Methods that send prototypes and heads, and whole models."""


def checkpointed(method: str, peers: int, rounds: int, every: int | str) -> RunTree:
    return {
        "name": method,
        "rounds": rounds,
        "peers": peers,
        "models": "tiny4",
        "device": "cpu",
        "eval_every": 5,
        "checkpoint_every": every,
        **CHECKPOINTED[method],
    }


def mlp_bytes(inputs: int, widths: Sequence[int], classes: int = 10) -> int:
    """Bytes of a model with these hidden layers, float32: the body of a message."""
    layers = [inputs, *widths, classes]
    return 4 * sum(before * after + after for before, after in pairwise(layers))


def dataset_name() -> str:
    dataset = fashion_mnist()
    return "Fashion-MNIST, IID" if isinstance(dataset, str) else "generated images of 1x28x28 (set $P2PFL_DATA)"
