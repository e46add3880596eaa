"""Every completed run, one JSON object per line of ``runs-*.jsonl``.

Records are appended, and changed only if an option was renamed. A run is found again by its key: the hash of its
resolved run file, every default filled in, without what cannot change the result. So a new default has new runs, and
a renamed claim keeps its own. What the hash cannot see is the code: ``CODE`` is incremented when equal settings give
other results on average. Each record has the commit that it is from.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from benchmarks.claims.summary import Summary, run_of
from p2pfl.data.cache_folder import data_root

CODE = 1


@dataclass(frozen=True)
class Identity:
    """What two runs with equal results have in common.

    Attributes:
        key: hash of the settings.
        missing: files of the dataset that are not there.
        rounds, peers: for the ledger.
    """

    key: str
    missing: tuple[str, ...]
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
def _identity(text: str, probe: str, default_root: Path) -> Identity:
    run = run_of(json.loads(text))
    content = [CODE, _essential(run.resolved()), probe]
    root = run.file.data.root or default_root
    missing = tuple(os.path.relpath(path, root) for path in run.loader.files(root) if not path.exists())
    return Identity(
        hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16], missing, run.rounds, run.peers
    )


def identity(tree: Mapping[str, Any], probe: str = "") -> Identity:
    """Identify a run file, whatever its seed. Raises RunFileError if it is invalid."""
    return _identity(json.dumps({**tree, "seed": 0}, sort_keys=True), probe, data_root())


class Store:
    """The runs in a folder. Several processes may use one folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.records: dict[tuple[str, int], dict[str, Any]] = {}
        self._read: dict[Path, int] = {}
        self.reload()

    def file_of(self, key: str) -> Path:
        """Return the file of the runs with this key. There are 64, so that each stays small."""
        return self.folder / f"runs-{int(key[:2], 16) // 4:02x}.jsonl"

    def files(self) -> list[Path]:
        """Return the files with runs."""
        return sorted(self.folder.glob("runs-*.jsonl"))

    def reload(self) -> None:
        """Read what was appended since; an incomplete last line is left for the next time."""
        for path in self.files():
            read = self._read.get(path, 0)
            with path.open("rb") as file:
                file.seek(read)
                content = file.read()
            complete = content[: content.rfind(b"\n") + 1]
            self._read[path] = read + len(complete)
            for line in complete.decode().splitlines():
                record = json.loads(line)
                self.records[record["key"], record["seed"]] = record

    def add(self, record: Mapping[str, Any]) -> None:
        """Append a record, in one write."""
        self.folder.mkdir(parents=True, exist_ok=True)
        with self.file_of(record["key"]).open("ab") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            file.write((json.dumps(record, separators=(",", ":"), allow_nan=False) + "\n").encode())

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

    def reserve(self, key: str, seed: int) -> int | None:
        """Reserve a run for this process; return what ``release`` takes, or None if another process executes it."""
        folder = self.folder / "running"
        folder.mkdir(parents=True, exist_ok=True)
        lock = os.open(folder / f"{key}-{seed}", os.O_CREAT | os.O_RDWR)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(lock)
            return None
        return lock

    def release(self, lock: int) -> None:
        os.close(lock)
