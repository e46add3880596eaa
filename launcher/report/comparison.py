"""The sections of the page that compares several runs, as HTML."""

from __future__ import annotations

import json
from collections.abc import Sequence
from operator import attrgetter
from statistics import fmean

from launcher import formatting
from launcher.comparison.groups import ComparedRun, RunGroup, common_clock, note_on_clock, without_attackers
from launcher.comparison.groups import differences as all_differences
from launcher.comparison.lines import differences
from launcher.comparison.statistics import Statistic
from launcher.comparison.tables import DASH, different_tests, percent_text, reached_text
from launcher.comparison.test_sets import differing
from launcher.formatting.flat import flatten
from launcher.formatting.labels import value_text
from launcher.report import several
from launcher.report.charts import Figures
from launcher.report.page import document, escape, figure, findings, table, tiles

SIGNIFICANT = 0.05


def body(
    groups: Sequence[RunGroup], found: Sequence[several.PairedTest], figures: Figures, seconds_to: float | None
) -> str:
    """Return the header, the sections and the footer; with the seconds to an accuracy if that is given."""
    members = [member for group in groups for member in group.members]
    drawn = (
        figure(figures.charts["compared"]) if "compared" in figures.charts else _nothing("no accuracies are recorded")
    )
    sections = {
        "glance": ("At a glance", _verdicts(groups, found)),
        "curves": ("Accuracy", drawn),
        "results": ("Results", _results(groups, seconds_to)),
        "tests": ("Paired tests", _tests(found)),
        "differences": ("What differs between the run files", _differences(members)),
        "runs": ("Runs", _runs(groups)),
    }
    intro = f"{len(groups)} settings; runs that differ only in the seed are one."
    return document(f"{len(members)} runs compared", intro, sections, "Made by <code>p2pfl report</code>")


def _nothing(why: str) -> str:
    return f'<p class="absent">Not shown: {escape(why)}.</p>'


def _verdicts(groups: Sequence[RunGroup], found: Sequence[several.PairedTest]) -> str:
    """Say which settings are the most accurate, the cheapest and the fastest, and whether that may be chance."""
    accuracy = {group.title: fmean(values.values()) for group in groups if (values := group.by_seed())}
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
    members = [member for group in groups for member in group.members]
    clock = common_clock(members)
    for question, unit, of in (
        ("Least traffic", formatting.size, attrgetter("bytes_sent")),
        *([("Shortest", formatting.duration, attrgetter("seconds"))] if clock is not None else []),
    ):
        costs = {group.title: fmean(of(member) for member in group.counted) for group in groups if group.counted}
        if costs:
            least = min(costs, key=costs.__getitem__)
            boxes.append((question, least, unit(costs[least])))
    unfinished = sum(not member.summary.finished for group in groups for member in group.members)
    remarks = [("bad", f"{unfinished} of the runs did not finish.")] if unfinished else []
    if left_out := without_attackers(member for group in groups for member in group.members):
        remarks.append(("look", left_out))
    if len(set(sets)) > 1:
        remarks.append(("bad", different_tests(differing([group.members[0] for group in groups]))))
    uncounted = sum(not member.counts for group in groups for member in group.members)
    if uncounted:
        text = f"Results and tests leave out {uncounted} of the runs: no peer of theirs has finished."
        remarks.append(("look", text))
    if clock is None:
        remarks.append(("look", "Seconds of some runs are simulated, and do not compare with those of the others."))
    compared = {key for group in groups for key in group.labels} | {"seed"}
    remarks += [
        ("look", f"The runs differ in {key}: {'; '.join(dict.fromkeys(map(json.dumps, values)))}.")
        for key, values in differences(members).items()
        if not any(f".{key}".endswith(f".{name}") for name in compared)
    ]
    return tiles(boxes) + findings([*remarks, *map(_verdict, found[:6])])


