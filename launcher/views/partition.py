"""``p2pfl data show``: the samples of each peer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

import numpy as np

from launcher.formatting import ids
from p2pfl.data import Dataset, Subset
from p2pfl.inputs import describe as describe_inputs
from p2pfl.inputs import shape_of
from p2pfl.run_file.run import Run

MAX_NAMES = 100
"""Most classes that are listed by name."""
MAX_CLASSES = 12
"""Most classes, or ranges of classes with equal counts, that a table row lists."""


def describe(run: Run, dataset: Dataset, subsets: Sequence[Subset]) -> dict[str, Any]:
    """Return the data of the table, the plot and ``--json`` as plain values."""
    peers = []
    for peer, subset in enumerate(subsets):
        train, test = (dataset.pool, dataset.pool) if subset.merged else (dataset.train, dataset.test)
        peers.append(
            {
                "peer": peer,
                "group": subset.group,
                "train": len(subset.train),
                "validation": len(subset.validation),
                "test": len(subset.test),
                "classes": _counts(train.labels[subset.train]),
                "test_classes": _counts(test.labels[subset.test]),
            }
        )
    sizes = [len(subset.train) for subset in subsets]
    resolved = run.resolved()["data"]
    return {
        "dataset": {
            **resolved["dataset"],
            "train": len(dataset.train),
            "test": len(dataset.test),
            "shape": list(shape_of(dataset.channels, dataset.size)),
            "inputs": describe_inputs(dataset.channels, dataset.size),
            "classes": dataset.classes,
            "class_names": list(dataset.class_names),
            "train_by_class": np.bincount(dataset.train.labels, minlength=dataset.classes).tolist(),
            "test_by_class": np.bincount(dataset.test.labels, minlength=dataset.classes).tolist(),
            "notes": list(dataset.notes),
        },
        "partition": resolved["partition"],
        "peers": peers,
        "total": {
            "train": sum(sizes),
            "distinct": len(np.unique(np.concatenate([subset.train for subset in subsets]))),
            "min": min(sizes),
            "mean": sum(sizes) / len(sizes),
            "max": max(sizes),
        },
    }


def _counts(labels: np.ndarray) -> dict[str, int]:
    present, counts = np.unique(labels, return_counts=True)
    return {str(label): int(count) for label, count in zip(present, counts, strict=True)}


def rows(found: Mapping[str, Any]) -> list[list[str]]:
    """Return the table's rows; consecutive peers with equal cells share a row."""
    described = [
        (
            peer["peer"],
            [
                str(peer["group"]),
                str(peer["train"]),
                str(peer["validation"]),
                str(peer["test"]),
                classes(peer["classes"]),
            ],
        )
        for peer in found["peers"]
    ]
    return [[ids(peer for peer, _ in alike), *row] for row, alike in groupby(described, key=lambda entry: entry[1])]


def class_rows(dataset: Mapping[str, Any]) -> list[list[str]]:
    """Return number, name, training and test samples of each class, in their order; none if they have no names."""
    names = dataset["class_names"]
    counts = dataset["train_by_class"], dataset["test_by_class"]
    listed = [[str(k), name, *(str(count[k]) for count in counts)] for k, name in enumerate(names)]
    omitted = len(listed) - MAX_NAMES
    return listed if omitted <= 0 else [*listed[:MAX_NAMES], ["", f"and {omitted} more (--json lists all)", "", ""]]


def classes(counts: Mapping[str, int]) -> str:
    """``0-4: 300``; ``0: 12, 3: 1440``: fold consecutive classes with equal counts."""
    ranges: list[list[int]] = []
    for label, count in sorted((int(label), count) for label, count in counts.items()):
        if ranges and ranges[-1][1] == label - 1 and ranges[-1][2] == count:
            ranges[-1][1] = label
        else:
            ranges.append([label, label, count])
    parts = [f"{first}: {count}" if first == last else f"{first}-{last}: {count}" for first, last, count in ranges]
    omitted = sum(last - first + 1 for first, last, _ in ranges[MAX_CLASSES:])
    return ", ".join(parts[:MAX_CLASSES] + ([f"and {omitted} more classes"] if omitted else [])) or "none"
