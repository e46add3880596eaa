"""Plug-ins for tests: a method that averages heads, a model, a graph and a partition, as a user would write them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from p2pfl.algorithms import ALGORITHMS
from p2pfl.graphs import GRAPHS
from p2pfl.plugins import loading

METHOD = '''\
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from p2pfl import plugins
from p2pfl.algorithms.base import Algorithm
from p2pfl.learning.optimizers import LocalTraining
from p2pfl.messaging.net import Net
from p2pfl.messaging.schema import Body, Layout
from p2pfl.tensors import average, parameters_of


@dataclass(frozen=True)
class Hyper(LocalTraining):
    own_weight: float = 1.0
    """Weight of the local head."""


@dataclass(frozen=True)
class Head(Body):
    values: dict[str, Tensor]


@plugins.algorithm("head-mean")
class HeadMean(Algorithm[Hyper]):
    """Average the heads of all neighbors."""

    Hyper = Hyper
    linear_heads = equal_features = True

    def setup(self) -> None:
        self.optimizer = self.hyper.make_optimizer(self.model.parameters())

    async def round(self, t: int, net: Net) -> None:
        self.train_or_roll_back(epochs=self.hyper.local_epochs, batch=self.hyper.batch)
        local = parameters_of(self.model.linear_head)
        heads = {j: head.values for j, head in (await net.exchange(Head(local))).items()}
        weights = {**dict.fromkeys(heads, 1.0), self.me: self.hyper.own_weight}
        self.assign_unless_diverged(local, average({**heads, self.me: local}, weights))

    def layouts(self) -> Sequence[Layout]:
        return [Layout.of(Head(parameters_of(self.model.linear_head)))]
'''

PARTS = '''\
import numpy as np
from torch import nn

from helpers import pairs
from p2pfl import plugins
from p2pfl.data import Partition, Subset
from p2pfl.graphs import Graph


@plugins.backbone("my-cnn", features=16)
def my_cnn(channels, size, features):
    layers = nn.Conv2d(channels, 4, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(16, features)
    return nn.Sequential(*layers)


@plugins.head("two-layers")
class TwoLayers(nn.Sequential):
    def __init__(self, features, classes):
        super().__init__(nn.Linear(features, 8), nn.ReLU(), nn.Linear(8, classes))


@plugins.graph("pairs")
class Pairs(Graph):
    """Peer 2i is a neighbor of 2i+1."""

    def edges_of(self, peers, seed, base):
        return pairs(peers)


@plugins.partition("in-order")
class InOrder(Partition):
    """Equally many samples for each peer, in the order of the dataset."""

    def split(self, data, peers, seed):
        train, test = np.array_split(np.arange(90), peers), np.array_split(np.arange(90), peers)
        return [Subset(mine, mine[:0], test[peer]) for peer, mine in enumerate(train)]
'''

HELPERS = """\
def pairs(peers):
    return [(peer, peer + 1) for peer in range(0, peers - 1, 2)]
"""

RUN = """\
name: mine
peers: 4
rounds: 3
plugins: [my_method.py, my_parts.py]
graph: {name: pairs, allow_disconnected: true}
data: {dataset: digits, partition: in-order}
models: my-cnn
algorithm: {name: head-mean, batch: 16, own_weight: 2}
device: cpu
"""

Project = Callable[..., Path]


@pytest.fixture
def project(tmp_path: Path) -> Project:
    """Make a folder with the plug-ins and the run file ``mine.yaml``; arguments replace their texts."""

    def make(run: str = RUN, folder: Path = tmp_path / "project", **files: str) -> Path:
        folder.mkdir(exist_ok=True)
        texts = {"my_method": METHOD, "my_parts": PARTS, "helpers": HELPERS, **files}
        for name, text in texts.items():
            (folder / f"{name}.py").write_text(text)
        (folder / "mine.yaml").write_text(run)
        return folder / "mine.yaml"

    return make


@pytest.fixture
def nothing_stays_registered(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Forget at the end what installed packages have registered, and their modules."""
    monkeypatch.setattr(loading, "_INSTALLED_ENTRIES", {})
    monkeypatch.setattr(loading, "_announced", None)
    before = set(sys.modules)
    yield
    loading.activate([])  # before the names of its modules are removed
    ALGORITHMS.unregister("head-mean")
    GRAPHS.unregister("turns")
    for name in set(sys.modules) - before:
        if name.startswith("lab_methods"):
            del sys.modules[name]
