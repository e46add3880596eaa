"""A row per claim, and per table or figure that no run decides: what is known of it, as cells of a table."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from benchmarks.claims import plan, sizes
from benchmarks.claims.claim import MOST_SEEDS, Claim, Left, Settings
from benchmarks.claims.sheets import Panel, band
from benchmarks.claims.statistics import LEAST_SEEDS, Interval, Verdict
from benchmarks.claims.store import Store, identity
from benchmarks.claims.summary import Summary

AT_HAND = ("FashionMNIST", "MNIST", "cifar10-part", "usps.bz2", "usps.t.bz2")
"""The files in $P2PFL_DATA that the study had."""
HEADER = "| | claim | verdict | figure | paper | size here; paper | seeds | cost |\n|---|---|---|---|---|---|---|---|"


DIFFERENCE = re.compile(r"([+−]\d+(?:\.\d+)?)(?: ± (\d+(?:\.\d+)?))?")
"""How the text of the paper's figure begins, where that is a difference: its value, and its uncertainty if known."""


@dataclass(frozen=True)
class Entry:
    """A claim with what is known of it.

    Attributes:
        figures: by seed.
        summaries: by label and seed.
        seconds: mean core seconds of one seed of all its runs; an estimate if ``measured`` is false.
        panel: its curves, or None if no run has more than one point.
    """

    claim: Claim
    figures: dict[int, float]
    summaries: dict[str, dict[int, Summary]]
    seconds: float
    measured: bool
    panel: Panel | None

    @property
    def verdict(self) -> Verdict:
        return self.claim.judge(list(self.figures.values()))

    @property
    def interval(self) -> Interval | None:
        return self.claim.interval(list(self.figures.values()))

    @property
    def excludes_the_papers(self) -> bool:
        """Whether the claim is undecided, but the interval lies below the paper's difference, and its uncertainty."""
        found, claim = self.interval, self.claim
        papers = DIFFERENCE.match(claim.paper)
        compares = claim.unit.startswith("points") and claim.threshold == 0 and claim.whose == "paper"
        if self.verdict != "undecided" or found is None or found.n < LEAST_SEEDS or not papers or not compares:
            return False
        difference, half = float(papers[1].replace("−", "-")), float(papers[2] or 0)
        return found.high < difference - half if claim.relation == ">" else found.low > difference + half


def keys(settings: Settings, store: Store) -> str:
    rate = plan.chosen(settings, store) if settings.rates else None
    return identity(settings.with_rate(rate), settings.probe).key


def summaries(settings: Settings, store: Store) -> dict[int, Summary]:
    key = keys(settings, store)
    found = ((seed, store.summary(key, seed)) for seed in range(MOST_SEEDS))
    return {seed: summary for seed, summary in found if summary is not None}


def entry(claim: Claim, store: Store) -> Entry:
    measured = [store.seconds(keys(settings, store), "cpu_seconds") for settings in claim.runs.values()]
    estimates = [settings.seconds for settings in claim.runs.values()]
    figures = plan.figures(claim, store)
    decisive = list(figures)[: len(claim.decisive(list(figures.values())))]
    found = {label: summaries(settings, store) for label, settings in claim.runs.items()}
    if decisive:  # a picture, too, compares runs of equal seeds
        found = {label: {seed: by_seed[seed] for seed in decisive} for label, by_seed in found.items()}
    return Entry(
        claim,
        figures,
        found,
        sum(seconds or estimate for seconds, estimate in zip(measured, estimates, strict=True)),
        None not in measured,
        panel(claim, found),
    )


# ---- cells -------------------------------------------------------------------------------------------------


def number(value: float) -> str:
    digits = 0 if abs(value) >= 1000 else 2 if abs(value) < 10 else 1
    return f"{value:.{digits}f}".replace("-", "−")


def mean_and_half(found: Interval) -> str:
    """Show a mean with its interval, to two digits of the interval's half."""
    if found.n == 1 or found.half == 0:
        return number(found.mean) + (" ± 0" if found.n > 1 else "")
    digits = min(4, max(0, 1 - math.floor(math.log10(found.half))))
    return f"{found.mean:.{digits}f} ± {found.half:.{digits}f}".replace("-", "−")


