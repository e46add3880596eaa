"""Pictures in files: PNG, SVG or PDF, as the name of the file says."""

from __future__ import annotations

import io
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from p2pfl.errors import MissingExtra
from p2pfl.run_folder.files import write_errors

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FORMATS = ("png", "svg", "pdf")
DOTS = 150
"""Pixels per inch of a PNG."""
COLORS = 10
"""Groups with different colors; then the colors repeat."""


def format_of(file: Path) -> str:
    """Return the format that a file's name asks for; PNG without a suffix. Raises ValueError for another one."""
    suffix = file.suffix.lower().removeprefix(".") or "png"
    if suffix not in FORMATS:
        known = ", ".join(f".{name}" for name in FORMATS[:-1])
        raise ValueError(f"{file.name!r} ends in no known format of pictures; use {known} or .{FORMATS[-1]}")
    return suffix


def new_figure(size: tuple[float, float], purpose: str = "drawing a graph") -> Figure:
    """Return an empty figure of ``size`` inches that can be saved. Raises MissingExtra without matplotlib."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise MissingExtra("matplotlib", "report", purpose) from None
    figure = Figure(figsize=size, layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def save(figure: Figure, file: Path) -> None:
    """Write a figure in the format of the file's name. Raises WriteError; then there is no part of a picture."""
    from matplotlib import rc_context

    kind = format_of(file)
    drawn = io.BytesIO()
    # Text stays text, and equal figures give equal files.
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "p2pfl", "pdf.fonttype": 42}), any_letters():
        metadata = {"png": {}, "svg": {"Date": None}, "pdf": {"CreationDate": None}}[kind]
        figure.savefig(drawn, dpi=DOTS, format=kind, metadata=metadata)
    with write_errors(file):
        file.write_bytes(drawn.getvalue())


@contextmanager
def any_letters() -> Iterator[None]:
    """Draw names in any script: letters that matplotlib's font lacks become boxes, without a warning for each."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing from", UserWarning)
        yield


def literal(text: str) -> str:
    """Return a text that matplotlib draws as it is: no formula, and in a legend also if it begins with ``_``."""
    text = text.replace("$", r"\$")
    return f" {text}" if text.startswith("_") else text


def group_colors(groups: Sequence[int]) -> list[Any]:
    """Return the color of each peer's group; white if there is only one group."""
    from matplotlib import colormaps

    known = sorted(set(groups))
    if len(known) < 2:
        return ["white"] * len(groups)
    palette = colormaps["tab10"]
    return [palette(known.index(group) % COLORS) for group in groups]
