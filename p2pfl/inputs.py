"""Shapes of inputs: images, vectors, series and tokens.

A dataset's inputs have a number of channels and a size, which backbones are built for:

    kind     inputs                                channels         size
    images   float [B, C, H, W]                    C                (H, W)
    series   float [B, C, L]                       C                (L,)
    vectors  float [B, D]                          D                ()
    tokens   int64 [B, L], each in [0, channels)   the vocabulary   Tokens((L,))
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

Kind = Literal["images", "series", "vectors", "tokens"]

Size = tuple[int, ...]
"""Height and width of images, length of series, or nothing for vectors."""


class Tokens(Size):
    """The size of sequences of tokens: their length. The number of channels is the size of the vocabulary."""


def size_of(kind: Kind, numbers: tuple[int, ...]) -> Size:
    """Return the size of inputs of a kind: height and width (or one number for both), a length, or () for vectors.

    Raises ValueError: there are more numbers.
    """
    wanted = {"images": 2, "series": 1, "tokens": 1, "vectors": 0}[kind]
    if kind == "images" and len(numbers) == 1:
        numbers *= 2
    if wanted and len(numbers) != wanted:
        raise ValueError(f"{kind} have {wanted} number{'s' * (wanted > 1)}, not {len(numbers)}")
    return Tokens(numbers) if kind == "tokens" else numbers[:wanted]


def kind_of(size: Size) -> Kind:
    """Return the kind of inputs of this size."""
    if isinstance(size, Tokens):
        return "tokens"
    return ("vectors", "series", "images")[len(size)]


def shape_of(channels: int, size: Size) -> tuple[int, ...]:
    """Return the shape of one input."""
    return tuple(size) if isinstance(size, Tokens) else (channels, *size)


def zeros(count: int, channels: int, size: Size) -> Tensor:
    """Return a batch of inputs, all zero, as float32, or int64 for tokens."""
    return torch.zeros(count, *shape_of(channels, size), dtype=torch.int64 if isinstance(size, Tokens) else None)


def varied(count: int, channels: int, size: Size) -> Tensor:
    """Return a batch of inputs that differ: evenly spaced in [0, 1], or all tokens in turn."""
    batch = zeros(count, channels, size)
    if isinstance(size, Tokens):
        return torch.arange(batch.numel(), device=batch.device).view(batch.shape) % channels
    return torch.linspace(0, 1, batch.numel()).view(batch.shape)


def describe(channels: int, size: Size) -> str:
    """``images of 3x32x32``, ``vectors of 8 numbers``."""
    match kind_of(size):
        case "vectors":
            return f"vectors of {channels} numbers"
        case "tokens":
            return f"sequences of {size[0]} tokens out of {channels}"
        case kind:
            return f"{kind} of {'x'.join(map(str, (channels, *size)))}"
