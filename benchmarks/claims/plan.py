"""Which runs a claim still needs, and at which learning rate: pure functions of the claims and the store."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.claims.claim import MOST_SEEDS, Claim, Settings
from benchmarks.claims.store import Store, identity

TUNING_SEED = 1000
"""Seed of the runs that choose a learning rate; test seeds count from 0."""
MOST_BEYOND = 3
"""Learning rates that a grid may get at each of its ends."""
LEAST_GAIN = 0.25
"""Points by which such a rate must be better than the grid's rates, a little less than the standard error of the
accuracies: else a rate that is too high could win by chance, and training would fail with other seeds."""


@dataclass(frozen=True)
class Task:
    """A run to execute.

    Attributes:
        key, seed: where the store keeps it.
        tree: the run file, with its seed.
        probe: additional measurement.
    """

    key: str
    seed: int
    tree: Mapping[str, Any]
    probe: str


def held_out(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Return the run file with a sixth of the training images in place of the test images."""
    dataset = tree["data"]["dataset"]
    return {**tree, "data": {**tree["data"], "dataset": {"name": "held-out", "of": dataset}}}


def tuning(settings: Settings, rates: Sequence[float]) -> Mapping[float, dict[str, Any]]:
    """Return the runs that try these learning rates, by rate."""
    tree = held_out(settings.tree)
    return {rate: {**tree, "algorithm": {**tree["algorithm"], "lr": rate}} for rate in rates}


def _tried(settings: Settings, rates: Sequence[float], store: Store) -> dict[float, float]:
    found = {}
    for rate, tree in tuning(settings, rates).items():
        summary = store.summary(identity(tree).key, TUNING_SEED)
        if summary is not None:
            found[rate] = settings.score(summary)
    return found


def _best(scores: Mapping[float, float], declared: Collection[float]) -> float:
    """Return the best rate, the smaller of equal ones; rates beyond the grid have a handicap."""
    return max(scores, key=lambda rate: (scores[rate] - LEAST_GAIN * (rate not in declared), -rate))


def grid(settings: Settings, store: Store) -> list[float]:
    """Return the learning rates to try, in ascending order.

    An optimum at the end of a grid may lie beyond it. So while the best rate is an end, the grid gets one more there,
    by the ratio of the last two: at most ``MOST_BEYOND`` at each end, which must gain ``LEAST_GAIN``.
    """
    rates = sorted(settings.rates)
    below = above = 0
    while len(rates) > 1:
        found = _tried(settings, rates, store)
        if len(found) < len(rates):
            break
        best = _best(found, settings.rates)
        if best == rates[0] and below < MOST_BEYOND:
            below += 1
            rates.insert(0, float(f"{rates[0] ** 2 / rates[1]:.3g}"))
        elif best == rates[-1] and above < MOST_BEYOND:
            above += 1
            rates.append(float(f"{rates[-1] ** 2 / rates[-2]:.3g}"))
        else:
            break
    return rates


def scores(settings: Settings, store: Store) -> dict[float, float]:
    """Return the accuracies on held-out training images, by learning rate, as far as they were measured."""
    return _tried(settings, grid(settings, store), store)


def chosen(settings: Settings, store: Store) -> float | None:
    """Return the best learning rate of the grid (the smaller of equal ones); None until all were tried."""
    rates = grid(settings, store)
    found = _tried(settings, rates, store)
    return _best(found, settings.rates) if found and len(found) == len(rates) else None


def tasks_of(settings: Settings, seeds: Collection[int], store: Store, device: str) -> list[Task]:
    """Return the runs that are missing: only those that choose the learning rate, while it is not chosen."""
    rate = chosen(settings, store) if settings.rates else None
    if settings.rates and rate is None:
        trees = tuning(settings, grid(settings, store)).values()
        return [task for tree in trees for task in _missing(tree, [TUNING_SEED], "", store, device)]
    return list(_missing(settings.with_rate(rate), seeds, settings.probe, store, device))


def _missing(
    tree: Mapping[str, Any], seeds: Collection[int], probe: str, store: Store, device: str
) -> Iterator[Task]:
    key = identity(tree, probe).key
    for seed in seeds:
        if store.summary(key, seed) is None:
            yield Task(key, seed, {**tree, "seed": seed, "device": device}, probe)


def figures(claim: Claim, store: Store) -> dict[int, float]:
    """Return the claim's figure by seed, up to the first seed that lacks a run."""
    found = {}
    rates = {label: chosen(settings, store) for label, settings in claim.runs.items()}
    if any(settings.rates and rates[label] is None for label, settings in claim.runs.items()):
        return {}
    keys = {label: identity(s.with_rate(rates[label]), s.probe).key for label, s in claim.runs.items()}
    for seed in range(MOST_SEEDS):
        runs = {label: store.summary(key, seed) for label, key in keys.items()}
        present = {label: summary for label, summary in runs.items() if summary is not None}
        if len(present) < len(runs):
            break
        found[seed] = claim.figure(present)
    return found


def files(claim: Claim) -> list[str]:
    """Return the files of the claim's datasets, relative to $P2PFL_DATA."""
    return [*dict.fromkeys(file for s in claim.runs.values() for file in identity(s.with_rate(None)).files)]


def remaining(claim: Claim, store: Store, device: str) -> list[Task]:
    """Return the runs that the claim needs now, seed by seed; those that choose learning rates first."""
    wanted = claim.seeds_wanted(list(figures(claim, store).values()))
    tasks = [task for settings in claim.runs.values() for task in tasks_of(settings, range(wanted), store, device)]
    unique = {(task.key, task.seed): task for task in tasks}
    return sorted(unique.values(), key=lambda task: (task.seed != TUNING_SEED, task.seed))
