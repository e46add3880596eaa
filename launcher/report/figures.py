"""The charts of a run, and of several, with their tables."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from launcher.comparison.groups import SIMULATED, RunGroup, common_clock
from launcher.report import charts, history, plots, several
from launcher.report.charts import Figures
from launcher.report.collect import ReportedRun
from launcher.report.history import PHASES, SENDERS
from launcher.report.learned import MAX_CONFUSION
from launcher.report.numbers import rounded

MAX_EDGES = 1500
"""Edges that the drawing shows: the strongest."""
FEW = 3
"""Rounds up to which curves show their points: a line through one would not be seen."""


def of_run(run: ReportedRun) -> Figures:
    """Return the charts for which there is data."""
    figures = Figures()
    groups = sorted({group for group in run.groups.values() if group is not None})
    _curves(figures, run, groups)
    _graph(figures, run, groups)
    _neighbors(figures, run)
    _models(figures, run, groups)
    _costs(figures, run)
    return figures


def _curves(figures: Figures, run: ReportedRun, groups: Sequence[int]) -> None:
    if not run.history.rows:
        return
    figures.tables["rounds"] = history.columns(run.history, run.groups)
    mean, attackers = history.means(run.history), bool(run.summary.attacks)
    if mean:
        moments = history.means_over_time(run.history)
        shown = charts.curves(
            len(run.history.peers),
            groups,
            points=len(mean) <= FEW,
            attackers=attackers,
            simulated=bool(run.summary.clock),
        )
        figures.add(shown, means=_columns(mean), moments=_columns(moments))
    for k, term in enumerate(run.history.terms):
        rounds = {row["t"] for row in run.history.rows if row["loss"].get(term) is not None}
        figures.add(charts.loss(k, term, points=len(rounds) <= FEW, attackers=attackers))


def _columns(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Return a table of rows that have the same keys, of which there is at least one, with its numbers rounded."""
    return {key: [row[key] if key == "name" else rounded(row[key]) for row in rows] for key in rows[0]}


