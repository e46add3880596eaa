"""Every completed run: ``runs.jsonl.xz``, and what was added since it was packed, ``added.jsonl``.

Both have a JSON object per line, with the fields of ``execute``; the packed ones are ordered by key and seed
(``xzcat runs.jsonl.xz | jq``). Records are changed only if an option was renamed.

A run is found again by its key: the hash of its resolved run file, every default filled in, without what cannot
change the result. So a new default has new runs, and a renamed claim keeps its own. What the hash cannot see is the
code: ``CODE`` is incremented when equal settings give other results on average. Each record has the commit that it is
from.
"""

from __future__ import annotations

import fcntl
import gc
import hashlib
import json
import lzma
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from benchmarks.claims.summary import Summary, planned

CODE = 1
RESULTS = Path(__file__).parents[1] / "results" / "claims"


@dataclass(frozen=True)
class Identity:
    """What two runs with equal results have in common.

    Attributes:
        key: hash of the settings.
        files: the dataset's files, there or not.
        rounds, peers: for the ledger.
    """

    key: str
    files: tuple[str, ...]
    rounds: int
    peers: int


LOCAL = (
    "name",
    "seed",
    "plugins",
    "out",
    "transport",
    "chaos",
    "slots",
    "gpu",
    "device",
    "checkpoint_every",
    "checkpoint_copies",
    "masked_test",
)
"""Keys of a run file that do not change what a record holds, or that it has beside."""


def _essential(resolved: Mapping[str, Any]) -> Any:
    """Return what determines a run's record.

    Options that are off are left out, so that a later version with one more, which is off by default, finds its runs.
    """
    data = {key: value for key, value in resolved["data"].items() if key not in ("root", "download")}
    algorithm = dict(resolved["algorithm"])
    for key, before in {"loss": "ce", "share": "trainable"}.items():  # what methods did before there was a choice
        if algorithm.get(key) == before:
            del algorithm[key]
    rules = {"aggregation": {"name": "mean"}, "gradient": {"name": "mean"}}  # likewise
    whole = {key: value for key, value in resolved.items() if key not in LOCAL and value != rules.get(key)}
    return _without_off({**whole, "data": data, "algorithm": algorithm})


def _without_off(value: Any) -> Any:
    if isinstance(value, Mapping):
        kept = {key: _without_off(item) for key, item in value.items()}
        return {
            key: item for key, item in kept.items() if item is not None and item is not False and item not in ({}, [])
        }
    return [_without_off(item) for item in value] if isinstance(value, list | tuple) else value


@cache
def _identity(text: str, probe: str) -> Identity:
    run = planned(json.loads(text))
    content = json.dumps([CODE, _essential(run.settings), probe], sort_keys=True)
    key = hashlib.sha256(content.encode()).hexdigest()[:16]
    return Identity(key, tuple(run.files()), run.settings["rounds"], run.settings["peers"])


def identity(tree: Mapping[str, Any], probe: str = "") -> Identity:
    """Identify a run file, whatever its seed. Raises RunFileError if it is invalid."""
    return _identity(json.dumps({**tree, "seed": 0}, sort_keys=True), probe)


class Store:
    """The runs in a folder, which one process at a time may add to."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.packed, self.added = folder / "runs.jsonl.xz", folder / "added.jsonl"
        self.records: dict[tuple[str, int], dict[str, Any]] = {}
        if self.packed.exists():
            self._take(lzma.decompress(self.packed.read_bytes()))
        if self.added.exists():
            self._take(self.added.read_bytes())

    def _take(self, content: bytes) -> None:
        """Take all complete lines; later ones replace earlier ones."""
        with _without_collector():
            for line in content.decode().splitlines(keepends=True):
                if line.endswith("\n"):
                    record = json.loads(line)
                    self.records[record["key"], record["seed"]] = record

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Let no other process add runs. Raises BlockingIOError if one may do so now."""
        self.folder.mkdir(parents=True, exist_ok=True)
        folder = os.open(self.folder, os.O_RDONLY)
        try:
            fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if self.added.exists():  # without an incomplete last line, of a process that was killed
                os.truncate(self.added, self.added.read_bytes().rfind(b"\n") + 1)
            yield
        finally:
            os.close(folder)

    def add(self, record: Mapping[str, Any]) -> None:
        """Append a record."""
        with self.added.open("ab") as file:
            file.write(_line(record))
        self._take(_line(record))

    def pack(self) -> None:
        """Move all added runs into the packed ones. Equal runs make equal files."""
        lines = b"".join(_line(record) for _, record in sorted(self.records.items()))
        new = self.packed.with_suffix(".new")
        new.write_bytes(lzma.compress(lines, preset=9 | lzma.PRESET_EXTREME))
        new.replace(self.packed)
        self.added.unlink(missing_ok=True)

    def summary(self, key: str, seed: int) -> Summary | None:
        record = self.records.get((key, seed))
        return None if record is None else Summary(**record["summary"])

    def seconds(self, key: str, clock: str = "seconds") -> float | None:
        """Mean duration of the simulated runs with this key, for other seeds; None if there are none.

        Args:
            clock: ``seconds`` that passed, which a busy machine makes longer, or ``cpu_seconds``.
        """
        found = [
            record[clock]
            for (other, _), record in self.records.items()
            if other == key and not record.get("sockets", False)
        ]
        return sum(found) / len(found) if found else None


@contextmanager
def _without_collector() -> Iterator[None]:
    """Do not look for garbage among millions of new objects that have none: that takes three times as long."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _line(record: Mapping[str, Any]) -> bytes:
    return (json.dumps(record, separators=(",", ":"), allow_nan=False) + "\n").encode()
