"""The records of a run as columns."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean, median, pstdev, quantiles
from typing import Any

from launcher.report.numbers import name, rounded
from p2pfl.run_folder.ages import AgeRange
from p2pfl.run_folder.records import Record

MAX_ROWS = 6_000
"""Rows of peers and rounds that a page holds; of longer runs, rounds are left out evenly."""
MAX_CELLS = 200_000
"""Cells of all matrices of mixing weights that a page holds; likewise."""
MAX_MOMENTS = 300
"""Moments at which means against seconds are shown, likewise."""
PHASES = ("training", "waiting", "queued", "sending", "evaluating")
SENDERS = ("honest neighbors", "attackers")
"""Whose messages are compared with an honest peer's own."""
MAX_TERMS = 24
"""Loss terms that are shown; a method has a few."""


@dataclass
class History:
    """What the peers recorded.

    Attributes:
        peers: ascending ids of those with records.
        rows: a row for each peer and round, by peer: ``peer``, ``t``, ``accuracy`` (None if not evaluated), ``bytes``
            (sent so far, with headers), ``seconds`` (since the start), ``training`` (seconds in this round) and
            ``loss`` by term.
        weights: mixing weights by round and peer: ``weights[t][peer][source]``.
        kinds: by kind of message: messages, payload bytes and header bytes that all peers sent.
        edges: bytes sent, by sender and receiver.
        seconds: by peer and phase; ``other`` is averaging and what else is in no phase.
        cpu: seconds of processors by peer, in its rounds; 0 if they are not recorded.
        missing: messages that did not arrive in time, by receiver and sender.
        peak_age: rounds since each peer's peak model was updated, as last recorded, of methods that have peak models.
        diverged: peers with a loss that was not finite, and the first round of it.
        skipped: what was not used because it had diverged, by peer and kind.
        attackers: the peers that attack; means are of the others.
        neighbors: by kind of message, round, and whether it is of attackers: for each honest peer, the median over
            its neighbors of the distance from its own, and the mean of the fraction that its rule took.
        ages: messages of each age that the peers took, by kind of message and round, if rounds do not wait.
    """

    peers: list[int] = field(default_factory=list)
    rows: list[dict[str, Any]] = field(default_factory=list)
    weights: dict[int, dict[int, dict[int, float]]] = field(default_factory=lambda: defaultdict(dict))
    kinds: dict[str, list[float]] = field(default_factory=dict)
    edges: dict[tuple[int, int], float] = field(default_factory=lambda: defaultdict(float))
    seconds: dict[int, dict[str, float]] = field(default_factory=dict)
    cpu: dict[int, float] = field(default_factory=dict)
    missing: dict[tuple[int, int], int] = field(default_factory=lambda: defaultdict(int))
    peak_age: dict[int, float] = field(default_factory=dict)
    diverged: dict[int, int] = field(default_factory=dict)
    skipped: dict[int, dict[str, int]] = field(default_factory=dict)
    attackers: Collection[int] = ()
    neighbors: dict[tuple[str, int, bool], list[tuple[float, float]]] = field(
        default_factory=lambda: defaultdict(list)
    )
    ages: dict[tuple[str, int], Counter[int]] = field(default_factory=lambda: defaultdict(Counter))

    @property
    def honest(self) -> list[int]:
        return [peer for peer in self.peers if peer not in self.attackers]

    @property
    def rounds(self) -> list[int]:
        return sorted({row["t"] for row in self.rows})

    @property
    def terms(self) -> list[str]:
        """The names of the terms of the loss, in the order of the records."""
        return list(dict.fromkeys(term for row in self.rows for term in row["loss"]))[:MAX_TERMS]


