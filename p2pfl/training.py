"""The local loop: a peer's own samples, batches, optimisers, evaluation."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import fmean
from typing import Literal

import numpy as np
import torch
from torch import Tensor, nn

from p2pfl.data import Dataset, Pool, Share, Split

Augment = Callable[[Tensor], Tensor]

EVALUATION_BATCH = 512


@dataclass(frozen=True)
class Samples:
    """Some of a dataset's images: ``indices`` into ``images``, which may be mapped from disk."""

    images: Split | Pool
    indices: np.ndarray

    def __len__(self) -> int:
        return len(self.indices)

    @cached_property
    def labels(self) -> np.ndarray:
        """int64 [N]."""
        return np.asarray(self.images.labels[self.indices])

    def take(self, positions: np.ndarray) -> tuple[Tensor, Tensor]:
        """uint8 [B, C, H, W] and int64 [B]."""
        return self.images.take(self.indices[positions])


@dataclass(frozen=True)
class Style:
    """All samples of one of a dataset's styles, whichever peers have them."""

    train: Samples
    test: Samples


class PeerData:
    """One peer's samples, and how they become network input.

    Args:
        dataset: all images; shared by all peers of a host, mapped read-only.
        share: which of them are this peer's.
        augment: [B, C, H, W] floats in [0, 1] to the same; draws from torch's global RNG.
        device: where batches go.
    """

    def __init__(self, dataset: Dataset, share: Share, augment: Augment, device: torch.device) -> None:
        self.classes = dataset.classes
        self.group = share.group
        self.device = device
        self.augment = augment
        trained: Split | Pool = dataset.pool if share.merged else dataset.train
        tested: Split | Pool = dataset.pool if share.merged else dataset.test
        self.train = Samples(trained, share.train)
        self.validation = Samples(trained, share.validation)
        self.test = Samples(tested, share.test)
        self.everything = Samples(dataset.test, np.arange(len(dataset.test.labels)))
        self._dataset = None if share.merged else dataset
        shape = (1, dataset.channels, 1, 1)
        self._mean = torch.tensor(dataset.mean, device=device).reshape(shape)
        self._std = torch.tensor(dataset.std, device=device).reshape(shape)

    @cached_property
    def own_classes(self) -> tuple[int, ...]:
        """Classes of which this peer has training samples, ascending."""
        return tuple(int(label) for label in np.unique(self.train.labels))

    @cached_property
    def styles(self) -> tuple[Style, ...]:
        """The dataset's styles; one, of everything, if it has none. For evaluation alone.

        Empty if the partition deals out the test set too, so that peers train on it.
        """
        if self._dataset is None:
            return ()
        train, test = self._dataset.train, self._dataset.test
        if train.styles is None or test.styles is None:
            return (Style(Samples(train, np.arange(len(train))), self.everything),)
        return tuple(
            Style(Samples(train, np.flatnonzero(train.styles == n)), Samples(test, np.flatnonzero(test.styles == n)))
            for n in range(int(train.styles.max()) + 1)
        )

    def batches(self, size: int, order: np.random.Generator) -> Iterator[tuple[Tensor, Tensor]]:
        """One epoch over the training samples in random order: uint8 [B, C, H, W] and int64 [B], on the device.

        A last batch of a single sample is left out when there are others: batch normalisation cannot use it.
        """
        positions = order.permutation(len(self.train))
        for start in range(0, len(positions), size):
            chosen = positions[start : start + size]
            if len(chosen) == 1 < size and start > 0:
                return
            images, labels = self.train.take(chosen)
            yield images.to(self.device), labels.to(self.device)

    def sweep(self, samples: Samples) -> Iterator[tuple[Tensor, Tensor]]:
        """All samples once, in their order, not augmented: normalised [B, C, H, W] and int64 [B], on the device."""
        for start in range(0, len(samples), EVALUATION_BATCH):
            images, labels = samples.take(np.arange(start, min(start + EVALUATION_BATCH, len(samples))))
            yield self.input(images.to(self.device), augmented=False), labels.to(self.device)

    def input(self, images: Tensor, *, augmented: bool) -> Tensor:
        """uint8 [B, C, H, W] to normalised float32 of the same shape."""
        x = images.to(torch.float32) / 255.0
        if augmented:
            x = self.augment(x)
        return (x - self._mean) / self._std


OptimizerName = Literal["sgd", "adam"]


def make_optimizer(
    name: OptimizerName,
    parameters: Iterable[nn.Parameter],
    *,
    lr: float,
    momentum: float = 0.0,
    betas: tuple[float, float] = (0.9, 0.999),
    weight_decay: float = 0.0,
) -> torch.optim.Optimizer:
    """SGD takes ``momentum``, Adam takes ``betas``."""
    if name == "sgd":
        return torch.optim.SGD(parameters, lr=lr, momentum=momentum, weight_decay=weight_decay)
    return torch.optim.Adam(parameters, lr=lr, betas=betas, weight_decay=weight_decay)


class Meter:
    """Sample-weighted means of loss terms between two readings."""

    def __init__(self) -> None:
        self._sums: defaultdict[str, float] = defaultdict(float)
        self._samples: defaultdict[str, int] = defaultdict(int)

    def add(self, terms: dict[str, Tensor], samples: int) -> None:
        for name, value in terms.items():
            self._sums[name] += float(value.detach()) * samples
            self._samples[name] += samples

    def drain(self) -> dict[str, float]:
        """Each term's mean over the samples that it was added for."""
        means = {name: total / self._samples[name] for name, total in self._sums.items()}
        self._sums.clear()
        self._samples.clear()
        return means


@dataclass(frozen=True)
class Evaluation:
    """Outcome on one test split. ``loss`` is the mean cross-entropy."""

    accuracy: float
    loss: float
    correct: int
    samples: int


@dataclass(frozen=True)
class Measure:
    """Something else to evaluate than the model on the own test split: ``predict`` on ``samples``, under a name."""

    name: str
    predict: Callable[[Tensor], Tensor]
    samples: Samples
    part_of: str = ""
    """Measures with the same word here are averaged too, each with equal weight, under that name."""


def mean_of(evaluations: Sequence[Evaluation]) -> Evaluation:
    """Plain means of accuracy and loss, sums of correct and samples."""
    return Evaluation(
        fmean(one.accuracy for one in evaluations),
        fmean(one.loss for one in evaluations),
        sum(one.correct for one in evaluations),
        sum(one.samples for one in evaluations),
    )


@torch.no_grad()
def evaluate(
    predict: Callable[[Tensor], Tensor], data: PeerData, samples: Samples, *, masked: bool = False
) -> Evaluation | None:
    """Classify ``samples`` by the largest score; ``predict`` maps [B, C, H, W] to scores [B, K].

    With ``masked``, only the scores of the peer's own classes count (L2C, Table 2): those that it has training
    samples of, or that occur in ``samples``. None if there are no samples.
    """
    correct, loss, total = 0, 0.0, len(samples)
    if total == 0:
        return None
    foreign = np.setdiff1d(np.arange(data.classes), [*data.own_classes, *samples.labels]) if masked else None
    for x, labels in data.sweep(samples):
        scores = predict(x)
        if foreign is not None:
            scores = scores.index_fill(1, torch.from_numpy(foreign).to(data.device), -torch.inf)
        correct += int((scores.argmax(1) == labels).sum())
        loss += float(nn.functional.cross_entropy(scores, labels, reduction="sum"))
    return Evaluation(correct / total, loss / total, correct, total)
