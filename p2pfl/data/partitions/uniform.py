"""Partitions in which all peers have the same class distribution."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import numpy as np
from pydantic import Field, PositiveInt

from p2pfl import rng
from p2pfl.data.partitions.base import (
    DatasetLabels,
    Fraction,
    Indices,
    Partition,
    Subset,
    partition,
    require_peers,
    sorted_subset,
)
from p2pfl.errors import DataError


@partition("iid")
@dataclass(frozen=True)
class Iid(Partition):
    """Training and test samples shuffled and distributed evenly, without overlap."""

    validation: Fraction = 0.0
    """Fraction of a peer's training samples to hold out, rounded to whole samples."""
    per_peer: PositiveInt | None = None
    """Maximum training samples per peer, including those held out; null for no limit."""

    def split(self, data: DatasetLabels, peers: int, seed: int) -> list[Subset]:
        require_peers("iid", len(data.train), "training", peers)
        require_peers("iid", len(data.test), "test", peers)
        stream = rng.shared(seed, "partition")
        train = np.array_split(stream.permutation(len(data.train)), peers)
        test = np.array_split(stream.permutation(len(data.test)), peers)
        return [
            sorted_subset(samples[: self.per_peer], self.validation, test_samples)
            for samples, test_samples in zip(train, test, strict=True)
        ]


PositiveFraction = Annotated[float, Field(gt=0, le=1)]


@partition("fraction")
@dataclass(frozen=True)
class FractionOfAll(Partition):
    """A given fraction of the training and test samples for each peer, without overlap."""

    fraction: PositiveFraction | tuple[PositiveFraction, ...]
    """One number for all peers, or a list of which peer m takes entry m modulo its length; the sum over peers must
    not exceed 1. Rounded down to whole samples."""
    validation: Fraction = 0.0
    """Fraction of a peer's training samples to hold out, rounded to whole samples."""

    def split(self, data: DatasetLabels, peers: int, seed: int) -> list[Subset]:
        entries: Sequence[float] = (self.fraction,) if isinstance(self.fraction, float) else self.fraction
        if not entries:
            raise DataError("partition fraction: fraction is an empty list")
        fractions = [entries[peer % len(entries)] for peer in range(peers)]
        if sum(fractions) > 1 + 1e-9:
            raise DataError(
                f"partition fraction: the fractions of {peers} peers add up to {sum(fractions):g}, more than 1"
            )
        stream = rng.shared(seed, "partition")
        train = _distribute(stream.permutation(len(data.train)), fractions, "training")
        test = _distribute(stream.permutation(len(data.test)), fractions, "test")
        return [
            sorted_subset(samples, self.validation, test_samples)
            for samples, test_samples in zip(train, test, strict=True)
        ]


def _distribute(samples: Indices, fractions: list[float], split: str) -> list[Indices]:
    counts = [int(fraction * len(samples) + 1e-9) for fraction in fractions]
    if min(counts) == 0:
        smallest = min(fractions)
        raise DataError(f"partition fraction: {smallest:g} of {len(samples)} {split} samples is less than one sample")
    return np.split(samples[: sum(counts)], np.cumsum(counts)[:-1])
