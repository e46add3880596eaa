"""The sections of the page of one run, as HTML."""

from __future__ import annotations

import math
from collections.abc import Iterator
from statistics import fmean, median
from typing import Any

from launcher import formatting
from launcher.facts.summary import Attackers
from launcher.report.charts import Figures
from launcher.report.collect import ReportedRun
from launcher.report.findings import SLOW, training_times
from launcher.report.history import PHASES
from launcher.report.page import document, escape, figure, findings, select, table, tiles
from launcher.views.print_summary import cost_text
from p2pfl.run_folder.folder import RunFolder

ABSENT = {
    "accuracy": "no peer has evaluated its model yet",
    "weights": "the method has no mixing weights, or no round is completed",
    "traffic": "nothing was sent",
    "time": "no round is completed",
}
"""Why a figure is missing, if nothing else is known."""

JOULES = {"cpu_joules", "gpu_joules"}
ALIKE = (0.8, 1.25)
"""Ratios of the weights within groups to those across between which the groups make no difference."""


def body(run: ReportedRun, figures: Figures) -> str:
    """Return the header, the sections and the footer."""
    heading = f'{escape(run.summary.name)} <span class="quiet">{escape(_kind(run))}</span>'
    footer = f"Made by <code>p2pfl report</code> from {escape(run.folder.root)}"
    return document(heading, escape(_origin(run)), dict(_sections(run, figures)), footer)


def _kind(run: ReportedRun) -> str:
    summary = run.summary
    done = sum(peer.ended == "finished" for peer in summary.peers)
    state = "finished" if summary.finished else f"{done} of {len(summary.peers)} peers finished"
    rounds = max((peer.rounds_done for peer in summary.peers), default=0)
    of = "" if rounds == summary.rounds else f" of {summary.rounds}"
    attackers = f" ({len(summary.honest)} honest)" if summary.attacks else ""
    return f"{summary.algorithm}, {len(summary.peers)} peers{attackers}, {rounds}{of} rounds, {state}"


def _origin(run: ReportedRun) -> str:
    info, summary = run.info, run.summary
    how = "collected from other hosts" if "collected" in info else "launched"
    if info.get("simulated"):
        how = "simulated on a clock" if summary.clock else "simulated"
    return f"{how} {str(info.get('started', '')).replace('T', ' ')[:16]}, seed {summary.seed}"


def _sections(run: ReportedRun, figures: Figures) -> Iterator[tuple[str, tuple[str, str]]]:
    yield "glance", ("At a glance", _tiles(run) + _findings(run))
    yield "learning", ("Learning", _learning(run, figures))
    yield "collaboration", ("Collaboration", _collaboration(run, figures))
    yield "peers-section", ("Peers", _peers(run))
    yield "cost", ("Traffic and time", _cost(run, figures))
    yield "data-section", ("Data and models", _models(run, figures))
    yield "faults", ("Faults and restarts", _faults(run))
    yield "run", ("Run file and versions", _run_file(run))


# ---- at a glance -----------------------------------------------------------------------------------------------


def _tiles(run: ReportedRun) -> str:
    attackers = [_attackers_tile(run.summary.attackers)] if run.summary.attackers else []
    return tiles([_accuracy_tile(run), *attackers, _slowest_tile(run), _collaboration_tile(run), _cost_tile(run)])


def _attackers_tile(found: Attackers) -> tuple[str, str, str]:
    accuracy = "" if found.accuracy is None else f"; accuracy {formatting.percent(found.accuracy.mean)} %"
    names = ", ".join(dict.fromkeys(found.attacks.values()))
    return "Who attacks?", formatting.peers(found.attacks), f"{names}{accuracy}"


def _accuracy_tile(run: ReportedRun) -> tuple[str, str, str]:
    found = run.summary.accuracy
    if found is not None:
        kind = "masked; " if run.summary.masked_test else ""
        kind += "honest peers; " if run.summary.attacks else ""
        middle = median(peer.accuracy for peer in run.summary.honest if peer.accuracy is not None)
        more = f"{kind}median {formatting.percent(middle)} %, worst tenth {formatting.percent(found.worst_tenth)} %"
        return "How accurate?", f"{formatting.percent(found.mean)} ± {formatting.percent(found.std)} %", more
    last = [row["accuracy"] for row in _last_rows(run) if row["peer"] not in run.summary.attacks]
    if last:
        return "How accurate?", f"{formatting.percent(fmean(last))} %", "mean of the last evaluations, unfinished"
    return "How accurate?", "–", ABSENT["accuracy"]


def _last_rows(run: ReportedRun) -> list[dict[str, Any]]:
    last: dict[int, dict[str, Any]] = {}
    for row in run.history.rows:
        if row["accuracy"] is not None:
            last[row["peer"]] = row
    return list(last.values())


