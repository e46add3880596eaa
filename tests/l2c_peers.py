"""L2C's small peers: softmax regressions on private noise."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from p2pfl.algorithms.l2c import L2C, Hyper, Update, aggregate
from p2pfl.learning.peer_data import PeerData
from p2pfl.messaging.topology import Topology
from p2pfl.tensors import Tensors
from tests.support import mean_at, peer_data, random_dataset, setting, softmax_regression

INPUTS, CLASSES = 4, 3
NUMBERS = CLASSES * (INPUTS + 1)
LINE = Topology.from_edges(3, [(0, 1), (1, 2)])


def hyper(**given: Any) -> Hyper:
    """All samples in one batch, so that an epoch is a step."""
    return Hyper.parse({"local_epochs": 2, "batch": 64, "lr": 0.5, "prune_round": None, **given})


def data_of(me: int) -> PeerData:
    """Peer i trains on 6 + i samples of private noise and validates on 5 others."""
    return peer_data(random_dataset(20, classes=CLASSES, seed=me), range(6 + me), validation=range(15, 20))


def aggregated(before: Tensors, updates: Mapping[int, Tensors], w: Mapping[int, float]) -> Tensors:
    return aggregate(mean_at(), before, {j: Update(update) for j, update in updates.items()}, w, "values")


def make(h: Hyper, peers: int = 3) -> list[L2C]:
    """Return peers with equal softmax regressions."""
    model = [softmax_regression(INPUTS, CLASSES, seed=7) for _ in range(peers)]
    return [L2C(h, setting(me, peers, model[me], data_of(me))) for me in range(peers)]
