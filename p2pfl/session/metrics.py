"""Measurements of a round, written as one JSON object per line of metrics.jsonl.

    {"peer": 3, "t": 12,
     "loss": {"ce": 0.31, "cont": 1.92, …},            means over the round's training samples, by term
     "seconds": {"training": …, "waiting": …, "sending": …, "queued": …, "evaluating": …, "total": …},
     "elapsed": 41.25,                                  seconds since this peer began the run, up to this record
     "cost": {"cpu_seconds": 0.7, "cpu_joules": …},     of the round; p2pfl/session/cost.py lists what it may hold
     "sent": {"7": {"Prototypes": [1, 2560, 61]}, …},   messages, payload bytes, header bytes by neighbor and kind
     "received": {…},                                   the same for accepted messages
     "missing": {"Prototypes": [5]},                    neighbors that missed the deadline or sent NaN, by kind
     "sources": 19, "receivers": 19,                    peers received from and sent to in this round; receivers are
                                                        null if they can stop receiving and nothing was sent to them
     "combined": {"Parameters": {"3": [0.4, 1.0]}},     if peers attack, or the run has a rule of aggregation, by kind
                                                        and neighbor: its distance from this peer's own, relative to
                                                        the norm of that, and the fraction that the rule has taken, 0
                                                        if it has left it out (p2pfl/aggregation/distances.py)
     "ages": {"Parameters": {"3": 1, "5": -1}},         unless rounds wait for one another, by kind and neighbor: how
                                                        many rounds before this one the body was sent, negative: after
    "weights": {"3": 0.05, …} | null,                  mixing weights after the round, if the method has them
     "personal": {"accuracy", "loss", "correct", "samples",      local test split, when evaluated, as masked_test asks
                  "masked_accuracy",                    only scores of the peer's local classes count
                  "unmasked_accuracy"} | null,          scores of all classes count
     "metrics": {"macro-f1": 0.71, …},                  of the local test split, if the run file names some
     "global": {…} | null,                              whole test set, if enabled; always unmasked
     "extra_metrics": {"peak": {…}, …},                 the method's additional evaluations
     "diagnostics": {"alpha": 0.8, …},                  the method's additional numbers
     "skipped": {"trainings": 1, …}}                    what was not used since it had diverged, if anything:
                                                        p2pfl/outcomes.py

``elapsed`` is of a monotonic clock. A peer that resumes counts on from its last record, also if it repeats rounds;
time in which it was not running does not count. NaN and infinity are null. The rest of ``total`` is aggregation and
everything else.
"""

from __future__ import annotations

import json
import logging
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from p2pfl import PeerId
from p2pfl.learning.evaluation import Evaluation
from p2pfl.messaging.inbox import MessageCounts
from p2pfl.outcomes import Outcomes
from p2pfl.run_folder.ages import AgeRange
from p2pfl.run_folder.files import append_line, read_lines, read_undamaged_lines, write_atomically
from p2pfl.run_folder.folder import Phase
from p2pfl.session.evaluation import Evaluations

MEASURED = ("seconds", "elapsed", "cost")
"""Keys whose values differ from run to run; all others are bit-identical on one platform."""


@dataclass
class RoundRecord:
    """One peer's round; see the module's docstring for units."""

    peer: PeerId
    t: int
    loss: dict[str, float]
    seconds: dict[str, float]
    elapsed: float
    cost: dict[str, float]
    sent: MessageCounts
    received: MessageCounts
    missing: dict[str, list[PeerId]]
    sources: int
    receivers: int | None
    combined: Mapping[str, Mapping[PeerId, tuple[float, float]]] = field(default_factory=dict)
    ages: Mapping[str, Mapping[PeerId, int]] = field(default_factory=dict)
    weights: Mapping[PeerId, float] | None = None
    evaluations: Evaluations = field(default_factory=Evaluations)
    diagnostics: Mapping[str, float] = field(default_factory=dict)
    outcomes: Outcomes = field(default_factory=Outcomes)

    def age_range(self) -> list[float] | None:
        """Return median, lowest and highest age of the messages that the round took; None if ``ages`` has none."""
        counts = Counter(age for by_peer in self.ages.values() for age in by_peer.values())
        return list(AgeRange.of(counts)) if counts else None

    def to_json(self) -> str:
        measured = {name: number(value, 6) for name, value in self.evaluations.metrics.items()}
        combined = {
            kind: {j: [number(value, 6) for value in values] for j, values in by_peer.items()}
            for kind, by_peer in self.combined.items()
        }
        record = {
            "peer": self.peer,
            "t": self.t,
            "loss": {name: number(value, 6) for name, value in self.loss.items()},
            "seconds": {name: round(value, 4) for name, value in self.seconds.items()},
            "elapsed": round(self.elapsed, 4),
            "cost": {name: round(value, 4) for name, value in self.cost.items()},
            "sent": self.sent,
            "received": self.received,
            "missing": self.missing,
            "sources": self.sources,
            "receivers": self.receivers,
            **({"combined": combined} if combined else {}),
            **({"ages": self.ages} if self.ages else {}),
            "weights": self.weights,
            "personal": plain(self.evaluations.personal),
            **({"metrics": measured} if measured else {}),
            "global": plain(self.evaluations.whole),
            "extra_metrics": {name: plain(evaluation) for name, evaluation in self.evaluations.extra.items()},
            "diagnostics": {name: number(value, 6) for name, value in self.diagnostics.items()},
            **({"skipped": self.outcomes.skipped} if self.outcomes.skipped else {}),
        }
        return json.dumps(record, allow_nan=False)


