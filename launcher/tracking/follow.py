"""Follow the records of a run while its peers write them."""

from __future__ import annotations

import json
import math
import os
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any

from p2pfl import PeerId
from p2pfl.session.tidy import row

LAG = 10
"""A mean does not wait for peers that are this many rounds behind the first one: they may be dead."""
SKIPPED = ("peer", "t")


class RecordFile:
    """Read the records of a peer while it appends to them.

    A peer that resumes replaces the file by one that ends earlier; then the records are read from its beginning.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._inode: int | None = None
        self._offset = 0

    def read(self) -> list[dict[str, Any]]:
        """Return the records since the last call; leave an incomplete last line for the next one."""
        try:
            with self._path.open("rb") as file:
                found = os.fstat(file.fileno())
                if found.st_ino != self._inode or found.st_size < self._offset:
                    self._inode, self._offset = found.st_ino, 0
                file.seek(self._offset)
                new = file.read()
        except OSError:
            return []
        new = new[: new.rfind(b"\n") + 1]
        self._offset += len(new)
        return [record for line in new.splitlines() if (record := _record(line)) is not None]


def _record(line: bytes) -> dict[str, Any] | None:
    """Return the record in a line; None if it is damaged."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return record if isinstance(record, dict) and type(record.get("t")) is int else None


def scalars(record: Mapping[str, Any]) -> dict[str, float]:
    """Return the finite numbers of a record, by name."""
    try:
        flat = row(record)
    except (AttributeError, TypeError, IndexError):  # a damaged record
        return {}
    return {
        name: value
        for name, value in flat.items()
        if name not in SKIPPED and type(value) in (int, float) and math.isfinite(value)
    }


class Means:
    """Means over the peers of what they recorded in a round."""

    def __init__(self, peers: int) -> None:
        self._peers = peers
        self._rounds: dict[int, dict[PeerId, Mapping[str, float]]] = defaultdict(dict)
        self._last = -1
        """The last round that was yielded: what arrives later is not in its mean."""
        self._first = -1
        """The last round of the peer that is first."""

    def add(self, peer: PeerId, t: int, values: Mapping[str, float]) -> None:
        if t > self._last:
            self._rounds[t][peer] = values
            self._first = max(self._first, t)

    def complete(self, *, end: bool = False) -> Iterator[tuple[int, dict[str, float]]]:
        """Yield, ascending, rounds that all peers have recorded or that are LAG behind the first; at the end, all."""
        for t in sorted(self._rounds):
            if not end and len(self._rounds[t]) < self._peers and t > self._first - LAG:
                return
            self._last = t
            yield t, _mean(list(self._rounds.pop(t).values()))


def _mean(peers: list[Mapping[str, float]]) -> dict[str, float]:
    """Return the mean of each number, the standard deviation and the minimum of the accuracy, and who took part."""
    values: dict[str, list[float]] = defaultdict(list)
    for numbers in peers:
        for name, value in numbers.items():
            values[name].append(value)
    found = {name: fmean(all_values) for name, all_values in values.items()}
    if accuracies := values.get("accuracy"):
        found["accuracy.std"], found["accuracy.min"] = pstdev(accuracies), min(accuracies)
    found["peers"] = len(peers)
    return found