def figure_cell(entry: Entry) -> str:
    found, claim = entry.interval, entry.claim
    if found is None:
        return "–"
    if claim.relation == "=":
        return f"{number(found.mean)} {claim.unit}, exactly"
    differs = claim.unit.startswith("points") and claim.relation != "<"
    compares = claim.threshold == 0 and claim.unit.startswith(("points", "rounds"))
    sign = "+" if (differs or compares) and found.mean > 0 else ""
    whose = {"paper": "the paper's", "ours": "ours"}[claim.whose]
    shown = claim.threshold != 0 or claim.whose == "ours"
    relation = "within ±" if claim.relation == "≈" else f"{claim.relation} "
    limit = f"; {relation}{number(claim.threshold) if claim.threshold else 0} ({whose})" if shown else ""
    return f"{sign}{mean_and_half(found)} {claim.unit}{limit}"


def verdict_cell(entry: Entry) -> str:
    verdict = entry.verdict
    less = ", less than in the paper" if entry.excludes_the_papers else ""
    return f"**{verdict}**" if verdict in ("reproduced", "refuted") else f"{verdict}{less}"


def size_cell(entry: Entry) -> str:
    runs = [identity(settings.with_rate(None)) for settings in entry.claim.runs.values()]
    peers, rounds = (sorted(set(values)) for values in ([r.peers for r in runs], [r.rounds for r in runs]))
    found = {fmean(run.samples for run in by_seed.values()) for by_seed in entry.summaries.values() if by_seed}
    samples = sorted(found or {sizes.samples(next(iter(entry.claim.runs.values())).with_rate(None))})
    shown = [dict.fromkeys(values) for values in (map(str, peers), map(str, rounds), (f"{n:,.0f}" for n in samples))]
    here = "{} peers, {} rounds, {} samples".format(*(" or ".join(values) for values in shown))
    return f"{here}{budgets(entry)}; {entry.claim.scale}"


def budgets(entry: Entry) -> str:
    """Name the epochs of local training by run, where they differ by a tenth or more."""
    epochs = {label: sizes.local_epochs(run.with_rate(None)) for label, run in entry.claim.runs.items()}
    if max(epochs.values()) < 1.1 * min(epochs.values()):
        return ""
    return f" (local epochs: {', '.join(f'{label} {number(found)}' for label, found in epochs.items())})"


def price_cell(entry: Entry) -> str:
    """Core hours spent, or expected, or what the runs at the paper's size cost, on a GPU and on a core."""
    if entry.claim.hours is not None:
        return "{:,} GPU h, {:,} core h".format(*entry.claim.hours)
    seeds = max(len(entry.figures), LEAST_SEEDS if entry.claim.relation != "=" else 1)
    spent = f"{entry.seconds * seeds / 3600:.2f} core h"
    return spent if entry.measured else f"about {spent}"


def row_of_claim(entry: Entry, sheet: str = "") -> str:
    """Return a claim's row. ``sheet``: the file that its panel is on."""
    claim, verdict = entry.claim, verdict_cell(entry)
    needed = [Path(file).parts[0] for file in plan.files(claim)]
    missing = [name for name in needed if name not in AT_HAND]
    if entry.verdict == "not tried" and missing:
        verdict = f"not tried (needs {missing[0]})"
    return row(
        [
            claim.where,
            f"[{claim.name}]({sheet})" if entry.panel else claim.name,
            verdict,
            figure_cell(entry),
            claim.paper,
            size_cell(entry),
            str(entry.interval.n if entry.interval else 0),
            price_cell(entry),
        ]
    )


def row_of_left(left: Left) -> str:
    return row([left.where, left.name, f"not tried: {left.reason}", "–", left.paper, "–", "–", left.cost])


def row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def panel(claim: Claim, found: Mapping[str, Mapping[int, Summary]]) -> Panel | None:
    """Return the runs' curves, by label and seed; None if there are none with more than one point."""
    bands = {}
    for label, by_seed in found.items():
        names = [claim.curves if claim.curves in run.curves else "accuracy" for run in by_seed.values()]
        bands[label] = band([run.curves[name] for run, name in zip(by_seed.values(), names, strict=True)])
    bands = {label: points for label, points in bands.items() if len(points) > 1}
    return Panel(f"{claim.where}: {claim.name}", bands, claim.curves) if bands and claim.curves else None
