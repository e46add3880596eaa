"""Write docs/claims.md and its pictures from the store: one line per claim, and per table or figure that is left."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from benchmarks.claims import compare, plan, prices
from benchmarks.claims.claim import Claim, Left, Paper, Settings
from benchmarks.claims.curves import band, draw
from benchmarks.claims.statistics import LEAST_SEEDS, Interval, Verdict, interval
from benchmarks.claims.store import Store, identity
from benchmarks.claims.summary import Summary

BEGIN, END = "<!-- begin: written by make claims -->", "<!-- end: written by make claims -->"
HEADER = "| | claim | verdict | figure | paper | size here; paper | seeds | cost |\n|---|---|---|---|---|---|---|---|"


@dataclass(frozen=True)
class Entry:
    """A claim with what is known of it.

    Attributes:
        figures: by seed.
        summaries: by label and seed.
        seconds: mean duration of one seed of all its runs; an estimate if ``measured`` is false.
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
        return interval(list(self.figures.values()))


def keys(settings: Settings, store: Store) -> str:
    rate = plan.chosen(settings, store) if settings.rates else None
    return identity(settings.with_rate(rate), settings.probe).key


def summaries(settings: Settings, store: Store, most: int) -> dict[int, Summary]:
    key = keys(settings, store)
    found = ((seed, store.summary(key, seed)) for seed in range(most))
    return {seed: summary for seed, summary in found if summary is not None}


def entry(claim: Claim, store: Store, most: int) -> Entry:
    measured = [store.seconds(keys(settings, store)) for settings in claim.runs.values()]
    estimates = [settings.seconds for settings in claim.runs.values()]
    found = {label: summaries(settings, store, most) for label, settings in claim.runs.items()}
    return Entry(
        claim,
        plan.figures(claim, store, most),
        found,
        sum(seconds or estimate for seconds, estimate in zip(measured, estimates, strict=True)),
        None not in measured,
        picture(claim, found),
    )


# ---- cells -------------------------------------------------------------------------------------------------


def number(value: float) -> str:
    digits = 0 if abs(value) >= 1000 else 2 if abs(value) < 10 else 1
    return f"{value:.{digits}f}".replace("-", "−")


def figure_cell(entry: Entry) -> str:
    found, claim = entry.interval, entry.claim
    if found is None:
        return "–"
    if claim.relation == "=":
        return f"{number(found.mean)} {claim.unit}, exactly"
    sign = "+" if claim.unit.startswith("points") and found.mean > 0 else ""
    half = f" ± {number(found.half)}" if found.n > 1 else ""
    whose = {"paper": "the paper's", "ours": "ours"}[claim.whose]
    limit = "" if claim.threshold == 0 else f"; {claim.relation} {number(claim.threshold)} ({whose})"
    return f"{sign}{number(found.mean)}{half} {claim.unit}{limit}"


def verdict_cell(entry: Entry) -> str:
    verdict = entry.verdict
    return f"**{verdict}**" if verdict in ("reproduced", "refuted") else verdict


def size_cell(entry: Entry) -> str:
    runs = [identity(settings.with_rate(None)) for settings in entry.claim.runs.values()]
    peers, rounds = (
        sorted({run_value for run_value in values}) for values in ([r.peers for r in runs], [r.rounds for r in runs])
    )
    found = [summary.samples for by_seed in entry.summaries.values() for summary in by_seed.values()]
    if found:
        samples = f", {fmean(found):,.0f} samples"
    else:
        samples = f", {prices.samples(next(iter(entry.claim.runs.values())).with_rate(None)):,.0f} samples"
    joined = [" or ".join(map(str, values)) for values in (peers, rounds)]
    return f"{joined[0]} peers, {joined[1]} rounds{samples}{budgets(entry)}; {entry.claim.scale}"


def budgets(entry: Entry) -> str:
    """Name the epochs of local training by run, where they differ by a tenth or more."""
    epochs = {label: prices.local_epochs(run.with_rate(None)) for label, run in entry.claim.runs.items()}
    if max(epochs.values()) < 1.1 * min(epochs.values()):
        return ""
    return f" (local epochs: {', '.join(f'{label} {number(found)}' for label, found in epochs.items())})"


def price_cell(entry: Entry, rates: dict[str, float]) -> str:
    """Hours spent, or the price of five seeds."""
    if entry.claim.dear:
        runs = [settings.with_rate(None) for settings in entry.claim.runs.values()]
        operations = LEAST_SEEDS * sum(map(prices.floating_point_operations, runs))
        gpu = f"{operations / rates.get('cuda', prices.ASSUMED_GPU) / 3600:,.0f} GPU h"
        core = f", {operations / rates['cpu'] / 3600:,.0f} core h" if "cpu" in rates else ""
        return gpu + core
    seeds = max(len(entry.figures), LEAST_SEEDS if entry.claim.relation != "=" else 1)
    hours = f"{entry.seconds * seeds / 3600:.2f} h"
    return hours if entry.measured else f"about {hours}"


def line(entry: Entry, rates: dict[str, float]) -> str:
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
        str(len(entry.figures)),
        price_cell(entry, rates),
    ]
    return row(cells)


def line_of_left(left: Left) -> str:
    return row([left.where, left.name, f"not tried: {left.reason}", "–", left.paper, "–", "–", "–"])


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


