"""Accuracy over rounds, bytes and seconds, from the records of a run."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from p2pfl import PeerId
from p2pfl.attackers import attacks
from p2pfl.run_folder import records
from p2pfl.run_folder.folder import RunFolder


@dataclass(frozen=True)
class CurvePoint:
    """The state of a run after a round in which peers were evaluated.

    Attributes:
        rounds: completed rounds.
        accuracy: mean over the honest peers of their last evaluation.
        bytes_sent: by all peers so far, with headers.
        seconds: since the start, of the slowest peer.
    """

    rounds: int
    accuracy: float
    bytes_sent: int
    seconds: float


@dataclass(frozen=True)
class Curves:
    """The accuracy of a run over rounds, by its records.

    Attributes:
        rounds: by round.
        times: seconds since the start at which a peer was evaluated, and the mean over the honest peers of their last
            evaluation then, from the moment on at which each has had one: peers may be in different rounds.
    """

    rounds: list[CurvePoint]
    times: list[tuple[float, float]]


def curves(folder: RunFolder, masked: bool) -> Curves:
    """Return the curves of a run; ``masked``: only the scores of local classes count."""
    # Not whole records: with many neighbors they are large.
    rounds: dict[int, list[tuple[PeerId, int, float, float | None]]] = defaultdict(list)
    attackers = attacks(folder.settings)
    for record in records.read(folder):
        accuracy = None if record.peer in attackers else record.accuracy_with(masked=masked)
        rounds[record.t].append((record.peer, record.bytes_sent, record.elapsed, accuracy))
    points = []
    accuracies: dict[PeerId, float] = {}
    total, seconds = 0, 0.0
    for t in sorted(rounds):
        for peer, sent, elapsed, accuracy in rounds[t]:
            total += sent
            seconds = max(seconds, elapsed)
            if accuracy is not None:
                accuracies[peer] = accuracy
        if any(accuracy is not None for *_, accuracy in rounds[t]):
            points.append(CurvePoint(t + 1, fmean(accuracies.values()), total, seconds))
    return Curves(points, _by_time(rounds, set(accuracies)))


def _by_time(
    rounds: Mapping[int, Sequence[tuple[PeerId, int, float, float | None]]], evaluated: Collection[PeerId]
) -> list[tuple[float, float]]:
    """Return ``Curves.times``, given the rounds, each with peers, bytes, seconds and accuracies."""
    found = ((elapsed, peer, accuracy) for of in rounds.values() for peer, _, elapsed, accuracy in of)
    last: dict[PeerId, float] = {}
    times = []
    for elapsed, peer, accuracy in sorted((at, peer, value) for at, peer, value in found if value is not None):
        last[peer] = accuracy
        if len(last) == len(evaluated):
            times.append((elapsed, fmean(last.values())))
    return times


def at_bytes(points: Sequence[CurvePoint], budget: float) -> float | None:
    """Return the accuracy of the last evaluation before more than ``budget`` bytes were sent; None before any."""
    return next((point.accuracy for point in reversed(points) if point.bytes_sent <= budget), None)


def at_seconds(times: Sequence[tuple[float, float]], budget: float) -> float | None:
    """Return the accuracy of the last evaluation within ``budget`` seconds; None before any."""
    return next((accuracy for seconds, accuracy in reversed(times) if seconds <= budget), None)


def seconds_to(times: Sequence[tuple[float, float]], target: float) -> float | None:
    """Return after how many seconds the accuracy has first reached ``target``; None if it never has."""
    return next((seconds for seconds, accuracy in times if accuracy >= target), None)


def rounds_to(points: Sequence[CurvePoint], target: float) -> int | None:
    """Return after how many rounds the accuracy has first reached ``target``; None if it never has."""
    return next((point.rounds for point in points if point.accuracy >= target), None)
