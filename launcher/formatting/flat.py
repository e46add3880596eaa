"""Nested settings as dotted keys. Imports nothing heavy: a tracker's process has no torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any


def flatten(tree: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the dotted keys of nested mappings, with their values; an empty mapping has none."""
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from flatten(value, f"{path}{key}.")
        else:
            yield f"{path}{key}", value
