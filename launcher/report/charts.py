"""Vega-Lite specifications. Colors come from the page's script, which knows whether the page is light or dark.

``@text``, ``@accent`` and the like stand for colors. A chart names the tables that it draws; the script turns their
columns into rows. ``picked`` is the highlighted peer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

Spec = dict[str, Any]


def channel(kind: str, field: str, **more: Any) -> Spec:
    """Return what encodes a field that is ``quantitative``, ``nominal`` or ``ordinal``."""
    return {"field": field, "type": kind, **more}


quantitative, nominal, ordinal = (partial(channel, kind) for kind in ("quantitative", "nominal", "ordinal"))

X_AXES: dict[str, Spec] = {
    "rounds": quantitative("t", title="round", axis={"tickMinStep": 1, "format": "d"}),
    "bytes": quantitative(
        "bytes", title="bytes sent per peer", axis={"labelExpr": "format(datum.value, '~s') + 'B'"}
    ),
    "seconds": quantitative("seconds", title="seconds since the start"),
}
"""Against what accuracy is shown."""
CLOCK_AXES = {**X_AXES, "seconds": {**X_AXES["seconds"], "title": "simulated seconds since the start"}}
"""The same on a simulated clock."""
MANY = 10
"""Groups or classes from which on a palette of twenty colors is used."""
PICKED = {"name": "picked", "value": -1}
PICKED_ONLY = {"filter": "datum.peer === picked"}
HONEST_ONLY = {"filter": "!datum.attacks"}
DASHED = {"condition": {"test": "datum.attacks", "value": [4, 3]}, "value": [1, 0]}
"""Lines of attackers."""


def accuracy(field: str) -> Spec:
    """Return what encodes an accuracy."""
    return quantitative(field, title="accuracy", axis={"format": ".0%"}, scale={"zero": False})


@dataclass(frozen=True)
class Chart:
    """A figure of the page.

    Attributes:
        label: what it shows, for screen readers.
        caption: how to read it.
        variants: specifications by the text of the button that selects it.
        choice: what the buttons choose, if there are several.
        tables: the tables that it draws.
        needs: a column of ``rounds``: rows without a value there are left out. The script does that much faster than
            a filter of the specification, whose expressions are interpreted.
        height: pixels; 0: as high as it is wide.
        param: a parameter that a list selects: its name and label, and the values by text.
    """

    id: str
    label: str
    caption: str
    variants: dict[str, Spec]
    tables: tuple[str, ...]
    needs: str = ""
    choice: str = ""
    height: int = 320
    param: tuple[str, str, dict[str, int]] | None = None
    canvas: bool = False

    def to_dict(self) -> dict[str, Any]:
        variants = [
            {"label": label, "spec": {**spec, "description": self.label}} for label, spec in self.variants.items()
        ]
        same = {name: getattr(self, name) for name in ("tables", "needs", "height", "canvas")}
        return {"variants": variants, "param": self.param and self.param[0], **same}


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


def curves(peers: int, groups: Sequence[int | None], *, points: bool, attackers: bool, simulated: bool) -> Chart:
    """Accuracy: a thin line per peer, and the mean of all honest ones; with a point per round if these are few.

    Args:
        simulated: seconds are those of a simulated clock.
    """
    return Chart(
        "accuracy",
        f"Accuracy on each peer's local test split, {peers} peers: a thin line per peer, the mean as a thick line, "
        "and its standard deviation over peers as a band",
        "Thin lines: peers, colored by group. Thick line and band: mean ± standard deviation over peers; against "
        "seconds, of the last evaluation of each."
        + (" Attackers are dashed, and not in the mean." if attackers else ""),
        {name: _curves(x, groups, points, attackers) for name, x in (CLOCK_AXES if simulated else X_AXES).items()},
        ("rounds", "means", "moments"),
        needs="accuracy",
        choice="Accuracy against",
        height=360,
    )


def _curves(x: Spec, groups: Sequence[int | None], points: bool, attackers: bool) -> Spec:
    rounds, means = {"data": {"name": "rounds"}}, {"data": {"name": "moments" if _over_time(x) else "means"}}
    y, mean, peer = accuracy("accuracy"), accuracy("mean"), nominal("peer")
    line = {"type": "line", "strokeWidth": 1, "opacity": 0.45, "aria": False, "point": points}
    thin = {"x": x, "y": y, "detail": peer, "color": by_group(groups), "tooltip": [peer, nominal("group")]}
    if attackers:
        thin["strokeDash"] = DASHED
    spread = [
        _place(x),
        {"field": "mean", "format": ".1%"},
        {"field": "std", "format": ".1%", "title": "standard deviation"},
    ]
    steps = _steps(x)
    band = {"type": "area", "opacity": 0.2, "color": "@text", "aria": False, **steps}
    thick = {"type": "line", "strokeWidth": 3, "color": "@text", "point": _point(points, "@text"), **steps}
    hidden = {"type": "point", "size": 90, "opacity": 0, "aria": False}
    picked = {"type": "line", "strokeWidth": 3, "color": "@strong", "aria": False}
    return {
        "params": [PICKED],
        "layer": [
            {**rounds, "mark": line, "encoding": thin},
            {**means, "mark": band, "encoding": {"x": x, "y": accuracy("low"), "y2": {"field": "high"}}},
            {**means, "mark": thick, "encoding": {"x": x, "y": mean}},
            {**means, "mark": hidden, "encoding": {"x": x, "y": mean, "tooltip": spread}},
            {**rounds, "transform": [PICKED_ONLY], "mark": picked, "encoding": {"x": x, "y": y}},
        ],
    }


def _over_time(x: Spec) -> bool:
    """Whether means are those at a moment, rather than of a round."""
    return bool(x["field"] == "seconds")


def _steps(x: Spec) -> Spec:
    """Return how the mark of a mean leads to the next: one at a moment holds until a peer is evaluated again."""
    return {"interpolate": "step-after"} if _over_time(x) else {}


def _place(x: Spec) -> Spec:
    """Return what a tooltip shows of the place of a mean."""
    return {"field": "seconds", "format": ".1f"} if _over_time(x) else {"field": "t", "title": "round"}


def _point(shown: bool, color: str) -> Spec | bool:
    return {"color": color, "size": 60} if shown else False


def by_group(groups: Sequence[int | None]) -> Spec:
    known = [group for group in groups if group is not None]
    if len(known) < 2:
        return {"value": "@quiet"}
    return nominal("group", title="group", **palette(known))


def loss(k: int, term: str, *, points: bool, attackers: bool) -> Chart:
    """One term of the training loss."""
    x, y = X_AXES["rounds"], quantitative(f"loss{k}", title=None, scale={"zero": False})
    thin = {"type": "line", "strokeWidth": 1, "opacity": 0.3, "aria": False, "color": "@quiet"}
    thick = {"type": "line", "strokeWidth": 2.5, "point": _point(points, "@text")}
    mean, picked = {**thick, "color": "@text"}, {**thick, "color": "@strong", "aria": False}
    dashed, honest = ({"strokeDash": DASHED}, {"transform": [HONEST_ONLY]}) if attackers else ({}, {})
    layers = [
        {"mark": thin, "encoding": {"x": x, "y": y, "detail": nominal("peer"), **dashed}},
        {**honest, "mark": mean, "encoding": {"x": x, "y": {**y, "aggregate": "mean"}}},
        {"transform": [PICKED_ONLY], "mark": picked, "encoding": {"x": x, "y": y}},
    ]
    return Chart(
        f"loss{k}",
        f"Training loss, term {term}: a thin line per peer and the mean",
        term,
        {"": {"params": [PICKED], "data": {"name": "rounds"}, "layer": layers}},
        ("rounds",),
        needs=f"loss{k}",
        height=200,
    )


def neighbors(
    kinds: Sequence[str], senders: Sequence[str], limits: tuple[float, float], *, selects: bool, points: bool
) -> Chart:
    """How far what neighbors send is from a peer's own, and how much of it is taken if the rule ``selects``.

    Args:
        limits: of the distances that are shown, above 0.
    """
    x = X_AXES["rounds"]
    legend = {"orient": "top", "symbolType": "stroke", "symbolOpacity": 1}
    color = nominal("of", title=None, legend=legend, scale={"domain": list(senders)})
    fraction = quantitative("taken", title="taken by the rule", axis={"format": ".0%"}, scale={"domain": [0, 1]})
    scale = {"type": "log", "domain": list(limits), "clamp": True}
    variants: dict[str, Spec] = {}
    for kind in kinds:
        of_kind = {"data": {"name": "neighbors"}, "transform": [{"filter": {"field": "kind", "equal": kind}}]}
        low = quantitative(
            "low", title="relative distance", scale=scale, axis={"format": "~g", "tickCount": 4}, stack=None
        )
        area = {"type": "area", "opacity": 0.2, "aria": False}
        line = {"mark": {"type": "line", "strokeWidth": 2.5, "point": points}}
        layers = [
            {"mark": area, "encoding": {"x": x, "y": low, "y2": {"field": "high"}, "color": color}},
            {**line, "encoding": {"x": x, "y": quantitative("distance", scale=scale), "color": color}},
        ]
        suffix = f" of {kind}" if len(kinds) > 1 else ""
        variants[f"distance{suffix}"] = {**of_kind, "layer": layers}
        if selects:
            variants[f"taken{suffix}"] = {**of_kind, **line, "encoding": {"x": x, "y": fraction, "color": color}}
    return Chart(
        "neighbors",
        "How far what neighbors send is from each honest peer's own, and how much of it its rule takes, by round",
        "Distance of a neighbor's message from the peer's own, relative to the norm of that: the median neighbor's, "
        "median and quartiles over honest peers. Taken: the fraction that the rule has not left out or clipped.",
        variants,
        ("neighbors",),
        choice="Of neighbors' messages",
        height=220,
    )


def ages(kinds: Sequence[str], *, points: bool) -> Chart:
    """How old the messages are that rounds take which do not wait: median and range by round."""
    x, y = X_AXES["rounds"], quantitative("median", title="age in rounds", axis={"tickMinStep": 1})
    tooltip = [
        {"field": "t", "title": "round"},
        {"field": "median"},
        {"field": "low", "title": "lowest"},
        {"field": "high", "title": "highest"},
    ]
    band = {"type": "area", "opacity": 0.2, "color": "@accent", "aria": False}
    line = {"type": "line", "strokeWidth": 2.5, "color": "@accent", "point": _point(points, "@accent")}
    hidden = {"type": "point", "size": 90, "opacity": 0, "aria": False}
    layers = [
        {"mark": band, "encoding": {"x": x, "y": {**y, "field": "low"}, "y2": {"field": "high"}}},
        {"mark": line, "encoding": {"x": x, "y": y}},
        {"mark": hidden, "encoding": {"x": x, "y": y, "tooltip": tooltip}},
    ]

    def spec(kind: str) -> Spec:
        of_kind = {"filter": {"field": "kind", "equal": kind}}
        return {"data": {"name": "ages"}, "transform": [of_kind], "layer": layers}

    return Chart(
        "ages",
        "Age of the messages that the peers take, by round: the median as a line, the range as a band",
        "How many rounds before a peer's own round the messages that it takes were sent: the median over all peers "
        "and their neighbors, and the range. Below 0: the neighbor was ahead.",
        {kind: spec(kind) for kind in kinds} if len(kinds) > 1 else {"": spec(kinds[0])},
        ("ages",),
        choice="Ages of",
        height=220,
    )


def time(order: Sequence[int], phases: Sequence[str], *, simulated: bool) -> Chart:
    """Seconds of each peer by phase, stacked; those of a clock if that is ``simulated``."""
    title = "simulated seconds" if simulated else "seconds"
    legend = {"orient": "top", "columns": 3}
    encoding = {
        "y": ordinal("peer", sort=None, scale={"domain": list(order)}, axis={"labelOverlap": True}),
        "x": quantitative("seconds", title=title, stack=True),
        "color": nominal("phase", title=None, scale={"domain": list(phases)}, legend=legend),
        "order": quantitative("rank"),
        "tooltip": [{"field": "peer"}, {"field": "phase"}, {"field": "seconds", "format": ".2f"}],
    }
    return Chart(
        "time",
        "Seconds of each peer by phase, as stacked bars",
        "Where each peer's time went. Queued: waiting for a free core or GPU slot; other: averaging and the rest.",
        {"": {"data": {"name": "time"}, "mark": {"type": "bar", "aria": False}, "encoding": encoding}},
        ("time",),
        height=max(160, min(900, 80 + 17 * len(order))),
        canvas=True,
    )


def compared(names: Sequence[str], *, simulated: bool) -> Chart:
    """Mean accuracy of several groups of runs, with bands over their seeds; on a clock if that is ``simulated``."""
    legend = {"orient": "top", "columns": 1, "labelLimit": 320, "symbolType": "stroke", "symbolOpacity": 1}
    color, y = nominal("name", title=None, legend=legend, **palette(names)), accuracy("mean")
    hidden = {"type": "point", "size": 90, "opacity": 0, "aria": False}

    def spec(x: Spec) -> Spec:
        tooltip = [
            {"field": "name", "title": "runs"},
            _place(x),
            {"field": "mean", "format": ".1%"},
            {"field": "std", "format": ".1%", "title": "standard deviation"},
            {"field": "seeds"},
        ]
        band = {"x": x, "y": accuracy("low"), "y2": {"field": "high"}, "color": color}
        steps = _steps(x)
        layers = [
            {"mark": {"type": "area", "opacity": 0.18, "aria": False, **steps}, "encoding": band},
            {"mark": {"type": "line", "strokeWidth": 2.5, **steps}, "encoding": {"x": x, "y": y, "color": color}},
            {"mark": hidden, "encoding": {"x": x, "y": y, "tooltip": tooltip}},
        ]
        return {"data": {"name": "compared_moments" if _over_time(x) else "compared"}, "layer": layers}

    return Chart(
        "compared",
        "Mean accuracy over peers of each group of runs, with the standard deviation over seeds as a band",
        "Lines: mean over peers and seeds; against seconds, of the last evaluation of each peer. Bands: ± standard "
        "deviation over seeds.",
        {name: spec(x) for name, x in (CLOCK_AXES if simulated else X_AXES).items()},
        ("compared", "compared_moments"),
        choice="Accuracy against",
        height=400,
    )
