"""What is measured in a round, and the record that is written for it: one JSON object per line of metrics.jsonl.

    {"peer": 3, "t": 12,
     "loss": {"ce": 0.31, "cont": 1.92, …},            means over the round's training samples, by term
     "seconds": {"training": …, "waiting": …, "queued": …, "evaluating": …, "total": …},
     "out": {"7": {"Prototypes": [1, 2560, 61]}, …},    messages, payload bytes, header bytes by neighbour, kind
     "in": {…},                                         the same for what was taken
     "missing": {"Prototypes": [5]},                    neighbours that missed the deadline or sent NaN, by kind
     "sources": 19, "listeners": 19,                    peers heard, peers hearing, in this round
     "weights": {"3": 0.05, …} | null,                  mixing weights after the round, if the method has them
     "personal": {"accuracy", "loss", "correct", "samples"} | null,      own test split, when evaluated
     "global": {…} | null,                              whole test set, when asked for
     "measures": {"peak": {…}, …},                      what else the method has evaluated, when evaluated
     "observed": {"alpha": 0.8, …}}                     the method's own numbers

NaN and infinity are null. Seconds of ``mixing`` and everything else are what remains of ``total``.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from p2pfl.net import Counts
from p2pfl.runfolder import PeerId, append_line, read_lines, write_atomically
from p2pfl.training import Evaluation


@dataclass
class RoundRecord:
    """One peer's round; see the module's docstring for units."""

    peer: PeerId
    t: int
    loss: dict[str, float]
    seconds: dict[str, float]
    out: Counts
    inn: Counts
    missing: dict[str, list[PeerId]]
    sources: int
    listeners: int
    weights: Mapping[PeerId, float] | None = None
    personal: Evaluation | None = None
    whole: Evaluation | None = None
    measures: Mapping[str, Evaluation] = field(default_factory=dict)
    observed: Mapping[str, float] = field(default_factory=dict)

    def to_json(self) -> str:
        record = {
            "peer": self.peer,
            "t": self.t,
            "loss": {name: _number(value, 6) for name, value in self.loss.items()},
            "seconds": {name: round(value, 4) for name, value in self.seconds.items()},
            "out": self.out,
            "in": self.inn,
            "missing": self.missing,
            "sources": self.sources,
            "listeners": self.listeners,
            "weights": self.weights,
            "personal": _plain(self.personal),
            "global": _plain(self.whole),
            "measures": {name: _plain(evaluation) for name, evaluation in self.measures.items()},
            "observed": {name: _number(value, 6) for name, value in self.observed.items()},
        }
        return json.dumps(record, allow_nan=False)


def _number(value: float, digits: int | None = None) -> float | None:
    """None for NaN and infinity, which JSON does not have."""
    if not math.isfinite(value):
        return None
    return value if digits is None else round(value, digits)


def _plain(evaluation: Evaluation | None) -> dict[str, Any] | None:
    return None if evaluation is None else {**asdict(evaluation), "loss": _number(evaluation.loss)}


def append(path: Path, record: RoundRecord) -> None:
    """Raises Unwritable; then no part of the record is there."""
    append_line(path, record.to_json())


def keep_before(path: Path, t: int) -> None:
    """Drop records of round ``t`` and later, and what is damaged: a peer that resumes writes them again."""
    if path.exists():
        kept = [json.dumps(record) + "\n" for record in read(path) if record["t"] < t]
        write_atomically(path, "".join(kept).encode())


def read(path: Path) -> list[dict[str, Any]]:
    """All records up to the first that is damaged or cut off by a crash."""
    return read_lines(path)


@dataclass
class Totals:
    """What adds up over a run."""

    out: Counts = field(default_factory=dict)
    inn: Counts = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    missing: int = 0
    left_out: int = 0
    """Rounds that the neighbours went through without this peer while it was gone."""
    best: float | None = None
    best_round: int | None = None

    def add(self, record: RoundRecord) -> None:
        for total, counts in ((self.out, record.out), (self.inn, record.inn)):
            for neighbor, kinds in counts.items():
                for kind, entry in kinds.items():
                    into = total.setdefault(neighbor, {}).setdefault(kind, [0, 0, 0])
                    into[:] = [a + b for a, b in zip(into, entry, strict=True)]
        for name, value in record.seconds.items():
            self.seconds[name] = self.seconds.get(name, 0.0) + value
        self.missing += sum(map(len, record.missing.values()))
        if record.personal is not None and (self.best is None or record.personal.accuracy > self.best):
            self.best, self.best_round = record.personal.accuracy, record.t

    def bytes_out(self) -> int:
        return _bytes(self.out)

    def bytes_in(self) -> int:
        return _bytes(self.inn)


def _bytes(counts: Counts) -> int:
    return sum(entry[1] + entry[2] for kinds in counts.values() for entry in kinds.values())
