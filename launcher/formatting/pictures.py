"""Pictures in files: Vega-Lite specifications drawn as PNG, SVG or PDF, in the style of a paper."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from p2pfl.errors import MissingExtra
from p2pfl.run_folder.files import write_atomically

VEGA_LITE = "6.4"
"""Version of Vega-Lite that the specifications are written for; vl-convert bundles several."""
FORMATS = ("png", "svg", "pdf")
SCALE = 3
"""Pixels of a PNG for each pixel of a specification."""
COLORS = {"text": "black", "quiet": "#57606a", "card": "white", "accent": "#0b5cad", "strong": "#c2410c"}
COLORS |= {"on": "white", "off": "black"}
CONFIG = {
    "background": "white",
    "view": {"stroke": None},
    "axis": {"gridOpacity": 0.6, "titleFontWeight": "normal"},
    "legend": {"titleFontWeight": "normal"},
    "range": {"heatmap": ["#f3f6fa", "#b7d3ee", "#4a8fca", "#0a3d73"], "ramp": ["#f3f6fa", "#0a3d73"]},
}


def vega(purpose: str) -> Any:
    """Import vl-convert. Raises MissingExtra if it is not installed."""
    try:
        import vl_convert
    except ImportError:
        raise MissingExtra("vl-convert-python", "report", purpose) from None
    return vl_convert


def format_of(file: Path) -> str:
    """Return the format that a file's name asks for; PNG without a suffix. Raises ValueError for another one."""
    suffix = file.suffix.lower().removeprefix(".") or "png"
    if suffix not in FORMATS:
        raise ValueError(f"{file.name!r} ends in no known format of pictures; use .png, .svg or .pdf")
    return suffix


def save(spec: Mapping[str, Any], file: Path, purpose: str) -> None:
    """Draw a specification, with its data, to a file whose name gives the format. Raises MissingExtra, WriteError."""
    library, form = vega(purpose), format_of(file)
    whole = {**_colored(spec), "config": CONFIG}
    if form == "png":
        drawn = library.vegalite_to_png(whole, VEGA_LITE, scale=SCALE)
    elif form == "svg":
        drawn = library.vegalite_to_svg(whole, VEGA_LITE).encode()
    else:
        drawn = library.vegalite_to_pdf(whole, VEGA_LITE)
    write_atomically(file, drawn)


def _colored(value: Any) -> Any:
    """Replace ``@text`` and the like."""
    if isinstance(value, str) and value.startswith("@"):
        return COLORS.get(value[1:], value)
    if isinstance(value, list):
        return [_colored(item) for item in value]
    return {key: _colored(item) for key, item in value.items()} if isinstance(value, dict) else value


def rows(columns: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
    """Return the rows of a table that is given by its columns."""
    return [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
