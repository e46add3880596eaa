"""Partition of FedStyle (Yang et al., 2022, arXiv 2211.06470), section 4 and appendices A and B."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from pydantic import PositiveFloat, PositiveInt

from p2pfl import rng
from p2pfl.data.partitions.base import (
    DatasetLabels,
    Fraction,
    Indices,
    Partition,
    Subset,
    concat_sorted,
    hold_out,
    partition,
    take_cyclic,
)
from p2pfl.errors import DataError


@partition("styles")
@dataclass(frozen=True)
class Styles(Partition):
    """The same number of peers for each style, and of training samples for each peer; for datasets with styles.

    A peer's style is its group; groups are contiguous blocks of peers. The training samples of each class and style
    are shuffled, and the peers of that style take them in turn, cyclically: samples of a small style are repeated,
    and some of a large one are unused. Peers are tested on all test samples of their style.

    A single peer has what one peer of each style would have, for centralized training.
    """

    beta: PositiveFloat | None = None
    """Concentration β of the Dirichlet distribution of each peer's class proportions (0.2 and 0.8 in Fig. 5); null
    for equal numbers of samples of each class."""
    per_peer: PositiveInt | None = None
    """Training samples of a peer, including those held out; by default the mean size of a style divided by the number
    of its peers."""
    validation: Fraction = 0.0
    """Fraction of a peer's training samples that is held out; no peer trains on them."""

    def split(self, data: DatasetLabels, peers: int, seed: int) -> list[Subset]:
        if data.train_styles is None or data.test_styles is None:
            raise DataError("partition styles: the dataset has no styles; use dataset styled or styles")
        styles = int(data.train_styles.max()) + 1
        if peers == 1 < styles:
            parts = self.split(data, styles, seed)
            return [
                Subset(
                    concat_sorted([part.train for part in parts]),
                    concat_sorted([part.validation for part in parts]),
                    concat_sorted([part.test for part in parts]),
                )
            ]
        if peers % styles:
            raise DataError(f"partition styles: {peers} peers cannot be divided evenly among {styles} styles")
        each = peers // styles
        total = self.per_peer or round(len(data.train) / styles / each)
        held_out = round(self.validation * total)
        stream = rng.shared(seed, "partition")
        subsets = []
        for style in range(styles):
            proportions = [self._proportions(data.classes, stream) for _ in range(each)]
            in_style = data.train_styles == style
            pools = [
                hold_out(stream.permutation(np.flatnonzero(in_style & (data.train == label))), self.validation)
                for label in range(data.classes)
            ]
            train = _distribute(
                [kept for kept, _ in pools], [_counts(p, total - held_out) for p in proportions], style
            )
            validation = _distribute([held for _, held in pools], [_counts(p, held_out) for p in proportions], style)
            test = np.flatnonzero(data.test_styles == style)
            subsets += [Subset(kept, held, test, style) for kept, held in zip(train, validation, strict=True)]
        return subsets

    def _proportions(self, classes: int, stream: np.random.Generator) -> npt.NDArray[np.float64]:
        """Draw the class proportions of one peer."""
        if self.beta is None:
            return np.full(classes, 1 / classes)
        return stream.dirichlet(np.full(classes, self.beta))


def _counts(proportions: npt.NDArray[np.float64], total: int) -> Indices:
    """Round ``proportions * total`` to integers that add up to ``total``."""
    edges = np.rint(np.cumsum(proportions) * total).astype(np.int64)
    edges[-1] = total
    return np.diff(edges, prepend=0)


def _distribute(pools: list[Indices], counts: list[Indices], style: int) -> list[Indices]:
    """Give each peer the next ``counts[peer][label]`` samples of ``pools[label]``, cyclically."""
    for label, pool in enumerate(pools):
        if not len(pool) and any(count[label] for count in counts):
            raise DataError(f"partition styles: too few training samples of class {label} in style {style}")
    starts = np.cumsum([np.zeros_like(counts[0]), *counts[:-1]], axis=0)
    return [
        concat_sorted([take_cyclic(pool, start, n) for pool, start, n in zip(pools, first, count, strict=True) if n])
        for first, count in zip(starts, counts, strict=True)
    ]
