"""The partitions of FedTGP (Zhang, Liu, Hua, Cao, AAAI 2024), "pathological" and "practical", and how it cuts a
dataset by Dirichlet proportions, which others do too.

Training and test samples are merged and dealt out together; then each peer holds a quarter of its own back for
testing. What the paper leaves open is as in its released code (github.com/TsingZ0/FedTGP, dataset/utils).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from pydantic import PositiveFloat, PositiveInt

from p2pfl import rng
from p2pfl.data.partitions.base import (
    Fraction,
    Indices,
    Labelled,
    Labels,
    Partition,
    Share,
    hold_out,
    merge,
    require_peers,
)
from p2pfl.errors import DataError

DRAWS = 100
"""Times that proportions are drawn before a Dirichlet partition gives up."""

LEAST = 40
"""Samples that each peer should have: a batch of 10 to test on when a quarter is for testing, 10 / (1 − 0.75)."""


@dataclass(frozen=True)
class Pathological(Partition):
    """A few classes for each peer, in very unequal amounts; all samples merged, none shared (Figs. 7 and 9).

    Class by class, the first ⌈M·k/K⌉ peers that have fewer than k classes get it. All but the last of them take a
    number of samples uniform in [max(m/10, least/K), m), where m is an even share of the class; the last takes the
    rest. When the k classes of all peers are found, further classes are nobody's.
    """

    classes_per_peer: PositiveInt = 2
    """Number of classes that a peer has, k: 2 of 10, 10 of 100 or 102, 20 of 200. Where ⌈M·k/K⌉ does not
    divide M, the last peers may have fewer."""
    test: Fraction = 0.25
    """Fraction of a peer's samples that it is tested on, rounded up to whole samples."""
    validation: Fraction = 0.0
    """Fraction of the others that is held out, rounded to whole samples."""

    def split(self, data: Labelled, peers: int, seed: int) -> list[Share]:
        if self.classes_per_peer > data.classes:
            raise DataError(
                f"partition pathological: {self.classes_per_peer} classes for each peer, but there are {data.classes}"
            )
        labels = data.pool
        stream = rng.shared(seed, "partition")
        least = _least(LEAST, len(labels), peers) / data.classes
        at_once = math.ceil(peers * self.classes_per_peer / data.classes)
        quota = [self.classes_per_peer] * peers
        dealt: list[list[Indices]] = [[] for _ in range(peers)]
        for label in range(data.classes):
            chosen = [peer for peer in range(peers) if quota[peer]][:at_once]
            if not chosen:
                break
            samples = stream.permutation(np.flatnonzero(labels == label))
            even = len(samples) / len(chosen)
            low, high = max(int(max(even / 10, least)), 1), int(even)
            if low >= high:
                raise DataError(
                    f"partition pathological: the {len(samples)} samples of class {label} are too few "
                    f"for {len(chosen)} peers: each should have more than {low}"
                )
            counts = stream.integers(low, high, size=len(chosen) - 1)
            for peer, mine in zip(chosen, np.split(samples, np.cumsum(counts)), strict=True):
                dealt[peer].append(mine)
                quota[peer] -= 1
        return _cut(dealt, self.test, self.validation, stream)


@dataclass(frozen=True)
class Dirichlet(Partition):
    """The "practical" setting: each class in Dirichlet proportions; all samples merged, none shared (Figs. 8, 10).

    See ``dirichlet_cut`` for the rule.
    """

    beta: PositiveFloat = 0.1
    """Concentration β; the smaller, the more a class belongs to few peers."""
    least: PositiveInt = LEAST
    """Samples that each peer must have, or half of an even share n/M if that is less."""
    test: Fraction = 0.25
    """Fraction of a peer's samples that it is tested on, rounded up to whole samples."""
    validation: Fraction = 0.0
    """Fraction of the others that is held out, rounded to whole samples."""

    def split(self, data: Labelled, peers: int, seed: int) -> list[Share]:
        stream = rng.shared(seed, "partition")
        dealt = dirichlet_cut("dirichlet", data.pool, data.classes, peers, self.beta, self.least, stream)
        return _cut(dealt, self.test, self.validation, stream)


def dirichlet_cut(
    name: str, labels: Labels, classes: int, peers: int, beta: float, least: int, stream: np.random.Generator
) -> list[list[Indices]]:
    """Each peer's samples, class by class: all of ``labels`` dealt out, no sample twice.

    The classes in turn are shuffled and cut in proportions drawn from Dir(β), where peers that already have n/M
    samples or more get nothing. All is drawn again until the smallest peer has min(least, n/M/2) samples.

    Raises DataError, with the best that was seen, after DRAWS draws.
    """
    require_peers(name, len(labels), "", peers)
    enough = _least(least, len(labels), peers)
    by_class = [np.flatnonzero(labels == label) for label in range(classes)]
    best = 0
    for _ in range(DRAWS):
        dealt: list[list[Indices]] = [[] for _ in range(peers)]
        sizes = np.zeros(peers, np.int64)
        for samples in by_class:
            samples = stream.permutation(samples)
            proportions = stream.dirichlet(np.full(peers, beta)) * (sizes < len(labels) / peers)
            total = proportions.sum()
            if not total > 0:  # all of it went to peers that are full, or was too small for a float
                break
            cuts = (np.cumsum(proportions / total) * len(samples)).astype(np.int64)[:-1]
            for peer, mine in enumerate(np.split(samples, cuts)):
                dealt[peer].append(mine)
                sizes[peer] += len(mine)
        else:
            if sizes.min() >= enough:
                return dealt
            best = max(best, int(sizes.min()))
    raise DataError(
        f"partition {name}: in {DRAWS} draws with beta {beta:g} the smallest of {peers} peers had at most {best} "
        f"samples, not {math.ceil(enough)}; a larger beta, fewer peers, a smaller least or another seed may do"
    )


def _least(least: int, samples: int, peers: int) -> float:
    return min(least, samples / peers / 2)


def _cut(dealt: list[list[Indices]], test: float, validation: float, stream: np.random.Generator) -> list[Share]:
    """Each peer's samples, which are indices into the pool, in random order cut in three."""
    shares = []
    for mine in dealt:
        samples = stream.permutation(merge(mine))
        cut = max(int((1 - test) * len(samples)), 1)
        kept, held_out = hold_out(samples[:cut], validation)
        shares.append(Share(np.sort(kept), np.sort(held_out), np.sort(samples[cut:]), merged=True))
    return shares
