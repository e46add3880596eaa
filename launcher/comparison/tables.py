"""Write the results of groups as a table for the terminal, Markdown, LaTeX or CSV."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from launcher.comparison.results import Difference, GroupLine, Results
from launcher.comparison.statistics import Statistic
from launcher.errors import CompareError
from launcher.formatting import duration, percent, size
from launcher.formatting.labels import value_text
from p2pfl.options import unknown
from p2pfl.terminal import printable

TableFormat = Literal["table", "markdown", "latex", "csv", "json"]

DASH = "–"
TESTS = {"t": "paired t-test", "wilcoxon": "Wilcoxon signed-rank test of paired differences"}
LONGEST_LIST = 6
"""Values of a key, and groups with a value, that a note lists."""


@dataclass(frozen=True)
class Page:
    """A table of texts.

    Attributes:
        left: number of columns that hold names, not numbers.
        bold: row and column of the highest accuracy; None if several are, if test sets differ, or if it is not shown.
        notes: what the numbers mean.
    """

    head: list[str]
    rows: list[list[str]]
    left: int
    bold: tuple[int, int] | None
    notes: list[str]


@dataclass(frozen=True)
class _Column:
    head: str
    text: Callable[[GroupLine], str]


COLUMNS = (
    *("seeds", "accuracy", "worst", "rounds", "seconds", "at-bytes", "at-time", "sent", "time", "difference", "p"),
)
"""What ``--columns`` may choose from, besides metrics."""
FIGURES = (
    *("accuracy", "worst_tenth", "at_bytes", "at_seconds", "rounds_to_target", "seconds_to_target"),
    *("bytes_sent", "seconds"),
)
"""Of a group, in CSV: mean and standard deviation of each."""


def columns_of(results: Results, chosen: Sequence[str] | None) -> Sequence[str]:
    """Return the names of the ``chosen`` columns; None: all of COLUMNS and the metrics. Raises CompareError."""
    metrics = metric_columns(results)
    after = COLUMNS.index("worst") + 1
    known = (*COLUMNS[:after], *metrics, *COLUMNS[after:])
    for name in chosen or ():
        if name not in known:
            raise CompareError(unknown(name, known, "column"))
    return chosen or known


def metric_columns(results: Results) -> dict[str, str]:
    """Return the metrics by the names of their columns."""
    names = sorted({name for line in results.lines for name in line.metrics})
    return {f"metric:{name}" if name in COLUMNS or name in FIGURES else name: name for name in names}


def page(results: Results, chosen: Sequence[str] | None = None) -> Page:
    """Return the table of all groups, and notes.

    Args:
        chosen: columns; columns without figures are left out. None: all.

    Raises:
        CompareError: there is no such column.
    """
    chosen = columns_of(results, chosen)
    lines = results.lines
    keys = list(lines[0].labels)
    names = [_Column(_short_key(key, keys), _label(key)) for key in keys] or [_Column("", lambda line: line.name)]
    figures = _figures(results)
    columns = [*names, *(figures[name] for name in chosen if name in figures)]
    known = [line.accuracy.mean for line in lines if line.accuracy is not None]
    means = [None if line.accuracy is None else line.accuracy.mean for line in lines]
    ranked = len(known) > 1 and not results.other_tests
    best = means.index(max(known)) if ranked and known.count(max(known)) == 1 else None
    bold = None if best is None or "accuracy" not in chosen else (best, columns.index(figures["accuracy"]))
    rows = [[_one_line(column.text(line)) for column in columns] for line in lines]
    return Page([_one_line(column.head) for column in columns], rows, len(names), bold, notes(results, chosen))


def _figures(results: Results) -> dict[str, _Column]:
    """Return the columns of figures that there are, by name."""
    several = len(results.lines) > 1
    kind = "masked" if results.masked else "unmasked"
    columns = {
        "seeds": _Column("seeds", _seeds),
        "accuracy": _Column(f"{kind} %", lambda line: percent_text(line.accuracy)),
        "worst": _Column("worst 10 %", lambda line: percent_text(line.worst_tenth)),
        "sent": _Column("sent", lambda line: DASH if line.bytes_sent is None else size(line.bytes_sent.mean)),
        "time": _Column("time", lambda line: DASH if line.seconds is None else duration(line.seconds.mean)),
    }
    columns |= {head: _Column(head, _metric(name)) for head, name in metric_columns(results).items()}
    if results.target is not None:
        columns["rounds"] = _Column(f"rounds to {percent(results.target)} %", _reached("rounds_to_target"))
    if results.seconds_target is not None:
        head = f"seconds to {percent(results.seconds_target)} %"
        columns["seconds"] = _Column(head, _reached("seconds_to_target"))
    if several and results.bytes_budget is not None:
        columns["at-bytes"] = _Column(f"% at {size(results.bytes_budget)}", lambda line: percent_text(line.at_bytes))
    if several and results.seconds_budget is not None:
        columns["at-time"] = _Column(
            f"% at {_seconds(results.seconds_budget)}", lambda line: percent_text(line.at_seconds)
        )
    if several:
        columns["difference"] = _Column("Δ", lambda line: _difference(line, results))
        columns["p"] = _Column("p", lambda line: _p(line, results))
    return columns


def _short_key(key: str, keys: Sequence[str]) -> str:
    """Return the last part of a key, or all of it if another one ends alike."""
    lasts = [other.removesuffix(".name").rpartition(".")[2] for other in keys]
    last = key.removesuffix(".name").rpartition(".")[2]
    return last if lasts.count(last) == 1 else key


def _one_line(text: str) -> str:
    """Neutralize what a terminal obeys, and line ends, which tables and comments obey."""
    return " ".join(printable(text).split())


def notes(results: Results, chosen: Sequence[str]) -> list[str]:
    """Say what the numbers in the ``chosen`` columns mean, and which keys differ."""
    lines = results.lines
    found = [different_tests(results.other_tests)] if results.other_tests else []
    if results.without_attackers:
        found.append(results.without_attackers)
    if any(len(line.seeds) > 1 for line in lines):
        found.append("±: standard deviation over seeds (n - 1).")
    if "worst" in chosen:
        found.append("worst 10 %: mean over the worst tenth of the peers.")
    if len(lines) > 1 and {"difference", "p"} & set(chosen):
        compared = [line.versus for line in lines if line.versus is not None]
        tested = sum(versus.p is not None for versus in compared)
        unit = "percentage points" if results.metric is None else f"difference in {results.metric}"
        within = ", of the groups with its test set" if results.other_tests else ""
        text = f"Δ: {unit} against {results.baseline}{within}, over the seeds of both."
        if tested:
            plural = "s" if tested > 1 else ""
            text += f" p: {TESTS[results.test]}, two-sided, Holm's correction for {tested} comparison{plural}."
        elif any(versus.n > 1 for versus in compared):
            text += " p: none, as the differences of all seeds are equal."
        else:
            text += " p: needs two seeds."
        found.append(text)
        if results.test == "wilcoxon" and any(versus.n < 6 for versus in compared):
            found.append("With fewer than 6 seeds this test cannot reach p < 0.05, regardless of the figures.")
    if {"at-bytes", "at-time"} & set(chosen) & _figures(results).keys():
        found.append(
            "% at a number of bytes or a time: accuracy of the last evaluation before all peers together had sent "
            "more, or it was over."
        )
    if results.clock and {"seconds", "at-time", "time"} & set(chosen):
        found.append(results.clock)
    shown = {part for key in lines[0].labels for part in (key, f"{key}.name")}
    for key, values in results.differ.items():
        if key not in shown:
            found.append(f"groups differ in {key}: {_short_list([_having(value) for value in values], '; ')}")
    return [_one_line(note) for note in found]


def different_tests(because: Sequence[str]) -> str:
    """Say that rows do not rank each other, ``because`` they differ in these."""
    return (
        f"Different test sets ({_short_list(because, ', ')}): rows were tested on different samples, so that their "
        "accuracies do not rank them; compare within a test set only."
    )


def _having(found: Difference) -> str:
    """``0.01 (local, mapl)``"""
    return f"{value_text(found.value)} ({_short_list(found.groups, '; ' if ',' in found.groups[0] else ', ')})"


def _short_list(parts: Sequence[str], between: str) -> str:
    more = f"{between}and {len(parts) - LONGEST_LIST} more" if len(parts) > LONGEST_LIST else ""
    return between.join(parts[:LONGEST_LIST]) + more


def _label(key: str) -> Callable[[GroupLine], str]:
    return lambda line: line.labels[key]


def _metric(name: str) -> Callable[[GroupLine], str]:
    def text(line: GroupLine) -> str:
        figure = line.metrics.get(name)
        if figure is None:
            return DASH
        return f"{figure.mean:.4f}" + ("" if figure.std is None else f" ± {figure.std:.4f}")

    return text


def _seeds(line: GroupLine) -> str:
    """The number of seeds; of how many runs, if some have not ended or several have one seed."""
    if line.runs == line.all_runs == len(line.seeds):
        return str(line.runs)
    return f"{len(line.seeds)} of {line.all_runs}"


def percent_text(figure: Statistic | None) -> str:
    """``60.0 ± 10.0``: mean and standard deviation in percent; a dash for None."""
    if figure is None:
        return DASH
    return percent(figure.mean) + ("" if figure.std is None else f" ± {percent(figure.std)}")


def _reached(figure: str) -> Callable[[GroupLine], str]:
    """Return the text of the rounds or seconds to a target, which some runs may not have reached."""

    return lambda line: reached_text(getattr(line, figure), len(line.seeds))


def reached_text(reached: Statistic | None, seeds: int) -> str:
    """``12.5 ± 1.0 (2 of 3)``: rounds or seconds to a target, over those of the ``seeds`` that have reached it."""
    if reached is None:
        return "not reached" if seeds else DASH
    text = f"{reached.mean:.1f}" + ("" if reached.std is None else f" ± {reached.std:.1f}")
    return text if reached.n == seeds else f"{text} ({reached.n} of {seeds})"


def _seconds(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds < 60 else duration(seconds)


def _difference(line: GroupLine, results: Results) -> str:
    if line.name == results.baseline:
        return "baseline"
    if line.versus is None:
        return DASH
    found = line.versus.difference
    return f"{100 * found:+.1f}" if results.metric is None else f"{found:+.4f}"


def _p(line: GroupLine, results: Results) -> str:
    if line.versus is None or line.versus.adjusted is None:
        return "" if line.name == results.baseline else DASH
    p = line.versus.adjusted
    return "< 0.001" if p < 0.001 else f"{p:.3f}" if p < 0.1 else f"{p:.2f}"


# ---- formats -----------------------------------------------------------------------------------------------


def markdown(shown: Page) -> str:
    """Return a table in GitHub's Markdown, the best accuracy bold, and the notes."""
    ruler = [":--"] * shown.left + ["--:"] * (len(shown.head) - shown.left)
    lines = [[_markdown_text(head) for head in shown.head], ruler]
    for at, row in enumerate(shown.rows):
        lines.append([_markdown_text(text) for text in row])
        if shown.bold is not None and at == shown.bold[0]:
            lines[-1][shown.bold[1]] = f"**{lines[-1][shown.bold[1]]}**"
    text = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    return "\n\n".join([text, *map(_markdown_text, shown.notes)])


