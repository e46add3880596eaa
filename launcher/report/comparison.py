"""The sections of the page that compares several runs, as HTML."""

from __future__ import annotations

import json
from collections.abc import Sequence
from statistics import fmean, stdev
from typing import Any

import yaml

from launcher import formatting
from launcher.comparison.lines import differences
from launcher.comparison.tables import different_tests
from launcher.comparison.test_sets import differing
from launcher.facts.summary import Summary
from launcher.report import several
from launcher.report.charts import Figures
from launcher.report.page import document, escape, figure, findings, table, tiles

SIGNIFICANT = 0.05


def body(groups: Sequence[several.Group], found: Sequence[several.Test], figures: Figures) -> str:
    """Return the header, the sections and the footer."""
    members = [member for group in groups for member in group.members]
    drawn = (
        figure(figures.charts["compared"]) if "compared" in figures.charts else _nothing("no accuracies are recorded")
    )
    sections = {
        "glance": ("At a glance", _verdicts(groups, found)),
        "curves": ("Accuracy", drawn),
        "results": ("Results", _results(groups)),
        "tests": ("Paired tests", _tests(found)),
        "differences": ("What differs between the run files", _differences(members)),
        "runs": ("Runs", _runs(groups)),
    }
    intro = f"{len(groups)} settings; runs that differ only in the seed are one."
    return document(f"{len(members)} runs compared", intro, sections, "Made by <code>p2pfl report</code>")


def _nothing(why: str) -> str:
    return f'<p class="absent">Not shown: {escape(why)}.</p>'


def _verdicts(groups: Sequence[several.Group], found: Sequence[several.Test]) -> str:
    """Say which settings are the most accurate, the cheapest and the fastest, and whether that may be chance."""
    accuracy = {group.name: fmean(values.values()) for group in groups if (values := group.by_seed())}
    boxes = []
    sets = [group.test_set for group in groups]
    if accuracy and len(set(sets)) == 1:
        best = max(accuracy, key=accuracy.__getitem__)
        rivals = [
            test.second if test.first == best else test.first
            for test in found
            if best in (test.first, test.second) and not _is_clear(test)
        ]
        doubt = f"; not clearly more than {', '.join(rivals)}" if rivals else ""
        boxes.append(("Most accurate", best, f"{formatting.percent(accuracy[best])} % on average{doubt}"))
    for question, unit, of in (
        ("Least traffic", formatting.size, _bytes),
        ("Shortest", formatting.duration, _seconds),
    ):
        costs = {
            group.name: fmean(of(member.summary) for member in group.counted) for group in groups if group.counted
        }
        if costs:
            least = min(costs, key=costs.__getitem__)
            boxes.append((question, least, unit(costs[least])))
    unfinished = sum(not member.summary.finished for group in groups for member in group.members)
    remarks = [("bad", f"{unfinished} of the runs did not finish.")] if unfinished else []
    if len(set(sets)) > 1:
        because = differing([group.members[0].compared for group in groups])
        remarks.append(("bad", different_tests(sets, because)))
    left_out = sum(not member.counts for group in groups for member in group.members)
    if left_out:
        text = f"Results and tests leave out {left_out} of the runs: no peer of theirs has finished."
        remarks.append(("look", text))
    members = [member.folder for group in groups for member in group.members]
    compared = {key for group in groups for key in group.keys} | {"seed"}
    remarks += [
        ("look", f"The runs differ in {key}: {'; '.join(dict.fromkeys(map(json.dumps, values)))}.")
        for key, values in differences(members).items()
        if not any(f".{key}".endswith(f".{name}") for name in compared)
    ]
    return tiles(boxes) + findings([*remarks, *map(_verdict, found[:6])])


def _is_clear(test: several.Test) -> bool:
    """Whether seeds tell that a difference is no chance."""
    return test.unit == "seeds" and test.corrected is not None and test.corrected < SIGNIFICANT


def _verdict(test: several.Test) -> tuple[str, str]:
    if test.pairs == 0:
        return "look", f"{test.first} and {test.second} have no seed in common that has finished: not paired."
    points = 100 * test.difference
    text = f"{test.first} against {test.second}: {points:+.1f} points"
    if test.pairs > 1 and test.low == test.high:
        return "look", f"{text}, the same in all {test.pairs} pairs of {test.unit}: not tested."
    if test.corrected is None:
        return "look", f"{text}, from a single pair: not tested."
    if test.unit == "peers":
        return "look", f"{text}, from one seed, whose peers are not independent: run more seeds."
    pairs = f"{test.pairs} paired {test.unit}"
    if _is_clear(test):
        return "good", f"{text}, which is unlikely to be chance (p = {test.corrected:.2g}, {pairs})."
    return "look", f"{text}, which may be chance (p = {test.corrected:.2g}, {pairs})."


