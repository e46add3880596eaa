"""One's own arrays, and images made up on the spot."""

from __future__ import annotations

import zipfile
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np
from pydantic import NonNegativeFloat, PositiveInt

from p2pfl import rng
from p2pfl.data.sources.base import Decoded, Images, Labels, Source
from p2pfl.errors import DataError


@dataclass(frozen=True)
class Npz(Source):
    """Arrays in a file that ``numpy.savez`` wrote: x_train, y_train, x_test, y_test.

    x are uint8 [N, H, W] or [N, H, W, C], C in {1, 3}; y are whole numbers [N] from 0 on.
    """

    obtain: ClassVar[str] = "make it with numpy.savez(path, x_train=…, y_train=…, x_test=…, y_test=…)"

    path: Path
    """The file; relative to the root, or absolute."""
    classes: PositiveInt | None = None
    """Number of classes; by default one more than the largest label."""
    mirror: bool = False
    """Whether a mirror image still has its label."""

    def files(self, root: Path) -> tuple[Path, ...]:
        return (root / self.path,)

    def read(self, root: Path) -> Decoded:
        path = root / self.path
        try:
            with path.open("rb") as file, np.load(file, allow_pickle=False) as content:
                arrays = {name: content[name] for name in ("x_train", "y_train", "x_test", "y_test")}
        except KeyError as error:
            raise DataError(f"{path}: {error.args[0]}; it should hold x_train, y_train, x_test, y_test") from error
        except (OSError, EOFError, ValueError, TypeError, AttributeError, zipfile.BadZipFile, zlib.error) as error:
            raise DataError(f"{path}: not a sound .npz file of plain arrays: {error}") from error
        train, test = (
            (_images(path, f"x_{half}", arrays[f"x_{half}"]), _labels(path, f"y_{half}", arrays[f"y_{half}"]))
            for half in ("train", "test")
        )
        classes = self.classes or int(max(labels.max(initial=0) for _, labels in (train, test))) + 1
        return Decoded(*train, *test, classes, self.mirror)


def _images(path: Path, name: str, array: np.ndarray) -> Images:
    if array.dtype != np.uint8 or array.ndim not in (3, 4) or (array.ndim == 4 and array.shape[3] not in (1, 3)):
        raise DataError(
            f"{path}: {name} is {array.dtype} {list(array.shape)}; it should be uint8 [N, H, W] or [N, H, W, 1 or 3]"
        )
    channels_last = array[..., np.newaxis] if array.ndim == 3 else array
    return np.ascontiguousarray(channels_last.transpose(0, 3, 1, 2))


def _labels(path: Path, name: str, array: np.ndarray) -> Labels:
    if array.dtype.kind not in "iu" or array.ndim != 1:
        raise DataError(f"{path}: {name} is {array.dtype} {list(array.shape)}; it should be whole numbers [N]")
    return array.astype(np.int64)


@dataclass(frozen=True)
class Synthetic(Source):
    """Made-up images, for tests and for runs whose size matters more than what is learned.

    A class has a few smooth patterns. An image is one of them, shifted by up to an eighth of its size, with its
    own contrast and brightness, in noise. Classes have equally many images, give or take one.
    """

    classes: PositiveInt = 10
    """Number of classes, K."""
    size: PositiveInt = 16
    """Height and width in pixels."""
    channels: PositiveInt = 1
    """1 for grey images, 3 for colours."""
    train: PositiveInt = 5000
    """Number of training images."""
    test: PositiveInt = 1000
    """Number of test images."""
    patterns: PositiveInt = 3
    """Patterns per class; the more, the less a linear classifier learns."""
    noise: NonNegativeFloat = 0.15
    """Standard deviation of a pixel's noise, where 1 is the brightest value."""
    seed: int = 0
    """Other seeds make other patterns. The run's seed has no part in it: all its repetitions have one dataset."""

    def read(self, root: Path) -> Decoded:
        if min(self.train, self.test) < self.classes:
            raise DataError(
                f"synthetic: {self.classes} classes, but {self.train} training and {self.test} test images: "
                "each class should have one of each"
            )
        stream = rng.shared(self.seed, "synthetic")
        patterns = self._patterns(stream)
        train, test = (self._draw(patterns, count, stream) for count in (self.train, self.test))
        return Decoded(*train, *test, self.classes, mirror=False)

    def _patterns(self, stream: np.random.Generator) -> np.ndarray:
        """Sums of slow cosines, mean 0, standard deviation 1: float32 [K, patterns, C, size, size]."""
        waves = np.cos(np.pi * np.outer(np.arange(self.size) + 0.5, np.arange(5)) / self.size)
        shape = (self.classes, self.patterns, self.channels, 5, 5)
        patterns = waves @ stream.standard_normal(shape) @ waves.T
        patterns -= patterns.mean((3, 4), keepdims=True)
        patterns /= patterns.std((3, 4), keepdims=True) + 1e-9
        return patterns.astype(np.float32)

    def _draw(self, patterns: np.ndarray, count: int, stream: np.random.Generator) -> tuple[Images, Labels]:
        labels = stream.permutation(np.arange(count) % self.classes)
        images = np.empty((count, self.channels, self.size, self.size), np.uint8)
        reach = self.size // 8
        for start in range(0, count, 1024):
            of = labels[start : start + 1024]
            n = len(of)
            drawn = patterns[of, stream.integers(self.patterns, size=n)]
            rows, columns = (
                (np.arange(self.size) + stream.integers(-reach, reach, (n, 1), endpoint=True)) % self.size
                for _ in range(2)
            )
            drawn = np.take_along_axis(drawn, rows[:, np.newaxis, :, np.newaxis], axis=2)
            drawn = np.take_along_axis(drawn, columns[:, np.newaxis, np.newaxis, :], axis=3)
            contrast = stream.uniform(0.08, 0.2, (n, 1, 1, 1)).astype(np.float32)
            brightness = stream.uniform(0.35, 0.65, (n, 1, 1, 1)).astype(np.float32)
            noise = stream.standard_normal(drawn.shape, np.float32) * np.float32(self.noise)
            images[start : start + n] = np.rint(255 * np.clip(drawn * contrast + brightness + noise, 0, 1))
        return images, labels
