"""The partitions of Learning to Collaborate in Decentralized Learning of Personalized Models (Li, Zhou, Tian,
Tao, CVPR 2022), section 4.

In both a peer is tested on all test images of its own classes.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from pydantic import PositiveInt

from p2pfl import rng
from p2pfl.data.partitions.base import (
    Fraction,
    Indices,
    Labelled,
    Partition,
    Share,
    hold_out,
    merge,
    of_classes,
    require,
)
from p2pfl.errors import DataError


@dataclass(frozen=True)
class Shards(Partition):
    """A few classes for each peer, and of each of them one shard (Fig. 2).

    The samples of each of the K classes, in the order of the dataset, are cut into P shards. Row j, shard j of
    every class, is shuffled, and every N consecutive shards of it are one peer's task. That makes K·P/N tasks,
    which have all samples and share none. Table 1: CIFAR-10 with P = 20, N = 2, CIFAR-100 with P = 10, N = 10,
    100 peers each.
    """

    classes_per_peer: PositiveInt = 2
    """Number of classes that a peer has, N; it divides K."""
    shards: PositiveInt | None = None
    """Number of shards of each class, P; by default, what makes as many tasks as there are peers. Tasks that are
    left over are nobody's."""
    validation: Fraction = 0.2
    """Fraction of each shard that is held out, rounded to whole samples."""

    def split(self, data: Labelled, peers: int, seed: int) -> list[Share]:
        shards = self._shards(data.classes, peers)
        require("shards", data.train, data.classes, shards, f"{shards} shards ask for as many training samples")
        stream = rng.shared(seed, "partition")
        cut = [np.array_split(np.flatnonzero(data.train == label), shards) for label in range(data.classes)]
        shares = []
        for row in range(shards):
            for task in stream.permutation(data.classes).reshape(-1, self.classes_per_peer):
                halves = [hold_out(stream.permutation(cut[label][row]), self.validation) for label in task]
                train, validation = (merge(half) for half in zip(*halves, strict=True))
                shares.append(Share(train, validation, of_classes(data.test, task)))
        return shares[:peers]

    def _shards(self, classes: int, peers: int) -> int:
        """The number of shards, P, once it is sure that the numbers fit."""
        n = self.classes_per_peer
        tasks, rest = divmod(classes, n)
        if rest:
            fitting = [str(divisor) for divisor in range(1, classes + 1) if classes % divisor == 0]
            raise DataError(
                f"partition shards: {classes} classes cannot be dealt out {n} to a peer; "
                f"classes_per_peer that can: {', '.join(fitting)}"
            )
        shards = self.shards or max(peers // tasks, 1)
        if shards * tasks < peers or (self.shards is None and shards * tasks > peers):
            raise DataError(
                f"partition shards: {classes} classes, {n} to a peer, in {shards} shards make {shards * tasks} tasks "
                f"for {peers} peers; peers should be a multiple of {tasks}, or shards larger"
            )
        return shards


@dataclass(frozen=True)
class Groups(Partition):
    """Groups of peers with the same task, each its own classes (Fig. 4: 15 peers, 5 groups, 2 classes each).

    The classes are dealt out at random, equally many to each group, and each class's samples evenly to the peers
    of its group. Groups are contiguous blocks of peers whose sizes differ by at most one.
    """

    groups: PositiveInt = 5
    """Number of groups; it divides the number of classes."""
    per_class: PositiveInt | None = None
    """The most training samples of each class, those held out included, that a peer gets; null for no limit."""
    validation: Fraction = 0.2
    """Fraction of a peer's training samples of each class that is held out, rounded to whole samples."""

    def split(self, data: Labelled, peers: int, seed: int) -> list[Share]:
        if data.classes % self.groups:
            raise DataError(
                f"partition groups: {data.classes} classes cannot be dealt out evenly to {self.groups} groups"
            )
        if peers < self.groups:
            raise DataError(f"partition groups: {peers} peers cannot form {self.groups} groups")
        stream = rng.shared(seed, "partition")
        blocks = np.array_split(np.arange(peers), self.groups)
        largest = len(blocks[0])
        require(
            "groups", data.train, data.classes, largest, f"groups of {largest} peers ask for as many training samples"
        )
        tasks = np.split(stream.permutation(data.classes), self.groups)
        shares = []
        for group, (block, task) in enumerate(zip(blocks, tasks, strict=True)):
            train: list[list[Indices]] = [[] for _ in block]
            validation: list[list[Indices]] = [[] for _ in block]
            for label in task:
                samples = stream.permutation(np.flatnonzero(data.train == label))
                for rank, mine in enumerate(np.array_split(samples, len(block))):
                    kept, held_out = hold_out(mine[: self.per_class], self.validation)
                    train[rank].append(kept)
                    validation[rank].append(held_out)
            test = of_classes(data.test, task)
            shares += [
                Share(merge(kept), merge(held), test, group) for kept, held in zip(train, validation, strict=True)
            ]
        return shares