def _bytes(summary: Summary) -> float:
    return sum(peer.bytes_out for peer in summary.peers)


def _seconds(summary: Summary) -> float:
    return summary.seconds or max((peer.seconds for peer in summary.peers), default=0.0)


def _results(groups: Sequence[several.Group]) -> str:
    rows = []
    for group in groups:
        summaries = [member.summary for member in group.counted]
        values = list(group.by_seed().values())
        worst = [summary.accuracy.worst_tenth for summary in summaries if summary.accuracy]
        best = [summary.best.mean for summary in summaries if summary.best]
        rows.append(
            [
                group.name,
                str(len(summaries)),
                ", ".join(str(seed) for seed in sorted({summary.seed for summary in summaries})),
                _spread(values),
                _spread(worst),
                _spread(best),
                formatting.size(fmean(map(_bytes, summaries))) if summaries else formatting.percent(None),
                formatting.duration(fmean(map(_seconds, summaries))) if summaries else formatting.percent(None),
            ]
        )
    head = ["runs", "n", "seeds", "accuracy %", "worst tenth %", "best %", "sent", "time"]
    return table(
        "Mean over peers, then mean ± standard deviation over seeds; traffic and time are means",
        head,
        rows,
        sortable=True,
    )


def _spread(values: Sequence[float]) -> str:
    if not values:
        return formatting.percent(None)
    deviation = f" ± {formatting.percent(stdev(values))}" if len(values) > 1 else ""
    return formatting.percent(fmean(values)) + deviation


def _tests(found: Sequence[several.Test]) -> str:
    if not found:
        return _nothing("there are no two settings with the same test set")
    rows = [
        [
            f"{test.first} − {test.second}",
            f"{test.pairs} {test.unit}",
            f"{100 * test.difference:+.2f}" if test.pairs else formatting.percent(None),
            formatting.percent(None)
            if test.low is None or test.high is None
            else f"{100 * test.low:+.2f} to {100 * test.high:+.2f}",
            *map(_p, (test.t, test.corrected, test.wilcoxon)),
        ]
        for test in found
    ]
    head = ["difference", "pairs", "points", "95 % interval", "p (t)", "p (t, Holm)", "p (Wilcoxon)"]
    by_peers = any(test.unit == "peers" for test in found)
    note = (
        '<p class="quiet">With a single common seed, peers are paired; those of one run are not independent, '
        "so p is too small: run more seeds.</p>"
        if by_peers
        else ""
    )
    return table("Differences in final accuracy, paired by seed", head, rows) + note


def _p(value: float | None) -> str:
    return formatting.percent(None) if value is None else f"{value:.3f}" if value >= 0.001 else f"{value:.1e}"


def _differences(members: Sequence[several.Member]) -> str:
    found = {key: values for key, values in several.differences(members).items() if key not in ("name", "out")}
    if not found:
        return "<p>Nothing: the run files are equal.</p>"
    names = [member.folder.root.name for member in members]
    rows = [[key, *map(_value, values)] for key, values in found.items()]
    return f'<div class="left">{table("A row for each key that differs", ["key", *names], rows)}</div>'


def _value(value: Any) -> str:
    text = (
        value
        if isinstance(value, str)
        else yaml.safe_dump(value, default_flow_style=True).removesuffix("...\n").strip()
    )
    return text if len(text) < 80 else text[:79] + "…"


def _runs(groups: Sequence[several.Group]) -> str:
    rows = [
        [
            str(member.folder.root),
            group.name,
            str(member.summary.seed),
            formatting.percent(group.accuracy(member)),
            f"{sum(peer.ended == 'finished' for peer in member.summary.peers)} of {len(member.summary.peers)}",
            formatting.size(_bytes(member.summary)),
            formatting.duration(_seconds(member.summary)),
        ]
        for group in groups
        for member in group.members
    ]
    head = ["folder", "setting", "seed", "accuracy %", "finished", "sent", "time"]
    return table("The runs", head, rows, sortable=True)
