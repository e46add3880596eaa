"""``p2pfl data show``: the samples of each peer, as a table and as a bubble plot."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np

from launcher.views.formatting import ids
from p2pfl.data import Dataset, Subset
from p2pfl.errors import MissingExtra
from p2pfl.inputs import describe as describe_inputs
from p2pfl.inputs import shape_of
from p2pfl.run_file.run import Run

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


def draw(found: Mapping[str, Any], file: Path) -> None:
    """Write a bubble plot as PNG: for each peer and class a circle whose area is the number of training samples.

    As in FedTGP's Figs. 7 to 11. Colors are groups. Raises MissingExtra if matplotlib is not installed.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
        from matplotlib.ticker import MaxNLocator
    except ImportError:
        raise MissingExtra("matplotlib", "report", "drawing a partition") from None
    peers, known = found["peers"], found["dataset"]["classes"]
    x, y, count, group = (
        np.array(column)
        for column in zip(
            *(
                (peer["peer"], int(label), count, peer["group"])
                for peer in peers
                for label, count in peer["classes"].items()
            ),
            strict=True,
        )
    )
    width, height = np.clip([1.5 + 0.25 * len(peers), 1.5 + 0.3 * known], 4, 16)
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot(xlim=(-0.8, len(peers) - 0.2), ylim=(-0.8, known - 0.2), xlabel="peer", ylabel="class")
    # The largest circle fills a grid cell, or a little more if cells are tiny. Sizes are in points squared.
    cell = 72 * min((width - 1) / (len(peers) + 1), (height - 1) / (known + 1))
    area = np.pi / 4 * (max(cell, 4.0) * 1.1) ** 2
    axes.scatter(
        x, y, s=area * count / count.max(), c=group % 10, cmap="tab10", vmin=0, vmax=9, alpha=0.8, linewidths=0
    )
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(MaxNLocator(integer=True, nbins=20))
    axes.grid(color="0.92", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.set_title(
        f"{found['dataset']['name']}, {found['partition']['name']}: largest circle {count.max()} samples", fontsize=10
    )
    figure.savefig(file, dpi=150, format="png")  # regardless of the extension
