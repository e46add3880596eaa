"""Read numbers and names from records: another host, or an earlier version, may have written anything into them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from p2pfl.terminal import printable

LONGEST_NAME = 60
"""Characters of a name that are shown."""


def number(value: Any) -> float | None:
    """Return a finite number, or None for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        found = float(value)
    except OverflowError:
        return None
    return found if math.isfinite(found) else None


def mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def name(value: Any) -> str:
    """Return a name without control characters, shortened if need be."""
    text = printable(str(value)).replace("\n", " ")
    return text if len(text) <= LONGEST_NAME else text[: LONGEST_NAME - 1] + "…"


def peer_id(value: Any) -> int | None:
    """Return the peer that a key of a record names."""
    text = str(value)
    return int(text) if text.isascii() and text.isdigit() and len(text) < 10 else None


def rounded(value: float | None, digits: int = 5) -> float | None:
    """Return a number with a few significant digits, so that the page stays small."""
    return None if value is None else float(f"{value:.{digits}g}")
