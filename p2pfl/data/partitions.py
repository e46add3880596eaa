"""Who gets which samples: one class per partition, and the table of their names.

A partition is a pure function of labels, number of peers, seed and its own parameters: every peer computes
the whole of it for itself and keeps its own share.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
import numpy.typing as npt
from pydantic import (
    Field,
    NonNegativeInt,
    PositiveInt,
    ValidationError,
    ValidatorFunctionWrapHandler,
    WrapValidator,
)

from p2pfl import rng
from p2pfl.errors import DataError
from p2pfl.options import Options, Table

Indices = npt.NDArray[np.int64]
Labels = npt.NDArray[np.int64]


def _count_or_range(value: Any, handler: ValidatorFunctionWrapHandler) -> int | tuple[int, int]:
    try:
        count: int | tuple[int, int] = handler(value)
    except ValidationError:
        count = (1, 0)
    if isinstance(count, tuple) and count[0] > count[1]:
        raise ValueError("should be a number of samples > 0, or [low, high] with 0 < low <= high")
    return count


Fraction = Annotated[float, Field(ge=0, lt=1)]
CountOrRange = Annotated[PositiveInt | tuple[PositiveInt, PositiveInt], WrapValidator(_count_or_range)]


@dataclass(frozen=True, eq=False)
class Share:
    """What one peer gets.

    Attributes:
        train, validation: int64 indices into the training split, ascending, without repetition, disjoint.
        test: int64 indices into the test split, ascending, without repetition.
        group: peers of the same group have the same task; 0 where the partition knows no groups.
    """

    train: Indices
    validation: Indices
    test: Indices
    group: int = 0


@dataclass(frozen=True)
class Partition(Options, ABC):
    """Base of all partitions: what stands behind ``partition: {name: …}`` in a run file."""

    @abstractmethod
    def split(self, train_labels: Labels, test_labels: Labels, classes: int, peers: int, seed: int) -> list[Share]:
        """One share per peer.

        Args:
            train_labels, test_labels: int64 [N], in [0, classes).
            classes: number of classes in the dataset, K.
            peers: number of peers, M.
            seed: the run's seed; equal arguments give equal shares.

        Raises DataError if the dataset is too small for what is asked, or cannot be cut that way.
        """


@dataclass(frozen=True)
class Iid(Partition):
    """All samples shuffled and dealt out evenly, training and test split alike; peers share no sample."""

    validation: Fraction = 0.0
    """Fraction of a peer's training samples that is held out, rounded to whole samples."""
    per_peer: PositiveInt | None = None
    """The most training samples, those held out included, that a peer gets; null for no limit."""

    def split(self, train_labels: Labels, test_labels: Labels, classes: int, peers: int, seed: int) -> list[Share]:
        for split, labels in (("training", train_labels), ("test", test_labels)):
            if len(labels) < peers:
                raise DataError(f"partition iid: {len(labels)} {split} samples are too few for {peers} peers")
        stream = rng.shared(seed, "partition")
        train = np.array_split(stream.permutation(len(train_labels)), peers)
        test = np.array_split(stream.permutation(len(test_labels)), peers)
        shares = []
        for mine, tested in zip(train, test, strict=True):
            kept, held_out = _hold_out(mine[: self.per_peer], self.validation)
            shares.append(Share(np.sort(kept), np.sort(held_out), np.sort(tested)))
        return shares


