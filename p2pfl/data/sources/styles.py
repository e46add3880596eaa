"""Datasets whose images come in several styles: the same classes, drawn, photographed or coloured differently.

FedStyle (Yang et al., 2022) is about such data; the partition ``styles`` gives every peer one style.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import numpy.typing as npt
from pydantic import Field, PlainSerializer, PlainValidator, PositiveInt, WithJsonSchema

from p2pfl import rng
from p2pfl.data.sources.base import Decoded, Images, Labels, Source
from p2pfl.errors import DataError

_BATCH = 4096  # images that are floats at the same time


@dataclass(frozen=True)
class Inner:
    """A dataset within another's options: its name and its own options."""

    name: str
    source: Source


def _parse(value: Any) -> Inner:
    from p2pfl.data.sources import DATASETS

    if isinstance(value, Inner):
        return value
    if isinstance(value, str):
        value = {"name": value}
    if not isinstance(value, Mapping) or not isinstance(value.get("name"), str):
        raise ValueError("should be the name of a dataset, or a mapping with a name and its parameters")
    options = {key: option for key, option in value.items() if key != "name"}
    return Inner(value["name"], DATASETS.find(value["name"]).parse(options))


InnerDataset = Annotated[
    Inner,
    PlainValidator(_parse),
    PlainSerializer(lambda inner: {"name": inner.name, **inner.source.to_dict()}),
    WithJsonSchema({"type": ["string", "object"]}),
]


@dataclass(frozen=True)
class Composed(Source):
    """Base of the datasets that are made of others."""

    def inner(self) -> Sequence[Inner]:
        raise NotImplementedError

    def files(self, root: Path) -> tuple[Path, ...]:
        return tuple(path for inner in self.inner() for path in inner.source.files(root))

    def download(self, root: Path) -> None:
        for inner in self.inner():
            if not all(path.exists() for path in inner.source.files(root)):
                inner.source.download(root)


@dataclass(frozen=True)
class Styles(Composed):
    """Several datasets of the same classes as one; each is a style, e.g. ``of: [mnist, svhn, usps]``.

    Images become RGB and are resized to squares (bilinear, antialiased). Class c of one dataset is class c of
    all: for trees of folders, whose classes are sorted by name, the names should be the same.
    """

    of: Annotated[tuple[InnerDataset, ...], Field(min_length=1)]
    """The datasets, by name or as mappings of a name and parameters; the first is style 0."""
    size: PositiveInt = 32
    """Height and width that images are resized to, in pixels."""

    def inner(self) -> Sequence[Inner]:
        return self.of

    def read(self, root: Path) -> Decoded:
        parts = [inner.source.read(root) for inner in self.of]
        if len({part.classes for part in parts}) > 1:
            counts = ", ".join(f"{inner.name} has {part.classes}" for inner, part in zip(self.of, parts, strict=True))
            raise DataError(f"styles: the datasets should have equally many classes, but {counts}")
        return Decoded(
            np.concatenate([_resized(part.train_images, self.size) for part in parts]),
            np.concatenate([part.train_labels for part in parts]),
            np.concatenate([_resized(part.test_images, self.size) for part in parts]),
            np.concatenate([part.test_labels for part in parts]),
            parts[0].classes,
            all(part.mirror for part in parts),
            np.repeat(np.arange(len(parts)), [len(part.train_labels) for part in parts]),
            np.repeat(np.arange(len(parts)), [len(part.test_labels) for part in parts]),
        )


def _resized(images: Images, size: int) -> Images:
    """uint8 [N, 1 or 3, H, W] as uint8 [N, 3, size, size]."""
    import torch
    from torch.nn.functional import interpolate

    result = np.empty((len(images), 3, size, size), np.uint8)
    for start in range(0, len(images), _BATCH):
        batch = torch.from_numpy(images[start : start + _BATCH].astype(np.float32))
        if batch.shape[2:] != (size, size):
            batch = interpolate(batch, (size, size), mode="bilinear", antialias=True).clamp(0, 255)
        result[start : start + _BATCH] = batch.round().to(torch.uint8).numpy()  # one channel goes into all three
    return result