def _slowest_tile(run: ReportedRun) -> tuple[str, str, str]:
    training = training_times(run.history)
    middle = median(training.values()) if training else 0.0
    if middle <= 0:
        return "Who is slow?", "–", ABSENT["time"]
    peer = max(training, key=training.__getitem__)
    times = training[peer] / middle
    if times < SLOW:
        return "Who is slow?", "nobody", f"peer {peer} trains longest: {times:.1f} × the median peer"
    return "Who is slow?", f"peer {peer}", f"trains {times:.1f} × as long as the median peer"


def _collaboration_tile(run: ReportedRun) -> tuple[str, str, str]:
    found, question = run.summary.collaboration, "Who works with whom?"
    if found is None:
        return question, "–", "see Collaboration" if run.history.weights else "no mixing weights are recorded"
    groups = len(set(found.groups))
    if groups > 1 and found.inside is not None and found.across is not None:
        ratio = found.inside / found.across if found.across else math.inf
        value = "own group" if ratio > ALIKE[1] else "other groups" if ratio < ALIKE[0] else "all alike"
        weights = f"{found.inside:.3f} within {groups} groups, {found.across:.3f} across"
        return question, value, f"mean weight {weights}" + (f": {ratio:.1f} times" if 0 < ratio < math.inf else "")
    own = {peer: row[k] for k, (peer, row) in enumerate(zip(found.peers, found.weights, strict=True))}
    alone = fmean([own[peer] for peer in own if peer not in run.summary.attacks] or own.values())
    kept, others = formatting.percent(alone), formatting.percent(1 - alone)
    return question, f"{others} % others", f"a peer keeps {kept} % of its own"


def _cost_tile(run: ReportedRun) -> tuple[str, str, str]:
    sent = sum(payload + header for _, payload, header in run.history.kinds.values())
    trained = sum(seconds["training"] for seconds in run.history.seconds.values())
    took = run.summary.seconds or max((row["seconds"] for row in run.history.rows), default=0.0)
    simulated = "simulated " if run.summary.clock else ""
    return (
        "What did it cost?",
        f"{formatting.size(sent)}, {formatting.duration(took)}",
        f"traffic and {simulated}time; training {formatting.duration(trained)} in all",
    )


def _findings(run: ReportedRun) -> str:
    return findings((found.level, found.text) for found in run.findings)


# ---- figures ---------------------------------------------------------------------------------------------------


def _absent(what: str, why: str) -> str:
    return f'<p class="absent">{escape(what)}: not shown, {escape(why)}.</p>'


def _figure(figures: Figures, key: str, what: str, why: str = "") -> str:
    if key in figures.charts:
        return figure(figures.charts[key])
    return _absent(what, why or ABSENT.get(key, "there is no data"))


def _learning(run: ReportedRun, figures: Figures) -> str:
    peers = {"none": -1, **{f"peer {peer}": peer for peer in run.history.peers}}
    pick = f'<div class="bar">{select("pick", "Highlight", peers)}</div>' if run.history.rows else ""
    losses = "".join(figure(chart) for key, chart in figures.charts.items() if key.startswith("loss"))
    if losses:
        losses = f'<h3>Terms of the training loss, by round</h3><div class="small">{losses}</div>'
    else:
        losses = _absent("Loss terms", "none are recorded")
    return pick + _figure(figures, "accuracy", "Accuracy") + losses


def _collaboration(run: ReportedRun, figures: Figures) -> str:
    bar = ""
    if figures.frames is not None:
        last = len(figures.frames["list"]) - 1
        t = figures.frames["list"][-1]["t"]
        bar = (
            '<div class="bar"><label for="round">Round</label>'
            f'<input type="range" id="round" min="0" max="{last}" value="{last}" step="1" '
            f'aria-valuetext="after round {t}">'
            f'<output id="round-shown" for="round">after round {t}</output>'
            '<button type="button" id="play">Play</button></div>'
        )
    drawn = _figure(figures, "drawing", "Graph", ABSENT["traffic"])
    pair = f'<div class="pair">{_figure(figures, "weights", "Mixing weights")}{drawn}</div>'
    return bar + pair + (figure(figures.charts["neighbors"]) if "neighbors" in figures.charts else "")