@dataclass(frozen=True)
class Clusters(Partition):
    """MAPL's partition: peers in clusters, each cluster with its own classes (arXiv 2403.19792, section 4).

    Peers form contiguous blocks whose sizes differ by at most one. Cluster c of C has the classes
    [c·s, c·s + s + overlap) with s = (K − overlap) / C, so that consecutive clusters have exactly ``overlap``
    classes in common and all K are used: 0–4 / 5–9 for K = 10, C = 2, overlap 0; 0–6 / 3–9 for overlap 4.

    The paper's four scenarios are {disjoint, overlapping} x {fixed, range}: ``overlap`` 0 or 4, ``per_class``
    300 or [100, 300].
    """

    PRESETS: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "paper": {"slices": "disjoint"},
        "official": {"slices": "staggered"},
    }

    preset: Literal["paper", "official"] = "paper"
    """``official`` deals training samples out as the released code does: sets ``slices: staggered``."""
    clusters: PositiveInt = 2
    """Number of clusters, C."""
    overlap: NonNegativeInt = 0
    """Number of classes that consecutive clusters have in common."""
    per_class: CountOrRange = 300
    """Training samples of each class per peer: a number, or [low, high] for uniform per peer and class."""
    test_per_class: PositiveInt = 15
    """Test samples of each class per peer."""
    validation: Fraction = 0.0
    """Fraction of a peer's training samples of each class that is held out, rounded to whole samples."""
    slices: Literal["disjoint", "staggered"] = "disjoint"
    """``disjoint``: peers take successive slices of each class, and share samples only once it is used up.
    ``staggered``: each slice begins two thirds into the one before, and each cluster at the start; with 300
    per class the i-th peer of a cluster takes [200 i, 200 i + 300) and shares 100 with the next."""

    def split(self, train_labels: Labels, test_labels: Labels, classes: int, peers: int, seed: int) -> list[Share]:
        stream = rng.shared(seed, "partition")
        cluster_classes = self._cluster_classes(classes)
        if peers < self.clusters:
            raise DataError(f"partition clusters: {peers} peers cannot form {self.clusters} clusters")
        blocks = np.array_split(np.arange(peers), self.clusters)
        cluster_of = [cluster for cluster, block in enumerate(blocks) for _ in block]

        low, high = (self.per_class, self.per_class) if isinstance(self.per_class, int) else self.per_class
        _require(train_labels, classes, high, "training", "per_class")
        _require(test_labels, classes, self.test_per_class, "test", "test_per_class")
        counts = stream.integers(low, high, size=(peers, classes), endpoint=True)

        train: list[list[Indices]] = [[] for _ in range(peers)]
        validation: list[list[Indices]] = [[] for _ in range(peers)]
        test: list[list[Indices]] = [[] for _ in range(peers)]
        for label in range(classes):
            holders = [peer for peer in range(peers) if label in cluster_classes[cluster_of[peer]]]
            pool = stream.permutation(np.flatnonzero(train_labels == label))
            starts = self._starts(counts[holders, label], [cluster_of[peer] for peer in holders])
            for peer, start in zip(holders, starts, strict=True):
                kept, held_out = _hold_out(_slice(pool, start, counts[peer, label]), self.validation)
                train[peer].append(kept)
                validation[peer].append(held_out)
            pool = stream.permutation(np.flatnonzero(test_labels == label))
            for rank, peer in enumerate(holders):
                test[peer].append(_slice(pool, rank * self.test_per_class, self.test_per_class))
        return [
            Share(_merge(train[peer]), _merge(validation[peer]), _merge(test[peer]), group)
            for peer, group in enumerate(cluster_of)
        ]

    def _cluster_classes(self, classes: int) -> list[range]:
        """The classes of each cluster."""
        step, rest = divmod(classes - self.overlap, self.clusters)
        if rest or step < 1:
            possible = map(str, range(classes % self.clusters, classes - self.clusters + 1, self.clusters))
            raise DataError(
                f"partition clusters: {classes} classes with an overlap of {self.overlap} cannot be cut into "
                f"{self.clusters} equal clusters; overlaps that can: {', '.join(possible) or 'none'}"
            )
        starts = range(0, self.clusters * step, step)
        return [range(start, start + step + self.overlap) for start in starts]

    def _starts(self, counts: Indices, clusters: list[int]) -> Iterator[int]:
        """Where each holder's slice of one class starts, given the holders' counts and clusters."""
        start, cluster = 0, clusters[0]
        for count, own_cluster in zip(counts, clusters, strict=True):
            if self.slices == "staggered" and own_cluster != cluster:
                start, cluster = 0, own_cluster
            yield start
            start += round(count * 2 / 3) if self.slices == "staggered" else int(count)


PARTITIONS: Table[type[Partition]] = Table("partition", {"iid": Iid, "clusters": Clusters})


def _slice(pool: Indices, start: int, count: int) -> Indices:
    """``count`` <= len(pool) entries of ``pool`` from ``start`` on, going round at its end."""
    return pool[(start + np.arange(count)) % len(pool)]


def _merge(parts: list[Indices]) -> Indices:
    return np.sort(np.concatenate(parts))


def _hold_out(samples: Indices, fraction: float) -> tuple[Indices, Indices]:
    """Split ``samples``, in random order, into those kept (at least one) and the ``fraction`` held out."""
    kept = max(len(samples) - round(fraction * len(samples)), 1)
    return samples[:kept], samples[kept:]


def _require(labels: Labels, classes: int, count: int, split: str, option: str) -> None:
    """Raises DataError unless every class has ``count`` samples."""
    available = np.bincount(labels, minlength=classes)
    scarcest = int(available.argmin())
    if available[scarcest] < count:
        raise DataError(
            f"partition clusters: {option} asks for {count} {split} samples of each class, "
            f"but class {scarcest} has {available[scarcest]}"
        )