def read(records: Iterable[Record], attackers: Collection[int] = ()) -> History:
    """Read the records of all peers, each peer's in the order of its rounds."""
    history = History(attackers=attackers)
    sent: dict[int, int] = defaultdict(int)
    for record in records:
        peer, t = record.peer, record.t
        seconds = record.numbers("seconds")
        _add_seconds(history, peer, seconds)
        for receiver, kind, counts in record.traffic():
            into = history.kinds.setdefault(name(kind), [0.0, 0.0, 0.0])
            into[:] = [a + b for a, b in zip(into, counts, strict=True)]
            history.edges[peer, receiver] += counts[1] + counts[2]
        sent[peer] += record.bytes_sent
        for sender in record.missing:
            history.missing[peer, sender] += 1
        losses = {name(term): value for term, value in record.loss.items()}
        if None in losses.values():
            history.diverged.setdefault(peer, t)
        for what, count in record.numbers("skipped").items():
            skipped = history.skipped.setdefault(peer, {})
            skipped[name(what)] = skipped.get(name(what), 0) + int(count)
        if (age := record.numbers("diagnostics").get("peak_age")) is not None:
            history.peak_age[peer] = age
        history.cpu[peer] = history.cpu.get(peer, 0.0) + record.numbers("cost").get("cpu_seconds", 0.0)
        row = {"peer": peer, "t": t, "accuracy": record.accuracy, "training": seconds.get("training", 0.0)}
        history.rows.append(row | {"bytes": sent[peer], "seconds": record.elapsed, "loss": losses})
        if record.weights:
            history.weights[t][peer] = record.weights
        if peer not in attackers:
            _add_neighbors(history, record)
        for kind, ages_of_kind in record.ages.items():
            history.ages[name(kind), t].update(ages_of_kind)
    history.peers = sorted({row["peer"] for row in history.rows})
    return history


def _add_seconds(history: History, peer: int, seconds: Mapping[str, float]) -> None:
    into = history.seconds.setdefault(peer, dict.fromkeys((*PHASES, "other"), 0.0))
    known = {phase: seconds.get(phase, 0.0) for phase in PHASES}
    for phase, value in known.items():
        into[phase] += value
    into["other"] += max(0.0, seconds.get("total", 0.0) - sum(known.values()))


def _add_neighbors(history: History, record: Record) -> None:
    found: dict[tuple[str, bool], list[tuple[float, float]]] = defaultdict(list)
    for kind, neighbor, distance, taken in record.combined():
        if distance is not None:
            found[name(kind), neighbor in history.attackers].append((distance, taken))
    for (kind, attacks), pairs in found.items():
        middle = median(distance for distance, _ in pairs)
        history.neighbors[kind, record.t, attacks].append((middle, fmean(taken for _, taken in pairs)))


