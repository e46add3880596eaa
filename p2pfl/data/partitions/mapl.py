"""Partition of MAPL (Mukherjee, Simonetto, Jamali-Rad, 2024, arXiv 2403.19792), section 5."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
from pydantic import NonNegativeInt, PositiveInt, ValidationError, ValidatorFunctionWrapHandler, WrapValidator

from p2pfl import rng
from p2pfl.data.partitions.base import (
    DatasetLabels,
    Fraction,
    Indices,
    Partition,
    Subset,
    concat_sorted,
    hold_out,
    partition,
    require_per_class,
    take_cyclic,
)
from p2pfl.errors import DataError


def _count_or_range(value: Any, handler: ValidatorFunctionWrapHandler) -> int | tuple[int, int]:
    try:
        count: int | tuple[int, int] = handler(value)
    except ValidationError:
        count = (1, 0)
    if isinstance(count, tuple) and count[0] > count[1]:
        raise ValueError("should be a number of samples > 0, or [low, high] with 0 < low <= high")
    return count


CountOrRange = Annotated[PositiveInt | tuple[PositiveInt, PositiveInt], WrapValidator(_count_or_range)]


@partition("clusters")
@dataclass(frozen=True)
class Clusters(Partition):
    """Clusters of peers with disjoint or overlapping classes.

    Clusters are contiguous blocks of peers whose sizes differ by at most one. Cluster c of C has the classes
    [c·s, c·s + s + overlap) with s = (K − overlap) / C, so that consecutive clusters have ``overlap`` classes in
    common and all K are used: 0-4 / 5-9 for K = 10, C = 2, overlap 0; 0-6 / 3-9 for overlap 4.

    The paper's four scenarios are {disjoint, overlapping} x {fixed, range}: ``overlap`` 0 or 4, ``per_class``
    300 or [100, 300].
    """

    PRESETS: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "paper": {"slices": "disjoint"},
        "official": {"slices": "staggered"},
    }

    preset: Literal["paper", "official"] = "paper"
    """``official`` selects training samples as the released code does: sets ``slices: staggered``."""
    clusters: PositiveInt = 2
    """Number of clusters, C."""
    overlap: NonNegativeInt = 0
    """Number of classes that consecutive clusters have in common."""
    per_class: CountOrRange = 300
    """Training samples per peer and class: a number, or [low, high] for a uniform draw per peer and class."""
    test_per_class: PositiveInt = 15
    """Test samples per peer and class."""
    validation: Fraction = 0.0
    """Fraction of a peer's training samples of each class to hold out, rounded to whole samples."""
    slices: Literal["disjoint", "staggered"] = "disjoint"
    """``disjoint``: peers take consecutive slices of each class, which overlap only when the class is used up.
    ``staggered``: a slice starts two thirds into the previous one, and at 0 in each cluster; with 300 per class,
    peer i of a cluster takes [200 i, 200 i + 300) and has 100 samples in common with the next."""

    def split(self, data: DatasetLabels, peers: int, seed: int) -> list[Subset]:
        classes = data.classes
        stream = rng.shared(seed, "partition")
        cluster_classes = self._cluster_classes(classes)
        if peers < self.clusters:
            raise DataError(f"partition clusters: {peers} peers are too few for {self.clusters} clusters")
        blocks = np.array_split(np.arange(peers), self.clusters)
        cluster_of = [cluster for cluster, block in enumerate(blocks) for _ in block]

        low, high = (self.per_class, self.per_class) if isinstance(self.per_class, int) else self.per_class
        require_per_class("clusters", data.train, classes, high, f"per_class needs {high} training samples")
        test_count = self.test_per_class
        require_per_class(
            "clusters", data.test, classes, test_count, f"test_per_class needs {test_count} test samples"
        )
        counts = stream.integers(low, high, size=(peers, classes), endpoint=True)

        train: list[list[Indices]] = [[] for _ in range(peers)]
        validation: list[list[Indices]] = [[] for _ in range(peers)]
        test: list[list[Indices]] = [[] for _ in range(peers)]
        for label in range(classes):
            holders = [peer for peer in range(peers) if label in cluster_classes[cluster_of[peer]]]
            pool = stream.permutation(np.flatnonzero(data.train == label))
            starts = self._starts(counts[holders, label], [cluster_of[peer] for peer in holders])
            for peer, start in zip(holders, starts, strict=True):
                kept, held_out = hold_out(take_cyclic(pool, start, counts[peer, label]), self.validation)
                train[peer].append(kept)
                validation[peer].append(held_out)
            pool = stream.permutation(np.flatnonzero(data.test == label))
            for rank, peer in enumerate(holders):
                test[peer].append(take_cyclic(pool, rank * test_count, test_count))
        return [
            Subset(
                concat_sorted(train[peer]),
                concat_sorted(validation[peer]),
                concat_sorted(test[peer]),
                group,
            )
            for peer, group in enumerate(cluster_of)
        ]

    def _cluster_classes(self, classes: int) -> list[range]:
        """The classes of each cluster."""
        step, rest = divmod(classes - self.overlap, self.clusters)
        if rest or step < 1:
            possible = map(str, range(classes % self.clusters, classes - self.clusters + 1, self.clusters))
            raise DataError(
                f"partition clusters: {classes} classes with an overlap of {self.overlap} cannot be divided into "
                f"{self.clusters} equal clusters; possible overlaps: {', '.join(possible) or 'none'}"
            )
        starts = range(0, self.clusters * step, step)
        return [range(start, start + step + self.overlap) for start in starts]

    def _starts(self, counts: Indices, clusters: list[int]) -> Iterator[int]:
        """Start of each holder's slice of one class, given their sample counts and clusters."""
        start, cluster = 0, clusters[0]
        for count, holder_cluster in zip(counts, clusters, strict=True):
            if self.slices == "staggered" and holder_cluster != cluster:
                start, cluster = 0, holder_cluster
            yield start
            start += round(count * 2 / 3) if self.slices == "staggered" else int(count)