_LATEX = {
    "\\": r"\textbackslash{}",
    "{": r"\{",
    "}": r"\}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": "$<$",
    ">": "$>$",
    "|": "$|$",
    '"': "''",
    "±": r"$\pm$",
    "Δ": r"$\Delta$",
    "–": "--",
    "…": r"\dots{}",
    **{letter: f"\\{letter}" for letter in "&%$#_"},
}


def _markdown_text(text: str) -> str:
    return re.sub(r"([\\|*_`<>\[\]])", r"\\\1", text)


def latex_text(text: str) -> str:
    """Escape what LaTeX treats specially. Other letters than Latin ones, which its fonts may lack, become ``?``."""
    return "".join(
        found
        if (found := _LATEX.get(letter))
        else letter
        if (letter.isascii() and letter.isprintable()) or "À" <= letter <= "ÿ"
        else "?"
        for letter in text
    )


def latex(shown: Page) -> str:
    """Return a table for LaTeX with the package booktabs, the best accuracy bold, and the notes as comments."""

    def number(text: str) -> str:
        return re.sub(r"^([+-])(?=\d)", r"$\1$", latex_text(text).replace(" ", "~") if text else "")

    align = "l" * shown.left + "r" * (len(shown.head) - shown.left)
    lines = ["% \\usepackage{booktabs}", *(f"% {note}" for note in shown.notes), rf"\begin{{tabular}}{{{align}}}"]
    lines += [r"  \toprule", f"  {' & '.join(map(latex_text, shown.head))} \\\\", r"  \midrule"]
    for at, row in enumerate(shown.rows):
        cells = [latex_text(text) for text in row[: shown.left]] + [number(text) for text in row[shown.left :]]
        if shown.bold is not None and at == shown.bold[0]:
            cells[shown.bold[1]] = rf"\textbf{{{cells[shown.bold[1]]}}}"
        lines.append(f"  {' & '.join(cells)} \\\\")
    return "\n".join([*lines, r"  \bottomrule", r"\end{tabular}"])


