"""The interface of all partitions, and helpers to select samples."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import numpy.typing as npt
from pydantic import Field

from p2pfl.data.columns import Columns
from p2pfl.errors import DataError
from p2pfl.options import Options
from p2pfl.registry import Table, options_decorator

Indices = npt.NDArray[np.int64]
Labels = npt.NDArray[np.int64]

Fraction = Annotated[float, Field(ge=0, lt=1)]


@dataclass(frozen=True, eq=False)
class DatasetLabels:
    """Labels and styles of a dataset: the input of a partition.

    Attributes:
        train, test: int64 [N], the label of each sample, in [0, classes).
        classes: number of classes, K.
        train_styles, test_styles: int64 [N], the style of each sample, counted from 0; None without styles.
        columns: further properties of the samples, by name.
    """

    train: Labels
    test: Labels
    classes: int
    train_styles: Labels | None = None
    test_styles: Labels | None = None
    columns: Columns = field(default_factory=dict)

    @property
    def pool(self) -> Labels:
        """Labels of the training samples, then of the test samples."""
        return np.concatenate((self.train, self.test))


@dataclass(frozen=True, eq=False)
class Subset:
    """One peer's samples.

    Attributes:
        train, validation: int64 indices into the training split, ascending and disjoint. Only the partition
            ``styles`` repeats samples.
        test: int64 indices into the test split, ascending, without repetition.
        group: equal for peers with the same task; 0 in partitions without groups.
        merged: all three index the pool instead (the training split followed by the test split) and are disjoint.
    """

    train: Indices
    validation: Indices
    test: Indices
    group: int = 0
    merged: bool = False


def check_subsets(subsets: Any, labels: DatasetLabels, peers: int) -> None:
    """Check what a partition returns. Raises DataError."""
    if not isinstance(subsets, Sequence) or len(subsets) != peers:
        found = f"{len(subsets)} items" if isinstance(subsets, Sequence) else type(subsets).__name__
        raise DataError(f"split should return a list with a Subset for each of the {peers} peers, not {found}")
    for peer, subset in enumerate(subsets):
        if not isinstance(subset, Subset):
            raise DataError(f"split should return Subset objects; peer {peer}'s is {type(subset).__name__}")
        train = len(labels.train) + (len(labels.test) if subset.merged else 0)
        test = train if subset.merged else len(labels.test)
        for name, length in (("train", train), ("validation", train), ("test", test)):
            indices = getattr(subset, name)
            if not isinstance(indices, np.ndarray) or indices.dtype != np.int64 or indices.ndim != 1:
                is_array = isinstance(indices, np.ndarray)
                found = f"{indices.dtype} {list(indices.shape)}" if is_array else type(indices).__name__
                raise DataError(f"{name} indices of peer {peer} should be an array int64 [N], not {found}")
            if len(indices) and not 0 <= indices.min() <= indices.max() < length:
                raise DataError(
                    f"{name} indices of peer {peer} range from {indices.min()} to {indices.max()}, but there are "
                    f"{length} samples"
                )


@dataclass(frozen=True)
class Partition(Options, ABC):
    """Base class of all partitions: the options of ``partition: {name: …}`` in a run file."""

    def files(self) -> dict[str, Path]:
        """The files that it reads, by option. A run folder keeps copies, and a changed file makes another run."""
        return {}

    @abstractmethod
    def split(self, data: DatasetLabels, peers: int, seed: int) -> list[Subset]:
        """Compute the subset of each peer.

        Args:
            data: labels of the dataset.
            peers: number of peers, M.
            seed: the run's seed; equal arguments give equal subsets.

        Raises:
            DataError: the dataset is too small, or the parameters do not fit its classes or the number of peers.
        """


PARTITIONS: Table[type[Partition]] = Table("partition")

partition = options_decorator(PARTITIONS, Partition)
"""Register a subclass of ``p2pfl.data.Partition``."""


def hold_out(samples: Indices, fraction: float) -> tuple[Indices, Indices]:
    """Split shuffled ``samples`` into training samples (at least one) and a ``fraction`` held out."""
    count = max(len(samples) - round(fraction * len(samples)), 1)
    return samples[:count], samples[count:]


def concat_sorted(parts: Sequence[Indices]) -> Indices:
    """Concatenate and sort indices."""
    return np.sort(np.concatenate(parts)) if parts else np.zeros(0, np.int64)


def take_cyclic(pool: Indices, start: int, count: int) -> Indices:
    """Take ``count`` entries of ``pool`` from ``start``, wrapping around at its end."""
    return pool[(start + np.arange(count)) % len(pool)]


def samples_of(labels: Labels, classes: npt.ArrayLike) -> Indices:
    """Indices of the samples of the given classes, ascending."""
    return np.flatnonzero(np.isin(labels, classes))


def require_per_class(name: str, labels: Labels, classes: int, count: int, requirement: str) -> None:
    """Raise DataError unless every class has ``count`` samples; ``requirement`` names what needs them."""
    available = np.bincount(labels, minlength=classes)
    scarcest = int(available.argmin())
    if available[scarcest] < count:
        raise DataError(
            f"partition {name}: {requirement} of each class, but class {scarcest} has {available[scarcest]}"
        )


def sorted_subset(train: Indices, validation: float, test: Indices, *, merged: bool = False) -> Subset:
    """The subset of a peer, of whose training samples the fraction ``validation`` is held out."""
    kept, held_out = hold_out(train, validation)
    return Subset(np.sort(kept), np.sort(held_out), np.sort(test), merged=merged)


def require_peers(name: str, samples: int, split: str, peers: int) -> None:
    """Raise DataError unless there is a sample for every peer."""
    if samples < peers:
        what = f"{split} samples".strip()
        raise DataError(
            f"partition {name}: {samples} {what} are too few for {peers} peers; reduce peers, or choose a "
            "larger dataset"
        )
