"""The figures that DFML's claims are about, computed of one seed's runs. Rounds count from 1."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from statistics import fmean

from benchmarks.claims.summary import Summary

MAXIMA = (5, 15, 30, 50, 75, 105)
"""Rounds in which α is α_max: the ends of periods of 5, 10, … and 30 rounds."""


def series(run: Summary) -> str:
    """Name the curve by which the paper compares: peak models, where the method has them."""
    return "peak" if "peak" in run.curves else "accuracy"


def final(run: Summary) -> float:
    """Accuracy after the last round."""
    return run.last(series(run))


def local(run: Summary) -> float:
    """Local accuracy after the last round: on the peer's validation samples."""
    return run.last("peak_local" if "peak_local" in run.curves else "local")


def area(run: Summary, curve: str = "") -> float:
    """Mean accuracy over rounds 10, 20, … and 100: how fast a run learns."""
    return fmean(run.at(t, curve or series(run)) for t in range(10, 101, 10))


def by_network(run: Summary, networks: int) -> list[float]:
    """Accuracy of the regular models after the last round, by network: peer i has number i modulo ``networks``."""
    return [fmean(run.accuracies[n::networks]) for n in range(networks)]


def least_gain(one: Summary, other: Summary, networks: int) -> float:
    """The difference of accuracies of the network that gains least."""
    pairs = zip(by_network(one, networks), by_network(other, networks), strict=True)
    return min(mine - theirs for mine, theirs in pairs)


def gain(runs: Mapping[str, Summary], data: str) -> float:
    """DFML's last accuracy minus that of decentralized FedAvg, on the same data."""
    return final(runs[f"dfml{data}"]) - final(runs[f"fedavg-dec{data}"])


def loss(runs: Mapping[str, Summary], method: str) -> float:
    """What a method's last accuracy loses where the peers' networks differ."""
    return final(runs[f"{method}, one network"]) - final(runs[method])


def loses_more(method: str) -> Callable[[Mapping[str, Summary]], float]:
    """What ``method`` loses where the peers' networks differ, minus what DFML loses."""
    return lambda runs: loss(runs, method) - loss(runs, "dfml")


def times_as_fast(runs: Mapping[str, Summary]) -> float:
    """Rounds of the run without distillation, by those until DFML reaches its last accuracy, in steps of five.

    If DFML never does, the rounds until the other reaches DFML's last accuracy, by DFML's: less than 1.
    """
    rounds = float(MAXIMA[-1])
    reached = runs["dfml"].first_to_reach(final(runs["α = 0"]), "peak")
    if reached <= rounds:
        return rounds / reached
    return runs["α = 0"].first_to_reach(final(runs["dfml"]), "peak") / rounds


def rounds_saved(runs: Mapping[str, Summary]) -> float:
    """Rounds, in steps of five, until the peak models reach the baseline's last accuracy; 200 if they never do."""
    return min(200.0, runs["dfml"].first_to_reach(runs["fedavg-dec"].last(), "peak"))


def rise(runs: Mapping[str, Summary]) -> float:
    """Regular models: accuracy at the maxima of α minus that where α is below a half, from the second period on."""
    return fmean(runs["dfml"].at(t) for t in MAXIMA[1:]) - _where(runs["dfml"], lambda alpha: alpha < 0.5)


def swing(runs: Mapping[str, Summary]) -> float:
    """Regular models: accuracy where α is above 0.8 minus that where it is below 0.2, from the second period on."""
    (run,) = runs.values()
    return _where(run, lambda alpha: alpha > 0.8) - _where(run, lambda alpha: alpha < 0.2)


def _where(run: Summary, inside: Callable[[float], bool]) -> float:
    alpha = dict(run.curves["alpha"])
    return fmean(value for t, value in run.curves["accuracy"] if t > MAXIMA[0] and inside(alpha[t]))


def keep(runs: Mapping[str, Summary]) -> float:
    """Peak models minus regular ones, in the rounds between the last two maxima of α."""
    found = runs["dfml"]
    between = [t for t, _ in found.curves["peak"] if MAXIMA[-2] < t < MAXIMA[-1]]
    return fmean(found.at(t, "peak") - found.at(t) for t in between)