def comma_separated(results: Results) -> str:
    """Return a line per group with plain numbers: accuracies as fractions, bytes, seconds, metrics."""
    keys = list(results.lines[0].labels)
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    metrics = metric_columns(results)
    means = [f"{name}_{part}" for name in (*FIGURES, *metrics) for part in ("mean", "std")]
    head = [*keys, "runs", "all_runs", "seeds", *means]
    writer.writerow([*head, "difference", "common_seeds", "p", "p_holm"])
    for line in results.lines:
        row: list[object] = [_one_line(line.labels[key]) for key in keys]
        row += [line.runs, line.all_runs, " ".join(map(str, line.seeds))]
        found: list[Statistic | None] = [getattr(line, name) for name in FIGURES]
        for figure in found + [line.metrics.get(name) for name in metrics.values()]:
            row += [None, None] if figure is None else [figure.mean, figure.std]
        versus = line.versus
        row += [None] * 4 if versus is None else [versus.difference, versus.n, versus.p, versus.adjusted]
        writer.writerow(row)
    return text.getvalue().rstrip("\n")


def texts(form: TableFormat, results: Results, chosen: Sequence[str] | None = None) -> Sequence[str]:
    """Return the lines of a format for files; ``table`` and ``json`` are printed elsewhere."""
    if form == "csv":
        return comma_separated(results).splitlines()
    return (markdown if form == "markdown" else latex)(page(results, chosen)).splitlines()
