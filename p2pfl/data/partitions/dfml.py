"""Partitions of DFML (Khalil et al., TMLR 2024), section 4.1 and Fig. 10.

The training set is distributed, and a fifth of each peer's samples is held out to measure local performance. Every
peer is tested on the whole official test set, which measures global performance.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from pydantic import PositiveFloat, PositiveInt

from p2pfl import rng
from p2pfl.data.partitions.base import (
    DatasetLabels,
    Fraction,
    Indices,
    Partition,
    Subset,
    concat_sorted,
    partition,
    require_peers,
    sorted_subset,
)
from p2pfl.data.partitions.fedtgp import MIN_SAMPLES, dirichlet_split


@partition("iid-train")
@dataclass(frozen=True)
class IidTrain(Partition):
    """The training set shuffled and distributed evenly; every peer is tested on the whole test set."""

    validation: Fraction = 0.2
    """Fraction of a peer's samples to hold out, rounded to whole samples."""

    def split(self, data: DatasetLabels, peers: int, seed: int) -> list[Subset]:
        require_peers("iid-train", len(data.train), "training", peers)
        stream = rng.shared(seed, "partition")
        samples_of_peers = np.array_split(stream.permutation(len(data.train)), peers)
        return _with_whole_test(samples_of_peers, self.validation, data)


@partition("dirichlet-train")
@dataclass(frozen=True)
class DirichletTrain(Partition):
    """The training set, each class in Dirichlet proportions; every peer is tested on the whole test set.

    ``dirichlet_split`` in ``fedtgp.py`` describes the procedure.
    """

    beta: PositiveFloat = 0.1
    """Concentration β; smaller values concentrate each class on fewer peers."""
    least: PositiveInt = MIN_SAMPLES
    """Minimum number of samples of a peer, or n/M/2 if that is less."""
    validation: Fraction = 0.2
    """Fraction of a peer's samples to hold out, rounded to whole samples."""

    def split(self, data: DatasetLabels, peers: int, seed: int) -> list[Subset]:
        stream = rng.shared(seed, "partition")
        parts = dirichlet_split("dirichlet-train", data.train, data.classes, peers, self.beta, self.least, stream)
        samples_of_peers = [stream.permutation(concat_sorted(by_class)) for by_class in parts]
        return _with_whole_test(samples_of_peers, self.validation, data)


def _with_whole_test(samples_of_peers: list[Indices], validation: float, data: DatasetLabels) -> list[Subset]:
    test = np.arange(len(data.test))
    return [sorted_subset(samples, validation, test) for samples in samples_of_peers]
