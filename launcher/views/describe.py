"""``p2pfl algorithms``, ``models`` and ``graph``: describe algorithms, costs of models, and graphs."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict
from functools import cache
from pathlib import Path
from statistics import fmean
from typing import Any

import networkx as nx

from p2pfl.errors import MissingExtra, ModelError
from p2pfl.messaging.topology import Topology


def describe_algorithm(name: str) -> dict[str, Any]:
    """Return summary, paper and hyper-parameters of an algorithm. Raises OptionErrors for an unknown name."""
    from p2pfl.algorithms import ALGORITHMS
    from p2pfl.run_file.options import notes

    algorithm = ALGORITHMS.find(name)
    paper = {key: getattr(algorithm, key) for key in ("name", "summary", "title", "authors", "venue", "url")}
    return {**paper, "hyper": [asdict(note) for note in notes(algorithm.Hyper)]}


def describe_models(
    names: Iterable[str], channels: int, size: tuple[int, int], classes: int, features: int | None = None
) -> list[dict[str, Any]]:
    """Return the costs of model groups: ``{"name", "members": [{"name", "parameters", …}, …]}`` for each.

    A member that does not support such images has ``{"name", "error"}``. Raises OptionErrors for an unknown name.
    """
    from p2pfl.models import MODELS
    from p2pfl.models.cost import cost

    @cache
    def member(name: str, features: int | None) -> dict[str, Any]:
        try:
            return asdict(cost(name, channels, size, classes, features))
        except ModelError as error:
            return {"name": name, "error": str(error)}

    found = []
    for name in names:
        group = MODELS.find(name)
        costs = [member(model, features or group.features) for model in group.members]
        found.append({"name": name, "members": costs})
    return found


def describe_graph(topology: Topology) -> dict[str, Any]:
    """Return the figures that determine how fast information spreads on a graph, and at what cost."""
    degrees = [topology.degree(peer) for peer in range(topology.peers)]
    return {
        "peers": topology.peers,
        "edges": len(topology.edges),
        "degree": {"min": min(degrees), "mean": fmean(degrees), "max": max(degrees)},
        "components": len(topology.components),
        "diameter": topology.diameter,
        "spectral_gap": topology.spectral_gap,
    }


def draw_graph(topology: Topology, file: Path) -> None:
    """Write a PNG. Raises MissingExtra if matplotlib is not installed."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise MissingExtra("matplotlib", "report", "drawing a graph") from None
    graph = nx.Graph(topology.edges)
    graph.add_nodes_from(range(topology.peers))
    # A spring layout untangles every graph but a complete one.
    complete = topology.diameter is not None and topology.diameter <= 1
    positions = nx.circular_layout(graph) if complete else nx.spring_layout(graph, seed=0)
    figure = Figure(figsize=(6, 6), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot(aspect="equal")
    axes.set_axis_off()
    for i, j in topology.edges:
        axes.plot(*zip(positions[i], positions[j], strict=True), color="0.7", linewidth=0.8, zorder=1)
    for peer in range(topology.peers):
        x, y = positions[peer]
        axes.scatter(x, y, s=220, color="white", edgecolors="black", zorder=2)
        axes.annotate(str(peer), (x, y), ha="center", va="center", fontsize=8, zorder=3)
    figure.savefig(file, dpi=150, format="png")  # regardless of the extension
