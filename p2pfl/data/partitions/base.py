"""What all partitions have in common: what they are told, what they return, and the ways of cutting."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import numpy as np
import numpy.typing as npt
from pydantic import Field

from p2pfl.errors import DataError
from p2pfl.options import Options

Indices = npt.NDArray[np.int64]
Labels = npt.NDArray[np.int64]

Fraction = Annotated[float, Field(ge=0, lt=1)]


@dataclass(frozen=True, eq=False)
class Labelled:
    """What a partition knows of a dataset.

    Attributes:
        train, test: int64 [N], the label of each sample, in [0, classes).
        classes: number of classes, K.
        train_styles, test_styles: int64 [N], the style of each sample, from 0 on; None without styles.
    """

    train: Labels
    test: Labels
    classes: int
    train_styles: Labels | None = None
    test_styles: Labels | None = None

    @property
    def pool(self) -> Labels:
        """The labels of the training samples followed by those of the test samples."""
        return np.concatenate((self.train, self.test))


@dataclass(frozen=True, eq=False)
class Share:
    """What one peer gets.

    Attributes:
        train, validation: int64 indices into the training split, ascending, disjoint. Without repetition, but
            for the partition ``styles``.
        test: int64 indices into the test split, ascending, without repetition.
        group: peers of the same group have the same task; 0 where the partition knows no groups.
        merged: all three are indices into the pool instead, which is the training split followed by the test
            split; test then shares no sample with train and validation.
    """

    train: Indices
    validation: Indices
    test: Indices
    group: int = 0
    merged: bool = False


@dataclass(frozen=True)
class Partition(Options, ABC):
    """Base of all partitions: what stands behind ``partition: {name: …}`` in a run file."""

    @abstractmethod
    def split(self, data: Labelled, peers: int, seed: int) -> list[Share]:
        """One share per peer.

        Args:
            data: the dataset's labels.
            peers: number of peers, M.
            seed: the run's seed; equal arguments give equal shares.

        Raises DataError if the dataset is too small for what is asked, or cannot be cut that way.
        """


def hold_out(samples: Indices, fraction: float) -> tuple[Indices, Indices]:
    """Split ``samples``, in random order, into those kept (at least one) and the ``fraction`` held out."""
    kept = max(len(samples) - round(fraction * len(samples)), 1)
    return samples[:kept], samples[kept:]


def merge(parts: Sequence[Indices]) -> Indices:
    """All of them in one, ascending."""
    return np.sort(np.concatenate(parts)) if parts else np.zeros(0, np.int64)


def cyclic(pool: Indices, start: int, count: int) -> Indices:
    """``count`` entries of ``pool`` from ``start`` on, going round at its end."""
    return pool[(start + np.arange(count)) % len(pool)]


def of_classes(labels: Labels, classes: npt.ArrayLike) -> Indices:
    """The samples that have one of these classes, ascending."""
    return np.flatnonzero(np.isin(labels, classes))


def require(name: str, labels: Labels, classes: int, count: int, what: str) -> None:
    """Raises DataError unless every class has ``count`` samples; ``what`` says who asks for them."""
    available = np.bincount(labels, minlength=classes)
    scarcest = int(available.argmin())
    if available[scarcest] < count:
        raise DataError(f"partition {name}: {what} of each class, but class {scarcest} has {available[scarcest]}")


def require_peers(name: str, samples: int, split: str, peers: int) -> None:
    """Raises DataError unless there is a sample for every peer."""
    if samples < peers:
        raise DataError(f"partition {name}: {samples} {split} samples are too few for {peers} peers")