def _is_clear(test: several.PairedTest) -> bool:
    """Return whether a difference over seeds is significant."""
    return test.unit == "seeds" and test.corrected is not None and test.corrected < SIGNIFICANT


def _verdict(test: several.PairedTest) -> tuple[str, str]:
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


def _results(groups: Sequence[RunGroup], seconds_to: float | None) -> str:
    rows = []
    for group in groups:
        runs = group.counted
        worst = [run.summary.accuracy.worst_tenth for run in runs if run.summary.accuracy]
        best = [run.summary.best.mean for run in runs if run.summary.best]
        rows.append(
            [
                group.title,
                str(len(runs)),
                ", ".join(str(seed) for seed in sorted({run.seed for run in runs})),
                *(percent_text(Statistic.of(values)) for values in (group.by_seed().values(), worst, best)),
                *([] if seconds_to is None else [_reached(group, seconds_to)]),
                formatting.size(fmean(run.bytes_sent for run in runs)) if runs else DASH,
                formatting.duration(fmean(run.seconds for run in runs)) if runs else DASH,
            ]
        )
    reached = [] if seconds_to is None else [f"seconds to {formatting.percent(seconds_to)} %"]
    head = ["runs", "n", "seeds", "accuracy %", "worst tenth %", "best %", *reached, "sent", "time"]
    caption = "Mean over peers, then mean ± standard deviation over seeds; traffic and time are means"
    note = note_on_clock(member for group in groups for member in group.members)
    return table(caption, head, rows, sortable=True) + (f'<p class="quiet">{escape(note)}</p>' if note else "")


def _reached(group: RunGroup, target: float) -> str:
    return reached_text(several.seconds_to(group, target), len(group.by_seed()))


def _tests(found: Sequence[several.PairedTest]) -> str:
    if not found:
        return _nothing("there are no two settings with the same test set")
    rows = [
        [
            f"{test.first} − {test.second}",
            f"{test.pairs} {test.unit}",
            f"{100 * test.difference:+.2f}" if test.pairs else DASH,
            DASH if test.low is None or test.high is None else f"{100 * test.low:+.2f} to {100 * test.high:+.2f}",
            *map(_p, (test.t, test.corrected, test.wilcoxon)),
        ]
        for test in found
    ]
    head = ["difference", "pairs", "points", "95 % interval", "p (t)", "p (t, Holm)", "p (Wilcoxon)"]
    html = table("Differences in final accuracy, paired by seed", head, rows)
    if any(test.unit == "peers" for test in found):
        html += (
            '<p class="quiet">With a single common seed, peers are paired; those of one run are not independent, '
            "so p is too small: run more seeds.</p>"
        )
    return html


def _p(value: float | None) -> str:
    return DASH if value is None else f"{value:.3f}" if value >= 0.001 else f"{value:.1e}"


def _differences(members: Sequence[ComparedRun]) -> str:
    flat = [dict(flatten(member.settings)) for member in members]
    found = {key: values for key, values in all_differences(flat, "(none)").items() if key not in ("name", "out")}
    if not found:
        return "<p>Nothing: the run files are equal.</p>"
    names = [member.folder.root.name for member in members]
    rows = [[key, *(value_text(value, 80) for value in values)] for key, values in found.items()]
    return f'<div class="left">{table("A row for each key that differs", ["key", *names], rows)}</div>'


def _runs(groups: Sequence[RunGroup]) -> str:
    rows = [
        [
            str(member.folder.root),
            group.title,
            str(member.summary.seed),
            formatting.percent(member.accuracy),
            f"{sum(peer.ended == 'finished' for peer in member.summary.peers)} of {len(member.summary.peers)}",
            formatting.size(member.bytes_sent),
            formatting.duration(member.seconds),
        ]
        for group in groups
        for member in group.members
    ]
    head = ["folder", "setting", "seed", "accuracy %", "finished", "sent", "time"]
    return table("The runs", head, rows, sortable=True)