def _peers(run: ReportedRun) -> str:
    recorded = run.history
    joules = any(peer.cost.keys() & JOULES for peer in run.summary.peers)
    head = [
        "peer",
        *(["attack"] if run.summary.attacks else []),
        "model",
        "group",
        "rounds",
        "accuracy %",
        "best %",
        "sent",
        "received",
        "missed",
        "training s",
        "waiting s",
        "CPU s",
        *(["joules"] if joules else []),
        "restarts",
        "ended",
    ]
    last = {row["peer"]: row["accuracy"] for row in _last_rows(run)}
    rows = []
    for peer in run.summary.peers:
        spent = recorded.seconds.get(peer.peer, {})
        accuracy = peer.accuracy if peer.accuracy is not None else last.get(peer.peer)
        sent = sum(count for (a, _), count in recorded.edges.items() if a == peer.peer)
        missed = sum(count for (receiver, _), count in recorded.missing.items() if receiver == peer.peer)
        received = sum(count for (_, b), count in recorded.edges.items() if b == peer.peer)
        rows.append(
            [
                str(peer.peer),
                *([run.summary.attacks.get(peer.peer, "")] if run.summary.attacks else []),
                peer.model,
                "" if peer.group is None else str(peer.group),
                str(peer.rounds_done),
                formatting.percent(accuracy),
                formatting.percent(peer.best),
                formatting.size(peer.bytes_out or sent),
                formatting.size(peer.bytes_in or received),
                str(peer.missing or missed),
                f"{spent.get('training', 0.0):.1f}",
                f"{spent.get('waiting', 0.0):.1f}",
                f"{peer.cost['cpu_seconds']:.1f}" if "cpu_seconds" in peer.cost else "–",
                *([f"{sum(peer.cost.get(key, 0.0) for key in JOULES):.0f}"] if joules else []),
                str(peer.restarts),
                peer.ended,
            ]
        )
    return table("Peers; a heading sorts by its column", head, rows, key="peers", sortable=True)


def _cost(run: ReportedRun, figures: Figures) -> str:
    kinds = [
        [kind, f"{messages:.0f}", formatting.size(payload), formatting.size(header)]
        for kind, (messages, payload, header) in run.history.kinds.items()
    ]
    traffic = table("Sent, by kind of message", ["kind", "messages", "payload", "headers"], kinds) if kinds else ""
    total = {phase: sum(spent[phase] for spent in run.history.seconds.values()) for phase in (*PHASES, "other")}
    spent = ", ".join(f"{phase} {formatting.duration(value)}" for phase, value in total.items() if value)
    summed = f'<p class="quiet">All peers together: {escape(spent)}.</p>' if spent else ""
    if run.summary.cost:
        summed += f'<p class="quiet">Their rounds used {escape(cost_text(run.summary.cost))}.</p>'
    if run.summary.clock:
        summed += '<p class="quiet">Seconds are those of a simulated clock, but for CPU time.</p>'
    elif run.info.get("simulated"):
        summed += '<p class="quiet">Simulated peers take turns, so waiting includes the work of the others.</p>'
    left = traffic + _figure(figures, "traffic", "Traffic by edge")
    spent = _figure(figures, "time", "Time by phase") + summed
    ages = figure(figures.charts["ages"]) if "ages" in figures.charts else ""
    return f'<div class="pair"><div>{left}</div><div>{spent}</div></div>{ages}'


def _models(run: ReportedRun, figures: Figures) -> str:
    absent = run.learned.absent
    titles = {
        "partition": "Data partition",
        "confusion": "Confusion matrices",
        "points": "Embeddings and prototypes",
    }
    drawn = [
        f"<div><h3>{title}</h3>{_figure(figures, key, title, absent.get(key, ''))}</div>"
        for key, title in titles.items()
    ]
    kept = run.summary.statistics
    noted = f'<p class="quiet">Batch-normalization statistics: {escape(kept)}.</p>' if kept else ""
    return f'<div class="pair">{"".join(drawn[:2])}</div>{drawn[2]}{noted}'


def _faults(run: ReportedRun) -> str:
    events = run.events
    if not events.count:
        return "<p>No warnings, faults or restarts are in the logs.</p>"
    listed_events = sum(len(entry["peers"]) for entry in events.shown)
    shown = f", the first {listed_events} of {events.count}" if events.count > listed_events else ""
    rows = [[entry["at"], formatting.ids(entry["peers"]), entry["level"], entry["text"]] for entry in events.shown]
    listed = table(f"Events in the logs{shown}", ["time", "peers", "level", "event"], rows)
    return f'<div class="left">{listed}</div>'


def _run_file(run: ReportedRun) -> str:
    info = run.info
    versions = info.get("versions")
    rows = [[package, version] for package, version in versions.items()] if isinstance(versions, dict) else []
    rows += [[key, str(info[key])] for key in ("host", "cores", "command", "id") if key in info]
    for files in run.folder.peers():
        origin = files.origin()
        if origin is not None:
            rows.append([f"peer {files.peer} collected from", str(origin.source)])
    described = table("Versions and origin", ["what", "value"], [[str(a), str(b)] for a, b in rows])
    text = escape(run.run_file)
    return (
        f'<div class="left">{described}</div><details><summary>The run file, with every default filled in</summary>'
        f'<pre tabindex="0" aria-label="Run file">{text}</pre></details>'
    )


def title(folder: RunFolder) -> str:
    """Return the title of a run's page."""
    return f"{folder.root.name} · p2pfl report"
