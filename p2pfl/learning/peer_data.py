"""One peer's samples and how they become network input."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from p2pfl.data import Augment, Dataset, Pool, Split, Subset

EVALUATION_BATCH = 512


@dataclass(frozen=True)
class Samples:
    """A selection of a dataset's samples.

    Attributes:
        images: the split or pool to select from, memory-mapped in general.
        indices: int64 [N], the selected samples.
    """

    images: Split | Pool
    indices: np.ndarray

    def __len__(self) -> int:
        return len(self.indices)

    @cached_property
    def labels(self) -> np.ndarray:
        """Labels of the selected samples, int64 [N]."""
        return np.asarray(self.images.labels[self.indices])

    def take(self, positions: np.ndarray) -> tuple[Tensor, Tensor]:
        """Copy the samples at ``positions`` [B] of this selection.

        Returns:
            Inputs as they are stored, e.g. uint8 [B, C, H, W], and labels, int64 [B], on the CPU.
        """
        return self.images.take(self.indices[positions])

    def take_in_turn(self, batches: Iterable[np.ndarray]) -> Iterator[tuple[Tensor, Tensor]]:
        """Copy one batch of positions after the other, as ``take``; at the end, unmap what was read."""
        try:
            yield from map(self.take, batches)
        finally:
            self.images.unmap()

    def in_order(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Copy all samples in order, in batches for evaluation."""
        starts = range(0, len(self), EVALUATION_BATCH)
        return self.take_in_turn(np.arange(start, min(start + EVALUATION_BATCH, len(self))) for start in starts)


@dataclass(frozen=True)
class TestedOn:
    """SHA-256 hashes that show whether runs were tested on the same samples.

    Attributes:
        dataset: of all samples of all peers; empty if unknown.
        samples: of this peer's test inputs and labels, in order; empty without any.
        classes: of the classes whose scores count if the test is masked.
    """

    dataset: str
    samples: str
    classes: str


@dataclass(frozen=True)
class Style:
    """All samples of one style of the dataset, over all peers."""

    train: Samples
    test: Samples


def batch_sizes(samples: int, size: int, *, drop_last: bool = False) -> Sequence[int]:
    """Return the sizes of the batches that ``PeerData.batches`` yields in an epoch over ``samples`` samples."""
    full, last = divmod(samples, size)
    return [size] * full + ([last] if last and (full == 0 or (last > 1 and not drop_last)) else [])


class PeerData:
    """One peer's samples as network input.

    Attributes:
        train, validation, test: the samples; poisoned ones may take the place of ``train``.

    Args:
        dataset: the whole dataset; all peers of a host map the same files.
        subset: the indices of this peer's samples.
        augment: maps float images [B, C, H, W] in [0, 1] to the same shape and range; draws from torch's global RNG.
        device: device of the batches.
    """

    def __init__(self, dataset: Dataset, subset: Subset, augment: Augment, device: torch.device) -> None:
        self.dataset = dataset.sha256
        self.classes = dataset.classes
        self.class_names = dataset.class_names
        self.group = subset.group
        self.device = device
        self.augment = augment
        train_images: Split | Pool = dataset.pool if subset.merged else dataset.train
        test_images: Split | Pool = dataset.pool if subset.merged else dataset.test
        self.train = self._loaded = Samples(train_images, subset.train)
        self.validation = Samples(train_images, subset.validation)
        self.test = Samples(test_images, subset.test)
        self._official_test = dataset.test
        self._dataset = None if subset.merged else dataset
        shape = (1, len(dataset.mean), *(1 for _ in dataset.size))
        self._mean = torch.tensor(dataset.mean, device=device).reshape(shape)
        self._std = torch.tensor(dataset.std, device=device).reshape(shape)

    @cached_property
    def global_test(self) -> Samples:
        """The whole official test set."""
        return Samples(self._official_test, np.arange(len(self._official_test.labels)))

    @cached_property
    def local_classes(self) -> tuple[int, ...]:
        """Classes of the local training samples, ascending."""
        return tuple(int(label) for label in np.unique(self.train.labels))

    def scored_classes(self, samples: Samples) -> np.ndarray:
        """Classes whose scores count in a masked evaluation of ``samples``, int64, ascending; poison adds none."""
        own = self.local_classes if self.train is self._loaded else np.unique(self._loaded.labels)
        return np.union1d(np.array(own, np.int64), samples.labels)

    @cached_property
    def tested_on(self) -> TestedOn:
        """Hashes of the test samples, so that runs can be compared."""
        if not len(self.test):
            return TestedOn(self.dataset, "", "")
        samples = hashlib.sha256(np.ascontiguousarray(self.test.labels).data)
        for inputs, _ in self.test.in_order():
            samples.update(f"{inputs.dtype} {list(inputs.shape)}".encode())
            samples.update(np.ascontiguousarray(inputs.numpy()).data)
        classes = hashlib.sha256(self.scored_classes(self.test).data)
        return TestedOn(self.dataset, samples.hexdigest()[:16], classes.hexdigest()[:16])

    @cached_property
    def styles(self) -> tuple[Style, ...]:
        """The dataset's styles, for evaluation only.

        A dataset without styles counts as one style. Empty if the subset is merged: then peers train on samples of
        the official test set.
        """
        if self._dataset is None:
            return ()
        train, test = self._dataset.train, self._dataset.test
        if train.styles is None or test.styles is None:
            return (Style(Samples(train, np.arange(len(train))), self.global_test),)
        return tuple(
            Style(Samples(train, np.flatnonzero(train.styles == n)), Samples(test, np.flatnonzero(test.styles == n)))
            for n in range(int(train.styles.max()) + 1)
        )

    def batches(
        self, size: int, order: np.random.Generator, *, drop_last: bool = False
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Iterate over the training samples once, in random order.

        A last batch of one sample is dropped unless it is the only batch: batch normalization fails on it.

        Args:
            drop_last: drop a last batch of fewer than ``size`` samples too, unless it is the only one.

        Yields:
            Inputs as they are stored, e.g. uint8 [B, C, H, W], and labels, int64 [B], on the device.
        """
        positions = order.permutation(len(self.train))
        chosen = (positions[n * size : (n + 1) * size] for n in range(self.batch_count(size, drop_last=drop_last)))
        for images, labels in self.train.take_in_turn(chosen):
            yield self._moved(images), self._moved(labels)

    def _moved(self, tensor: Tensor) -> Tensor:
        """Move a tensor to the device; to a GPU without waiting for what it computes."""
        pinned = self.device.type == "cuda"
        return (tensor.pin_memory() if pinned else tensor).to(self.device, non_blocking=pinned)

    def batch_count(self, size: int, *, drop_last: bool = False) -> int:
        """Return the number of batches that ``batches`` yields."""
        return len(batch_sizes(len(self.train), size, drop_last=drop_last))

    def sweep(self, samples: Samples) -> Iterator[tuple[Tensor, Tensor]]:
        """Iterate over ``samples`` once, in order and without augmentation.

        Yields:
            Network input, e.g. float32 [B, C, H, W], and labels, int64 [B], on the device.
        """
        for images, labels in samples.in_order():
            yield self.input(images.to(self.device), augmented=False), labels.to(self.device)

    def input(self, images: Tensor, *, augmented: bool) -> Tensor:
        """Convert inputs as they are stored to network input of the same shape: normalized float32, but int64 tokens.

        Images, uint8, are scaled to [0, 1] first.
        """
        if images.dtype == torch.int64:
            return images
        x = images.to(torch.float32).div_(255.0) if images.dtype == torch.uint8 else images
        if augmented:
            x = self.augment(x)
        return (x - self._mean).div_(self._std)
