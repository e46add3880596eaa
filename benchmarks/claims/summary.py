"""Execute a run, and keep of it what figures and curves are computed of: plain values that fit a line of JSON.

Accuracies are percentages, with all classes' scores counted unless they are called masked. Curves are by number of
completed rounds:

    accuracy, masked      mean over peers of the personal accuracy
    pooled                Σ correct / Σ samples over the peers
    worst                 mean over the worst tenth of the peers
    peak, global, …       mean of the algorithm's extra metrics, and of the accuracy on the whole test set
    inside, across, itself, right
                          mean mixing weight of another peer of the same group, of a peer of another group, and of the
                          peer itself; percentage of the peers whose largest weights are those of their group
    sent KIND             messages of that kind that all peers sent in that round
    alpha, margin, …      mean of the algorithm's diagnostics
"""

from __future__ import annotations

import gc
import json
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

import p2pfl
from p2pfl.api import PlannedRun, RecordedRun
from p2pfl.errors import RunFailed

PLUGIN = Path(__file__).with_name("claim_data.py")
TRAINING_QUARTER = 0.75

Curve = list[tuple[int, float]]
Records = list[list[dict[str, Any]]]


@dataclass
class Summary:
    """What is kept of a run.

    Attributes:
        accuracies: last personal accuracy, by peer.
        best: mean over peers of the best personal accuracy.
        curves: {name: [[completed rounds, value], …]}.
        classes: local classes, by peer.
        weights: last mixing weights, by peer.
        messages: {kind: [messages, payload bytes]} of all peers.
        samples: mean number of training samples of a peer.
        epochs: mean number of epochs that a peer trained locally.
        probe: additional measurements.
    """

    accuracies: list[float]
    best: float
    curves: dict[str, Curve]
    classes: list[list[int]]
    weights: list[dict[str, float]]
    messages: dict[str, list[int]]
    samples: float
    epochs: float
    probe: dict[str, float] = field(default_factory=dict)

    def last(self, curve: str = "accuracy") -> float:
        """The curve's last value."""
        return self.curves[curve][-1][1]

    def settled(self, curve: str = "accuracy", until: int | None = None) -> float:
        """Mean of the curve over the last quarter of the rounds, or of the first ``until``."""
        end = until or self.curves[curve][-1][0]
        return fmean(value for t, value in self.curves[curve] if TRAINING_QUARTER * end < t <= end)

    def mean(self, curve: str = "accuracy") -> float:
        """Mean of the curve over all evaluated rounds: how fast a run learns."""
        return fmean(value for _, value in self.curves[curve])

    def highest(self, curve: str = "accuracy") -> float:
        """The curve's highest value: the best evaluated round of all peers together."""
        return max(value for _, value in self.curves[curve])

    def at(self, rounds: int, curve: str = "accuracy") -> float:
        """The curve's value after so many rounds. Raises KeyError if it was not evaluated then."""
        return {t: value for t, value in self.curves[curve]}[rounds]  # noqa: C416  # lists, when read from the store

    def first_to_reach(self, goal: float, curve: str) -> float:
        """Completed rounds when the curve first reached the goal; infinity if never."""
        return min((float(t) for t, value in self.curves[curve] if value >= goal), default=float("inf"))

    def to_dict(self) -> dict[str, Any]:
        plain: dict[str, Any] = json.loads(json.dumps(asdict(self)), parse_float=lambda text: round(float(text), 6))
        return plain


def planned(tree: Mapping[str, Any]) -> PlannedRun:
    """Check a run file of a claim, whose datasets may come from the plug-in. Raises RunFileError."""
    named = json.dumps(tree["data"]["dataset"])
    plugins = [str(PLUGIN)] if "cifar10-part" in named or "held-out" in named else []
    return p2pfl.load({"name": "claim", "device": "cpu", "plugins": plugins, **tree})


def executed(tree: Mapping[str, Any], probe: str = "", *, sockets: bool = False) -> Summary:
    """Execute a run and summarize it.

    Args:
        sockets: each peer is a process, as in `p2pfl launch`; otherwise all are in this one. On the CPU the records
            are the same, bit for bit.

    Raises:
        RunFailed: a peer failed, or somebody stopped the run.
    """
    from benchmarks.claims.probes import PROBES

    with tempfile.TemporaryDirectory(prefix="p2pfl-claim-") as scratch:
        if probe:
            tree = PROBES[probe].before(tree, Path(scratch))
        run = planned(tree)
        if sockets:
            with run.launch(Path(scratch, "run")) as launched:
                done = launched.wait()
        else:
            done = run.simulate(Path(scratch, "run"))
            gc.collect()  # sessions are reference cycles that hold models
        ended = [result.phase for result in done.results()]
        if ended != ["finished"] * run.settings["peers"]:
            raise RunFailed(f"not all peers have finished: {', '.join(ended)}")
        summary = summarize(done)
        if probe:
            summary.probe = dict(PROBES[probe].after(done))
    return summary


