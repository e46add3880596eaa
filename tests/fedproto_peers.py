"""FedProto's small peers, whose backbones, samples and classes differ."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from p2pfl.algorithms.fedproto import FedProto, Hyper
from p2pfl.learning.peer_data import PeerData
from tests.support import linear_model, peer_data, random_dataset, setting

FEATURES, CLASSES = 5, 4
LINE = [(0, 1), (1, 2)]
COMPLETE = [(0, 1), (1, 2), (0, 2)]
LOCAL_CLASSES: tuple[tuple[int, ...], ...] = ((0, 1), (1, 2), (0, 1, 2))
"""Classes of each peer; no peer has class 3."""


def hyper(**given: Any) -> Hyper:
    return Hyper.parse({"lr": 0.1, "batch": 1000, **given})


def data_of(me: int, classes: Sequence[int]) -> PeerData:
    """6 + 3 me training samples of these classes, and all four test samples of the peer's dataset."""
    dataset = random_dataset(60, classes=CLASSES, seed=me)
    chosen = [n for n in range(60) if dataset.train.labels[n] in classes][: 6 + 3 * me]
    return peer_data(dataset, chosen, range(4))


def make(h: Hyper, classes_of: Sequence[Sequence[int]] = LOCAL_CLASSES) -> list[FedProto]:
    """Peers with linear backbones on gray noise."""
    return [
        FedProto(h, setting(me, len(classes_of), linear_model(4, FEATURES, CLASSES, seed=me), data_of(me, classes)))
        for me, classes in enumerate(classes_of)
    ]