def number(value: float, digits: int | None = None) -> float | None:
    """Return a number as a record holds it: None for NaN and infinity, which JSON does not have."""
    if not math.isfinite(value):
        return None
    return value if digits is None else round(value, digits)


def plain(evaluation: Evaluation | None) -> dict[str, Any] | None:
    """Return an evaluation as a record holds it."""
    if evaluation is None:
        return None
    found = {**asdict(evaluation), "loss": number(evaluation.loss)}
    del found["metrics"]
    return found


def append(path: Path, record: RoundRecord) -> None:
    """Append a record. Raises WriteError; then no part of it is written."""
    append_line(path, record.to_json())


def truncate(path: Path, t: int, log: logging.Logger, last: int = -1) -> float:
    """Drop damaged records, and records of round ``t`` and later: a peer that resumes writes them again.

    The others are on disk before they replace the file, since the peer does not write them again. If some of them are
    lost, say so in ``log``, and keep a file with damaged ones.

    Args:
        last: round of the last record that the checkpoint knows; -1 if it knows none.

    Returns:
        The seconds that the peer had taken up to the last record, dropped or not.
    """
    found, damaged = read_undamaged_lines(path)
    records: list[dict[str, Any]] = []
    for record in found:
        if type(record.get("t")) is int and (not records or record["t"] > records[-1]["t"]):
            records.append(record)
    damaged += len(found) - len(records)
    before = path.read_bytes() if path.exists() else b""
    if damaged:
        copy = path.with_stem(f"{path.stem}-damaged")
        write_atomically(copy, before)
        log.warning("damaged records dropped count=%d; the file as it was: %s", damaged, copy)
    earlier = [record for record in records if record["t"] < t]
    ends = earlier[-1]["t"] if earlier else -1
    if ends < last:
        log.warning("records are missing rounds=%d..%d: %s was cut off or deleted", ends + 1, last, path)
    kept = "".join(json.dumps(record) + "\n" for record in earlier).encode()
    if kept != before:
        write_atomically(path, kept, durable=True)
    return max((record.get("elapsed", 0.0) for record in records), default=0.0)


def read(path: Path) -> list[dict[str, Any]]:
    """Return all records before the first damaged or incomplete one."""
    return read_lines(path)


@dataclass
class Totals:
    """Sums over a run."""

    sent: MessageCounts = field(default_factory=dict)
    received: MessageCounts = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    cost: dict[str, float] = field(default_factory=dict)
    missing: int = 0
    skipped_rounds: int = 0
    """Rounds that the neighbors completed without this peer."""
    best: float | None = None
    best_round: int | None = None
    outcomes: Outcomes = field(default_factory=Outcomes)
    ages: dict[str, dict[int, int]] = field(default_factory=dict)
    """Messages of each age that the rounds have taken, by kind."""
    last_ages: list[float] | None = None
    """Median, lowest and highest age of the messages that the last round took."""

    def state_dict(self) -> dict[str, Any]:
        return {**vars(self), "outcomes": vars(self.outcomes)}

    @classmethod
    def from_state_dict(cls, state: Mapping[str, Any]) -> Totals:
        return cls(**{**state, "outcomes": Outcomes(**state["outcomes"])})

    def add(self, record: RoundRecord) -> None:
        for total, counts in ((self.sent, record.sent), (self.received, record.received)):
            add_counts(total, counts)
        for sums, values in ((self.seconds, record.seconds), (self.cost, record.cost)):
            for name, value in values.items():
                sums[name] = sums.get(name, 0.0) + value
        self.missing += sum(map(len, record.missing.values()))
        self.note_accuracy(record.evaluations.personal, record.t)
        self.outcomes.add(record.outcomes, record.t)
        self.last_ages = record.age_range()
        for kind, ages in record.ages.items():
            of_kind = self.ages.setdefault(kind, {})
            for age in ages.values():
                of_kind[age] = of_kind.get(age, 0) + 1

    def ended(self) -> tuple[Phase, str]:
        """Return how a peer ends after its last round: "failed", and why, if every result was discarded."""
        failure = self.outcomes.failure()
        return ("failed", failure) if failure else ("finished", "")

    def note_accuracy(self, personal: Evaluation | None, t: int) -> None:
        """Keep the best accuracy, and its round."""
        if personal is not None and (self.best is None or personal.accuracy > self.best):
            self.best, self.best_round = personal.accuracy, t

    def bytes_out(self) -> int:
        return _bytes(self.sent)

    def bytes_in(self) -> int:
        return _bytes(self.received)

    def messages_out(self) -> int:
        return sum(entry[0] for kinds in self.sent.values() for entry in kinds.values())


def add_counts(total: MessageCounts, counts: MessageCounts) -> None:
    for neighbor, kinds in counts.items():
        for kind, entry in kinds.items():
            into = total.setdefault(neighbor, {}).setdefault(kind, [0, 0, 0])
            into[:] = [a + b for a, b in zip(into, entry, strict=True)]


def _bytes(counts: MessageCounts) -> int:
    return sum(entry[1] + entry[2] for kinds in counts.values() for entry in kinds.values())
