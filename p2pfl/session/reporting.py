"""What a session reports: the status file, log lines of a round, and the result."""

from __future__ import annotations

import asyncio
import logging
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from time import monotonic, perf_counter
from typing import Any

from p2pfl import PeerId
from p2pfl.aggregation.aggregator import Aggregator
from p2pfl.algorithms.base import Algorithm
from p2pfl.errors import WriteError
from p2pfl.messaging.inbox import MessageCounts
from p2pfl.messaging.neighborhood import Neighborhood
from p2pfl.outcomes import MESSAGES
from p2pfl.run_folder.ages import AgeRange
from p2pfl.run_folder.folder import FINAL, PeerFolder, Phase, Result, Status
from p2pfl.run_folder.peer_log import details
from p2pfl.session.evaluation import Evaluations
from p2pfl.session.method_results import weights_of
from p2pfl.session.metrics import RoundRecord, Totals, number
from p2pfl.tensors import statistics_of

STATUS_EVERY = 0.25
"""Minimum seconds between two updates of the status file: phases may last milliseconds."""
STATUS_UPDATES = 50
"""Most updates per second of all peers of a run together, since they may share a host."""
LONGEST = 5.0
"""Seconds after which an update is due however many peers there are."""


class StatusFile:
    """Keeps a peer's status file up to date; without a folder, only the status.

    Args:
        peers: number of peers of the run.
        queues: returns how many messages are unread and undelivered. Asked only when something else has changed.
        live: phases last as long as they seem to. Otherwise, time is simulated: no phase has a beginning that others
            could compare with their clocks, and ``keep_current`` does nothing.
    """

    def __init__(
        self,
        status: Status,
        folder: PeerFolder | None,
        peers: int = 1,
        queues: Callable[[], tuple[int, int]] = lambda: (0, 0),
        live: bool = True,
    ) -> None:
        self.status = status
        self._queues = queues
        self._folder = folder
        self._live = live
        self._every = max(STATUS_EVERY, min(peers / STATUS_UPDATES, LONGEST))
        self._totals = Totals()
        self._counted = -1
        self._waits_for: Callable[[], list[PeerId]] = list
        self._written: Status | None = None
        self._checked_at = -self._every
        self._stale = asyncio.Event()
        """Set while the file may differ from the status."""

    def enter(
        self,
        phase: Phase,
        t: int,
        rounds_done: int,
        evaluations: Evaluations,
        totals: Totals,
        waits_for: Callable[[], list[PeerId]] = list,
    ) -> None:
        """Update the status for a new phase, and write it if an update is due or the phase is final."""
        self.status.phase = phase
        self.status.since = round(monotonic(), 2) if self._live else 0.0
        self.status.t = t
        self.status.rounds_done = rounds_done
        if (personal := evaluations.personal) is not None:
            self.status.accuracy = personal.accuracy
            self.status.masked_accuracy = personal.masked_accuracy
            self.status.unmasked_accuracy = personal.unmasked_accuracy
        self._totals = totals
        self._waits_for = waits_for
        self._stale.set()
        self.write(now=phase in FINAL)

    def write(self, now: bool = False) -> None:
        """Write the status if it has changed, unless less than the minimum time has passed and not ``now``."""
        if self._folder is None or not (now or perf_counter() >= self._checked_at + self._every):
            return
        self._checked_at = perf_counter()
        self.status.waiting_for = self._waits_for()
        if self._counted != self.status.rounds_done:  # a sum over all neighbors, which changes between rounds only
            self._counted = self.status.rounds_done
            self.status.bytes_out, self.status.bytes_in = self._totals.bytes_out(), self._totals.bytes_in()
            self.status.messages_out = self._totals.messages_out()
            self.status.skipped = dict(self._totals.outcomes.skipped)
            self.status.ages = self._totals.last_ages
        if self.status != self._written:
            self.status.unread, self.status.undelivered = self._queues()
            current = replace(self.status)
            try:
                self._folder.write_status(current, in_place=self._written is not None and not now)
            except WriteError:  # only observers need it; try again later
                return
            self._written = current
        if self.status.phase != "waiting":  # in other phases, nothing changes until ``enter`` is called
            self._stale.clear()

    async def keep_current(self) -> None:
        """Write updates that were not due when they happened, for as long as the event loop runs."""
        while self._live and self._folder is not None:
            await self._stale.wait()  # an idle peer does not wake up
            await asyncio.sleep(self._checked_at + self._every - perf_counter())
            self.write()


def log_rule(
    log: logging.Logger, names: Sequence[str], aggregation: Aggregator, neighborhood: Neighborhood, t: int
) -> None:
    """Log a rule in place of the mean, and what it assumes of the contributions of round ``t``."""
    if not aggregation.is_mean:
        n = 1 + len(neighborhood.topology_at(t).sources[neighborhood.me])
        assumed = "".join(f" {key}={value}" for key, value in aggregation.rule.assumed(n).items())
        log.info("aggregation t=%d rule=%s contributions=%d%s", t, ",".join(names), n, assumed)


