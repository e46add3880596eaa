"""The charts of a report as files for papers: a PNG or a PDF of each."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from launcher.report.charts import Chart, Figures, Spec
from launcher.report.page import VEGA_LITE
from p2pfl.run_folder.files import write_atomically, write_errors

WIDTH = 400
"""Pixels of the plot, or points in a PDF: a column of a paper, nearly."""
SCALE = 3
"""Pixels of a PNG for each of these."""
ONLY_ON_PAGE = ("drawing",)
"""Charts whose tables the page's script fills."""
COLORS = {"text": "black", "quiet": "#57606a", "card": "white", "accent": "#0b5cad", "strong": "#c2410c"}
COLORS |= {"on": "white", "off": "black"}
CONFIG: Spec = {
    "background": "white",
    "view": {"stroke": None},
    "axis": {"gridOpacity": 0.6, "titleFontWeight": "normal"},
    "legend": {"titleFontWeight": "normal"},
    "range": {"heatmap": ["#f3f6fa", "#b7d3ee", "#4a8fca", "#0a3d73"], "ramp": ["#f3f6fa", "#0a3d73"]},
}


def write(figures: Figures, png: Path | None, pdf: Path | None) -> list[Path]:
    """Write the charts.

    Args:
        png: folder for a PNG of each.
        pdf: folder for a PDF of each.

    Raises:
        MissingExtra: vl-convert is not installed.
        WriteError: a file cannot be written.
    """
    if png is None and pdf is None:
        return []
    import vl_convert

    specs = dict(specifications(figures))
    written = []
    for folder, suffix in ((png, "png"), (pdf, "pdf")):
        if folder is None:
            continue
        with write_errors(folder):
            folder.mkdir(parents=True, exist_ok=True)
        for name, spec in specs.items():
            drawn = (
                vl_convert.vegalite_to_png(spec, VEGA_LITE, scale=SCALE)
                if suffix == "png"
                else vl_convert.vegalite_to_pdf(spec, VEGA_LITE)
            )
            write_atomically(folder / f"{name}.{suffix}", drawn)
            written.append(folder / f"{name}.{suffix}")
    return written


def specifications(figures: Figures) -> Iterator[tuple[str, Spec]]:
    """Yield the name of each file and the specification that it shows, with its data."""
    for chart in figures.charts.values():
        if chart.id in ONLY_ON_PAGE:
            continue
        tables = {name: _rows(figures, name, chart) for name in chart.tables}
        for text, spec in chart.variants.items():
            yield (
                f"{chart.id}-{text}" if text else chart.id,
                {
                    **_colored(spec),
                    "title": chart.caption if chart.id.startswith("loss") else "",  # the term
                    "width": WIDTH,
                    "height": chart.height or WIDTH,
                    "datasets": tables,
                    "config": CONFIG,
                },
            )


def _rows(figures: Figures, table: str, chart: Chart) -> list[dict[str, Any]]:
    if table == "cells" and figures.frames is not None:  # of the last round
        order, last = figures.frames["order"], figures.frames["list"][-1]["cells"]
        pairs = ((row, column) for row in order for column in order)
        return [
            {"row": row, "column": column, "w": cell / 1000}
            for (row, column), cell in zip(pairs, last, strict=True)
            if cell >= 0
        ]
    columns = figures.tables[table]
    rows = [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
    needs = chart.needs if table == "rounds" else ""
    return [row for row in rows if not needs or row[needs] is not None]


def _colored(value: Any) -> Any:
    """Replace ``@text`` and the like."""
    if isinstance(value, str) and value.startswith("@"):
        return COLORS.get(value[1:], value)
    if isinstance(value, list):
        return [_colored(item) for item in value]
    return {key: _colored(item) for key, item in value.items()} if isinstance(value, dict) else value
