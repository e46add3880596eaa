"""Pictures of graphs and of data partitions, without a run: `p2pfl graph --png` and `p2pfl data show --png`."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import Any

import networkx as nx
import numpy as np
import numpy.typing as npt

from launcher.formatting import pictures
from launcher.report import plots
from launcher.report.charts import Spec
from launcher.report.figures import edge_table, partition_table
from launcher.report.papers import WIDTH, whole
from p2pfl.messaging.topology import Topology

MOST_SPRING = 200
"""Peers of a larger graph are placed by a spring layout: the better one takes too long."""
DENSE = 0.4
"""A graph with a larger fraction of all edges is drawn as a circle: no layout untangles it."""


def draw_partition(described: Mapping[str, Any], file: Path) -> None:
    """Draw the training samples of each peer by class, as views.partition describes them. See ``pictures.save``."""
    peers, dataset = described["peers"], described["dataset"]
    names = dataset["class_names"] or range(dataset["classes"])
    order = [peer["peer"] for peer in sorted(peers, key=lambda peer: (peer["group"], peer["peer"]))]
    chart = plots.partition(order, list(names), sorted({peer["group"] for peer in peers}))
    table = {"partition": pictures.rows(partition_table(peers, names))}
    title = f"{dataset['name']}, {described['partition']['name']}"
    pictures.save(whole(chart, chart.variants[""], table, title=title), file, "drawing a partition")


def draw_graph(
    topology: Topology,
    file: Path,
    groups: Sequence[int] | None = None,
    weights: npt.NDArray[np.float64] | None = None,
    attackers: Collection[int] = (),
) -> None:
    """Draw a graph. See ``pictures.save``.

    Args:
        groups: the group of each peer, for its color.
        weights: float [M, M], w[i, j] that peer i gives to peer j; NaN in rows of peers without weights. An edge is
            as wide and dark as the mean of both directions.
        attackers: peers with a dashed ring.
    """
    groups = [0] * topology.peers if groups is None else groups
    places = positions(topology, groups)
    title = ""
    if weights is None:
        strength = dict.fromkeys(topology.edges, 0.3)
    else:
        known = np.nan_to_num(weights)
        strength = {(i, j): float(known[i, j] + known[j, i]) / 2 for i, j in topology.edges}
        title = f"mixing weights, mean of both directions, of up to {max(strength.values(), default=0.0):.3f}"
    edges = edge_table(strength, places, 1.0 if weights is None else None)
    nodes = [
        {"peer": peer, "group": groups[peer], "x": x, "y": y, "attacks": peer in attackers}
        for peer, (x, y) in sorted(places.items())
    ]
    chart = plots.drawing(sorted(set(groups)), learned=weights is not None, attackers=bool(attackers))
    tables = {"edges": pictures.rows(edges), "nodes": nodes}
    width = max(WIDTH, round(60 * math.sqrt(topology.peers)))
    spec = whole(chart, chart.variants[""], tables, title=title, width=width)
    with_legend = {"resolve": {"legend": {"color": "independent"}}}  # the edges' layer would hide it
    pictures.save(spec | with_legend, file, "drawing a graph")


def positions(topology: Topology, groups: Sequence[int]) -> dict[int, tuple[float, float]]:
    """Return where to draw each peer: a ring as a ring, a dense graph as a circle, by group."""
    graph = nx.Graph(topology.edges)
    graph.add_nodes_from(range(topology.peers))
    if topology.connected and topology.peers > 2 and all(degree == 2 for _, degree in graph.degree):
        found = nx.circular_layout(nx.cycle_basis(graph)[0])
    elif topology.peers < 3 or nx.density(graph) >= DENSE:
        found = nx.circular_layout(sorted(graph, key=lambda peer: (groups[peer], peer)))
    elif topology.connected and topology.peers <= MOST_SPRING:
        found = nx.kamada_kawai_layout(graph)
    else:
        found = nx.spring_layout(graph, seed=0)
    return {peer: (float(x), float(y)) for peer, (x, y) in found.items()}


def draw_over_time(described: Mapping[str, Any], file: Path) -> None:
    """Draw the spectral gap over time, as views.describe describes it. See ``pictures.save``."""
    window = described["window"]
    each, windows = "each round", "round" if window == 1 else f"the product of {window} rounds"
    ends = (
        (start + window - 1, gap) for start, gap in zip(described["starts"], described["window_gap"], strict=True)
    )
    lines = {each: zip(count(), described["gap"]), windows: ends}
    spec: Spec = {
        "data": {"name": "gaps"},
        "mark": {"type": "line", "point": True},
        "encoding": {
            "x": {"field": "t", "type": "quantitative", "title": "round", "axis": {"tickMinStep": 1, "format": "d"}},
            "y": {"field": "gap", "type": "quantitative", "title": "spectral gap", "scale": {"domain": [0, 1]}},
            "color": {"field": "of", "type": "nominal", "title": None, "sort": None},
        },
        "width": 2 * WIDTH,
        "datasets": {"gaps": [{"of": of, "t": t, "gap": gap} for of, line in lines.items() for t, gap in line]},
    }
    pictures.save(spec, file, "drawing a graph")
