"""Vega-Lite specifications of matrices, graphs and scatter plots; see charts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from launcher.report.charts import MANY, PICKED, Chart, Spec, by_group, nominal, ordinal, palette, quantitative


def weights(order: Sequence[int], highest: float, several_groups: bool) -> Chart:
    """Heat map of mixing weights; the script fills in the round that the slider selects."""
    peers: Spec = {"sort": None, "scale": {"domain": list(order)}}
    cell = {
        "x": ordinal("column", title="gives weight to peer", **peers),
        "y": ordinal("row", title="peer", **peers),
    }
    color = quantitative("w", title="weight", scale={"domain": [0, highest], "clamp": True})
    tooltip = [
        {"field": "row", "title": "peer"},
        {"field": "column", "title": "gives peer"},
        {"field": "w", "title": "weight", "format": ".3f"},
    ]
    block = {
        "data": {"name": "blocks"},
        "mark": {"type": "rect", "fill": None, "strokeWidth": 2, "stroke": "@strong", "aria": False},
        "encoding": {
            "x": ordinal("first", bandPosition=0),
            "x2": {"field": "last", "bandPosition": 1},
            "y": ordinal("first", bandPosition=0),
            "y2": {"field": "last", "bandPosition": 1},
        },
    }
    rects = {
        "data": {"name": "cells"},
        "mark": {"type": "rect", "tooltip": True, "aria": len(order) <= MANY},
        "encoding": {**cell, "color": color, "tooltip": tooltip},
    }
    return Chart(
        "weights",
        "Heat map of mixing weights: how much each peer, by row, averages of each other peer, by column",
        "A row holds the weights of one peer. Peers are ordered by group"
        + (", outlined." if several_groups else "."),
        {"": {"layer": [rects, *([block] if several_groups else [])]}},
        ("cells", "blocks") if several_groups else ("cells",),
        height=0,
        canvas=len(order) > 30,
    )


def drawing(groups: Sequence[int | None], *, learned: bool, attackers: bool = False) -> Chart:
    """The graph: peers, edges as strong as their weights or traffic; with ``attackers``, nodes have ``attacks``."""
    place: Spec = {key: quantitative(key, axis=None, scale={"domain": [-1.12, 1.12]}) for key in ("x", "y")}
    ends: Spec = {**place, "x2": {"field": "x2"}, "y2": {"field": "y2"}}
    strength: Spec = quantitative("strength", legend=None)
    what = "mixing weight" if learned else "bytes sent"
    edges = {
        "data": {"name": "edges"},
        "mark": {"type": "rule", "color": "@accent", "aria": False},
        "encoding": {
            **ends,
            "opacity": {**strength, "scale": {"domain": [0, 1], "range": [0.04, 0.9]}},
            "size": {**strength, "scale": {"domain": [0, 1], "range": [0.4, 3.5]}},
            "tooltip": [{"field": "pair", "title": "peers"}, {"field": "value", "title": what}],
        },
    }
    chosen = {"condition": {"test": "datum.peer === picked", "value": 4}, "value": 1.5}
    nodes = {
        "data": {"name": "nodes"},
        "mark": {"type": "circle", "size": 420, "opacity": 1, "stroke": "@card"},
        "encoding": {
            **place,
            "color": by_group(groups),
            "strokeWidth": chosen,
            "tooltip": [{"field": "peer"}, {"field": "group"}, {"field": "model"}, {"field": "accuracy"}],
        },
    }
    ring = {"type": "point", "size": 720, "strokeWidth": 2.5, "strokeDash": [4, 3], "color": "@strong", "aria": False}
    rings = {
        "data": {"name": "nodes"},
        "transform": [{"filter": "datum.attacks"}],
        "mark": ring,
        "encoding": place,
    }
    texts = {
        "data": {"name": "nodes"},
        "mark": {"type": "text", "fontSize": 11, "fontWeight": "bold", "color": "@on", "aria": False},
        "encoding": {**place, "text": {"field": "peer"}},
    }
    return Chart(
        "drawing",
        f"Drawing of the graph: peers as circles, colored by group, edges as strong as the {what}",
        f"Peers that exchange much are close. Stronger lines: larger {what}"
        + (", the larger of both directions." if learned else ", both directions together.")
        + (" Dashed rings: attackers." if attackers else ""),
        {"": {"params": [PICKED], "layer": [edges, nodes, *([rings] if attackers else []), texts]}},
        ("edges", "nodes"),
        height=0,
        canvas=True,
    )


def matrix(key: str, label: str, caption: str, order: Sequence[int], value: str) -> Chart:
    """Heat map of a table with columns ``row``, ``column`` and ``value``; one cell per sender and receiver."""
    peers: Spec = {"scale": {"domain": list(order)}, "sort": None}
    encoding = {
        "x": ordinal("column", title="to peer", **peers),
        "y": ordinal("row", title="from peer", **peers),
        "color": quantitative("value", title=value, scale={"zero": True}, legend={"format": "~s"}),
        "tooltip": [
            {"field": "row", "title": "from"},
            {"field": "column", "title": "to"},
            {"field": "value", "title": value, "format": ".4~s"},
        ],
    }
    mark = {"type": "rect", "aria": len(order) <= MANY}
    spec = {"data": {"name": key}, "mark": mark, "encoding": encoding}
    return Chart(key, label, caption, {"": spec}, (key,), height=0, canvas=len(order) > 30)


def partition(order: Sequence[int], labels: Sequence[str | int], groups: Sequence[int | None]) -> Chart:
    """Samples of each peer by label, as circles."""
    axis, size = _axis_of_classes(labels), {"scale": {"range": [8, 220]}, "legend": {"tickCount": 3}}
    encoding = {
        "x": ordinal("label", title="label", scale={"domain": list(labels)}, axis=axis),
        "y": ordinal("peer", sort=None, scale={"domain": list(order)}, axis={"labelOverlap": True}),
        "size": quantitative("count", title="samples", **size),
        "color": by_group(groups),
        "tooltip": [{"field": "peer"}, {"field": "label"}, {"field": "count", "title": "samples"}],
    }
    mark = {"type": "circle", "opacity": 0.85, "aria": False}
    return Chart(
        "partition",
        "Training samples of each peer by label: a circle's area is the number of samples",
        "Training samples per peer and label; the area of a circle is their number.",
        {"": {"data": {"name": "partition"}, "mark": mark, "encoding": encoding}},
        ("partition",),
        height=max(160, min(900, 60 + 17 * len(order))),
        canvas=True,
    )


def _axis_of_classes(labels: Sequence[str | int]) -> Spec:
    """Names do not fit beside each other."""
    longest = max((len(str(label)) for label in labels), default=0)
    return {"labelAngle": -45 if longest > 3 else 0, "labelOverlap": True}


def confusion(labels: Sequence[str | int], whose: Mapping[str, int]) -> Chart:
    """Predictions by true class, of all peers together or of one."""
    scale, upright = {"domain": list(labels)}, {"labelAngle": 0, "labelOverlap": True}
    cell = {
        "x": ordinal("said", title="predicted class", scale=scale, axis=_axis_of_classes(labels)),
        "y": ordinal("true", title="true class", scale=scale, axis=upright),
    }
    color = quantitative("fraction", title="of the class", scale={"domain": [0, 1]}, legend={"format": ".0%"})
    tooltip = [
        {"field": "true"},
        {"field": "said", "title": "predicted"},
        {"field": "count"},
        {"field": "fraction", "format": ".1%"},
    ]
    layers: list[Spec] = [
        {"mark": {"type": "rect", "aria": False}, "encoding": {**cell, "color": color, "tooltip": tooltip}}
    ]
    if len(labels) <= 12:
        contrast = {"condition": {"test": "datum.fraction > 0.55", "value": "@on"}, "value": "@off"}
        text = {**cell, "text": {"field": "fraction", "format": ".0%"}, "color": contrast}
        layers.append({"mark": {"type": "text", "fontSize": 11}, "encoding": text})
    chosen = {"params": [{"name": "whose", "value": -1}], "transform": [{"filter": "datum.peer === whose"}]}
    return Chart(
        "confusion",
        "Confusion matrix on the local test splits: fraction of each true class that is predicted as each class",
        "Local test splits, last checkpoints; each row sums to 100 %.",
        {"": {**chosen, "data": {"name": "confusion"}, "layer": layers}},
        ("confusion",),
        height=0,
        param=("whose", "Confusion of", dict(whose)),
        canvas=len(labels) > 20,
    )


def points(by: Mapping[str, tuple[str, Sequence[Any]]]) -> Chart:
    """Projected embeddings and prototypes. ``by``: the field that colors them and its values, by text."""
    return Chart(
        "points",
        "t-SNE projection of test samples' embeddings, and of prototypes as diamonds, onto a plane",
        "t-SNE by cosine distance: circles are embeddings of local test samples, diamonds prototypes. Only who is "
        "near whom has a meaning.",
        {text: _points(name, values) for text, (name, values) in by.items()},
        ("points",),
        choice="Color by",
        height=420,
        canvas=True,
    )


def _points(name: str, values: Sequence[Any]) -> Spec:
    color = nominal(name, title="class" if name == "label" else name, **palette(values))
    legend = {"columns": 2 if len(values) > MANY else 1, "symbolLimit": 40}
    scale = {"zero": False, "nice": False, "padding": 12}
    place: Spec = {key: quantitative(key, axis=None, scale=scale) for key in ("x", "y")}
    place["tooltip"] = [{"field": "kind"}, {"field": "label", "title": "class"}, {"field": "peer"}]
    diamond = {"type": "point", "shape": "diamond", "size": 90, "filled": True, "opacity": 1}
    circles = {
        "transform": [{"filter": "datum.kind === 'embedding'"}],
        "mark": {"type": "circle", "size": 22, "opacity": 0.55},
        "encoding": {**place, "color": {**color, "legend": legend}},
    }
    diamonds = {
        "transform": [{"filter": "datum.kind === 'prototype'"}],
        "mark": {**diamond, "stroke": "@text", "strokeWidth": 1},
        "encoding": {**place, "color": color},
    }
    return {"data": {"name": "points"}, "layer": [circles, diamonds]}
