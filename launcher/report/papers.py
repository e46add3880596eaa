"""The charts of a report as files for papers: a PNG or a PDF of each."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from launcher.formatting import pictures
from launcher.report.charts import Chart, Figures, Spec
from p2pfl.run_folder.files import write_errors

WIDTH = 400
"""Pixels of the plot, or points in a PDF: a column of a paper, nearly."""
ONLY_ON_PAGE = ("drawing",)
"""Charts whose tables the page's script fills."""


def write(figures: Figures, png: Path | None, pdf: Path | None) -> list[Path]:
    """Write the charts.

    Args:
        png: folder for a PNG of each.
        pdf: folder for a PDF of each.

    Raises:
        MissingExtra: vl-convert is not installed.
        WriteError: a file cannot be written.
    """
    specs = dict(specifications(figures))
    written = []
    for folder, suffix in ((png, "png"), (pdf, "pdf")):
        if folder is None:
            continue
        with write_errors(folder):
            folder.mkdir(parents=True, exist_ok=True)
        for name, spec in specs.items():
            pictures.save(spec, folder / f"{name}.{suffix}", "p2pfl report")
            written.append(folder / f"{name}.{suffix}")
    return written


def specifications(figures: Figures) -> Iterator[tuple[str, Spec]]:
    """Yield the name of each file and the specification that it shows, with its data."""
    for chart in figures.charts.values():
        if chart.id in ONLY_ON_PAGE:
            continue
        tables = {name: _rows(figures, name, chart) for name in chart.tables}
        for text, spec in chart.variants.items():
            title = chart.caption if chart.id.startswith("loss") else ""  # the term
            yield f"{chart.id}-{text}" if text else chart.id, whole(chart, spec, tables, title=title)


def whole(chart: Chart, spec: Spec, tables: dict[str, list[Any]], *, title: str, width: int = WIDTH) -> Spec:
    """Return a chart's specification with its data and size."""
    return {**spec, "title": title, "width": width, "height": chart.height or width, "datasets": tables}


def _rows(figures: Figures, table: str, chart: Chart) -> list[dict[str, Any]]:
    if table == "cells" and figures.frames is not None:  # of the last round
        order, last = figures.frames["order"], figures.frames["list"][-1]["cells"]
        pairs = ((row, column) for row in order for column in order)
        return [
            {"row": row, "column": column, "w": cell / 1000}
            for (row, column), cell in zip(pairs, last, strict=True)
            if cell >= 0
        ]
    needs = chart.needs if table == "rounds" else ""
    return [row for row in pictures.rows(figures.tables[table]) if not needs or row[needs] is not None]
