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
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from p2pfl.api import PlannedRun
from p2pfl.errors import RunFailed
from p2pfl.run_file.load import from_dict
from p2pfl.run_file.run import Run
from p2pfl.run_folder.folder import Result, RunFolder
from p2pfl.session import checkpoint, metrics
from p2pfl.session.build import load_data
from p2pfl.simulation.simulate import simulate

RUN_ID = "0" * 16
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


@dataclass(frozen=True)
class Finished:
    """A finished run, with its files."""

    run: Run
    results: Sequence[Result]
    records: Records
    folder: RunFolder

    def state(self, peer: int) -> dict[str, Any]:
        """Return the algorithm's state after the last round."""
        saved = checkpoint.load(self.folder.peer(peer).checkpoint, self.folder.info["id"], peer)
        assert saved is not None
        state: dict[str, Any] = saved["algorithm"]
        return state


def run_of(tree: Mapping[str, Any]) -> Run:
    """Check a run file of a claim, whose datasets may be those of the plug-in. Raises RunFileError."""
    named = json.dumps(tree["data"]["dataset"])
    plugins = [str(PLUGIN)] if "cifar10-part" in named or "held-out" in named else []
    return from_dict({"name": "claim", "device": "cpu", "plugins": plugins, **tree})


def simulate_in(run: Run, scratch: Path) -> Finished:
    """Simulate a run, on the device that it names, with its files in an empty folder."""
    folder = RunFolder.create(scratch / "run", range(run.peers))
    folder.write_info({"id": RUN_ID})
    folder.run_file.write_text(run.to_yaml(), encoding="utf-8")
    results = simulate(run, folder)
    gc.collect()  # sessions are reference cycles that hold models
    return Finished(run, results, [metrics.read(peer.metrics) for peer in folder.peers()], folder)


def launch_in(run: Run, scratch: Path) -> Finished:
    """As ``simulate_in``, with a process for each peer: on the CPU the same records, bit for bit.

    Raises:
        RunFailed: a peer failed, or somebody stopped the run.
    """
    with PlannedRun(run).launch(scratch / "run") as launched:
        results = launched.wait().results()
    ended = [result.phase for result in results]
    if ended != ["finished"] * run.peers:
        raise RunFailed(f"not all {run.peers} peers have finished: {', '.join(ended)}")
    folder = RunFolder.open(scratch / "run")
    return Finished(run, results, [metrics.read(peer.metrics) for peer in folder.peers()], folder)


def executed(tree: Mapping[str, Any], probe: str = "", *, sockets: bool = False) -> Summary:
    """Execute a run and summarize it.

    Args:
        sockets: each peer is a process, as in `p2pfl launch`; otherwise all are in this one.
    """
    from benchmarks.claims.probes import PROBES

    with tempfile.TemporaryDirectory(prefix="p2pfl-claim-") as scratch:
        if probe:
            tree = PROBES[probe].before(tree, Path(scratch))
        done = (launch_in if sockets else simulate_in)(run_of(tree), Path(scratch))
        summary = summarize(done)
        if probe:
            summary.probe = dict(PROBES[probe].after(done))
    return summary


def summarize(done: Finished) -> Summary:
    dataset, subsets = load_data(done.run)
    local_epochs = getattr(done.run.hyper, "local_epochs", None) or 1
    sent: dict[str, list[int]] = {}
    for result in done.results:
        for kinds in result.sent.values():
            for kind, (messages, payload, *_) in kinds.items():
                counts = sent.setdefault(kind, [0, 0])
                counts[0] += messages
                counts[1] += payload
    labels = [(dataset.pool if subset.merged else dataset.train).labels for subset in subsets]
    return Summary(
        accuracies=[100.0 * result.accuracy for result in done.results if result.accuracy is not None],
        best=100.0 * fmean(result.best or 0.0 for result in done.results),
        curves=dict(_curves(done)),
        classes=[np.unique(all_[subset.train]).tolist() for all_, subset in zip(labels, subsets, strict=True)],
        weights=[dict(result.weights or {}) for result in done.results],
        messages=sent,
        samples=fmean(len(subset.train) for subset in subsets),
        epochs=local_epochs * fmean(sum(bool(record["loss"]) for record in records) for records in done.records),
    )


def _curves(done: Finished) -> Iterator[tuple[str, Curve]]:
    rounds = list(enumerate(zip(*done.records, strict=True), start=1))
    scored = [(t, records) for t, records in rounds if all(record["personal"] for record in records)]
    personal = [(t, [record["personal"] for record in records]) for t, records in scored]
    yield "accuracy", [(t, _mean(found, "unmasked_accuracy")) for t, found in personal]
    yield "masked", [(t, _mean(found, "masked_accuracy")) for t, found in personal]
    yield (
        "pooled",
        [(t, 100.0 * sum(_column(found, "correct")) / sum(_column(found, "samples"))) for t, found in personal],
    )
    yield "worst", [(t, _worst_tenth(_column(found, "unmasked_accuracy"))) for t, found in personal]
    if scored and all(record["global"] for record in scored[-1][1]):
        yield "global", [(t, _mean([record["global"] for record in records], "accuracy")) for t, records in scored]
    extra = [(t, _extra(records)) for t, records in scored]
    for name in extra[-1][1] if extra else ():
        yield name, [(t, found[name]) for t, found in extra]
    for name in rounds[-1][1][0]["diagnostics"]:
        values = ((t, [record["diagnostics"].get(name) for record in records]) for t, records in rounds)
        yield name, [(t, fmean(found)) for t, found in values if None not in found]
    for kind in sorted({kind for result in done.results for kinds in result.sent.values() for kind in kinds}):
        yield (
            f"sent {kind}",
            [(t, float(sum(_messages(record, kind) for record in records))) for t, records in rounds],
        )
    groups = [result.group for result in done.results]
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


def _weights(groups: Sequence[int], records: Sequence[Mapping[str, Any]]) -> dict[str, float]:
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
