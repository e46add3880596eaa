"""Write docs/claims.md, a page for each paper below it, and their sheets of pictures, from the store."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.claims import compare, plan, sheets
from benchmarks.claims.claim import Paper, Settings
from benchmarks.claims.figures import settled
from benchmarks.claims.ledger import (
    HEADER,
    Entry,
    entry,
    mean_and_half,
    number,
    row,
    row_of_claim,
    row_of_left,
    summaries,
)
from benchmarks.claims.statistics import Verdict, interval
from benchmarks.claims.store import Store, identity
from launcher.comparison.groups import varied
from launcher.formatting.flat import flatten
from launcher.formatting.labels import short, value_text

BEGIN, END = "<!-- begin: written by make claims -->", "<!-- end: written by make claims -->"


AGAINST_LOCAL = {"reproduced": "above", "refuted": "below"}
"""Words of the comparison, which is not a claim of a paper."""
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
            interval([settled(run) for run in runs]),
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


def rates_chosen(runs: Iterable[Settings], store: Store) -> Iterator[str]:
    """A row per grid: what was chosen, and the accuracies on held-out training images."""
    seen = set()
    grids: dict[str, list[tuple[Mapping[str, Any], str, str]]] = {}
    for settings in runs:
        text = repr((settings.tree, settings.rates))
        if settings.rates and text not in seen:
            seen.add(text)
            rate, found = plan.chosen(settings, store), plan.scores(settings, store)
            if rate is not None:
                shown = ", ".join(f"{rate:g}: {accuracy:.1f}" for rate, accuracy in found.items())
                run, tree = identity(settings.tree), settings.tree
                what = f"{tree['algorithm']['name']} on {tree['data']['dataset']}"
                what += f", {run.peers} peers, {run.rounds} rounds"
                grids.setdefault(what, []).append((tree, f"{rate:g}", shown))
    for what, rows in grids.items():
        for (_, best, shown), options in zip(rows, _differing([tree for tree, _, _ in rows]), strict=True):
            yield row([what + options, best, shown])


def _differing(trees: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield the options in which each run file differs from others, but for the learning rate: ``, margin=none``."""
    flat = [dict(flatten(tree)) for tree in trees]
    keys = [key for key in varied(flat) if key != "algorithm.lr"]
    for options in flat:
        own = (f", {short(key, value_text(options[key]))}" for key in keys if key in options)
        yield "".join(own)


RATES = """## Learning rates

| method | rate | accuracy by rate |
|---|---|---|
"""


def verdicts_of(paper: Paper, entries: Sequence[Entry]) -> str:
    """Return a row: how many claims of a paper have which verdict."""
    counted = Counter(one.verdict for one in entries)
    less = sum(one.excludes_the_papers for one in entries)
    decided = (counted["reproduced"], counted["refuted"], counted["undecided"])
    name = f"[{paper.key}](claims/{paper.key}.md)"
    return row([name, *map(str, (*decided, less, counted["not tried"], len(paper.left)))])


def overview(entries: Mapping[Paper, Sequence[Entry]], store: Store) -> str:
    """How many claims have which verdict, and what was run."""
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
    return (
        f"{total}; {left} more rows have no runs: each says why. Of the claims, with a "
        f"threshold or comparison that is ours: {mine}. {len(store.records)} runs{where}, {hours:.1f} core hours, "
        f"of {versions} (each run's record has its own).\n\n"
        "| | reproduced | refuted | undecided | of them less than in the paper | not tried | no runs |\n"
        f"|---|---|---|---|---|---|---|\n{by_paper}"
    )


def section(paper: Paper, entries: Sequence[Entry], store: Store) -> tuple[str, dict[str, str]]:
    """A paper's page, its rows in the order of its tables and figures, and its sheets by file name."""
    order = {where: position for position, where in enumerate(paper.contents)}

    def place(one: Entry) -> int:
        return order.get(one.claim.where.rstrip("abc"), len(order))

    panels = [one.panel for one in sorted(entries, key=place) if one.panel is not None]
    drawn = {f"{paper.key}-{n}.svg": part for n, part in enumerate(sheets.divided(panels), start=1)}
    file = {id(panel): name for name, part in drawn.items() for panel in part}
    rows = [(place(one), row_of_claim(one, file.get(id(one.panel), ""))) for one in entries]
    rows += [(order[left.where], row_of_left(left)) for left in paper.left]
    body = "\n".join(text for _, text in sorted(rows, key=lambda item: item[0]))
    shown = "\n\n".join(f"![curves of the claims, sheet {n}]({name})" for n, name in enumerate(drawn, start=1))
    chosen = "\n".join(rates_chosen((run for claim in paper.claims for run in claim.runs.values()), store))
    text = f"{HEADER}\n{body}\n\n## Curves\n\n{shown}\n\n{RATES}{chosen}"
    return text, {name: sheets.sheet(part) for name, part in drawn.items()}


def write(papers: Sequence[Paper], store: Store, file: Path) -> None:
    """Replace the generated parts of all pages, and the sheets; what is outside the markers stays.

    Args:
        file: the overview; the other pages are in the folder of the same name.
    """
    folder = file.with_suffix("")
    entries = {paper: [entry(claim, store) for claim in paper.claims] for paper in papers}
    sections = {paper.key: section(paper, found, store) for paper, found in entries.items()}
    table = "\n".join(comparison(store))
    rates = "\n".join(rates_chosen(compare.METHODS.values(), store))
    _replace(file, overview(entries, store))
    _replace(folder / "comparison.md", f"{table}\n\n{RATES}{rates}")
    for old in folder.glob("*.svg"):
        old.unlink()
    for key, (text, pictures) in sections.items():
        _replace(folder / f"{key}.md", text)
        for name, drawn in pictures.items():
            (folder / name).write_text(drawn, encoding="utf-8")


def _replace(file: Path, content: str) -> None:
    before, begin, rest = file.read_text(encoding="utf-8").partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"{file}: should have the lines {BEGIN} and {END}")
    file.write_text(f"{before}{BEGIN}\n\n{content}\n\n{END}{after}", encoding="utf-8")
