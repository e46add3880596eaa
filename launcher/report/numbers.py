"""Names and numbers as a page shows them."""

from __future__ import annotations

from typing import Any

from p2pfl.terminal import printable

LONGEST_NAME = 60
"""Characters of a name that are shown."""


def name(value: Any) -> str:
    """Return a name without control characters, shortened if need be."""
    text = printable(str(value)).replace("\n", " ")
    return text if len(text) <= LONGEST_NAME else text[: LONGEST_NAME - 1] + "…"


def rounded(value: float | None, digits: int = 5) -> float | None:
    """Return a number with a few significant digits, so that the page stays small."""
    return None if value is None else float(f"{value:.{digits}g}")