def log_round(
    log: logging.Logger, record: RoundRecord, best: float | None, nonfinite: Mapping[str, Sequence[PeerId]]
) -> None:
    """Log one line per round, and a warning per kind of message that was missing or diverged."""
    evaluation, seconds = record.evaluations.personal, record.seconds
    accuracy = f" accuracy={evaluation.accuracy:.4f} best={best:.4f}" if evaluation is not None else ""
    more = []
    if record.loss:
        more.append("loss " + " ".join(f"{name}={value:.4f}" for name, value in record.loss.items()))
    if metrics := record.evaluations.metrics:
        named = ((repr(name) if " " in name else name, value) for name, value in metrics.items())
        more.append("metrics " + " ".join(f"{name}={value:.4f}" for name, value in named))
    if record.sources or record.receivers:
        more.append(f"sources={record.sources} receivers={'?' if record.receivers is None else record.receivers}")
    for kind, ages in record.ages.items():
        median, lowest, highest = AgeRange.of(Counter(ages.values()))
        more.append(f"ages of {kind} median={median:g} from={lowest} to={highest}")
    if record.weights:
        largest = sorted(record.weights.items(), key=lambda item: -item[1])[:4]
        more.append("largest weights " + " ".join(f"{j}={weight:.3f}" for j, weight in largest))
    if record.sent:
        entries = [entry for kinds in record.sent.values() for entry in kinds.values()]
        sent_bytes = sum(payload + header for _, payload, header in entries)
        more.append(f"sent messages={sum(entry[0] for entry in entries)} bytes={sent_bytes}")
    durations = f"train={seconds['training']:.2f}s wait={seconds['waiting']:.2f}s"
    log.info("round done t=%d%s %s", record.t, accuracy, durations, extra=details(*more))
    for kind, absent in record.missing.items():
        log.warning("messages missing kind=%s peers=%s t=%d", kind, ",".join(map(str, absent)), record.t)
    for kind, senders in nonfinite.items():
        log.warning("diverged values received kind=%s peers=%s t=%d", kind, ",".join(map(str, senders)), record.t)
    for what, count in record.outcomes.skipped.items():
        if what != MESSAGES:
            log.warning("skipped %s=%d t=%d: %s", what, count, record.t, record.outcomes.why[what])


def log_diverged_loss(log: logging.Logger, record: RoundRecord) -> bool:
    """Log a warning if a term of the training loss is not finite; return whether one is."""
    terms = [name for name, value in record.loss.items() if not math.isfinite(value)]
    if terms:
        log.warning("training loss diverged t=%d terms=%s", record.t, ",".join(terms))
    return bool(terms)


def make_result(
    algorithm: Algorithm[Any],
    phase: Phase,
    error: str,
    *,
    rounds_done: int,
    digest: str,
    evaluations: Evaluations,
    totals: Totals,
    dropped: Mapping[PeerId, int],
    expired: int,
) -> Result:
    """Summarize the run of a peer; ``dropped`` and ``expired`` are counts of its endpoint."""
    try:
        weights = weights_of(algorithm)
    except Exception:
        if phase != "failed":  # otherwise this method may be the reason
            raise
        weights = None
    personal = evaluations.personal
    scored = evaluations.personal_and_extra()
    return Result(
        peer=algorithm.me,
        phase=phase,
        rounds_done=rounds_done,
        digest=digest,
        model=algorithm.model.name,
        group=algorithm.data.group,
        accuracy=personal.accuracy if personal else None,
        loss=number(personal.loss) if personal else None,
        correct=personal.correct if personal else 0,
        samples=personal.samples if personal else 0,
        global_accuracy=evaluations.whole.accuracy if evaluations.whole else None,
        metrics={name: number(value) for name, value in evaluations.metrics.items()},
        extra_metrics={name: evaluation.accuracy for name, evaluation in evaluations.extra.items()},
        masked_accuracies={name: evaluation.masked_accuracy for name, evaluation in scored.items()},
        unmasked_accuracies={name: evaluation.unmasked_accuracy for name, evaluation in scored.items()},
        best=totals.best,
        best_round=totals.best_round,
        sent=_with_string_keys(totals.sent),
        received=_with_string_keys(totals.received),
        weights=None if weights is None else {str(j): weight for j, weight in weights.items()},
        missing=totals.missing,
        skipped_rounds=totals.skipped_rounds,
        skipped=totals.outcomes.skipped,
        dropped={str(neighbor): count for neighbor, count in sorted(dropped.items())},
        expired=expired,
        seconds=totals.seconds,
        cost=totals.cost,
        error=error,
        tested_on=asdict(algorithm.data.tested_on),
        statistics=_norm_statistics(algorithm),
        ages={kind: {str(age): counts[age] for age in sorted(counts)} for kind, counts in totals.ages.items()},
    )


def _norm_statistics(algorithm: Algorithm[Any]) -> str:
    if not any(map(statistics_of, algorithm.modules())):
        return ""
    shared = getattr(algorithm.hyper, "share_statistics", False)
    return algorithm.shared_norm_statistics if shared else algorithm.norm_statistics


def _with_string_keys(counts: MessageCounts) -> dict[str, dict[str, list[int]]]:
    return {str(neighbor): counts[neighbor] for neighbor in sorted(counts)}
