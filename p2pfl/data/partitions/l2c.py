"""Partitions of L2C: Learning to Collaborate in Decentralized Learning of Personalized Models (Li, Zhou, Tian, Tao,
CVPR 2022), section 4.

In both, a peer is tested on all test samples of its classes.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from pydantic import PositiveInt

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
    samples_of,
)
from p2pfl.errors import DataError


@partition("shards")
@dataclass(frozen=True)
class Shards(Partition):
    """One shard of each of a few classes for each peer (Fig. 2).

    The samples of each of the K classes are split into P shards, in the order of the dataset. For each j, shards j of
    all classes are shuffled, and every N consecutive ones are the task of one peer. The K·P/N tasks are disjoint and
    cover all samples. Table 1: CIFAR-10 with P = 20, N = 2; CIFAR-100 with P = 10, N = 10; 100 peers each.
    """

    classes_per_peer: PositiveInt = 2
    """Number of classes of a peer, N; a divisor of K."""
    shards: PositiveInt | None = None
    """Number of shards of each class, P; by default such that there are as many tasks as peers. Excess tasks are
    unused."""
    validation: Fraction = 0.2
    """Fraction of each shard to hold out, rounded to whole samples."""

    def split(self, data: DatasetLabels, peers: int, seed: int) -> list[Subset]:
        shards = self._shards(data.classes, peers)
        require_per_class(
            "shards", data.train, data.classes, shards, f"{shards} shards need as many training samples"
        )
        stream = rng.shared(seed, "partition")
        shards_of = [np.array_split(np.flatnonzero(data.train == label), shards) for label in range(data.classes)]
        subsets = []
        for row in range(shards):
            for task in stream.permutation(data.classes).reshape(-1, self.classes_per_peer):
                parts = [hold_out(stream.permutation(shards_of[label][row]), self.validation) for label in task]
                train, validation = (concat_sorted(part) for part in zip(*parts, strict=True))
                subsets.append(Subset(train, validation, samples_of(data.test, task)))
        return subsets[:peers]

    def _shards(self, classes: int, peers: int) -> int:
        """The number of shards, P. Raises DataError if classes, peers and shards do not fit."""
        n = self.classes_per_peer
        tasks, rest = divmod(classes, n)
        if rest:
            divisors = [str(divisor) for divisor in range(1, classes + 1) if classes % divisor == 0]
            raise DataError(
                f"partition shards: {classes} classes cannot be divided into tasks of {n} classes; "
                f"allowed classes_per_peer: {', '.join(divisors)}"
            )
        shards = self.shards or max(peers // tasks, 1)
        if shards * tasks < peers or (self.shards is None and shards * tasks > peers):
            fitting = f"at most {shards * tasks}" if self.shards else f"a multiple of {tasks}"
            raise DataError(
                f"partition shards: {classes} classes in {shards} shards, with classes_per_peer {n}, make "
                f"{shards * tasks} tasks for {peers} peers; use {fitting} peers, or set shards: {-(-peers // tasks)}"
            )
        return shards


@partition("groups")
@dataclass(frozen=True)
class Groups(Partition):
    """Groups of peers with disjoint classes (Fig. 4: 15 peers, 5 groups, 2 classes each).

    Each group gets the same number of random classes, and distributes the samples of each class evenly to its peers.
    Groups are contiguous blocks of peers whose sizes differ by at most one.
    """

    groups: PositiveInt = 5
    """Number of groups; a divisor of the number of classes."""
    per_class: PositiveInt | None = None
    """Maximum training samples of each class per peer, including those held out; null for no limit."""
    validation: Fraction = 0.2
    """Fraction of a peer's training samples of each class to hold out, rounded to whole samples."""

    def split(self, data: DatasetLabels, peers: int, seed: int) -> list[Subset]:
        if data.classes % self.groups:
            raise DataError(
                f"partition groups: {data.classes} classes cannot be divided evenly among {self.groups} groups"
            )
        if peers < self.groups:
            raise DataError(f"partition groups: {peers} peers are too few for {self.groups} groups")
        stream = rng.shared(seed, "partition")
        blocks = np.array_split(np.arange(peers), self.groups)
        largest = len(blocks[0])
        require_per_class(
            "groups", data.train, data.classes, largest, f"groups of {largest} peers need as many training samples"
        )
        tasks = np.split(stream.permutation(data.classes), self.groups)
        subsets = []
        for group, (block, task) in enumerate(zip(blocks, tasks, strict=True)):
            train: list[list[Indices]] = [[] for _ in block]
            validation: list[list[Indices]] = [[] for _ in block]
            for label in task:
                samples = stream.permutation(np.flatnonzero(data.train == label))
                for rank, part in enumerate(np.array_split(samples, len(block))):
                    kept, held_out = hold_out(part[: self.per_class], self.validation)
                    train[rank].append(kept)
                    validation[rank].append(held_out)
            test = samples_of(data.test, task)
            subsets += [
                Subset(concat_sorted(kept), concat_sorted(held), test, group)
                for kept, held in zip(train, validation, strict=True)
            ]
        return subsets
