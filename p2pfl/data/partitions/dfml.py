"""The partitions of DFML (Khalil et al., TMLR 2024), section 4.1 and Fig. 10.

The training set is dealt out, and a fifth of each peer's samples is held out: local performance is measured on
that. The official test set is for global performance: every peer is tested on all of it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from pydantic import PositiveFloat, PositiveInt

from p2pfl import rng
from p2pfl.data.partitions.base import Fraction, Indices, Labelled, Partition, Share, hold_out, merge, require_peers
from p2pfl.data.partitions.fedtgp import LEAST, dirichlet_cut


@dataclass(frozen=True)
class IidTrain(Partition):
    """The training set shuffled and dealt out evenly; everyone is tested on the whole test set."""

    validation: Fraction = 0.2
    """Fraction of a peer's samples that is held out, rounded to whole samples."""

    def split(self, data: Labelled, peers: int, seed: int) -> list[Share]:
        require_peers("iid-train", len(data.train), "training", peers)
        stream = rng.shared(seed, "partition")
        dealt = np.array_split(stream.permutation(len(data.train)), peers)
        return _with_whole_test(dealt, self.validation, data)


@dataclass(frozen=True)
class DirichletTrain(Partition):
    """The training set, each class in Dirichlet proportions; everyone is tested on the whole test set.

    See ``fedtgp.dirichlet_cut`` for the rule.
    """

    beta: PositiveFloat = 0.1
    """Concentration β; the smaller, the more a class belongs to few peers."""
    least: PositiveInt = LEAST
    """Samples that each peer must have, or half of an even share n/M if that is less."""
    validation: Fraction = 0.2
    """Fraction of a peer's samples that is held out, rounded to whole samples."""

    def split(self, data: Labelled, peers: int, seed: int) -> list[Share]:
        stream = rng.shared(seed, "partition")
        parts = dirichlet_cut("dirichlet-train", data.train, data.classes, peers, self.beta, self.least, stream)
        dealt = [stream.permutation(merge(mine)) for mine in parts]
        return _with_whole_test(dealt, self.validation, data)


def _with_whole_test(dealt: list[Indices], validation: float, data: Labelled) -> list[Share]:
    test = np.arange(len(data.test))
    shares = []
    for mine in dealt:
        kept, held_out = hold_out(mine, validation)
        shares.append(Share(np.sort(kept), np.sort(held_out), test))
    return shares
