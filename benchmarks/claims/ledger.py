"""Write docs/claims.md and its pictures from the store: one row per claim, and per table or figure that is left."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.claims import compare, plan, prices
from benchmarks.claims.claim import MOST_SEEDS, Claim, Left, Paper, Settings
from benchmarks.claims.curves import band, draw
from benchmarks.claims.statistics import LEAST_SEEDS, Interval, Verdict, interval
from benchmarks.claims.store import Store, identity
from benchmarks.claims.summary import Summary
from launcher.comparison.groups import varied
from launcher.formatting.flat import flatten
from launcher.formatting.labels import short, value_text

BEGIN, END = "<!-- begin: written by make claims -->", "<!-- end: written by make claims -->"
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
        picture: its curves as SVG, or None if no run has more than one point.
    """

    claim: Claim
    figures: dict[int, float]
    summaries: dict[str, dict[int, Summary]]
    seconds: float
    measured: bool
    picture: str | None

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
        picture(claim, found),
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
    samples = sorted(found or {prices.samples(next(iter(entry.claim.runs.values())).with_rate(None))})
    shown = [dict.fromkeys(values) for values in (map(str, peers), map(str, rounds), (f"{n:,.0f}" for n in samples))]
    here = "{} peers, {} rounds, {} samples".format(*(" or ".join(values) for values in shown))
    return f"{here}{budgets(entry)}; {entry.claim.scale}"


def budgets(entry: Entry) -> str:
    """Name the epochs of local training by run, where they differ by a tenth or more."""
    epochs = {label: prices.local_epochs(run.with_rate(None)) for label, run in entry.claim.runs.items()}
    if max(epochs.values()) < 1.1 * min(epochs.values()):
        return ""
    return f" (local epochs: {', '.join(f'{label} {number(found)}' for label, found in epochs.items())})"


def price(cells: Sequence[Mapping[str, Settings]], speeds: Mapping[str, prices.Speed]) -> str:
    """Return what the runs of these cells cost for the seeds that decide, on a GPU and, if measured, on a core."""
    runs = [settings.with_rate(None) for cell in cells for settings in cell.values()]
    shown = {"GPU h": speeds.get("cuda", prices.ASSUMED_GPU), "core h": speeds.get("cpu")}
    hours = {unit: sum(prices.hours(run, speed) for run in runs) for unit, speed in shown.items() if speed}
    return ", ".join(f"{LEAST_SEEDS * found:,.0f} {unit}" for unit, found in hours.items())


def price_cell(entry: Entry, speeds: Mapping[str, prices.Speed]) -> str:
    """Core hours spent, or expected, or the price at the paper's size."""
    if entry.claim.dear:
        return price([entry.claim.runs], speeds)
    seeds = max(len(entry.figures), LEAST_SEEDS if entry.claim.relation != "=" else 1)
    spent = f"{entry.seconds * seeds / 3600:.2f} core h"
    return spent if entry.measured else f"about {spent}"


def row_of_claim(entry: Entry, speeds: Mapping[str, prices.Speed]) -> str:
    claim, verdict = entry.claim, verdict_cell(entry)
    missing = plan.missing_files(claim) if claim.dear else ()
    if entry.verdict == "not tried" and missing:
        verdict = f"not tried (needs {Path(missing[0]).parts[0]})"
    cells = [
        claim.where,
        f"[{claim.name}](claims/{file_name(claim)})" if entry.picture else claim.name,
        verdict,
        figure_cell(entry),
        claim.paper,
        size_cell(entry),
        str(entry.interval.n if entry.interval else 0),
        price_cell(entry, speeds),
    ]
    return row(cells)


def row_of_left(left: Left, speeds: Mapping[str, prices.Speed]) -> str:
    cost, several = "–", len(left.cells) > 1
    if left.cells:
        cost = f"about {price(left.cells, speeds)}{f' for {len(left.cells)} cells' if several else ''}"
    missing = plan.missing_parts([{**run.tree, "algorithm": "local"} for cell in left.cells for run in cell.values()])
    needs = f" (needs {', '.join(missing)})" if missing and "needs" not in left.reason else ""
    return row([left.where, left.name, f"not tried: {left.reason}{needs}", "–", left.paper, "–", "–", cost])


def row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


# ---- pictures ----------------------------------------------------------------------------------------------


def file_name(claim: Claim) -> str:
    words = re.findall(r"[a-z0-9]+", f"{claim.where} {claim.name}".lower())
    return "-".join(words)[:80] + ".svg"


def picture(claim: Claim, found: Mapping[str, Mapping[int, Summary]]) -> str | None:
    """Draw the runs' curves, by label and seed; None if there are none with more than one point."""
    bands = {}
    for label, by_seed in found.items():
        names = [claim.curves if claim.curves in run.curves else "accuracy" for run in by_seed.values()]
        bands[label] = band([run.curves[name] for run, name in zip(by_seed.values(), names, strict=True)])
    bands = {label: points for label, points in bands.items() if len(points) > 1}
    return draw(bands, claim.curves) if bands and claim.curves else None