@dataclass(frozen=True)
class Styled(Composed):
    """Another dataset's images, each in one of several made-up styles; RGB.

    Style 0 leaves images as they are. The others go round six kinds: negative in a colour, texture behind,
    blurred and noisy, outlines, few colours, faded in a gradient of light; each with colours and strengths of its
    own. The samples of each class are dealt out evenly to the styles, at random.
    """

    of: InnerDataset
    """The dataset, by name or as a mapping of a name and parameters."""
    styles: PositiveInt = 5
    """Number of styles."""
    seed: int = 0
    """Other seeds make other styles. The run's seed has no part in it: all its repetitions have one dataset."""

    def inner(self) -> Sequence[Inner]:
        return (self.of,)

    def read(self, root: Path) -> Decoded:
        plain = self.of.source.read(root)
        if plain.train_styles is not None:
            raise DataError(f"styled: {self.of.name} has styles already")
        train, test = (
            self._style(images, labels, half)
            for half, (images, labels) in enumerate(
                ((plain.train_images, plain.train_labels), (plain.test_images, plain.test_labels))
            )
        )
        return Decoded(
            train[0],
            plain.train_labels,
            test[0],
            plain.test_labels,
            plain.classes,
            plain.mirror,
            train[1],
            test[1],
        )

    def _style(self, images: Images, labels: Labels, half: int) -> tuple[Images, Labels]:
        """Images in their styles, uint8 [N, 3, H, W], and which these are."""
        stream = rng.shared(self.seed, "styled", half)
        order = stream.permutation(len(labels))
        styles = np.empty(len(labels), np.int64)
        for label in np.unique(labels):
            of_class = order[labels[order] == label]
            styles[of_class] = np.arange(len(of_class)) % self.styles
        result = np.empty((len(images), 3, *images.shape[2:]), np.uint8)
        for style in range(self.styles):
            mine = np.flatnonzero(styles == style)
            for batch in np.split(mine, range(_BATCH, len(mine), _BATCH)):
                x = np.repeat(images[batch], 3 // images.shape[1], axis=1).astype(np.float32) / 255
                result[batch] = np.rint(255 * np.clip(self._apply(style, x, stream), 0, 1))
        return result, styles

    def _apply(self, style: int, x: Pixels, noise: np.random.Generator) -> Pixels:
        """float32 [N, 3, H, W] in [0, 1] to about the same range; ``noise`` differs from image to image."""
        if style == 0:
            return x
        own = rng.shared(self.seed, "style", style)  # what is the same for all images of the style
        return _KINDS[(style - 1) % len(_KINDS)](x, own, noise)


Pixels = npt.NDArray[np.floating[Any]]
Kind = Callable[[Pixels, np.random.Generator, np.random.Generator], Pixels]


def _colour(stream: np.random.Generator, low: float, high: float) -> Pixels:
    """A factor for each channel, one of them ``high`` and one ``low``; [3, 1, 1]."""
    return stream.permutation(np.array([low, stream.uniform(low, high), high])).reshape(3, 1, 1)


def _negative(x: Pixels, own: np.random.Generator, noise: np.random.Generator) -> Pixels:
    styled: Pixels = (1 - x) * _colour(own, 0.2, 1.0)
    return styled


def _texture(x: Pixels, own: np.random.Generator, noise: np.random.Generator) -> Pixels:
    """Stripes and spots show where the image is dark."""
    height, width = x.shape[2:]
    rows, columns = np.mgrid[0:height, 0:width] / max(height, width)
    angle, waves = own.uniform(0, np.pi), own.uniform(2, 5)
    along, across = rows * np.cos(angle) + columns * np.sin(angle), rows * np.sin(angle) - columns * np.cos(angle)
    pattern = 0.5 + 0.25 * np.sin(2 * np.pi * waves * along) + 0.25 * np.sin(2 * np.pi * own.uniform(1, 5) * across)
    styled: Pixels = x + (1 - x) * 0.6 * pattern * _colour(own, 0.2, 1.0)
    return styled


def _blurred(x: Pixels, own: np.random.Generator, noise: np.random.Generator) -> Pixels:
    from scipy.ndimage import gaussian_filter

    sigma = own.uniform(0.03, 0.05) * min(x.shape[2:])
    blurred = gaussian_filter(x, (0, 0, sigma, sigma))
    styled: Pixels = blurred + own.uniform(0.08, 0.16) * noise.standard_normal(x.shape, np.float32)
    return styled


def _outlines(x: Pixels, own: np.random.Generator, noise: np.random.Generator) -> Pixels:
    """Dark lines on coloured paper."""
    from scipy.ndimage import correlate1d

    # Not scipy's sobel, which would smooth across channels and from one image to the next.
    vertical = correlate1d(correlate1d(x, [1, 2, 1], axis=3), [-1, 0, 1], axis=2)
    horizontal = correlate1d(correlate1d(x, [1, 2, 1], axis=2), [-1, 0, 1], axis=3)
    edges = np.hypot(vertical, horizontal).mean(1, keepdims=True)
    strongest = edges.max((2, 3), keepdims=True) + 1e-3
    styled: Pixels = _colour(own, 0.7, 1.0) * (1 - 0.9 * edges / strongest)
    return styled


def _few_colours(x: Pixels, own: np.random.Generator, noise: np.random.Generator) -> Pixels:
    """Shades of grey, cut into four, each with a colour; brighter ones stay brighter on the whole."""
    levels = np.minimum((4 * x.mean(1)).astype(np.int64), 3)
    palette = 0.7 * np.linspace(0.1, 1, 4)[:, np.newaxis] + 0.3 * own.uniform(0, 1, (4, 3))
    styled: Pixels = palette[levels].transpose(0, 3, 1, 2)
    return styled


def _faded(x: Pixels, own: np.random.Generator, noise: np.random.Generator) -> Pixels:
    """Little contrast, in light that comes from one side."""
    height, width = x.shape[2:]
    rows, columns = np.mgrid[0:height, 0:width] / max(height, width) - 0.5
    angle = own.uniform(0, 2 * np.pi)
    light = 0.5 + own.uniform(0.5, 0.8) * (rows * np.cos(angle) + columns * np.sin(angle))
    styled: Pixels = own.uniform(0.35, 0.5) * x + 0.5 * light * _colour(own, 0.5, 1.0)
    return styled


_KINDS: tuple[Kind, ...] = (_negative, _texture, _blurred, _outlines, _few_colours, _faded)
