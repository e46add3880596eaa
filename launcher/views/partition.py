"""``p2pfl data show``: the samples of each peer, as a table and as a bubble plot."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np

from launcher.formatting import ids
from launcher.formatting.pictures import COLORS, group_colors, literal, new_figure, save
from p2pfl.data import Dataset, Subset
from p2pfl.inputs import describe as describe_inputs
from p2pfl.inputs import shape_of
from p2pfl.run_file.run import Run

MAX_TICKS = 40
"""Most classes whose names a bubble plot shows."""
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


def draw(found: Mapping[str, Any], file: Path) -> None:
    """Draw a bubble plot: for each peer and class a circle whose area is the number of training samples.

    As in FedTGP's Figs. 7 to 11. Colors are groups. Raises MissingExtra without matplotlib, WriteError.
    """
    peers, known = found["peers"], found["dataset"]["classes"]
    width, height = np.clip([2.6 + 0.25 * len(peers), 1.8 + 0.3 * known], 4.5, 16)
    figure = new_figure((width, height), "drawing a partition")
    from matplotlib.ticker import MaxNLocator

    x, y, count = (
        np.array(column)
        for column in zip(
            *((peer["peer"], int(label), count) for peer in peers for label, count in peer["classes"].items()),
            strict=True,
        )
    )
    axes = figure.add_subplot(xlim=(-0.8, len(peers) - 0.2), ylim=(-0.8, known - 0.2), xlabel="peer", ylabel="class")
    # The largest circle fills a grid cell, or a little more if cells are tiny. Sizes are in points squared.
    cell = 72 * min((width - 2.1) / (len(peers) + 1), (height - 1) / (known + 1))
    area = np.pi / 4 * (max(cell, 4.0) * 1.1) ** 2
    groups = [peer["group"] for peer in peers]
    colors: list[Any] = group_colors(groups)
    several = len(set(groups)) > 1
    plain = "tab:blue"
    axes.scatter(
        x,
        y,
        s=area * count / count.max(),
        c=[colors[peer] if several else plain for peer in x],
        alpha=0.8,
        linewidths=0,
    )
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(MaxNLocator(integer=True, nbins=20, min_n_ticks=1))
    if (names := found["dataset"]["class_names"]) and known <= MAX_TICKS:
        axes.set_yticks(range(known), [literal(name) for name in names])
    axes.grid(color="0.92", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.set_title(f"{found['dataset']['name']}, {found['partition']['name']}", fontsize=10)
    sizes = legend_sizes(int(count.max()))
    handles = [axes.scatter([], [], s=area * size / count.max(), color="0.5", linewidths=0) for size in sizes]
    legends = [("samples", handles, [str(size) for size in sizes])]
    if several and len(set(groups)) <= COLORS:
        by_group = dict(zip(groups, colors, strict=True))
        dots = [axes.scatter([], [], s=40, color=by_group[group], linewidths=0) for group in sorted(by_group)]
        legends.append(("group", dots, [str(group) for group in sorted(by_group)]))
    for title, marks, labels in legends:
        figure.legend(
            marks,
            labels,
            title=title,
            loc="outside right upper" if title == "samples" else "outside right lower",
            frameon=False,
            fontsize=8,
            title_fontsize=8,
            labelspacing=1,
        )
    save(figure, file)


def legend_sizes(largest: int) -> list[int]:
    """Return up to three round numbers of samples that a legend shows, the largest at most ``largest``."""
    sizes: list[int] = []
    for part in (1.0, 0.5, 0.1):
        wanted = largest * part
        step = 10 ** max(0, math.floor(math.log10(wanted)) - 1) if wanted >= 1 else 1
        size = int(wanted // (5 * step) * 5 * step) or int(wanted)
        if size >= 1 and size not in sizes:
            sizes.append(size)
    return sizes