def neighbors(history: History) -> dict[str, list[Any]]:
    """Return quartiles over honest peers of how far their neighbors' messages are, by kind, round and who sent."""
    kept = set(thinned(sorted({t for _, t, _ in history.neighbors}), MAX_ROWS // 10))
    columns = ("kind", "t", "of", "distance", "low", "high", "taken")
    table: dict[str, list[Any]] = {column: [] for column in columns}
    for (kind, t, attacks), pairs in sorted(history.neighbors.items()):
        if t in kept:
            distances = [distance for distance, _ in pairs]
            low, middle, high = quantiles(distances, n=4, method="inclusive") if len(distances) > 1 else distances * 3
            row = (kind, t, SENDERS[attacks], middle, low, high, fmean(fraction for _, fraction in pairs))
            for column, value in zip(columns, row, strict=True):
                table[column].append(rounded(value) if isinstance(value, float) else value)
    return table


def ages(history: History) -> dict[str, list[Any]]:
    """Return median and range of the ages of the messages that all peers took, by kind and round."""
    kept = set(thinned(sorted({t for _, t in history.ages}), MAX_ROWS // 10))
    rows = [(kind, t, *AgeRange.of(counts)) for (kind, t), counts in sorted(history.ages.items()) if t in kept]
    return {column: [row[k] for row in rows] for k, column in enumerate(("kind", "t", "median", "low", "high"))}


def thinned(rounds: Sequence[int], most: int) -> list[int]:
    """Return at most ``most`` of the rounds, evenly, always with the first and the last."""
    if len(rounds) <= most:
        return list(rounds)
    most = max(2, most)
    return [rounds[round(k * (len(rounds) - 1) / (most - 1))] for k in range(most)]


def columns(history: History, groups: Mapping[int, int | None]) -> dict[str, list[Any]]:
    """Return the rows as columns for the page, thinned to MAX_ROWS: rounds without an evaluation first."""
    kept = set(thinned(history.rounds, MAX_ROWS // max(1, len(history.peers))))
    evaluated = sorted({row["t"] for row in history.rows if row["accuracy"] is not None})
    if len(history.rounds) > len(kept):  # those that have an accuracy say more
        kept = {*thinned(evaluated, len(kept) // 2), *thinned(history.rounds, len(kept) // 2)}
    rows = [row for row in history.rows if row["t"] in kept]
    table: dict[str, list[Any]] = {
        "peer": [row["peer"] for row in rows],
        "group": [groups.get(row["peer"]) for row in rows],
        "t": [row["t"] for row in rows],
        "accuracy": [rounded(row["accuracy"]) for row in rows],
        "bytes": [rounded(row["bytes"], 6) for row in rows],
        "seconds": [rounded(row["seconds"]) for row in rows],
    }
    if history.attackers:
        table["attacks"] = [row["peer"] in history.attackers for row in rows]
    for k, term in enumerate(history.terms):
        table[f"loss{k}"] = [rounded(row["loss"].get(term)) for row in rows]
    return table


def means(history: History) -> list[dict[str, float]]:
    """Return for each evaluated round mean and standard deviation over honest peers, and mean bytes and seconds.

    Only rounds count that at least half of these peers have evaluated: the mean over a few would jump.
    """
    by_round: dict[int, list[dict[str, Any]]] = defaultdict(list)
    for row in history.rows:
        if row["accuracy"] is not None and row["peer"] not in history.attackers:
            by_round[row["t"]].append(row)
    return [
        {"t": t, **_spread([row["accuracy"] for row in rows])}
        | {key: fmean(row[key] for row in rows) for key in ("bytes", "seconds")}
        for t, rows in sorted(by_round.items())
        if 2 * len(rows) >= len(history.honest)
    ]


def means_over_time(history: History) -> list[dict[str, float]]:
    """Return mean and standard deviation over honest peers of their last evaluations, by seconds since the start.

    They begin at the moment at which each of these peers has had one; peers may be in different rounds.
    """
    by_moment: dict[float, dict[int, float]] = defaultdict(dict)
    for row in history.rows:
        if row["accuracy"] is not None and row["peer"] not in history.attackers:
            by_moment[row["seconds"]][row["peer"]] = row["accuracy"]
    peers = {peer for found in by_moment.values() for peer in found}
    kept = set(thinned(range(len(by_moment)), MAX_MOMENTS))
    last: dict[int, float] = {}
    rows = []
    for k, (seconds, found) in enumerate(sorted(by_moment.items())):
        last |= found
        if k in kept and len(last) == len(peers):
            rows.append({"seconds": seconds, **_spread(list(last.values()))})
    return rows


def _spread(accuracies: Sequence[float]) -> dict[str, float]:
    mean, std = fmean(accuracies), pstdev(accuracies)
    return {"mean": mean, "low": max(0.0, mean - std), "high": min(1.0, mean + std), "std": std}


def frames(history: History, order: Sequence[int]) -> list[dict[str, Any]]:
    """Return the matrices of mixing weights, in thousandths, for rows and columns in ``order``.

    Returns:
        ``{"t": round, "cells": [...]}`` for at most as many rounds as MAX_CELLS allows; -1 where a row is unknown.
    """
    kept = thinned(sorted(history.weights), MAX_CELLS // max(1, len(order) ** 2))
    return [{"t": t, "cells": list(_cells(history.weights[t], order))} for t in kept]


def _cells(rows: Mapping[int, Mapping[int, float]], order: Sequence[int]) -> Iterable[int]:
    for peer in order:
        row = rows.get(peer)
        for source in order:
            weight = None if row is None else row.get(source, 0.0)
            yield -1 if weight is None else round(1000 * max(0.0, min(1.0, weight)))
