"""Partitions of FedTGP (Zhang, Liu, Hua, Cao, AAAI 2024): "pathological" and "practical" (Dirichlet).

Training and test samples are merged and distributed together; then each peer holds out a quarter of its samples for
testing. Details that the paper leaves open follow its released code (github.com/TsingZ0/FedTGP, dataset/utils).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from pydantic import PositiveFloat, PositiveInt

from p2pfl import rng
from p2pfl.data.partitions.base import (
    DatasetLabels,
    Fraction,
    Indices,
    Labels,
    Partition,
    Subset,
    concat_sorted,
    partition,
    require_peers,
    sorted_subset,
)
from p2pfl.errors import DataError

DRAWS = 100
"""Maximum number of draws of a Dirichlet partition."""

MIN_SAMPLES = 40
"""Minimum number of samples of a peer: a quarter of them is a test batch of 10."""


@partition("pathological")
@dataclass(frozen=True)
class Pathological(Partition):
    """A few classes for each peer, in very unequal amounts; merged pool, disjoint subsets (FedTGP, Figs. 7 and 9).

    Each class goes to the first ⌈M·k/K⌉ peers that have fewer than k classes. All but the last of them take a number
    of samples uniform in [max(m/10, least/K), m), where m is the class size divided by the number of these peers;
    the last takes the rest. Classes are unused once all peers have k.
    """

    classes_per_peer: PositiveInt = 2
    """Number of classes of a peer, k: 2 of 10, 10 of 100 or 102, 20 of 200. Where ⌈M·k/K⌉ does not divide M, the last
    peers may have fewer."""
    test: Fraction = 0.25
    """Fraction of a peer's samples to test on, rounded up to whole samples."""
    validation: Fraction = 0.0
    """Fraction of the other samples to hold out, rounded to whole samples."""

    def split(self, data: DatasetLabels, peers: int, seed: int) -> list[Subset]:
        if self.classes_per_peer > data.classes:
            raise DataError(
                f"partition pathological: classes_per_peer is {self.classes_per_peer}, but the dataset has "
                f"{data.classes} classes"
            )
        labels = data.pool
        stream = rng.shared(seed, "partition")
        least = _minimum(MIN_SAMPLES, len(labels), peers) / data.classes
        peers_per_class = math.ceil(peers * self.classes_per_peer / data.classes)
        missing_classes = [self.classes_per_peer] * peers
        parts: list[list[Indices]] = [[] for _ in range(peers)]
        for label in range(data.classes):
            holders = [peer for peer in range(peers) if missing_classes[peer]][:peers_per_class]
            if not holders:
                break
            samples = stream.permutation(np.flatnonzero(labels == label))
            even = len(samples) / len(holders)
            low, high = max(int(max(even / 10, least)), 1), int(even)
            if low >= high:
                raise DataError(
                    f"partition pathological: the {len(samples)} samples of class {label} are too few "
                    f"for {len(holders)} peers with more than {low} each"
                )
            counts = stream.integers(low, high, size=len(holders) - 1)
            for peer, part in zip(holders, np.split(samples, np.cumsum(counts)), strict=True):
                parts[peer].append(part)
                missing_classes[peer] -= 1
        return _hold_out_test(parts, self.test, self.validation, stream)


@partition("dirichlet")
@dataclass(frozen=True)
class Dirichlet(Partition):
    """The "practical" setting: each class in Dirichlet proportions; merged pool, disjoint subsets (FedTGP, Fig. 8).

    ``dirichlet_split`` describes the procedure.
    """

    beta: PositiveFloat = 0.1
    """Concentration β; smaller values concentrate each class on fewer peers."""
    least: PositiveInt = MIN_SAMPLES
    """Minimum number of samples of a peer, or n/M/2 if that is less."""
    test: Fraction = 0.25
    """Fraction of a peer's samples to test on, rounded up to whole samples."""
    validation: Fraction = 0.0
    """Fraction of the other samples to hold out, rounded to whole samples."""

    def split(self, data: DatasetLabels, peers: int, seed: int) -> list[Subset]:
        stream = rng.shared(seed, "partition")
        parts = dirichlet_split("dirichlet", data.pool, data.classes, peers, self.beta, self.least, stream)
        return _hold_out_test(parts, self.test, self.validation, stream)


def dirichlet_split(
    name: str, labels: Labels, classes: int, peers: int, beta: float, least: int, stream: np.random.Generator
) -> list[list[Indices]]:
    """Distribute all n samples to the M peers, without repetition.

    Each class is shuffled and split in proportions drawn from Dir(β); peers that already have n/M samples get none.
    The draw is repeated until the smallest peer has min(least, n/M/2) samples.

    Returns:
        For each peer a list of indices, one array per class.

    Raises:
        DataError: ``DRAWS`` draws failed.
    """
    require_peers(name, len(labels), "", peers)
    required = _minimum(least, len(labels), peers)
    by_class = [np.flatnonzero(labels == label) for label in range(classes)]
    best = 0
    for _ in range(DRAWS):
        parts: list[list[Indices]] = [[] for _ in range(peers)]
        sizes = np.zeros(peers, np.int64)
        for samples in by_class:
            samples = stream.permutation(samples)
            proportions = stream.dirichlet(np.full(peers, beta)) * (sizes < len(labels) / peers)
            total = proportions.sum()
            if not len(samples):
                proportions, total = np.ones(peers), float(peers)  # all get none
            if not total > 0:  # only full peers got a proportion, or all proportions underflowed
                break
            cuts = (np.cumsum(proportions / total) * len(samples)).astype(np.int64)[:-1]
            for peer, part in enumerate(np.split(samples, cuts)):
                parts[peer].append(part)
                sizes[peer] += len(part)
        else:
            if sizes.min() >= required:
                return parts
            best = max(best, int(sizes.min()))
    smaller_least = f"a least of {best}, " if best else ""  # with which the best of these draws would have done
    raise DataError(
        f"partition {name}: in {DRAWS} draws with beta {beta:g}, the smallest of {peers} peers had at most {best} "
        f"samples instead of {math.ceil(required)}; try a larger beta, {smaller_least}fewer peers or another seed"
    )


def _minimum(least: int, samples: int, peers: int) -> float:
    return min(least, samples / peers / 2)


def _hold_out_test(
    parts: list[list[Indices]], test: float, validation: float, stream: np.random.Generator
) -> list[Subset]:
    """Shuffle each peer's samples of the pool and split them into training, validation and test samples."""
    subsets = []
    for by_class in parts:
        samples = stream.permutation(concat_sorted(by_class))
        cut = max(int((1 - test) * len(samples)), 1)
        subsets.append(sorted_subset(samples[:cut], validation, samples[cut:], merged=True))
    return subsets
