"""Errors of torch in training, in terms of the run file."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from p2pfl.algorithms.base import Algorithm
from p2pfl.errors import ModelError


@contextmanager
def naming_batches(algorithm: Algorithm[Any]) -> Iterator[None]:
    """Raise ModelError if batch normalization fails on a batch of one sample."""
    try:
        yield
    except ValueError as error:
        if "Expected more than 1 value per channel" not in str(error):
            raise
        batch, samples = getattr(algorithm.hyper, "batch", None), len(algorithm.data.train)
        raise ModelError(
            f"peer {algorithm.me} trains {algorithm.model.name} on batches of one sample (algorithm.batch: {batch}, "
            f"training samples: {samples}), but batch normalization needs two: give peers more samples and "
            "batches of two or more, or choose another model"
        ) from error