def _graph(figures: Figures, run: ReportedRun, groups: Sequence[int]) -> None:
    order, frames = run.order, history.frames(run.history, run.order)
    learned = bool(frames)
    if not learned and not run.history.edges:
        return
    size = len(order)
    if learned:
        cells = frames[-1]["cells"]
        others = [f["cells"][k] for f in frames for k in range(size * size) if k // size != k % size]
        highest = max(others, default=0) / 1000 or 1.0
        strength = {(a, b): max(0, cells[i * size + j]) for i, a in enumerate(order) for j, b in enumerate(order)}
        figures.add(plots.weights(order, highest, len(groups) > 1), blocks=_blocks(run))
        figures.frames = {"order": order, "list": frames, "highest": highest}
    else:
        strength = {pair: int(count) for pair, count in run.history.edges.items()}
        figures.tables["edges"] = {}
    places = layout(order, strength)
    peers = {peer.peer: peer for peer in run.summary.peers}
    nodes: dict[str, list[Any]] = {
        "peer": list(order),
        "group": [run.groups[peer] for peer in order],
        "model": [peers[peer].model if peer in peers else "" for peer in order],
        "accuracy": [rounded(peers[peer].accuracy, 4) if peer in peers else None for peer in order],
        "x": [rounded(places[peer][0], 4) for peer in order],
        "y": [rounded(places[peer][1], 4) for peer in order],
    }
    if run.summary.attacks:
        nodes["attacks"] = [peer in run.summary.attacks for peer in order]
    figures.add(plots.drawing(groups, learned=learned, attackers=bool(run.summary.attacks)), nodes=nodes)
    if not learned:
        figures.tables["edges"] = edge_table(strength, places)


def _neighbors(figures: Figures, run: ReportedRun) -> None:
    table = history.neighbors(run.history)
    if table["t"]:
        senders = [sender for sender in SENDERS if sender in table["of"]]
        positive = [value for key in ("low", "high") for value in table[key] if value > 0] or [1.0]
        selects = any(taken < 1.0 for taken in table["taken"])
        chart = charts.neighbors(
            sorted(set(table["kind"])),
            senders,
            (min(positive) / 1.2, max(positive) * 1.2),
            selects=selects,
            points=len(set(table["t"])) <= FEW,
        )
        figures.add(chart, neighbors=table)


def _blocks(run: ReportedRun) -> dict[str, list[Any]]:
    """The first and the last peer of each group."""
    ends: dict[int | None, list[int]] = {}
    for peer in run.order:
        ends.setdefault(run.groups[peer], []).append(peer)
    return {"first": [peers[0] for peers in ends.values()], "last": [peers[-1] for peers in ends.values()]}


def edge_table(
    strength: Mapping[tuple[int, int], float], places: Mapping[int, tuple[float, float]], most: float | None = None
) -> dict[str, list[Any]]:
    """Return the strongest edges; as wide as the sum of both directions is large, compared with ``most``."""
    both: dict[tuple[int, int], float] = {}
    for (a, b), count in strength.items():
        if a != b and a in places and b in places:
            pair = min(a, b), max(a, b)
            both[pair] = both.get(pair, 0) + count
    strongest = sorted(both.items(), key=lambda item: -item[1])[:MAX_EDGES]
    most = most or (strongest[0][1] if strongest else 1)
    ends = [(*places[a], *places[b]) for (a, b), _ in strongest]
    names = ("x", "y", "x2", "y2")
    table: dict[str, list[Any]] = {name: [rounded(end[k], 4) for end in ends] for k, name in enumerate(names)}
    table["pair"] = [f"{a} – {b}" for (a, b), _ in strongest]
    table["value"] = [count for _, count in strongest]
    table["strength"] = [rounded(count / most if most else 0.0, 3) for _, count in strongest]
    return table


def layout(order: Sequence[int], strength: dict[tuple[int, int], int]) -> dict[int, tuple[float, float]]:
    """Place the peers so that strongly connected ones are close, in [-1, 1]; the same for the same graph."""
    import networkx as nx

    graph = nx.Graph()
    graph.add_nodes_from(order)
    highest = max((count for (a, b), count in strength.items() if a != b), default=0)
    for (a, b), count in strength.items():
        if a < b and (mean := (count + strength.get((b, a), 0)) / 2) > 0:
            graph.add_edge(a, b, weight=mean / highest)
    uniform = len({data["weight"] for _, _, data in graph.edges(data=True)}) <= 1
    complete = graph.number_of_edges() == len(order) * (len(order) - 1) // 2
    if len(order) < 3 or (uniform and complete):
        places = nx.circular_layout(graph)
    else:
        places = nx.spring_layout(graph, seed=0, iterations=200, weight="weight", k=1.6 / len(order) ** 0.5)
    return {peer: (float(x), float(y)) for peer, (x, y) in places.items()}


def _models(figures: Figures, run: ReportedRun, groups: Sequence[int]) -> None:
    learned = run.learned
    if learned.partition is not None:
        labels = [learned.name(label) for label in range(learned.partition["dataset"]["classes"])]
        table = partition_table(learned.partition["peers"], labels)
        figures.add(plots.partition(run.order, labels, groups), partition=table)
    if learned.confusion:
        figures.add(_confusion(run))
        confusion = confusion_table(run)
        named = {key: [learned.name(label) for label in confusion[key]] for key in ("true", "said")}
        figures.tables["confusion"] = confusion | named
    if learned.points:
        groups_of = [run.groups.get(peer) for peer in learned.points["peer"]]
        by: dict[str, tuple[str, Sequence[Any]]] = {
            "class": ("label", [learned.name(label) for label in sorted(set(learned.points["label"]))]),
            "peer": ("peer", sorted(set(learned.points["peer"]))),
        }
        if len(groups) > 1:
            by["group"] = ("group", groups)
        labels = [learned.name(label) for label in learned.points["label"]]
        figures.add(plots.points(by), points={**learned.points, "group": groups_of, "label": labels})


def partition_table(peers: Iterable[Mapping[str, Any]], labels: Sequence[str | int]) -> dict[str, list[Any]]:
    """Return the training samples of each peer by class; ``labels``: what to call the classes."""
    rows = [
        (peer["peer"], peer["group"], labels[int(label)], count)
        for peer in peers
        for label, count in peer["classes"].items()
    ]
    return {name: [row[k] for row in rows] for k, name in enumerate(("peer", "group", "label", "count"))}


def _confusion(run: ReportedRun) -> charts.Chart:
    found = run.learned.confusion
    labels = sorted({label for rows in found.values() for true, said, _ in rows for label in (true, said)})
    single, named = shown_confusions(run), [run.learned.name(label) for label in labels]
    everyone = "all honest peers" if run.summary.attacks else "all peers"
    return plots.confusion(named, {everyone: -1, **{f"peer {peer}": peer for peer in single}})


def shown_confusions(run: ReportedRun) -> list[int]:
    """The peers whose matrices the page holds: as many as there is room for."""
    shown, cells = [], 0
    for peer, rows in sorted(run.learned.confusion.items()):
        cells += len(rows)
        if cells > MAX_CONFUSION:
            break
        shown.append(peer)
    return shown


def confusion_table(run: ReportedRun) -> dict[str, list[Any]]:
    """Return columns ``peer`` (-1: all), ``true``, ``said``, ``count`` and ``fraction`` (of the true class)."""
    pooled: dict[tuple[int, int], int] = {}
    honest = (rows for peer, rows in run.learned.confusion.items() if peer not in run.summary.attacks)
    for rows in honest:
        for true, said, count in rows:
            pooled[true, said] = pooled.get((true, said), 0) + count
    of = {-1: [[true, said, count] for (true, said), count in sorted(pooled.items())]}
    of |= {peer: run.learned.confusion[peer] for peer in shown_confusions(run)}
    table: dict[str, list[Any]] = {name: [] for name in ("peer", "true", "said", "count", "fraction")}
    for peer, rows in of.items():
        totals: dict[int, int] = {}
        for true, _, count in rows:
            totals[true] = totals.get(true, 0) + count
        for true, said, count in rows:
            for name, value in zip(table, (peer, true, said, count, rounded(count / totals[true], 3)), strict=True):
                table[name].append(value)
    return table


def _costs(figures: Figures, run: ReportedRun) -> None:
    order, recorded = run.order, run.history
    if recorded.edges:
        edges: dict[str, list[Any]] = {
            "row": [a for a, _ in recorded.edges],
            "column": [b for _, b in recorded.edges],
            "value": list(recorded.edges.values()),
        }
        label = "Bytes sent over each edge, from the peer of the row to that of the column"
        chart = plots.matrix("traffic", label, "Bytes by sender and receiver, with headers.", order, "bytes")
        figures.add(chart, traffic=edges)
    if recorded.seconds:
        phases = (*PHASES, "other")
        spent = [
            (peer, phase, rank, round(recorded.seconds[peer][phase], 2))
            for peer in order
            if peer in recorded.seconds
            for rank, phase in enumerate(phases)
            if any(seconds[phase] for seconds in recorded.seconds.values())
        ]
        table = {name: [row[k] for row in spent] for k, name in enumerate(("peer", "phase", "rank", "seconds"))}
        shown = [phase for phase in phases if phase in set(table["phase"])]
        figures.add(charts.time(order, shown, simulated=bool(run.summary.clock)), time=table)
    ages = history.ages(recorded)
    if kinds := sorted(set(ages["kind"])):
        figures.add(charts.ages(kinds, points=len(set(ages["t"])) <= FEW), ages=ages)


def of_several(groups: Sequence[RunGroup]) -> Figures:
    """Return the curves of several groups of runs."""
    figures = Figures()
    curves = [(group.title, several.histories(group)) for group in groups]
    rows = [row for title, runs in curves for row in several.curve(title, runs)]
    if rows:
        moments = [row for title, runs in curves for row in several.curve_over_time(title, runs)]
        members = [member for group in groups for member in group.members]
        chart = charts.compared([title for title, _ in curves], simulated=common_clock(members) == SIMULATED)
        figures.add(chart, compared=_columns(rows), compared_moments=_columns(moments))
    return figures