def comparison(store: Store, most: int) -> Iterator[str]:
    """The table of all algorithms on one partition."""
    yield "| algorithm | accuracy | masked | worst tenth | against local | verdict | epochs | rate | batch, momentum | bytes sent |"
    yield "|---|---|---|---|---|---|---|---|---|---|"
    entries = {claim.name.partition(" ")[0]: entry(claim, store, most) for claim in compare.CLAIMS}
    for name, settings in compare.METHODS.items():
        runs = list(summaries(settings, store, most).values())
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
        against = figure_cell(found).removesuffix(" points") if found else "–"
        sent = fmean(sum(payload for _, payload in run.messages.values()) for run in runs) / 1e6
        optimizer = f"{algorithm['batch']}, {algorithm.get('momentum', 'Adam' if name.startswith('mapl') else 0)}"
        half = f" ± {number(accuracy.half)}" if accuracy.n > 1 else ""
        cells = [
            name, f"{number(accuracy.mean)}{half}", number(masked), number(fmean(run.settled("worst") for run in runs)), against,
            verdict_cell(found) if found else "–", number(fmean(run.epochs for run in runs)), f"{rate:g}", optimizer, f"{sent:,.0f} MB",
        ]  # fmt: skip
        yield row(cells)


def rates_chosen(papers: Sequence[Paper], store: Store) -> Iterator[str]:
    """A line per grid: what was chosen, and the accuracies on held-out training images."""
    seen = set()
    groups = [(paper.key, settings) for paper in papers for claim in paper.claims for settings in claim.runs.values()]
    for key, settings in [*groups, *(("compare", settings) for settings in compare.METHODS.values())]:
        text = repr((settings.tuned, settings.rates))
        if settings.rates and text not in seen:
            seen.add(text)
            found = plan.scores(settings, store)
            if len(found) == len(settings.rates):
                shown = ", ".join(f"{rate:g}: {accuracy:.1f}" for rate, accuracy in found.items())
                run = identity(settings.with_rate(None))
                name, dataset = settings.tree["algorithm"]["name"], settings.tree["data"]["dataset"]
                yield f"| {key} | {name} on {dataset}, {run.peers} peers, {run.rounds} rounds | {plan.chosen(settings, store):g} | {shown} |"


def page(entries: Mapping[Paper, Sequence[Entry]], store: Store, most: int) -> str:
    """The part of the page between the markers."""
    rates = prices.rates(store.folder)
    counted: Counter[str] = Counter()
    sections = []
    for paper, found in entries.items():
        counted.update(entry.verdict for entry in found)
        counted["left"] += len(paper.left)
        order = {where: position for position, where in enumerate(paper.contents)}
        lines = [(order.get(e.claim.where.rstrip("abc"), len(order)), line(e, rates)) for e in found]
        lines += [(order[left.where], line_of_left(left)) for left in paper.left]
        rows = "\n".join(text for _, text in sorted(lines, key=lambda item: item[0]))
        sections.append(
            f"## {paper.key}\n\n{paper.title}. Settings: [`{paper.key}.py`](../benchmarks/claims/{paper.key}.py).\n\n"
            f"    P2PFL_DATA=… make claims ONLY={paper.key}\n\n{HEADER}\n{rows}"
        )
    verdicts: tuple[Verdict, ...] = ("reproduced", "refuted", "undecided", "not tried")
    total = ", ".join(f"{counted[name]} {name}" for name in verdicts)
    codes = sorted({record["code"] for record in store.records.values()})
    seconds = sum(record["seconds"] for record in store.records.values())
    rate = f"{rates['cpu'] / 1e9:.0f} GFLOP/s a core here, measured" if "cpu" in rates else "not measured here"
    gpu = (
        f"{rates['cuda'] / 1e12:.1f} TFLOP/s, measured"
        if "cuda" in rates
        else f"{prices.ASSUMED_GPU / 1e12:.0f} TFLOP/s, assumed"
    )
    intro = (
        f"{total}; {counted['left']} lines of tables and figures that no run can decide. {len(store.records)} runs, "
        f"{seconds / 3600:.1f} core hours; code: {'; '.join(codes) or '–'}.\n\nPrices at the papers' size are for {LEAST_SEEDS} seeds: "
        f"the images that the runs train on, times three forward passes of their networks, at the rate of training ResNet18 in batches "
        f"of 64 ({rate}; GPU: {gpu})."
    )
    chosen = "\n".join(rates_chosen(list(entries), store))
    table = "\n".join(comparison(store, most))
    return "\n\n".join([
        intro,
        *sections,
        f"## All algorithms on one partition\n\nTwelve peers, complete graph, Fashion-MNIST, two clusters with five classes each, 24 "
        f"training samples per class and peer, `tiny-cnn`; accuracies of the last quarter of the rounds. No algorithm knows the "
        f"clusters. Run files: [`topologies/compare/`](../topologies/compare).\n\n    P2PFL_DATA=… make claims ONLY=compare\n\n{table}",
        f"## Learning rates\n\nChosen with seed {plan.TUNING_SEED} on a sixth of the training images.\n\n"
        f"| | method | rate | accuracy by rate |\n|---|---|---|---|\n{chosen}",
    ])  # fmt: skip


def write(papers: Sequence[Paper], store: Store, most: int, file: Path) -> None:
    """Replace the page's generated part and its pictures; what is outside the markers stays."""
    before, begin, rest = file.read_text(encoding="utf-8").partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"{file}: should have the lines {BEGIN} and {END}")
    folder = file.with_suffix("")
    folder.mkdir(exist_ok=True)
    for old in folder.glob("*.svg"):
        old.unlink()
    entries = {paper: [entry(claim, store, most) for claim in paper.claims] for paper in papers}
    for found in entries.values():
        for one in found:
            if one.picture is not None:
                (folder / file_name(one.claim)).write_text(one.picture, encoding="utf-8")
    content = page(entries, store, most)
    file.write_text(f"{before}{BEGIN}\n\n{content}\n\n{END}{after}", encoding="utf-8")
