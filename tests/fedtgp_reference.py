"""FedTGP's options in tests, and its loss (Eq. 10) differentiable by autograd."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import cross_entropy, one_hot

from p2pfl.algorithms.fedtgp import Hyper
from p2pfl.algorithms.prototypes import distances

Array = NDArray[np.float64]

FEATURES, CLASSES, SEED = 5, 4, 7


def hyper(**given: Any) -> Hyper:
    return Hyper.parse({"lr": 0.1, "batch": 4, "prototype_epochs": 5, "prototype_batch": 3, **given})


def apart(centers: Array) -> dict[tuple[int, int], float]:
    pairs = [(i, j) for i in range(len(centers)) for j in range(len(centers)) if i != j]
    return {(i, j): math.dist(centers[i], centers[j]) for i, j in pairs}


def acl_loss(values: Tensor, labels: Tensor, prototypes: Tensor, margin: float) -> Tensor:
    """Eq. 10 in torch, averaged over the batch: the loss whose gradient ``acl_gradient`` computes."""
    apart = distances(values, prototypes) + margin * one_hot(labels, len(prototypes)).to(values.dtype)
    return cross_entropy(-apart, labels)
