"""How tables call the value of a key of a run file."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

TITLES = ("algorithm", "graph", "models", "dataset", "partition", "augment")
"""Sections of the run file that are called by their names."""
LONGEST_VALUE = 40
"""Characters of a value in a label."""


def short(key: str, label: str) -> str:
    """``mapl`` or ``lr=0.01``: a value, with the last part of its key if it does not say by itself what it is."""
    name = key.removesuffix(".name").rpartition(".")[2]
    return label if name in TITLES else f"{name}={label}"


def value_text(value: Any, longest: int = LONGEST_VALUE) -> str:
    """Return a value as a label; of plug-ins, their names and the first digits of their hashes."""
    if isinstance(value, list) and value and all(isinstance(each, Mapping) and "sha256" in each for each in value):
        return ", ".join(f"{each.get('name')}@{str(each['sha256'])[:8]}" for each in value)
    text = value if isinstance(value, str) else "–" if value is None else json.dumps(value, default=str)
    return text if len(text) <= longest else f"{text[: longest - 1]}…"