def records_by_peer(done: RecordedRun) -> Records:
    """Return the records of each peer's rounds."""
    return [list(records) for _, records in groupby(done.records(), itemgetter("peer"))]


def summarize(done: RecordedRun) -> Summary:
    dataset, subsets, results, records = done.dataset(), done.partition(), done.results(), records_by_peer(done)
    local_epochs = done.plan().settings["algorithm"].get("local_epochs") or 1
    sent: dict[str, list[int]] = {}
    for result in results:
        for kinds in result.sent.values():
            for kind, (messages, payload, *_) in kinds.items():
                counts = sent.setdefault(kind, [0, 0])
                counts[0] += messages
                counts[1] += payload
    labels = [(dataset.pool if subset.merged else dataset.train).labels for subset in subsets]
    return Summary(
        accuracies=[100.0 * result.accuracy for result in results if result.accuracy is not None],
        best=100.0 * fmean(result.best or 0.0 for result in results),
        curves=dict(_curves(records, [result.group for result in results])),
        classes=[np.unique(all_[subset.train]).tolist() for all_, subset in zip(labels, subsets, strict=True)],
        weights=[dict(result.weights or {}) for result in results],
        messages=sent,
        samples=fmean(len(subset.train) for subset in subsets),
        epochs=local_epochs * fmean(sum(bool(record["loss"]) for record in of_peer) for of_peer in records),
    )


def _curves(by_peer: Records, groups: Sequence[int | None]) -> Iterator[tuple[str, Curve]]:
    rounds = list(enumerate(zip(*by_peer, strict=True), start=1))
    scored = [(t, records) for t, records in rounds if all(record["personal"] for record in records)]
    personal = [(t, [record["personal"] for record in records]) for t, records in scored]
    yield "accuracy", [(t, _mean(found, "unmasked_accuracy")) for t, found in personal]
    yield "masked", [(t, _mean(found, "masked_accuracy")) for t, found in personal]
    pooled = [(t, sum(_column(found, "correct")) / sum(_column(found, "samples"))) for t, found in personal]
    yield "pooled", [(t, 100.0 * accuracy) for t, accuracy in pooled]
    yield "worst", [(t, _worst_tenth(_column(found, "unmasked_accuracy"))) for t, found in personal]
    if scored and all(record["global"] for record in scored[-1][1]):
        yield "global", [(t, _mean([record["global"] for record in records], "accuracy")) for t, records in scored]
    extra = [(t, _extra(records)) for t, records in scored]
    for name in extra[-1][1] if extra else ():
        yield name, [(t, found[name]) for t, found in extra]
    for name in rounds[-1][1][0]["diagnostics"]:
        values = ((t, [record["diagnostics"].get(name) for record in records]) for t, records in rounds)
        yield name, [(t, fmean(found)) for t, found in values if None not in found]
    kinds = {kind for records in by_peer for record in records for sent in record["sent"].values() for kind in sent}
    for kind in sorted(kinds):
        yield (
            f"sent {kind}",
            [(t, float(sum(_messages(record, kind) for record in records))) for t, records in rounds],
        )
    if len(set(groups)) > 1:
        by_round = [(t, _weights(groups, records)) for t, records in rounds if all(r["weights"] for r in records)]
        for name in by_round[-1][1] if by_round else ():
            yield name, [(t, found[name]) for t, found in by_round if name in found]


def _column(evaluations: Sequence[Mapping[str, Any]], name: str) -> list[float]:
    return [evaluation[name] for evaluation in evaluations]


def _mean(evaluations: Sequence[Mapping[str, Any]], name: str) -> float:
    return 100.0 * fmean(_column(evaluations, name))


def _worst_tenth(accuracies: Sequence[float]) -> float:
    return 100.0 * fmean(sorted(accuracies)[: max(1, len(accuracies) // 10)])


def _extra(records: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Average each extra metric over its parts ("generalization, style 0") and the peers that have it."""
    found: dict[str, list[float]] = {}
    for record in records:
        for name, evaluation in record["extra_metrics"].items():
            found.setdefault(name.partition(",")[0], []).append(100.0 * evaluation["accuracy"])
    return {name: fmean(accuracies) for name, accuracies in found.items()}


def _messages(record: Mapping[str, Any], kind: str) -> int:
    return sum(kinds.get(kind, [0])[0] for kinds in record["sent"].values())


def _weights(groups: Sequence[int | None], records: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    inside, across, itself, right = [], [], [], []
    for i, record in enumerate(records):
        w = {int(j): weight for j, weight in record["weights"].items()}
        mine = {j for j in range(len(groups)) if groups[j] == groups[i]}
        itself.append(w.get(i, 0.0))
        inside += [w.get(j, 0.0) for j in mine - {i}]
        across += [w.get(j, 0.0) for j in range(len(groups)) if j not in mine]
        right.append(set(sorted(w, key=lambda j: -w[j])[: len(mine)]) == mine)
    found = {"across": fmean(across), "itself": fmean(itself), "right": 100.0 * fmean(right)}
    return {**found, **({"inside": fmean(inside)} if inside else {})}
