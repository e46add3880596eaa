"""Register what a run file can name: algorithms, backbones, datasets, partitions, graphs, metrics, losses, ….

    from p2pfl import plugins

    @plugins.algorithm("best-heads")
    class BestHeads(Algorithm[Hyper]): ...

    @plugins.backbone("my-cnn", features=64)
    def my_cnn(channels, size, features): ...

Put them into a file and list it in the run file: ``plugins: [my_method.py]``. Each decorator returns what it
decorates. A mistake raises PluginError with file and line.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from p2pfl.algorithms import ALGORITHMS, algorithm
from p2pfl.data import AUGMENTATIONS, DATASETS, PARTITIONS, augmentation, dataset, partition
from p2pfl.graphs import GRAPHS, graph
from p2pfl.learning.metrics import METRICS, metric
from p2pfl.learning.named_losses import LOSSES, loss
from p2pfl.models import BACKBONES, HEADS, MODELS
from p2pfl.models.registration import backbone, group, head
from p2pfl.registry import Table

__all__ = [
    "algorithm",
    "augmentation",
    "backbone",
    "dataset",
    "graph",
    "group",
    "head",
    "loss",
    "metric",
    "partition",
]

TABLES: Mapping[str, Table[Any]] = {
    table.kind: table
    for table in (
        ALGORITHMS,
        MODELS,  # before backbones, each of which is a model
        BACKBONES,
        HEADS,
        DATASETS,
        PARTITIONS,
        AUGMENTATIONS,
        GRAPHS,
        METRICS,
        LOSSES,
    )
}
"""All tables of names, by the kind of thing."""
