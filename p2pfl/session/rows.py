"""A record of metrics.jsonl as one row of a table, without torch: for tables, trackers and displays."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any


def row(record: Mapping[str, Any]) -> dict[str, Any]:
    """Flatten a record: ``{"loss": {"ce": 1}}`` to ``{"loss.ce": 1}``; traffic and missing messages as sums."""
    row: dict[str, Any] = {}
    for key, value in record.items():
        if key == "weights":
            continue
        if key in ("sent", "received"):
            counts = [entry for kinds in value.values() for entry in kinds.values()]
            row[f"{key}.messages"] = sum(entry[0] for entry in counts)
            row[f"{key}.bytes"] = sum(entry[1] + entry[2] for entry in counts)
        elif key == "missing":
            row[key] = sum(map(len, value.values()))
        else:
            row.update(_flat("" if key == "personal" else key, value))
    return row


def _flat(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    if not isinstance(value, Mapping):
        if name:
            yield name, value
        return
    for key, item in value.items():
        yield from _flat(f"{name}.{key}" if name else f"test_{key}" if key == "loss" else key, item)
