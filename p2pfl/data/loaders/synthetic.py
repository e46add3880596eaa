"""Synthetic images of random patterns."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from pydantic import NonNegativeFloat, NonNegativeInt, PositiveInt

from p2pfl import rng
from p2pfl.data.loaders.base import DatasetArrays, Images, Labels, Loader, dataset
from p2pfl.errors import DataError


@dataset("synthetic")
@dataclass(frozen=True)
class Synthetic(Loader):
    """Synthetic images, for tests and for runs where the size matters more than the task.

    A class has a few smooth patterns. An image is one of them, shifted by up to an eighth of its size, with random
    contrast and brightness, plus noise. Class sizes differ by at most one.
    """

    classes: PositiveInt = 10
    """Number of classes, K."""
    size: PositiveInt = 16
    """Height and width in pixels."""
    channels: PositiveInt = 1
    """1 for grayscale images, 3 for RGB."""
    train: PositiveInt = 5000
    """Number of training images."""
    test: PositiveInt = 1000
    """Number of test images."""
    patterns: PositiveInt = 3
    """Patterns per class; more make the task harder for a linear classifier."""
    noise: NonNegativeFloat = 0.15
    """Standard deviation of the noise of a pixel, where 1 is the brightest value."""
    seed: NonNegativeInt = 0
    """Seed of the dataset. It does not depend on the run's seed, so that repetitions of a run use the same images."""

    def read(self, root: Path) -> DatasetArrays:
        if min(self.train, self.test) < self.classes:
            raise DataError(
                f"synthetic: {self.classes} classes need as many training and test images, but train is {self.train} "
                f"and test is {self.test}"
            )
        stream = rng.shared(self.seed, "synthetic")
        patterns = self._patterns(stream)
        train, test = (self._draw(patterns, count, stream) for count in (self.train, self.test))
        return DatasetArrays(*train, *test, self.classes, mirror=False)

    def _patterns(self, stream: np.random.Generator) -> np.ndarray:
        """Draw sums of low-frequency cosines with mean 0 and standard deviation 1, float32 [K, patterns, C, size,
        size]."""
        waves = np.cos(np.pi * np.outer(np.arange(self.size) + 0.5, np.arange(5)) / self.size)
        shape = (self.classes, self.patterns, self.channels, 5, 5)
        patterns = waves @ stream.standard_normal(shape) @ waves.T
        patterns -= patterns.mean((3, 4), keepdims=True)
        patterns /= patterns.std((3, 4), keepdims=True) + 1e-9
        return patterns.astype(np.float32)

    def _draw(self, patterns: np.ndarray, count: int, stream: np.random.Generator) -> tuple[Images, Labels]:
        labels = stream.permutation(np.arange(count) % self.classes)
        images = np.empty((count, self.channels, self.size, self.size), np.uint8)
        max_shift = self.size // 8
        for start in range(0, count, 1024):
            batch = labels[start : start + 1024]
            n = len(batch)
            drawn = patterns[batch, stream.integers(self.patterns, size=n)]
            rows, columns = (
                (np.arange(self.size) + stream.integers(-max_shift, max_shift, (n, 1), endpoint=True)) % self.size
                for _ in range(2)
            )
            drawn = np.take_along_axis(drawn, rows[:, np.newaxis, :, np.newaxis], axis=2)
            drawn = np.take_along_axis(drawn, columns[:, np.newaxis, np.newaxis, :], axis=3)
            contrast = stream.uniform(0.08, 0.2, (n, 1, 1, 1)).astype(np.float32)
            brightness = stream.uniform(0.35, 0.65, (n, 1, 1, 1)).astype(np.float32)
            noise = stream.standard_normal(drawn.shape, np.float32) * np.float32(self.noise)
            images[start : start + n] = np.rint(255 * np.clip(drawn * contrast + brightness + noise, 0, 1))
        return images, labels
