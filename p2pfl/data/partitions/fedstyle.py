"""The partition of FedStyle (Yang et al., 2022, arXiv 2211.06470), section 4 and appendices A and B."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from pydantic import PositiveFloat, PositiveInt

from p2pfl import rng
from p2pfl.data.partitions.base import Fraction, Indices, Labelled, Partition, Share, cyclic, hold_out, merge
from p2pfl.errors import DataError


@dataclass(frozen=True)
class Styles(Partition):
    """Equally many peers for each style, all with equally many training samples; for datasets that have styles.

    A peer's style is its group: peers form contiguous blocks. The training samples of each class and style are
    shuffled and taken in turn by the peers of that style, from the start again when they are used up; so a small
    style's samples are repeated, and a large one's are not all used. Peers are tested on all test samples of
    their style.
    """

    beta: PositiveFloat | None = None
    """Concentration β of the Dirichlet distribution that each peer's proportions of classes are drawn from (0.2 and
    0.8 in Fig. 5); null for equally many samples of each class."""
    per_peer: PositiveInt | None = None
    """Training samples of a peer, those held out included; by default the mean size of a style, divided by the
    number of peers that a style has."""
    validation: Fraction = 0.0
    """Fraction of a peer's training samples that is held out; none of them is trained on by any peer."""

    def split(self, data: Labelled, peers: int, seed: int) -> list[Share]:
        if data.train_styles is None or data.test_styles is None:
            raise DataError("partition styles: this dataset has no styles; those that have: styled, styles")
        styles = int(data.train_styles.max()) + 1
        if peers % styles:
            raise DataError(f"partition styles: {peers} peers cannot be dealt out evenly to {styles} styles")
        each = peers // styles
        total = self.per_peer or round(len(data.train) / styles / each)
        held_out = round(self.validation * total)
        stream = rng.shared(seed, "partition")
        shares = []
        for style in range(styles):
            quotas = [self._quotas(data.classes, stream) for _ in range(each)]
            mine = data.train_styles == style
            pools = [
                hold_out(stream.permutation(np.flatnonzero(mine & (data.train == label))), self.validation)
                for label in range(data.classes)
            ]
            train = _deal([kept for kept, _ in pools], [_counts(q, total - held_out) for q in quotas], style)
            validation = _deal([held for _, held in pools], [_counts(q, held_out) for q in quotas], style)
            test = np.flatnonzero(data.test_styles == style)
            shares += [Share(kept, held, test, style) for kept, held in zip(train, validation, strict=True)]
        return shares

    def _quotas(self, classes: int, stream: np.random.Generator) -> npt.NDArray[np.float64]:
        """One peer's proportions of classes."""
        if self.beta is None:
            return np.full(classes, 1 / classes)
        return stream.dirichlet(np.full(classes, self.beta))


def _counts(proportions: npt.NDArray[np.float64], total: int) -> Indices:
    """Whole numbers that add up to ``total`` and are within one of the proportions of it."""
    edges = np.rint(np.cumsum(proportions) * total).astype(np.int64)
    edges[-1] = total
    return np.diff(edges, prepend=0)


def _deal(pools: list[Indices], counts: list[Indices], style: int) -> list[Indices]:
    """To each peer ``counts[peer][label]`` samples of ``pools[label]``, from where the peer before it stopped."""
    for label, pool in enumerate(pools):
        if not len(pool) and any(count[label] for count in counts):
            raise DataError(f"partition styles: too few training samples of class {label} in style {style}")
    starts = np.cumsum([np.zeros_like(counts[0]), *counts[:-1]], axis=0)
    return [
        merge([cyclic(pool, start, n) for pool, start, n in zip(pools, first, count, strict=True) if n])
        for first, count in zip(starts, counts, strict=True)
    ]
