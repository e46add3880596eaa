"""The summary of a run, and its file, summary.json:

    {"name": "mesh20", "algorithm": "mapl", "seed": 0, "rounds": 60, "started": "2026-11-21T09:30:00+00:00",
     "run": "<folder>", "seconds": 93.1,        from the request for the peers to the last exit (*); null if unknown
     "finished": true,                          all peers finished
     "parts": [[0, 1, 2], [4, 5]] | null,       components of the graph without unfinished peers, if it has more now
     "masked_test": false,                      which of the two accuracies below ``accuracy`` and ``best`` are
     "peers": [{"peer": 3, "model": "…", "group": 1, "rounds_done": 60, "digest": "…",
                "accuracy": 0.97, "best": 0.98, "best_round": 41, "global_accuracy": null,
                "bytes_out": 81234, "bytes_in": 81234, "messages_out": 1140, "missing": 0,
                "dropped": {"7": 2}, "expired": 0, "skipped": {"trainings": 1},       as in result.json
                "tested_on": {"dataset": "…", "samples": "…", "classes": "…"},   hashes, as in status.json
                "seconds": 80.2, "cost": {"cpu_seconds": 21.5}, "ended": "finished", "log": "<path>"}, …],
     "accuracy": {"mean": …, "std": …, "worst_tenth": …, "worst_fifth": …} | null,   over the peers that have one
     "best": …, "global_accuracy": …,           likewise
     "metrics": {"macro-f1": {"mean": …, "std": …, "lowest": …, "highest": …}, …},   those that the run file names
     "nonfinite_metrics": {"macro-f1": [3, 5], …},           the peers where it is NaN or infinite
     "extra_metrics": {"peak": {"mean": …, …}, …},           additional evaluations of the algorithm, likewise
     "masked_accuracies": {"personal": {"mean": …, …}, "peak": …},     only scores of each peer's local classes count
     "unmasked_accuracies": {"personal": {"mean": …, …}, "peak": …},   scores of all classes count
     "weighted_accuracy": 0.96 | null,          correct predictions of all peers / test samples of all peers
     "cost": {"cpu_seconds": 430.1, "cpu_joules": …},    sums over the peers; see p2pfl/session/cost.py
     "statistics": "local" | "averaged" | …,    what becomes of batch-normalization statistics; "" without any
     "ages": {"Parameters": {"median": 0, "lowest": -4, "highest": 9}},   of the messages that all rounds of all
                                                peers took, in rounds; if rounds do not wait for one another
     "traffic": {"Prototypes": {"messages": …, "payload": …, "header": …}, …},     bytes sent by kind
     "collaboration": {"peers": [0, 2, …], "groups": [0, 0, …], "weights": [[…], …],
                       "inside": …, "across": …, "ratio": …} | null,
     "attackers": {"attacks": {"3": "sign-flip"}, "accuracy": {…} | null,       if peers attack
                   "weight": 0.01 | null, "honest_weight": 0.05 | null},
     "clock": "simulated",                      if ``seconds`` are simulated: those of the slowest peer
     "trained": false}                          if the run file leaves training out: then there are no accuracies

(*) For a resumed run: the sum over its parts, at least the time of the slowest peer, since launchers that were killed
did not record theirs.

``std`` is the population standard deviation. ``worst_tenth`` and ``worst_fifth`` are the means over the tenth and the
fifth of the peers (at least one) with the lowest values. ``collaboration.weights[a][b]`` is the mixing weight that
the a-th of ``collaboration.peers`` gives to the b-th, 0 if that is not its neighbor; peers are ordered by group.
``inside`` and ``across`` are mean weights over ordered pairs of different peers of the same group and of different
groups; null if there is no such pair. Of more than 1,000 peers, there is no such matrix.

If peers attack (p2pfl/attackers.py), all means and what else describes several peers' results are of
honest peers; only ``cost``, ``traffic`` and ``collaboration.weights`` are of all. ``attackers`` has the attack of
each attacker, the accuracy of their models, and the mean weights that honest peers give to them and to each other.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from statistics import fmean
from typing import TYPE_CHECKING, Any

from launcher.facts.processes import RUNNING, is_alive, outcome
from launcher.facts.spreads import MetricSpread, Spread, metric_spreads, nonfinite_metrics, spreads
from p2pfl import PeerId
from p2pfl.attackers import attacks
from p2pfl.errors import RunFolderError, WriteError
from p2pfl.run_folder.ages import AgeRange
from p2pfl.run_folder.files import read_json, write_json
from p2pfl.run_folder.folder import PeerFolder, Result, RunFolder, Status

if TYPE_CHECKING:
    from p2pfl.messaging.topology import Topology


@dataclass(frozen=True)
class PeerSummary:
    """The summary of one peer."""

    peer: PeerId
    model: str
    group: int | None
    rounds_done: int
    digest: str
    accuracy: float | None
    best: float | None
    best_round: int | None
    global_accuracy: float | None
    bytes_out: int
    bytes_in: int
    messages_out: int
    missing: int
    dropped: dict[str, int]
    expired: int
    skipped: dict[str, int]
    restarts: int
    seconds: float
    cost: dict[str, float]
    ended: str
    log: str
    tested_on: dict[str, str] = field(default_factory=dict)


MOST_WEIGHTED = 1000
"""Peers of which a summary has the matrix of mixing weights, with an entry for each pair."""


@dataclass(frozen=True)
class Collaboration:
    """The matrix of mixing weights, and its mean within and across groups."""

    peers: list[PeerId]
    groups: list[int]
    weights: list[list[float]]
    inside: float | None
    across: float | None
    ratio: float | None

    @classmethod
    def of(cls, results: Iterable[Result], attackers: Collection[PeerId] = ()) -> Collaboration | None:
        """Return the weights of all peers, and their means over honest ones; None without weights, or of too many."""
        results = [result for result in results if result.rounds_done]  # the others have initial weights only
        rows = {result.peer: result.weights for result in results if result.weights is not None}
        if not rows or len(rows) > MOST_WEIGHTED:
            return None
        group = {result.peer: result.group for result in results}
        peers = sorted(rows, key=lambda peer: (group[peer], peer))
        weights = [[rows[i].get(str(j), 0.0) for j in peers] for i in peers]
        honest = [at for at, peer in enumerate(peers) if peer not in attackers]
        pairs = [(i, j) for i in honest for j in honest if i != j]
        same = [weights[i][j] for i, j in pairs if group[peers[i]] == group[peers[j]]]
        other = [weights[i][j] for i, j in pairs if group[peers[i]] != group[peers[j]]]
        inside = fmean(same) if same else None
        across = fmean(other) if other else None
        ratio = inside / across if inside is not None and across else None
        return cls(peers, [group[peer] for peer in peers], weights, inside, across, ratio)


@dataclass(frozen=True)
class Attackers:
    """The peers that attack: the name of each one's attack, the accuracy of their models, honest peers' trust.

    Attributes:
        weight, honest_weight: mean weights that an honest peer gives to an attacker, and to another honest peer; None
            without such pairs, or if the method has no mixing weights.
    """

    attacks: dict[PeerId, str]
    accuracy: Spread | None
    weight: float | None
    honest_weight: float | None

    @classmethod
    def of(
        cls,
        attacks: dict[PeerId, str],
        accuracies: Mapping[PeerId, float | None],
        collaboration: Collaboration | None = None,
    ) -> Attackers | None:
        """Describe the attackers, given the accuracies of all peers; None if nobody attacks."""
        if not attacks:
            return None
        given: dict[bool, list[float]] = {True: [], False: []}
        if collaboration is not None:
            for i, row in zip(collaboration.peers, collaboration.weights, strict=True):
                for j, w in zip(collaboration.peers, row, strict=True):
                    if i not in attacks and i != j:
                        given[j in attacks].append(w)
        weight, honest_weight = (fmean(given[of]) if given[of] else None for of in (True, False))
        return cls(attacks, Spread.of(map(accuracies.get, attacks)), weight, honest_weight)


@dataclass(frozen=True)
class Summary:
    """The summary of a run; see the module docstring."""

    name: str
    algorithm: str
    seed: int
    rounds: int
    started: str
    run: str
    seconds: float | None
    finished: bool
    masked_test: bool
    parts: list[list[PeerId]] | None
    peers: list[PeerSummary]
    accuracy: Spread | None
    best: Spread | None
    global_accuracy: Spread | None
    metrics: dict[str, MetricSpread]
    nonfinite_metrics: dict[str, list[PeerId]]
    extra_metrics: dict[str, Spread]
    masked_accuracies: dict[str, Spread]
    unmasked_accuracies: dict[str, Spread]
    weighted_accuracy: float | None
    cost: dict[str, float]
    traffic: dict[str, dict[str, int]]
    collaboration: Collaboration | None
    statistics: str = ""
    attackers: Attackers | None = None
    clock: str = ""
    trained: bool = True
    ages: dict[str, AgeRange] = field(default_factory=dict)
    unwritten: str = ""
    """Why summary.json could not be written; not part of it."""

    @property
    def attacks(self) -> dict[PeerId, str]:
        """The attack of each attacker, by peer; empty if all are honest."""
        return self.attackers.attacks if self.attackers else {}

    @property
    def honest(self) -> list[PeerSummary]:
        return [peer for peer in self.peers if peer.peer not in self.attacks]

    def to_dict(self) -> dict[str, Any]:
        plain = asdict(self)
        del plain["unwritten"]
        if self.attackers is None:
            del plain["attackers"]
        if not self.clock:
            del plain["clock"]
        if self.trained:
            del plain["trained"]
        plain["ages"] = {kind: ages._asdict() for kind, ages in self.ages.items()}
        if not self.ages:
            del plain["ages"]
        return plain


def measured_seconds(folder: RunFolder) -> float | None:
    """Return the duration in summary.json; None if no launcher has measured one."""
    seconds: float | None = (read_json(folder.summary) or {}).get("seconds")
    return seconds


def is_final(folder: RunFolder) -> bool:
    """Return whether all peers had finished when summary.json was written."""
    return bool(written_summary(folder).get("finished"))


def summarize(
    folder: RunFolder,
    exit_codes: Mapping[PeerId, int] | None = None,
    seconds: float | None = None,
    topology: Topology | None = None,
    errors: Mapping[PeerId, str] | None = None,
) -> Summary:
    """Summarize the peers' results and write summary.json.

    A peer whose process lives, because another launcher has started it, has ``ended`` RUNNING.

    Args:
        exit_codes, errors: exit codes of peers and errors that they reported to the launcher, if known.
        seconds: measured duration of the run.
    """
    summary = _with_running(folder, _summary(folder, exit_codes or {}, seconds, errors or {}), "died")
    if topology is not None:
        unfinished = {
            peer.peer for peer in summary.peers if peer.ended != "finished" and peer.rounds_done < summary.rounds
        }
        summary = replace(summary, parts=_parts(topology, unfinished))
    try:
        write_json(folder.summary, summary.to_dict())
    except WriteError as error:
        return replace(summary, unwritten=str(error))
    return summary


def current_summary(folder: RunFolder) -> Summary:
    """Summarize what the peers have achieved so far, whoever started them; write nothing.

    A peer whose process lives has ``ended`` RUNNING.

    Raises:
        RunFolderError: the run file, run.json or a result is damaged.
    """
    seconds = written_summary(folder).get("seconds")
    try:
        summary = _summary(folder, {}, seconds if isinstance(seconds, int | float) else None, {})
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise RunFolderError(f"{folder.root}: damaged: {type(error).__name__}: {error}") from None
    return _with_running(folder, summary, "died", "running on host")


def written_summary(folder: RunFolder) -> dict[str, Any]:
    """Return summary.json; nothing if there is none, or if it is damaged."""
    try:
        return read_json(folder.summary) or {}
    except RunFolderError:
        return {}


def _with_running(folder: RunFolder, summary: Summary, *ended: str) -> Summary:
    """Set ``ended`` to RUNNING for each peer whose process lives although its ``ended`` starts with one of these."""
    peers = [
        replace(peer, ended=RUNNING) if peer.ended.startswith(ended) and is_alive(folder, peer.peer) else peer
        for peer in summary.peers
    ]
    return replace(summary, peers=peers)


def _summary(
    folder: RunFolder, exit_codes: Mapping[PeerId, int], seconds: float | None, errors: Mapping[PeerId, str]
) -> Summary:
    run = folder.settings
    clock = folder.info.get("clock", "")
    if clock:  # the time of the slowest peer, whatever the launcher has measured
        seconds = 0.0
    attackers = attacks(run)
    peer_folders = list(folder.peers())
    found = {files: files.result() for files in peer_folders}
    results = [result for result in found.values() if result is not None]
    honest = [result for result in results if result.peer not in attackers]
    # A peer that died has no result, but its status has what its last evaluation found.
    lost = (files for files, result in found.items() if result is None and files.peer not in attackers)
    others = [status for files in lost if (status := files.status()) is not None]
    masked = [{"personal": status.masked_accuracy} for status in others if status.masked_accuracy is not None]
    unmasked = [{"personal": status.unmasked_accuracy} for status in others if status.unmasked_accuracy is not None]
    peers = [_summarize_peer(files, exit_codes.get(files.peer), errors.get(files.peer, "")) for files in peer_folders]
    honest_peers = [peer for peer in peers if peer.peer not in attackers]
    collaboration = Collaboration.of(results, attackers)
    return Summary(
        name=run["name"],
        algorithm=run["algorithm"]["name"],
        seed=run["seed"],
        rounds=run["rounds"],
        started=folder.info["started"],
        run=str(folder.root),
        seconds=None if seconds is None else max([seconds, *(peer.seconds for peer in peers)]),
        finished=all(peer.ended == "finished" for peer in peers),
        masked_test=bool(run.get("masked_test")),
        parts=None,
        peers=peers,
        accuracy=Spread.of(peer.accuracy for peer in honest_peers),
        best=Spread.of(peer.best for peer in honest_peers),
        global_accuracy=Spread.of(peer.global_accuracy for peer in honest_peers),
        metrics=metric_spreads(result.metrics for result in honest),
        nonfinite_metrics=nonfinite_metrics({result.peer: result.metrics for result in honest}),
        extra_metrics=spreads(result.extra_metrics for result in honest),
        masked_accuracies=spreads([*(result.masked_accuracies for result in honest), *masked]),
        unmasked_accuracies=spreads([*(result.unmasked_accuracies for result in honest), *unmasked]),
        weighted_accuracy=_weighted_accuracy(honest),
        cost=_sums(result.cost for result in results),
        traffic=_traffic(results),
        collaboration=collaboration,
        statistics="; ".join(sorted({result.statistics for result in results if result.statistics})),
        attackers=Attackers.of(attackers, {peer.peer: peer.accuracy for peer in peers}, collaboration),
        clock=clock,
        trained=(run.get("time") or {}).get("train", True),
        ages=_ages(results),
    )


def _parts(topology: Topology, lost: set[PeerId]) -> list[list[PeerId]] | None:
    """Return the components of the graph without the peers ``lost``, if their loss has disconnected it."""
    left = [sorted(set(part) - lost) for part in topology.without(lost).components]
    parts = [part for part in left if part]
    before = [part for part in topology.components if set(part) - lost]
    return parts if len(parts) > len(before) else None


def _summarize_peer(files: PeerFolder, exit_code: int | None, error: str) -> PeerSummary:
    result, known = files.result(), files.status() or Status(files.peer, 0)
    sent, received = (_total(result.sent), _total(result.received)) if result else ([0, 0, 0], [0, 0, 0])
    last = result or known
    return PeerSummary(
        peer=files.peer,
        model=result.model if result else "",
        group=result.group if result else None,
        rounds_done=last.rounds_done,
        digest=result.digest if result else "",
        accuracy=last.accuracy,
        best=result.best if result else None,
        best_round=result.best_round if result else None,
        global_accuracy=result.global_accuracy if result else None,
        bytes_out=sent[1] + sent[2] if result else known.bytes_out,
        bytes_in=received[1] + received[2] if result else known.bytes_in,
        messages_out=sent[0] if result else known.messages_out,
        missing=result.missing if result else 0,
        dropped=result.dropped if result else {},
        expired=result.expired if result else 0,
        skipped=last.skipped,
        restarts=max(known.starts - 1 - known.resumes, 0),
        seconds=result.seconds.get("total", 0.0) if result else 0.0,
        cost=result.cost if result else {},
        ended=outcome(files, exit_code, error),
        log=str(files.log),
        tested_on=last.tested_on,
    )


def _weighted_accuracy(results: Iterable[Result]) -> float | None:
    """Σ correct / Σ samples: each peer weighted by the size of its test split (FedTGP)."""
    counts = [(result.correct, result.samples) for result in results]
    correct, samples = (sum(part) for part in zip(*counts, strict=True)) if counts else (0, 0)
    return correct / samples if samples else None


def _ages(results: Iterable[Result]) -> dict[str, AgeRange]:
    counts: dict[str, Counter[int]] = defaultdict(Counter)
    for result in results:
        for kind, by_age in result.ages.items():
            counts[kind].update({int(age): n for age, n in by_age.items() if age.lstrip("-").isdecimal()})
    return {kind: AgeRange.of(counts[kind]) for kind in sorted(counts) if counts[kind]}


def _sums(costs: Iterable[Mapping[str, float]]) -> dict[str, float]:
    sums: dict[str, float] = defaultdict(float)
    for cost in costs:
        for name, value in cost.items():
            sums[name] += value
    return dict(sums)


def _total(counts: Mapping[str, Mapping[str, list[int]]]) -> list[int]:
    """Return total messages, payload bytes and header bytes."""
    entries = [entry for kinds in counts.values() for entry in kinds.values()]
    return [sum(entry[part] for entry in entries) for part in range(3)]


def _traffic(results: Iterable[Result]) -> dict[str, dict[str, int]]:
    totals: dict[str, list[int]] = defaultdict(lambda: [0, 0, 0])
    for result in results:
        for kinds in result.sent.values():
            for kind, entry in kinds.items():
                totals[kind] = [have + more for have, more in zip(totals[kind], entry, strict=True)]
    return {kind: dict(zip(("messages", "payload", "header"), totals[kind], strict=True)) for kind in sorted(totals)}
