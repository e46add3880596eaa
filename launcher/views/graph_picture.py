"""Draw a graph: peers in the colors of their groups, and learned mixing weights as edges."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import networkx as nx
import numpy as np
import numpy.typing as npt

from launcher.formatting.pictures import COLORS, group_colors, new_figure, save
from p2pfl.messaging.topology import Topology

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Matrix = npt.NDArray[np.float64]
Positions = dict[int, tuple[float, float]]

MOST_SPRING = 200
"""Peers of a larger graph are placed by a spring layout: the better one takes too long."""
DENSE = 0.4
"""A graph with a larger fraction of all edges is drawn as a circle: no layout untangles it."""


def draw_graph(
    topology: Topology, file: Path, groups: Sequence[int] | None = None, weights: Matrix | None = None
) -> None:
    """Draw a graph to a file whose name gives the format.

    Args:
        groups: the group of each peer, for its color.
        weights: float [M, M], w[i, j] that peer i gives to peer j; NaN in rows of peers without weights. An edge is
            as wide and dark as the mean of both directions.

    Raises:
        MissingExtra: matplotlib is not installed.
        WriteError: the file cannot be written.
    """
    groups = [0] * topology.peers if groups is None else groups
    side = min(max(5.0, 0.9 * math.sqrt(topology.peers) + 2), 16.0)
    figure = new_figure((side, side))
    axes = figure.add_subplot(aspect="equal")
    axes.set_axis_off()
    places = positions(topology, groups)
    colors = group_colors(groups)
    if weights is None:
        faint = len(topology.edges) > 4 * topology.peers
        for i, j in topology.edges:
            ends = zip(places[i], places[j], strict=True)
            axes.plot(*ends, color="0.8" if faint else "0.6", linewidth=0.6 if faint else 1.0, zorder=1)
    else:
        _draw_weights(axes, topology, places, weights, groups, colors)
    _draw_peers(axes, places, colors, side)
    _draw_legend(axes, groups, colors)
    save(figure, file)


def positions(topology: Topology, groups: Sequence[int]) -> Positions:
    """Return where to draw each peer: a ring as a ring, a dense graph as a circle, by group."""
    if (cycle := _cycle(topology)) is not None:
        return _circle(cycle, [0] * topology.peers)
    peers, possible = topology.peers, topology.peers * (topology.peers - 1) / 2
    if peers < 3 or len(topology.edges) >= DENSE * possible:
        return _circle(sorted(range(peers), key=lambda peer: (groups[peer], peer)), groups)
    graph = nx.Graph(topology.edges)
    graph.add_nodes_from(range(peers))
    if topology.connected and peers <= MOST_SPRING:
        found = nx.kamada_kawai_layout(graph)
    else:
        found = nx.spring_layout(graph, seed=0)
    return {peer: (float(x), float(y)) for peer, (x, y) in found.items()}


def _cycle(topology: Topology) -> list[int] | None:
    """Return the peers of a graph that is a single cycle in its order; None if it is none."""
    if topology.peers < 3 or not topology.connected or any(len(near) != 2 for near in topology.neighbors):
        return None
    order = [0, topology.neighbors[0][0]]
    while len(order) < topology.peers:
        before, last = order[-2:]
        order.append(next(peer for peer in topology.neighbors[last] if peer != before))
    return order


def _circle(order: Sequence[int], groups: Sequence[int]) -> Positions:
    """Place peers on a circle, clockwise from the top, with a gap between groups."""
    gaps = [groups[peer] != groups[before] for before, peer in zip([order[-1], *order], order, strict=False)]
    at = np.cumsum([0.0, *(1.6 if gap else 1.0 for gap in gaps[1:])])
    total = at[-1] + (1.6 if gaps[0] else 1.0)
    at += 0.8 if gaps[0] else 0.0  # so that two groups are halves on the right and on the left
    return {
        peer: (math.sin(2 * math.pi * place / total), math.cos(2 * math.pi * place / total))
        for peer, place in zip(order, at, strict=True)
    }


def _draw_weights(
    axes: Axes, topology: Topology, places: Positions, weights: Matrix, groups: Sequence[int], colors: Sequence[Any]
) -> None:
    """Draw the mean of both directions of each edge, the largest last; edges without weight are dotted."""
    known = np.nan_to_num(weights)
    means = {(i, j): (known[i, j] + known[j, i]) / 2 for i, j in topology.edges}
    largest = max(means.values(), default=0.0) or 1.0
    plain = len(set(groups)) < 2
    for (i, j), mean in sorted(means.items(), key=lambda item: item[1]):
        ends = list(zip(places[i], places[j], strict=True))
        strength = mean / largest
        if mean <= 0:
            if len(topology.edges) <= 4 * topology.peers:  # more of them would hide the others
                axes.plot(*ends, color="0.8", linewidth=0.6, linestyle=":", zorder=1)
            continue
        inside = groups[i] == groups[j] and not plain
        axes.plot(
            *ends,
            color=colors[i] if inside else "0.25",
            linewidth=0.3 + 3.2 * strength,
            alpha=0.12 + 0.78 * strength,
            solid_capstyle="round",
            zorder=1 + strength,
        )
    handles = [
        axes.plot([], [], color="0.25", linewidth=0.3 + 3.2 * part, alpha=0.12 + 0.78 * part)[0] for part in (1, 0.5)
    ]
    labels = [f"{largest * part:.3f}" for part in (1, 0.5)]
    legend = axes.legend(
        handles, labels, title="mixing weight", loc="lower right", frameon=False, fontsize=8, title_fontsize=8
    )
    axes.add_artist(legend)


def _draw_peers(axes: Axes, places: Positions, colors: Sequence[Any], side: float) -> None:
    size = min(230.0, 7000.0 * (side / 6) ** 2 / len(places))
    for peer, (x, y) in places.items():
        axes.scatter(x, y, s=size, color=colors[peer], edgecolors="black", linewidths=0.8, zorder=3)
        white = isinstance(colors[peer], str)
        if size >= 40:
            axes.annotate(
                str(peer),
                (x, y),
                ha="center",
                va="center",
                fontsize=min(8.0, 0.55 * math.sqrt(size)),
                color="black" if white else "white",
                fontweight="normal" if white else "bold",
                zorder=4,
            )
    axes.set(xlim=(-1.15, 1.15), ylim=(-1.15, 1.15))


def _draw_legend(axes: Axes, groups: Sequence[int], colors: Sequence[Any]) -> None:
    """Explain the colors, if there are several and each is of one group."""
    by_group = dict(zip(groups, colors, strict=True))
    if not 2 <= len(by_group) <= COLORS:
        return
    handles = [
        axes.scatter([], [], s=60, color=by_group[group], edgecolors="black", linewidths=0.8)
        for group in sorted(by_group)
    ]
    labels = [f"group {group}" for group in sorted(by_group)]
    axes.legend(handles, labels, loc="upper right", frameon=False, fontsize=8, borderaxespad=0)
