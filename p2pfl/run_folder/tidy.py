"""Round records as rows of one table: a row for each peer and round, a column for each number.

This needs neither torch nor pandas: the Python API's ``metrics()`` and `p2pfl export` share it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from p2pfl.run_folder.files import read_lines
from p2pfl.run_folder.folder import RunFolder


def rows(folder: RunFolder) -> Iterator[dict[str, Any]]:
    """Yield the rows of a run, by peer and round. Raises RunFolderError if a file cannot be read."""
    for files in folder.peers():
        for record in read_lines(files.metrics):
            yield row(record)


def row(record: Mapping[str, Any]) -> dict[str, Any]:
    """Flatten a record: ``{"loss": {"ce": 1}}`` to ``{"loss.ce": 1}``."""
    found: dict[str, Any] = {}
    for key, value in record.items():
        if key == "weights":
            continue
        if key in ("sent", "received"):
            counts = [entry for kinds in value.values() for entry in kinds.values()]
            found[f"{key}.messages"] = sum(entry[0] for entry in counts)
            found[f"{key}.bytes"] = sum(entry[1] + entry[2] for entry in counts)
        elif key == "missing":
            found[key] = sum(map(len, value.values()))
        else:
            found.update(_flat("" if key == "personal" else key, value))
    return found


def _flat(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    if not isinstance(value, Mapping):
        if name:
            yield name, value
        return
    for key, item in value.items():
        yield from _flat(f"{name}.{key}" if name else f"test_{key}" if key == "loss" else key, item)