# ---- the page ----------------------------------------------------------------------------------------------


AGAINST_LOCAL = {"reproduced": "above", "refuted": "below"}
"""Words of the comparison, which is no paper's claim."""
COLUMNS = (
    "",
    "accuracy",
    "local classes",
    "worst tenth",
    "minus local",
    "verdict",
    "local epochs",
    "rate",
    "batch, momentum",
    "sent",
)


def comparison(store: Store) -> Iterator[str]:
    """The table of algorithms on one partition."""
    yield row(COLUMNS)
    yield "|" + "---|" * len(COLUMNS)
    entries = {claim.name.partition(" ")[0]: entry(claim, store) for claim in compare.CLAIMS}
    for name, settings in compare.METHODS.items():
        runs = list(summaries(settings, store).values())
        rate = plan.chosen(settings, store)
        if not runs or rate is None:
            yield f"| {name} | – | – | – | – | not tried | – | – | – | – |"
            continue
        found = entries.get(name)
        algorithm = settings.tree["algorithm"]
        accuracy, masked = (
            interval([compare.score(run) for run in runs]),
            fmean(run.settled("masked") for run in runs),
        )
        assert accuracy is not None
        against = mean_and_half(found.interval) if found and found.interval else "–"
        sent = fmean(sum(payload for _, payload in run.messages.values()) for run in runs) / 1e6
        optimizer = f"{algorithm['batch']}, {algorithm.get('momentum', 'Adam' if name.startswith('mapl') else 0)}"
        cells = [
            name,
            mean_and_half(accuracy),
            number(masked),
            number(fmean(run.settled("worst") for run in runs)),
            against,
            AGAINST_LOCAL.get(found.verdict, found.verdict) if found else "–",
            number(fmean(run.epochs for run in runs)),
            f"{rate:g}",
            optimizer,
            f"{sent:,.0f} MB",
        ]
        yield row(cells)


def rates_chosen(papers: Sequence[Paper], store: Store) -> Iterator[str]:
    """A row per grid: what was chosen, and the accuracies on held-out training images."""
    seen = set()
    grids: dict[tuple[str, str], list[tuple[Mapping[str, Any], str, str]]] = {}
    groups = [(paper.key, settings) for paper in papers for claim in paper.claims for settings in claim.runs.values()]
    for key, settings in [*groups, *(("compare", settings) for settings in compare.METHODS.values())]:
        text = repr((settings.tuned, settings.rates))
        if settings.rates and text not in seen:
            seen.add(text)
            rate, found = plan.chosen(settings, store), plan.scores(settings, store)
            if rate is not None:
                shown = ", ".join(f"{rate:g}: {accuracy:.1f}" for rate, accuracy in found.items())
                run, tree = identity(settings.tuned), settings.tuned
                what = f"{tree['algorithm']['name']} on {tree['data']['dataset']}"
                what += f", {run.peers} peers, {run.rounds} rounds"
                grids.setdefault((key, what), []).append((tree, f"{rate:g}", shown))
    for (key, what), rows in grids.items():
        for (_, best, shown), options in zip(rows, _differing([tree for tree, _, _ in rows]), strict=True):
            yield row([key, what + options, best, shown])


