"""What a benchmark reports: tables and goals, written as JSON and as Markdown."""

from __future__ import annotations

import json
import os
import platform
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any, Literal

import psutil

from benchmarks.bench.measuring import RunTree, cores
from p2pfl.run_folder.files import write_atomically

BEGIN, END = "<!-- make bench: begin -->", "<!-- make bench: end -->"

Value = float | str | list[float] | None
"""A cell: a number, a text, the numbers of several turns, or nothing."""


@dataclass(frozen=True)
class Goal:
    """A figure and its limit. ``value`` is None if it was not measured, e.g. since the run failed.

    Attributes:
        better: whether ``value`` should be at most (lower) or at least (higher) ``limit``.
    """

    what: str
    value: float | None
    limit: float
    unit: str = ""
    better: Literal["lower", "higher"] = "lower"

    @property
    def met(self) -> bool:
        if self.value is None:
            return False
        return self.value <= self.limit if self.better == "lower" else self.value >= self.limit


@dataclass(frozen=True)
class Table:
    """Rows of figures.

    Attributes:
        columns: heading → format of its numbers, e.g. ``.1f``; empty for texts.
    """

    columns: Mapping[str, str]
    rows: list[list[Value]] = field(default_factory=list)

    def add(self, *cells: Value) -> None:
        assert len(cells) == len(self.columns), cells
        self.rows.append(list(cells))


@dataclass
class Report:
    """The outcome of one benchmark.

    Attributes:
        name: as in ``--only``.
        text: what the columns mean, in Markdown.
        machine: where and when it was measured.
        runs: by goal, the run that shows why it was missed. Not part of the JSON file.
    """

    name: str
    title: str
    text: str
    tables: list[Table]
    goals: list[Goal] = field(default_factory=list)
    machine: dict[str, Any] = field(default_factory=dict)
    runs: dict[str, RunTree] = field(default_factory=dict)

    def goal(self, goal: Goal, run: RunTree | None = None) -> None:
        """Add a goal, and the run to profile if it was missed."""
        self.goals.append(goal)
        if run is not None:
            self.runs[goal.what] = run

    @property
    def missed(self) -> list[Goal]:
        return [goal for goal in self.goals if not goal.met]

    def to_json(self) -> str:
        tree = asdict(self)
        del tree["runs"]
        return json.dumps(tree, indent=1, ensure_ascii=False) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Report:
        tree = json.loads(text)
        tree["tables"] = [Table(**table) for table in tree["tables"]]
        tree["goals"] = [Goal(**goal) for goal in tree["goals"]]
        return cls(**tree)


def median_of(values: Iterable[float | None]) -> float | None:
    """The median of the values that are not None; None if there are none."""
    known = [value for value in values if value is not None]
    return median(known) if known else None


def ratio(one: float | None, other: float | None) -> float | None:
    """one / other; None if either was not measured."""
    return None if one is None or not other else one / other


def known(values: Iterable[float | None]) -> list[float]:
    return [value for value in values if value is not None]


def describe_machine(turns: int) -> dict[str, Any]:
    """What figures depend on: processors, memory, versions, commit and the load by other programs."""
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"]
    try:
        commit = subprocess.run(command, capture_output=True, text=True).stdout.strip()
    except OSError:  # a host without git
        commit = "unknown"
    return {
        "cores": cores(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30),
        "python": platform.python_version(),
        "torch": version("torch"),
        "pyzmq": version("pyzmq"),
        "load": round(os.getloadavg()[0], 1),
        "commit": commit,
        "turns": turns,
    }


def cell(value: Value, form: str) -> str:
    """Format a cell; several turns as their median and range."""
    if value is None or value == []:
        return "–"
    if isinstance(value, list):
        middle = format(median(value), form)
        return middle if len(value) == 1 else f"{middle} ({min(value):{form}} to {max(value):{form}})"
    return value if isinstance(value, str) else format(value, form)


def markdown_table(columns: Mapping[str, str], rows: Sequence[Sequence[Value]]) -> str:
    lines = [list(columns), ["---:" if form else "---" for form in columns.values()]]
    lines += [[cell(value, form) for value, form in zip(row, columns.values(), strict=True)] for row in rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def goals_table(reports: Iterable[Report]) -> str:
    rows: list[list[Value]] = []
    for report in reports:
        for goal in report.goals:
            sign = "at most" if goal.better == "lower" else "at least"
            limit = f"{sign} {goal.limit:g} {goal.unit}".strip()
            measured = "–" if goal.value is None else f"{goal.value:.3g} {goal.unit}".strip()
            met = "not measured" if goal.value is None else "yes" if goal.met else "**no**"
            rows.append([goal.what, measured, limit, met])
    return markdown_table({"goal": "", "measured": "", "limit": "", "met": ""}, rows)


def markdown(reports: Sequence[Report]) -> str:
    """The generated part of docs/benchmarks.md."""
    parts = ["## Goals", goals_table(reports)]
    for report in reports:
        parts += [f"## {report.title}", f"    python -m benchmarks.bench --only {report.name}", report.text]
        parts += [markdown_table(table.columns, table.rows) for table in report.tables]
        on = report.machine
        parts.append(
            f"Turns: {on['turns']}. {on['cores']} cores, {on['memory_gib']} GiB, Python {on['python']}, "
            f"torch {on['torch']}, pyzmq {on['pyzmq']}, load {on['load']} before; commit {on['commit']}."
        )
    return "\n\n".join(parts)


def replace_between_markers(page: str, generated: str) -> str:
    """Replace what is between the markers in a page. Raises ValueError unless it has both, once."""
    if page.count(BEGIN) != 1 or page.count(END) != 1 or page.index(BEGIN) > page.index(END):
        raise ValueError(f"the page should have the line {BEGIN} and, after it, the line {END}, once each")
    before, rest = page.split(BEGIN)
    return f"{before}{BEGIN}\n\n{generated}\n\n{END}{rest.split(END)[1]}"


def write(report: Report, order: Sequence[str], results: Path, page: Path) -> None:
    """Write a report's JSON file, and the page from all files in ``results``, in ``order``."""
    results.mkdir(parents=True, exist_ok=True)
    write_atomically(results / f"{report.name}.json", report.to_json().encode())
    files = [results / f"{name}.json" for name in order]
    reports = [Report.from_json(file.read_text(encoding="utf-8")) for file in files if file.exists()]
    text = replace_between_markers(page.read_text(encoding="utf-8"), markdown(reports))
    page.write_text(text, encoding="utf-8")
