"""Datasets of the same classes in several styles, for FedStyle (Yang et al., 2022).

The partition ``styles`` gives every peer one style.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import numpy.typing as npt
from pydantic import (
    Field,
    NonNegativeInt,
    PlainSerializer,
    PlainValidator,
    PositiveInt,
    SerializationInfo,
    ValidationInfo,
    WithJsonSchema,
)

from p2pfl import rng
from p2pfl.data.loaders.base import DATASETS, DatasetArrays, Images, Labels, Loader, dataset
from p2pfl.errors import DataError
from p2pfl.paths import base_of
from p2pfl.registry import parse_section

_BATCH = 4096  # images converted to float at a time


@dataclass(frozen=True)
class NamedLoader:
    """A dataset as an option of another one."""

    name: str
    loader: Loader


def _parse(value: Any, info: ValidationInfo) -> NamedLoader:
    if isinstance(value, NamedLoader):
        return value
    return NamedLoader(*parse_section(DATASETS, "a dataset", value, base_of(info)))


def _plain(dataset: NamedLoader, info: SerializationInfo) -> dict[str, Any]:
    portable = bool((info.context or {}).get("portable"))
    return {"name": dataset.name, **dataset.loader.to_dict(portable=portable)}


DatasetOption = Annotated[
    NamedLoader,
    PlainValidator(_parse),
    PlainSerializer(_plain),
    WithJsonSchema({"type": ["string", "object"]}),
]


def _images_of(dataset: NamedLoader, root: Path) -> DatasetArrays:
    """Read a dataset of images. Raises DataError if it has other inputs."""
    arrays = dataset.loader.read(root)
    if arrays.train_images.dtype != np.uint8 or arrays.train_images.ndim != 4:
        raise DataError(
            f"{dataset.name}: styles need images, but it has {list(arrays.train_images.shape[1:])} inputs"
        )
    if (channels := arrays.train_images.shape[1]) not in (1, 3):
        raise DataError(f"{dataset.name}: styles need gray or RGB images, but it has {channels} channels")
    return arrays


@dataclass(frozen=True)
class CompositeLoader(Loader):
    """Base class of datasets made of other datasets."""

    @abstractmethod
    def datasets(self) -> Sequence[NamedLoader]:
        """The datasets that this one is made of."""

    def files(self, root: Path) -> tuple[Path, ...]:
        return tuple(path for dataset in self.datasets() for path in dataset.loader.files(root))

    def fingerprint(self, root: Path) -> list[Any]:
        return [found for dataset in self.datasets() for found in dataset.loader.fingerprint(root)]

    @property
    def codes(self) -> list[str]:
        return [*super().codes, *(code for dataset in self.datasets() for code in dataset.loader.codes)]

    def download(self, root: Path) -> None:
        for source in self.datasets():
            if not all(path.exists() for path in source.loader.files(root)):
                source.loader.download(root)


@dataset("styles")
@dataclass(frozen=True)
class Styles(CompositeLoader):
    """Several datasets of the same classes; each is a style, for example ``of: [mnist, svhn, usps]``.

    Images are converted to RGB and resized to squares (bilinear, antialiased). Class c is the same in all datasets:
    datasets of type ``folder``, whose classes are sorted by name, need the same names.
    """

    of: Annotated[tuple[DatasetOption, ...], Field(min_length=1)]
    """The datasets, as names or mappings of a name and parameters; the first is style 0."""
    size: PositiveInt = 32
    """Height and width of the resized images, in pixels."""

    def datasets(self) -> Sequence[NamedLoader]:
        return self.of

    def read(self, root: Path) -> DatasetArrays:
        parts = [_images_of(dataset, root) for dataset in self.of]
        if len({part.classes for part in parts}) > 1:
            counts = ", ".join(
                f"{dataset.name} has {part.classes}" for dataset, part in zip(self.of, parts, strict=True)
            )
            raise DataError(f"styles: the datasets must have the same number of classes, but {counts}")
        return DatasetArrays(
            np.concatenate([_resized(part.train_images, self.size) for part in parts]),
            np.concatenate([part.train_labels for part in parts]),
            np.concatenate([_resized(part.test_images, self.size) for part in parts]),
            np.concatenate([part.test_labels for part in parts]),
            parts[0].classes,
            all(part.mirror for part in parts),
            np.repeat(np.arange(len(parts)), [len(part.train_labels) for part in parts]),
            np.repeat(np.arange(len(parts)), [len(part.test_labels) for part in parts]),
            class_names=next((part.class_names for part in parts if part.class_names), ()),
            notes=[note for part in parts for note in part.notes] + self._differences(parts),
        )

    def _differences(self, parts: Sequence[DatasetArrays]) -> list[str]:
        """Return a note on each dataset whose class of a number has another name than in the first with names."""
        named = [(dataset.name, part.class_names) for dataset, part in zip(self.of, parts, strict=True)]
        named = [(name, names) for name, names in named if names]
        notes = []
        for name, names in named[1:]:
            first, expected = named[0]
            k = next((k for k, pair in enumerate(zip(expected, names, strict=True)) if pair[0] != pair[1]), None)
            if k is not None:
                notes.append(
                    f"class {k} is {expected[k]!r} in {first}, but {names[k]!r} in {name}: are they the same?"
                )
        return notes


def _resized(images: Images, size: int) -> Images:
    """Convert uint8 [N, 1 or 3, H, W] to uint8 [N, 3, size, size]."""
    import torch
    from torch.nn.functional import interpolate

    result = np.empty((len(images), 3, size, size), np.uint8)
    for start in range(0, len(images), _BATCH):
        batch = torch.from_numpy(images[start : start + _BATCH].astype(np.float32))
        if batch.shape[2:] != (size, size):
            batch = interpolate(batch, (size, size), mode="bilinear", antialias=True).clamp(0, 255)
        result[start : start + _BATCH] = batch.round().to(torch.uint8).numpy()  # one channel is copied to all three
    return result


@dataset("styled")
@dataclass(frozen=True)
class Styled(CompositeLoader):
    """Another dataset's images in RGB, each in one of several synthetic styles.

    Style 0 keeps images as they are. The others cycle through six effects: tinted negative, background texture, blur
    with noise, outlines, few colors, faded in a light gradient. Each style has its own colors and strengths. The
    samples of each class are assigned to styles at random, in equal numbers.
    """

    of: DatasetOption
    """The dataset, as a name or a mapping of a name and parameters."""
    styles: PositiveInt = 5
    """Number of styles."""
    seed: NonNegativeInt = 0
    """Seed of the styles. It does not depend on the run's seed, so that repetitions of a run use the same images."""

    def datasets(self) -> Sequence[NamedLoader]:
        return (self.of,)

    def read(self, root: Path) -> DatasetArrays:
        source = _images_of(self.of, root)
        if source.train_styles is not None:
            raise DataError(f"styled: {self.of.name} already has styles; choose a dataset without styles")
        train, test = (
            self._style(images, labels, split)
            for split, (images, labels) in enumerate(
                ((source.train_images, source.train_labels), (source.test_images, source.test_labels))
            )
        )
        return DatasetArrays(
            train[0],
            source.train_labels,
            test[0],
            source.test_labels,
            source.classes,
            source.mirror,
            train[1],
            test[1],
            class_names=source.class_names,
            notes=source.notes,
        )

    def _style(self, images: Images, labels: Labels, split: int) -> tuple[Images, Labels]:
        """Assign styles at random; return images in their styles, uint8 [N, 3, H, W], and the styles, int64 [N]."""
        stream = rng.shared(self.seed, "styled", split)
        order = stream.permutation(len(labels))
        styles = np.empty(len(labels), np.int64)
        for label in np.unique(labels):
            of_class = order[labels[order] == label]
            styles[of_class] = np.arange(len(of_class)) % self.styles
        result = np.empty((len(images), 3, *images.shape[2:]), np.uint8)
        for style in range(self.styles):
            members = np.flatnonzero(styles == style)
            for batch in np.split(members, range(_BATCH, len(members), _BATCH)):
                x = np.repeat(images[batch], 3 // images.shape[1], axis=1).astype(np.float32) / 255
                result[batch] = np.rint(255 * np.clip(self._apply(style, x, stream), 0, 1))
        return result, styles

    def _apply(self, style: int, x: Pixels, noise: np.random.Generator) -> Pixels:
        """Apply a style to float32 [N, 3, H, W] in [0, 1]; results may slightly exceed that range.

        ``noise`` draws what differs between images; a stream of the style draws what they have in common.
        """
        if style == 0:
            return x
        common = rng.shared(self.seed, "style", style)
        return _EFFECTS[(style - 1) % len(_EFFECTS)](x, common, noise)


Pixels = npt.NDArray[np.floating[Any]]
Effect = Callable[[Pixels, np.random.Generator, np.random.Generator], Pixels]


def _tint(stream: np.random.Generator, low: float, high: float) -> Pixels:
    """Draw a factor per channel, one of them ``high`` and one ``low``; [3, 1, 1]."""
    return stream.permutation(np.array([low, stream.uniform(low, high), high])).reshape(3, 1, 1)


def _negative(x: Pixels, common: np.random.Generator, noise: np.random.Generator) -> Pixels:
    styled: Pixels = (1 - x) * _tint(common, 0.2, 1.0)
    return styled


def _texture(x: Pixels, common: np.random.Generator, noise: np.random.Generator) -> Pixels:
    """Stripes and spots where the image is dark."""
    height, width = x.shape[2:]
    rows, columns = np.mgrid[0:height, 0:width] / max(height, width)
    angle, waves = common.uniform(0, np.pi), common.uniform(2, 5)
    along, across = rows * np.cos(angle) + columns * np.sin(angle), rows * np.sin(angle) - columns * np.cos(angle)
    stripes, spots = np.sin(2 * np.pi * waves * along), np.sin(2 * np.pi * common.uniform(1, 5) * across)
    pattern = 0.5 + 0.25 * stripes + 0.25 * spots
    styled: Pixels = x + (1 - x) * 0.6 * pattern * _tint(common, 0.2, 1.0)
    return styled


def _blurred(x: Pixels, common: np.random.Generator, noise: np.random.Generator) -> Pixels:
    from scipy.ndimage import gaussian_filter

    sigma = common.uniform(0.03, 0.05) * min(x.shape[2:])
    blurred = gaussian_filter(x, (0, 0, sigma, sigma))
    styled: Pixels = blurred + common.uniform(0.08, 0.16) * noise.standard_normal(x.shape, np.float32)
    return styled


def _outlines(x: Pixels, common: np.random.Generator, noise: np.random.Generator) -> Pixels:
    """Dark outlines on colored paper."""
    from scipy.ndimage import correlate1d

    # scipy's sobel would smooth across channels and images.
    vertical = correlate1d(correlate1d(x, [1, 2, 1], axis=3), [-1, 0, 1], axis=2)
    horizontal = correlate1d(correlate1d(x, [1, 2, 1], axis=2), [-1, 0, 1], axis=3)
    edges = np.hypot(vertical, horizontal).mean(1, keepdims=True)
    strongest = edges.max((2, 3), keepdims=True) + 1e-3
    styled: Pixels = _tint(common, 0.7, 1.0) * (1 - 0.9 * edges / strongest)
    return styled


def _few_colors(x: Pixels, common: np.random.Generator, noise: np.random.Generator) -> Pixels:
    """Four levels of gray, each replaced by a color of similar brightness."""
    levels = np.minimum((4 * x.mean(1)).astype(np.int64), 3)
    palette = 0.7 * np.linspace(0.1, 1, 4)[:, np.newaxis] + 0.3 * common.uniform(0, 1, (4, 3))
    styled: Pixels = palette[levels].transpose(0, 3, 1, 2)
    return styled


def _faded(x: Pixels, common: np.random.Generator, noise: np.random.Generator) -> Pixels:
    """Low contrast, in light from one side."""
    height, width = x.shape[2:]
    rows, columns = np.mgrid[0:height, 0:width] / max(height, width) - 0.5
    angle = common.uniform(0, 2 * np.pi)
    light = 0.5 + common.uniform(0.5, 0.8) * (rows * np.cos(angle) + columns * np.sin(angle))
    styled: Pixels = common.uniform(0.35, 0.5) * x + 0.5 * light * _tint(common, 0.5, 1.0)
    return styled


_EFFECTS: tuple[Effect, ...] = (_negative, _texture, _blurred, _outlines, _few_colors, _faded)
