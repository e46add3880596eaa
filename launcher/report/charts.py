"""Vega-Lite specifications. Colors come from the page's script, which knows whether the page is light or dark.

A chart names the tables that it draws; the script turns their columns into rows. ``picked`` is the highlighted peer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

Spec = dict[str, Any]

X_AXES: dict[str, Spec] = {
    "rounds": {"field": "t", "type": "quantitative", "title": "round", "axis": {"tickMinStep": 1, "format": "d"}},
    "bytes": {
        "field": "bytes",
        "type": "quantitative",
        "title": "bytes sent per peer",
        "axis": {"labelExpr": "format(datum.value, '~s') + 'B'"},
    },
    "seconds": {"field": "seconds", "type": "quantitative", "title": "seconds since the start"},
}
"""Against what accuracy is shown."""
ACCURACY: Spec = {"type": "quantitative", "title": "accuracy", "axis": {"format": ".0%"}, "scale": {"zero": False}}
MANY = 10
"""Groups or classes from which on a palette of twenty colors is used."""
PICKED = {"name": "picked", "value": -1}


@dataclass(frozen=True)
class Chart:
    """A figure of the page.

    Attributes:
        label: what it shows, for screen readers.
        caption: how to read it.
        variants: specifications by the text of the button that selects it.
        choice: what the buttons choose, if there are several.
        tables: the tables that it draws.
        height: pixels; 0: as high as it is wide.
        param: a parameter that a list selects: its name and label, and the values by text.
    """

    id: str
    label: str
    caption: str
    variants: dict[str, Spec]
    tables: tuple[str, ...]
    choice: str = ""
    height: int = 320
    param: tuple[str, str, dict[str, int]] | None = None
    canvas: bool = False

    def to_dict(self) -> dict[str, Any]:
        specs = [
            {"label": label, "spec": {**spec, "description": self.label}} for label, spec in self.variants.items()
        ]
        param = None if self.param is None else self.param[0]
        return {
            "variants": specs,
            "tables": self.tables,
            "height": self.height,
            "param": param,
            "canvas": self.canvas,
        }


@dataclass
class Figures:
    """The charts of a page and the tables that they share.

    Attributes:
        frames: the matrices of the slider, and what the script needs to draw them.
    """

    charts: dict[str, Chart] = field(default_factory=dict)
    tables: dict[str, dict[str, list[Any]]] = field(default_factory=dict)
    frames: dict[str, Any] | None = None

    def add(self, chart: Chart, **tables: dict[str, list[Any]]) -> None:
        self.charts[chart.id] = chart
        self.tables |= tables

    def to_dict(self) -> dict[str, Any]:
        charts = {key: chart.to_dict() for key, chart in self.charts.items()}
        return {"charts": charts, "tables": self.tables, "frames": self.frames}


def palette(values: Sequence[Any]) -> Spec:
    """The scale of a nominal color."""
    return {"scale": {"domain": list(values), **({"scheme": "tableau20"} if len(values) > MANY else {})}}


def curves(peers: int, groups: Sequence[int | None]) -> Chart:
    """Accuracy: a thin line per peer, and the mean of all."""
    return Chart(
        "accuracy",
        f"Accuracy on each peer's local test split, {peers} peers: a thin line per peer, the mean as a thick line, and "
        "its standard deviation over peers as a band",
        "Thin lines: peers, colored by group. Thick line and band: mean ± standard deviation over peers.",
        {name: _curves(x, groups) for name, x in X_AXES.items()},
        ("rounds", "means"),
        choice="Accuracy against",
        height=360,
    )


def _curves(x: Spec, groups: Sequence[int | None]) -> Spec:
    shown = {"data": {"name": "rounds"}, "transform": [{"filter": "isValid(datum.accuracy)"}]}
    picked = [{"filter": "datum.peer === picked && isValid(datum.accuracy)"}]
    y, peer = {"field": "accuracy", **ACCURACY}, {"field": "peer", "type": "nominal"}
    mean = {**ACCURACY, "field": "mean"}
    line = {"type": "line", "strokeWidth": 1, "opacity": 0.45, "aria": False}
    tooltip = [peer, {"field": "group", "type": "nominal"}]
    spread = [
        {"field": "t", "title": "round"},
        {"field": "mean", "format": ".1%"},
        {"field": "std", "format": ".1%", "title": "standard deviation"},
    ]
    return {
        "params": [PICKED],
        "layer": [
            {
                **shown,
                "mark": line,
                "encoding": {"x": x, "y": y, "detail": peer, "color": _by_group(groups), "tooltip": tooltip},
            },
            {
                "data": {"name": "means"},
                "mark": {"type": "area", "opacity": 0.2, "style": "accent", "aria": False},
                "encoding": {"x": x, "y": {**mean, "field": "low"}, "y2": {"field": "high"}},
            },
            {
                "data": {"name": "means"},
                "mark": {"type": "line", "strokeWidth": 3, "style": "accentline"},
                "encoding": {"x": x, "y": mean},
            },
            {
                "data": {"name": "means"},
                "mark": {"type": "point", "size": 90, "opacity": 0, "aria": False},
                "encoding": {"x": x, "y": mean, "tooltip": spread},
            },
            {
                **shown,
                "transform": picked,
                "mark": {"type": "line", "strokeWidth": 3, "style": "pickedline", "aria": False},
                "encoding": {"x": x, "y": y},
            },
        ],
    }


def _by_group(groups: Sequence[int | None]) -> Spec:
    known = [group for group in groups if group is not None]
    if len(known) < 2:
        return {"value": "#8a8f98"}
    return {"field": "group", "type": "nominal", "title": "group", **palette(known)}


def loss(k: int, term: str) -> Chart:
    """One term of the training loss."""
    x, y = X_AXES["rounds"], {"field": f"loss{k}", "type": "quantitative", "title": None, "scale": {"zero": False}}
    shown = {"filter": f"isValid(datum.loss{k})"}
    thin = {"type": "line", "strokeWidth": 1, "opacity": 0.3, "aria": False, "color": "#8a8f98"}
    detail = {"field": "peer", "type": "nominal"}
    picked = {"filter": f"datum.peer === picked && isValid(datum.loss{k})"}
    thick = {"type": "line", "strokeWidth": 2.5}
    return Chart(
        f"loss{k}",
        f"Training loss, term {term}: a thin line per peer and the mean",
        term,
        {
            "": {
                "params": [PICKED],
                "data": {"name": "rounds"},
                "layer": [
                    {"transform": [shown], "mark": thin, "encoding": {"x": x, "y": y, "detail": detail}},
                    {
                        "transform": [shown],
                        "mark": {**thick, "style": "accentline"},
                        "encoding": {"x": x, "y": {**y, "aggregate": "mean"}},
                    },
                    {
                        "transform": [picked],
                        "mark": {**thick, "style": "pickedline", "aria": False},
                        "encoding": {"x": x, "y": y},
                    },
                ],
            }
        },
        ("rounds",),
        height=200,
    )


def weights(order: Sequence[int], highest: float, several_groups: bool) -> Chart:
    """Heat map of mixing weights; the script fills its cells with those of the round that the slider selects."""
    cell = {
        "x": {
            "field": "column",
            "type": "ordinal",
            "sort": None,
            "scale": {"domain": list(order)},
            "title": "averages the model of peer",
        },
        "y": {"field": "row", "type": "ordinal", "sort": None, "scale": {"domain": list(order)}, "title": "peer"},
    }
    color = {
        "field": "w",
        "type": "quantitative",
        "title": "weight",
        "scale": {"domain": [0, highest], "clamp": True},
    }
    tooltip = [
        {"field": "row", "title": "peer"},
        {"field": "column", "title": "gives peer"},
        {"field": "w", "title": "weight", "format": ".3f"},
    ]
    block = {
        "data": {"name": "blocks"},
        "mark": {"type": "rect", "fill": None, "strokeWidth": 2, "style": "outline", "aria": False},
        "encoding": {
            "x": {"field": "first", "type": "ordinal", "bandPosition": 0},
            "x2": {"field": "last", "bandPosition": 1},
            "y": {"field": "first", "type": "ordinal", "bandPosition": 0},
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
        "A row is how a peer mixes; darker is more. Peers are ordered by group"
        + (", outlined." if several_groups else "."),
        {"": {"layer": [rects, *([block] if several_groups else [])]}},
        ("cells", "blocks") if several_groups else ("cells",),
        height=0,
        canvas=len(order) > 30,
    )


def drawing(groups: Sequence[int | None], *, learned: bool) -> Chart:
    """The graph: peers, and edges as strong as their weights or traffic."""
    axis = {"type": "quantitative", "axis": None, "scale": {"domain": [-1.12, 1.12]}}
    place = {"x": {"field": "x", **axis}, "y": {"field": "y", **axis}}
    ends = {**place, "x2": {"field": "x2"}, "y2": {"field": "y2"}}
    strength = {"field": "strength", "type": "quantitative", "legend": None}
    what = "mixing weight" if learned else "bytes sent"
    edges = {
        "data": {"name": "edges"},
        "mark": {"type": "rule", "style": "edge", "aria": False},
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
        "mark": {"type": "circle", "size": 420, "opacity": 1, "style": "node"},
        "encoding": {
            **place,
            "color": _by_group(groups),
            "strokeWidth": chosen,
            "tooltip": [{"field": "peer"}, {"field": "group"}, {"field": "model"}, {"field": "accuracy"}],
        },
    }
    texts = {
        "data": {"name": "nodes"},
        "mark": {"type": "text", "fontSize": 11, "fontWeight": "bold", "style": "nodetext", "aria": False},
        "encoding": {**place, "text": {"field": "peer"}},
    }
    return Chart(
        "drawing",
        f"Drawing of the graph: peers as circles, colored by group, edges as strong as the {what}",
        f"Peers that exchange much are close. Stronger lines: larger {what}"
        + (", the larger of both directions." if learned else ", both directions together."),
        {"": {"params": [PICKED], "layer": [edges, nodes, texts]}},
        ("edges", "nodes"),
        height=0,
        canvas=True,
    )


def matrix(key: str, label: str, caption: str, order: Sequence[int], value: str) -> Chart:
    """Heat map of a table with columns ``row``, ``column`` and ``value``; one cell per sender and receiver."""
    axis = {"type": "ordinal", "scale": {"domain": list(order)}, "sort": None}
    return Chart(
        key,
        label,
        caption,
        {
            "": {
                "data": {"name": key},
                "mark": {"type": "rect", "aria": len(order) <= MANY},
                "encoding": {
                    "x": {"field": "column", "title": "to peer", **axis},
                    "y": {"field": "row", "title": "from peer", **axis},
                    "color": {
                        "field": "value",
                        "type": "quantitative",
                        "title": value,
                        "scale": {"zero": True},
                        "legend": {"format": "~s"},
                    },
                    "tooltip": [
                        {"field": "row", "title": "from"},
                        {"field": "column", "title": "to"},
                        {"field": "value", "title": value, "format": ".4~s"},
                    ],
                },
            }
        },
        (key,),
        height=0,
        canvas=len(order) > 30,
    )


def partition(order: Sequence[int], labels: int, groups: Sequence[int | None]) -> Chart:
    """Samples of each peer by label, as circles."""
    return Chart(
        "partition",
        "Training samples of each peer by label: a circle's area is the number of samples",
        "Training samples per peer and label; the area of a circle is their number.",
        {
            "": {
                "data": {"name": "partition"},
                "mark": {"type": "circle", "opacity": 0.85, "aria": False},
                "encoding": {
                    "x": {
                        "field": "label",
                        "type": "ordinal",
                        "title": "label",
                        "scale": {"domain": list(range(labels))},
                        "axis": {"labelAngle": 0, "labelOverlap": True},
                    },
                    "y": {
                        "field": "peer",
                        "type": "ordinal",
                        "sort": None,
                        "scale": {"domain": list(order)},
                        "axis": {"labelOverlap": True},
                    },
                    "size": {
                        "field": "count",
                        "type": "quantitative",
                        "title": "samples",
                        "scale": {"range": [8, 220]},
                    },
                    "color": _by_group(groups),
                    "tooltip": [{"field": "peer"}, {"field": "label"}, {"field": "count", "title": "samples"}],
                },
            }
        },
        ("partition",),
        height=max(160, min(900, 60 + 17 * len(order))),
        canvas=True,
    )


def confusion(labels: Sequence[int], whose: Mapping[str, int]) -> Chart:
    """Predictions by true class, of all peers together or of one."""
    axis = {"type": "ordinal", "scale": {"domain": list(labels)}, "axis": {"labelAngle": 0, "labelOverlap": True}}
    cell = {
        "x": {"field": "said", "title": "predicted class", **axis},
        "y": {"field": "true", "title": "true class", **axis},
    }
    color = {
        "field": "fraction",
        "type": "quantitative",
        "title": "of the class",
        "scale": {"domain": [0, 1]},
        "legend": {"format": ".0%"},
    }
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
        contrast = {"condition": {"test": "datum.fraction > 0.55", "value": "on"}, "value": "off"}
        layers.append(
            {
                "mark": {"type": "text", "fontSize": 11},
                "encoding": {**cell, "text": {"field": "fraction", "format": ".0%"}, "color": contrast},
            }
        )
    return Chart(
        "confusion",
        "Confusion matrix on the local test splits: fraction of each true class that is predicted as each class",
        "Local test splits, last checkpoints; each row sums to 100 %.",
        {
            "": {
                "params": [{"name": "whose", "value": -1}],
                "data": {"name": "confusion"},
                "transform": [{"filter": "datum.peer === whose"}],
                "layer": layers,
            }
        },
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
    axis = {"type": "quantitative", "axis": None, "scale": {"zero": False, "nice": False, "padding": 12}}
    color = {"field": name, "type": "nominal", "title": "class" if name == "label" else name, **palette(values)}
    tooltip = [{"field": "kind"}, {"field": "label", "title": "class"}, {"field": "peer"}]
    place = {"x": {"field": "x", **axis}, "y": {"field": "y", **axis}}
    legend = {"legend": {"columns": 2 if len(values) > MANY else 1, "symbolLimit": 40}}
    circles = {
        "transform": [{"filter": "datum.kind === 'embedding'"}],
        "mark": {"type": "circle", "size": 22, "opacity": 0.55},
        "encoding": {**place, "color": {**color, **legend}, "tooltip": tooltip},
    }
    diamonds = {
        "transform": [{"filter": "datum.kind === 'prototype'"}],
        "mark": {"type": "point", "shape": "diamond", "size": 90, "filled": True, "opacity": 1, "style": "prototype"},
        "encoding": {**place, "color": color, "tooltip": tooltip},
    }
    return {"data": {"name": "points"}, "layer": [circles, diamonds]}


def time(order: Sequence[int], phases: Sequence[str]) -> Chart:
    """Seconds of each peer by phase, stacked."""
    return Chart(
        "time",
        "Seconds of each peer by phase, as stacked bars",
        "Where each peer's time went. Queued: waiting for a free core or GPU slot; other: averaging and the rest.",
        {
            "": {
                "data": {"name": "time"},
                "mark": {"type": "bar", "aria": False},
                "encoding": {
                    "y": {
                        "field": "peer",
                        "type": "ordinal",
                        "sort": None,
                        "scale": {"domain": list(order)},
                        "axis": {"labelOverlap": True},
                    },
                    "x": {"field": "seconds", "type": "quantitative", "title": "seconds", "stack": True},
                    "color": {
                        "field": "phase",
                        "type": "nominal",
                        "title": None,
                        "scale": {"domain": list(phases)},
                        "legend": {"orient": "top", "columns": 3},
                    },
                    "order": {"field": "rank", "type": "quantitative"},
                    "tooltip": [{"field": "peer"}, {"field": "phase"}, {"field": "seconds", "format": ".2f"}],
                },
            }
        },
        ("time",),
        height=max(160, min(900, 80 + 17 * len(order))),
        canvas=True,
    )


def compared(names: Sequence[str]) -> Chart:
    """Mean accuracy of several groups of runs, with bands over their seeds."""
    color = {
        "field": "name",
        "type": "nominal",
        "title": None,
        "legend": {"orient": "top", "columns": 1, "labelLimit": 320},
        **palette(names),
    }
    y = {"field": "mean", **ACCURACY}

    def spec(x: Spec) -> Spec:
        tooltip = [
            {"field": "name", "title": "runs"},
            {"field": "t", "title": "round"},
            {"field": "mean", "format": ".1%"},
            {"field": "std", "format": ".1%", "title": "standard deviation"},
            {"field": "seeds"},
        ]
        band = {"x": x, "y": {**y, "field": "low"}, "y2": {"field": "high"}, "color": color}
        return {
            "data": {"name": "compared"},
            "layer": [
                {"mark": {"type": "area", "opacity": 0.18, "aria": False}, "encoding": band},
                {"mark": {"type": "line", "strokeWidth": 2.5}, "encoding": {"x": x, "y": y, "color": color}},
                {
                    "mark": {"type": "point", "size": 90, "opacity": 0, "aria": False},
                    "encoding": {"x": x, "y": y, "tooltip": tooltip},
                },
            ],
        }

    return Chart(
        "compared",
        "Mean accuracy over peers of each group of runs, with the standard deviation over seeds as a band",
        "Lines: mean over peers and seeds. Bands: ± standard deviation over seeds.",
        {name: spec(x) for name, x in X_AXES.items()},
        ("compared",),
        choice="Accuracy against",
        height=400,
    )
