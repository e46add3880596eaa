"""Poisoned training data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Literal

import numpy as np
from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt

from p2pfl.adversaries.base import Poisoning, adversary
from p2pfl.data.loaders import Inputs, Labels
from p2pfl.errors import DataError
from p2pfl.inputs import Size, kind_of, shape_of


@adversary("label-flip")
@dataclass(frozen=True)
class LabelFlip(Poisoning):
    """Learn from wrong labels: K − 1 − y of K classes in place of y, or by a table.

    Tolpegin, Truex, Gursoy, Liu: "Data Poisoning Attacks Against Federated Learning Systems", ESORICS 2020.
    https://arxiv.org/abs/2007.08432
    """

    flips: Mapping[NonNegativeInt, NonNegativeInt] = field(default_factory=dict)
    """{true class: wrong class}; classes that are not listed keep their label. Empty: K − 1 − y of all."""

    def poison(
        self, inputs: Inputs, labels: Labels, classes: int, draw: np.random.Generator
    ) -> tuple[Inputs, Labels]:
        table = np.arange(classes)
        if not self.flips:
            table = table[::-1]
        for true, wrong in self.flips.items():
            table[true] = wrong
        return inputs, table[labels]

    def check(self, classes: int, channels: int, size: Size) -> None:
        for name in (*self.flips, *self.flips.values()):
            _check_class(name, classes)


@adversary("backdoor")
@dataclass(frozen=True)
class Backdoor(Poisoning):
    """Learn that inputs with a pattern in a corner are of one class.

    Gu, Dolan-Gavitt, Garg: "BadNets: Identifying Vulnerabilities in the Machine Learning Model Supply Chain", 2017.
    https://arxiv.org/abs/1708.06733
    """

    target: NonNegativeInt = 0
    """The class of inputs with the pattern."""
    fraction: Annotated[float, Field(gt=0.0, le=1.0)] = 0.3
    """Fraction of the training samples that get pattern and class."""
    pattern: Literal["square", "checkerboard"] = "square"
    """Of the lower right corner of images: white, or white and black in turn. The last entries of other inputs get
    the largest value that the peer's samples have."""
    size: PositiveInt = 3
    """Height and width of the pattern, or its number of entries."""

    def poison(
        self, inputs: Inputs, labels: Labels, classes: int, draw: np.random.Generator
    ) -> tuple[Inputs, Labels]:
        chosen = draw.permutation(len(labels))[: round(self.fraction * len(labels))]
        if len(chosen):
            inputs[chosen] = self.marked(inputs[chosen], 255 if inputs.dtype == np.uint8 else inputs.max())
        labels[chosen] = self.target
        return inputs, labels

    def marked(self, inputs: Inputs, brightest: float) -> Inputs:
        """Return a copy of inputs as they are stored, [N, …], with the pattern."""
        marked = inputs.copy()
        if inputs.ndim < 4:
            marked[..., -self.size :] = brightest
            return marked
        rows, columns = np.indices((self.size, self.size))
        dark = (rows + columns) % 2 if self.pattern == "checkerboard" else np.zeros_like(rows)
        marked[..., -self.size :, -self.size :] = np.where(dark, 0, brightest)
        return marked

    def check(self, classes: int, channels: int, size: Size) -> None:
        _check_class(self.target, classes)
        kind, lengths = kind_of(size), shape_of(channels, size)
        if kind == "images":
            lengths = lengths[1:]
        elif self.pattern != "square":
            raise DataError(f"pattern {self.pattern!r} needs images, but the dataset has {kind}; remove it")
        if self.size > min(lengths[-2:] if kind == "images" else lengths[-1:]):
            raise DataError(f"size {self.size} is larger than the inputs, {'x'.join(map(str, lengths))}")


@adversary("sample-noise")
@dataclass(frozen=True)
class SampleNoise(Poisoning):
    """Learn from inputs with Gaussian noise."""

    std: PositiveFloat = 0.5
    """Standard deviation of the noise: 1 is the brightest value of images, and of vectors and series the standard
    deviation of each channel over the peer's samples."""

    def poison(
        self, inputs: Inputs, labels: Labels, classes: int, draw: np.random.Generator
    ) -> tuple[Inputs, Labels]:
        noise = np.float32(self.std) * draw.standard_normal(inputs.shape, np.float32)
        if inputs.dtype == np.uint8:
            return (inputs + 255 * noise).round().clip(0, 255).astype(np.uint8), labels
        others = tuple(axis for axis in range(inputs.ndim) if axis != 1)
        return inputs + inputs.std(axis=others, keepdims=True) * noise, labels

    def check(self, classes: int, channels: int, size: Size) -> None:
        if kind_of(size) == "tokens":
            raise DataError("sample-noise needs numbers, but the dataset has tokens; choose label-flip or backdoor")


def _check_class(label: int, classes: int) -> None:
    if label >= classes:
        raise DataError(f"no class {label}; the {classes} classes are 0 to {classes - 1}")
