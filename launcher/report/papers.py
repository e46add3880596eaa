"""The figures of a report by matplotlib, for papers: a PNG each, or all of them as the pages of a PDF."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from launcher.formatting.pictures import any_letters, literal
from launcher.report import history, several
from launcher.report.collect import Collected
from launcher.report.figures import confusion_table
from launcher.report.history import PHASES
from p2pfl.errors import MissingExtra
from p2pfl.run_folder.files import write_errors

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Draw = Callable[["Figure"], None]
SIZE = (5.0, 3.4)
"""Inches: a column of a paper, nearly."""
DPI = 200
AXES = {"rounds": ("t", "round"), "bytes": ("bytes", "MB sent per peer"), "seconds": ("seconds", "seconds")}
BYTES = 1e6
MAX_LABELS = 12
"""Classes up to which a confusion matrix shows numbers."""


def require() -> None:
    """Raise MissingExtra if matplotlib is not installed."""
    if importlib.util.find_spec("matplotlib") is None:
        raise MissingExtra("matplotlib", "report", "drawing figures")


def write(drawn: Mapping[str, Draw], png: Path | None, pdf: Path | None) -> list[Path]:
    """Write the figures.

    Args:
        drawn: what draws each figure, by name.
        png: folder for a PNG of each.
        pdf: file with a page for each.

    Raises:
        MissingExtra: matplotlib is not installed.
        WriteError: a file cannot be written.
    """
    if png is None and pdf is None:
        return []
    require()
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.backends.backend_pdf import PdfPages
    from matplotlib.figure import Figure

    made = []
    for name, draw in drawn.items():
        figure = Figure(figsize=SIZE, layout="constrained")
        FigureCanvasAgg(figure)
        draw(figure)
        made.append((name, figure))
    written = []
    if png is not None:
        with write_errors(png):
            png.mkdir(parents=True, exist_ok=True)
        for name, figure in made:
            file = png / f"{name}.png"
            with write_errors(file), any_letters():
                figure.savefig(file, dpi=DPI, format="png")
            written.append(file)
    if pdf is not None:
        with write_errors(pdf), any_letters(), PdfPages(pdf) as pages:
            for _, figure in made:
                pages.savefig(figure)
        written.append(pdf)
    return written


def of_run(run: Collected) -> dict[str, Draw]:
    """Return what draws each figure for which there is data."""
    drawn: dict[str, Draw] = {}
    if history.means(run.history):
        drawn |= {f"accuracy-{name}": partial(_accuracy, run, name) for name in AXES}
    if run.history.terms:
        drawn["loss"] = partial(_losses, run)
    if run.history.weights:
        drawn["weights"] = partial(_weights, run)
    if run.learned.partition is not None:
        drawn["partition"] = partial(_partition, run)
    if run.learned.confusion:
        drawn["confusion"] = partial(_confusion, run)
    if run.learned.points:
        drawn["embeddings"] = partial(_points, run)
    if run.history.edges:
        drawn["traffic"] = partial(_traffic, run)
    if run.history.seconds:
        drawn["time"] = partial(_time, run)
    return drawn


def of_several(groups: Sequence[several.Group]) -> dict[str, Draw]:
    """Return what draws the curves of several groups of runs."""
    curves = {group.name: several.curve(group) for group in groups}
    if not any(curves.values()):
        return {}
    return {f"accuracy-{name}": partial(_compared, curves, name) for name in AXES}


def _x(rows: Sequence[Mapping[str, Any]], key: str) -> list[float]:
    return [row[key] / (BYTES if key == "bytes" else 1) for row in rows]


def _accuracy(run: Collected, against: str, figure: Figure) -> None:
    key, label = AXES[against]
    axes = figure.add_subplot(xlabel=label, ylabel="accuracy (%)")
    for peer in run.history.peers:
        rows = [row for row in run.history.rows if row["peer"] == peer and row["accuracy"] is not None]
        group = run.groups.get(peer) or 0
        axes.plot(_x(rows, key), [100 * row["accuracy"] for row in rows], color=f"C{group % 10}", lw=0.6, alpha=0.5)
    mean = history.means(run.history)
    low, high = ([100 * row[bound] for row in mean] for bound in ("low", "high"))
    axes.fill_between(_x(mean, key), low, high, color="black", alpha=0.15, lw=0)
    axes.plot(_x(mean, key), [100 * (row["mean"]) for row in mean], color="black", lw=1.8, label="mean ± std")
    axes.legend(frameon=False, loc="lower right")
    axes.grid(alpha=0.25)


def _losses(run: Collected, figure: Figure) -> None:
    axes = figure.add_subplot(xlabel="round", ylabel="training loss")
    for term in run.history.terms:
        by_round: dict[int, list[float]] = {}
        for row in run.history.rows:
            if (value := row["loss"].get(term)) is not None:
                by_round.setdefault(row["t"], []).append(value)
        rounds = sorted(by_round)
        means, stds = (np.array([measure(by_round[t]) for t in rounds]) for measure in (np.mean, np.std))
        (line,) = axes.plot(rounds, means, label=term)
        axes.fill_between(rounds, means - stds, means + stds, color=line.get_color(), alpha=0.15, lw=0)
    axes.legend(frameon=False)
    axes.grid(alpha=0.25)


def _weights(run: Collected, figure: Figure) -> None:
    last = history.frames(run.history, run.order)[-1]
    size = len(run.order)
    table = np.array(last["cells"], dtype=float).reshape(size, size) / 1000
    table[table < 0] = np.nan
    others = table[~np.eye(size, dtype=bool)]
    highest = np.nanmax(others) if np.isfinite(others).any() else 1.0
    _matrix(figure, table, run.order, "mixing weight", f"after round {last['t']}", highest or 1.0)


def _traffic(run: Collected, figure: Figure) -> None:
    at = {peer: k for k, peer in enumerate(run.order)}
    table = np.zeros((len(at), len(at)))
    for (a, b), count in run.history.edges.items():
        if a in at and b in at:
            table[at[a], at[b]] = count / BYTES
    _matrix(figure, table, run.order, "MB sent", "from row to column", None)


def _matrix(figure: Figure, table: Any, order: Sequence[int], label: str, title: str, highest: float | None) -> None:
    axes = figure.add_subplot(xlabel="peer", ylabel="peer", title=title)
    image = axes.imshow(table, cmap="Blues", vmin=0, vmax=highest)
    step = max(1, len(order) // 20)
    ticks = range(0, len(order), step)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_ticks(list(ticks), [str(order[k]) for k in ticks], fontsize=7)
    figure.colorbar(image, label=label)


def _partition(run: Collected, figure: Figure) -> None:
    assert run.learned.partition is not None
    peers, classes = run.learned.partition["peers"], run.learned.partition["dataset"]["classes"]
    axes = figure.add_subplot(xlabel="peer", ylabel="label")
    bottom, shown = np.zeros(len(peers)), [peer["peer"] for peer in peers]
    if classes > MAX_LABELS:
        points = [(peer["peer"], int(k), n) for peer in peers for k, n in peer["classes"].items()]
        x, y, n = map(np.array, zip(*points, strict=True))
        axes.scatter(x, y, s=40 * n / n.max(), lw=0)
        return
    axes.set_ylabel("training samples")
    for label in range(classes):
        counts = np.array([peer["classes"].get(str(label), 0) for peer in peers])
        axes.bar(
            shown,
            counts,
            bottom=bottom,
            label=literal(str(run.learned.name(label))),
            color=f"C{label % 10}",
            width=0.85,
        )
        bottom += counts
    axes.legend(title="label", frameon=False, fontsize=7, loc="center left", bbox_to_anchor=(1.0, 0.5))


def _confusion(run: Collected, figure: Figure) -> None:
    found = confusion_table(run)
    rows = [
        (true, said, fraction)
        for peer, true, said, fraction in zip(*(found[k] for k in ("peer", "true", "said", "fraction")), strict=True)
        if peer == -1
    ]
    size = 1 + max(max(true, said) for true, said, _ in rows)
    table = np.zeros((size, size))
    for true, said, fraction in rows:
        table[true, said] = 100 * fraction
    axes = figure.add_subplot(xlabel="predicted class", ylabel="true class", title="all peers")
    image = axes.imshow(table, cmap="Blues", vmin=0, vmax=100)
    if size <= MAX_LABELS:
        for true, said, fraction in rows:
            color = "white" if fraction > 0.55 else "black"
            axes.text(said, true, f"{100 * fraction:.0f}", ha="center", va="center", fontsize=6, color=color)
        names = [literal(str(run.learned.name(label))) for label in range(size)]
        axes.xaxis.set_ticks(range(size), names, rotation=90 if max(map(len, names)) > 3 else 0)
        axes.yaxis.set_ticks(range(size), names)
    figure.colorbar(image, label="% of the true class")


def _points(run: Collected, figure: Figure) -> None:
    points = {name: np.array(column) for name, column in run.learned.points.items()}
    for k, name in enumerate(("label", "peer")):
        axes = figure.add_subplot(
            1, 2, 1 + k, title=f"by {'class' if name == 'label' else name}", xticks=[], yticks=[]
        )
        for kind, marker, size in (("embedding", "o", 5), ("prototype", "D", 16)):
            of = points["kind"] == kind
            colors = points[name][of] % 20
            edge = {"linewidths": 0.4, "edgecolors": "black"} if kind == "prototype" else {"linewidths": 0}
            axes.scatter(
                points["x"][of],
                points["y"][of],
                c=colors,
                s=size,
                marker=marker,
                cmap="tab20",
                vmin=0,
                vmax=19,
                **edge,
            )


def _time(run: Collected, figure: Figure) -> None:
    spent = run.history.seconds
    order = [peer for peer in run.order if peer in spent]
    axes = figure.add_subplot(xlabel="peer", ylabel="seconds")
    bottom, places = np.zeros(len(order)), np.arange(len(order))
    for phase in (*PHASES, "other"):
        values = np.array([spent[peer][phase] for peer in order])
        if values.any():
            axes.bar(places, values, bottom=bottom, label=phase, width=0.85)
            bottom += values
    step = max(1, len(order) // 20)
    axes.set_xticks(places[::step], [str(peer) for peer in order[::step]], fontsize=7)
    axes.legend(frameon=False, fontsize=7, loc="center left", bbox_to_anchor=(1.0, 0.5))


def _compared(curves: Mapping[str, list[dict[str, Any]]], against: str, figure: Figure) -> None:
    key, label = AXES[against]
    axes = figure.add_subplot(xlabel=label, ylabel="accuracy (%)")
    for name, rows in curves.items():
        (line,) = axes.plot(_x(rows, key), [100 * row["mean"] for row in rows], label=name)
        low, high = ([100 * row[bound] for row in rows] for bound in ("low", "high"))
        axes.fill_between(_x(rows, key), low, high, color=line.get_color(), alpha=0.18, lw=0)
    axes.legend(frameon=False, fontsize=8)
    axes.grid(alpha=0.25)