def _differing(trees: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield the options in which each run file differs from others, but for the learning rate: ``, margin=none``."""
    flat = [dict(flatten(tree)) for tree in trees]
    keys = [key for key in varied(flat) if key != "algorithm.lr"]
    for options in flat:
        own = (f", {short(key, value_text(options[key]))}" for key in keys if key in options)
        yield "".join(own)


COMPARISON = """## Fourteen algorithms on one partition

Twelve peers, complete graph, Fashion-MNIST, two clusters with five classes each, 24 training samples per class and
peer, `tiny-cnn`; accuracies of the last quarter of the rounds ("accuracy" of DFML's peak models, the other columns of
its regular ones). "Local classes" is the accuracy by the scores of the peer's own classes alone, "minus local" the
difference from local training, decided like a claim. No algorithm knows the clusters, and L2C does not prune. All
have cross-entropy, no weight decay and no augmentation, so that both of MAPL's views are one. DFML has 146 epochs of
mutual learning beside its local ones. FedTGP has τ = 1. With equal samples on a complete graph, `dpsgd` is `fedavg`.
Run files: [`topologies/compare/`](../topologies/compare).

    P2PFL_DATA=… make claims ONLY=compare

"""
RATES = f"""## Learning rates

Chosen with seed {plan.TUNING_SEED} on a sixth of the training images, which the run did not train on. Where the
best rate was the grid's first or last one, up to {plan.MOST_BEYOND} more were tried beyond that end: one of them is
chosen only if it is more than {plan.LEAST_GAIN} points better than every rate of the grid.

| | method | rate | accuracy by rate |
|---|---|---|---|
"""


def section(paper: Paper, entries: Sequence[Entry], speeds: Mapping[str, prices.Speed]) -> str:
    """A paper's part of the page, its rows in the order of its tables and figures."""
    order = {where: position for position, where in enumerate(paper.contents)}
    rows = [(order.get(one.claim.where.rstrip("abc"), len(order)), row_of_claim(one, speeds)) for one in entries]
    rows += [(order[left.where], row_of_left(left, speeds)) for left in paper.left]
    body = "\n".join(text for _, text in sorted(rows, key=lambda item: item[0]))
    source = f"[`{paper.key}.py`](../benchmarks/claims/{paper.key}.py)"
    head = f"## {paper.key}\n\n{paper.title}. Settings: {source}.\n\n    P2PFL_DATA=… make claims ONLY={paper.key}"
    head += f"\n\n{paper.terms}"
    return f"{head}\n\n{HEADER}\n{body}"


def verdicts_of(paper: Paper, entries: Sequence[Entry]) -> str:
    """Return a row: how many claims of a paper have which verdict."""
    counted = Counter(one.verdict for one in entries)
    less = sum(one.excludes_the_papers for one in entries)
    decided = (counted["reproduced"], counted["refuted"], counted["undecided"])
    return row([f"[{paper.key}](#{paper.key})", *map(str, (*decided, less, counted["not tried"]))])


def introduction(entries: Mapping[Paper, Sequence[Entry]], store: Store) -> str:
    """How many claims have which verdict, and how prices are computed."""
    verdicts: tuple[Verdict, ...] = ("reproduced", "refuted", "undecided", "not tried")
    counted = Counter(one.verdict for found in entries.values() for one in found)
    counts = {name: f"{counted[name]} {name}" for name in verdicts}
    less = sum(one.excludes_the_papers for found in entries.values() for one in found)
    counts["undecided"] += f" ({less} of them less than in the paper)"
    total = ", ".join(counts.values())
    by_paper = "\n".join(verdicts_of(paper, found) for paper, found in entries.items())
    ours = Counter(one.verdict for found in entries.values() for one in found if one.claim.whose == "ours")
    mine = ", ".join(f"{ours[name]} {name}" for name in verdicts[:3])
    left = sum(len(paper.left) for paper in entries)
    codes = {record["code"].partition(", ")[::2] for record in store.records.values()}
    commits = len({commit.removesuffix("-dirty") for commit, _ in codes})
    versions = f"{commits} commits, {', '.join(sorted({torch for _, torch in codes}))}"
    hours = sum(record["cpu_seconds"] for record in store.records.values()) / 3600
    on_gpus = sum(record["device"] == "cuda" for record in store.records.values())
    where = f" ({on_gpus} of them on a GPU)" if on_gpus else ""
    speeds = prices.speeds(store.folder)
    cpu, gpu = speeds.get("cpu"), speeds.get("cuda", prices.ASSUMED_GPU)
    here = f"{cpu.flops / 1e9:.0f} GFLOP/s a core here, measured" if cpu else "not measured here"
    how = "measured" if "cuda" in speeds else "assumed"
    return (
        f"{total}; {left} more rows have no runs: each says why. Of the claims, with a "
        f"threshold or comparison that is ours: {mine}. {len(store.records)} runs{where}, {hours:.1f} core hours, "
        f"of {versions} (each run's record has its own).\n\n"
        "| | reproduced | refuted | undecided | of them less than in the paper | not tried |\n"
        f"|---|---|---|---|---|---|\n{by_paper}\n\n"
        f"Prices at the papers' size are for {LEAST_SEEDS} seeds, one peer at a time: "
        f"the images that the runs train on, times three forward passes of their networks, at the speed of training "
        f"ResNet18 ({here}; GPU: {gpu.flops / 1e12:.0f} TFLOP/s, and {1000 * gpu.step:.0f} ms or "
        f"more a step, {how}). A row without runs has the price of all that would decide it, in each cell (dataset "
        "and setting) that it covers; runs that several rows need are in each one's price."
    )


def page(entries: Mapping[Paper, Sequence[Entry]], store: Store) -> str:
    """The part of the page between the markers."""
    speeds = prices.speeds(store.folder)
    sections = [section(paper, found, speeds) for paper, found in entries.items()]
    table = COMPARISON + "\n".join(comparison(store))
    chosen = RATES + "\n".join(rates_chosen(list(entries), store))
    return "\n\n".join([introduction(entries, store), *sections, table, chosen])


def write(papers: Sequence[Paper], store: Store, file: Path) -> None:
    """Replace the page's generated part and its pictures; what is outside the markers stays."""
    before, begin, rest = file.read_text(encoding="utf-8").partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"{file}: should have the lines {BEGIN} and {END}")
    folder = file.with_suffix("")
    folder.mkdir(exist_ok=True)
    for old in folder.glob("*.svg"):
        old.unlink()
    entries = {paper: [entry(claim, store) for claim in paper.claims] for paper in papers}
    for found in entries.values():
        for one in found:
            if one.picture is not None:
                (folder / file_name(one.claim)).write_text(one.picture, encoding="utf-8")
    content = page(entries, store)
    file.write_text(f"{before}{BEGIN}\n\n{content}\n\n{END}{after}", encoding="utf-8")
