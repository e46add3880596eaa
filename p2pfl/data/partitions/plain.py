"""Partitions in which every peer has all classes alike."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import numpy as np
from pydantic import Field, PositiveInt

from p2pfl import rng
from p2pfl.data.partitions.base import Fraction, Indices, Labelled, Partition, Share, hold_out, require_peers
from p2pfl.errors import DataError


@dataclass(frozen=True)
class Iid(Partition):
    """All samples shuffled and dealt out evenly, training and test split alike; peers share no sample."""

    validation: Fraction = 0.0
    """Fraction of a peer's training samples that is held out, rounded to whole samples."""
    per_peer: PositiveInt | None = None
    """The most training samples, those held out included, that a peer gets; null for no limit."""

    def split(self, data: Labelled, peers: int, seed: int) -> list[Share]:
        require_peers("iid", len(data.train), "training", peers)
        require_peers("iid", len(data.test), "test", peers)
        stream = rng.shared(seed, "partition")
        train = np.array_split(stream.permutation(len(data.train)), peers)
        test = np.array_split(stream.permutation(len(data.test)), peers)
        shares = []
        for mine, tested in zip(train, test, strict=True):
            kept, held_out = hold_out(mine[: self.per_peer], self.validation)
            shares.append(Share(np.sort(kept), np.sort(held_out), np.sort(tested)))
        return shares


PartOfAll = Annotated[float, Field(gt=0, le=1)]


@dataclass(frozen=True)
class FractionOfAll(Partition):
    """Each peer gets a given fraction of the training and of the test samples; peers share no sample."""

    fraction: PartOfAll | tuple[PartOfAll, ...]
    """One for all peers, or a list of which peer m takes entry m mod its length; the peers' must not add up to
    more than 1. Rounded down to whole samples."""
    validation: Fraction = 0.0
    """Fraction of a peer's training samples that is held out, rounded to whole samples."""

    def split(self, data: Labelled, peers: int, seed: int) -> list[Share]:
        given: Sequence[float] = (self.fraction,) if isinstance(self.fraction, float) else self.fraction
        if not given:
            raise DataError("partition fraction: fraction is an empty list")
        fractions = [given[peer % len(given)] for peer in range(peers)]
        if sum(fractions) > 1 + 1e-9:
            raise DataError(
                f"partition fraction: the fractions of {peers} peers add up to {sum(fractions):g}, more than 1"
            )
        stream = rng.shared(seed, "partition")
        train = _deal(stream.permutation(len(data.train)), fractions, "training")
        test = _deal(stream.permutation(len(data.test)), fractions, "test")
        shares = []
        for mine, tested in zip(train, test, strict=True):
            kept, held_out = hold_out(mine, self.validation)
            shares.append(Share(np.sort(kept), np.sort(held_out), np.sort(tested)))
        return shares


def _deal(samples: Indices, fractions: list[float], split: str) -> list[Indices]:
    counts = [int(fraction * len(samples) + 1e-9) for fraction in fractions]
    if min(counts) == 0:
        smallest = min(fractions)
        raise DataError(f"partition fraction: {smallest:g} of {len(samples)} {split} samples is less than one")
    return np.split(samples[: sum(counts)], np.cumsum(counts)[:-1])
