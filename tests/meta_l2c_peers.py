"""meta-L2C's small peers, random changes and encoders."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from p2pfl.algorithms.meta_l2c import Hyper, MetaL2C
from p2pfl.algorithms.meta_l2c_encoder import Encoder
from p2pfl.learning.peer_data import PeerData
from p2pfl.messaging.topology import Topology
from p2pfl.session.pretrained import load_pretrained
from p2pfl.tensors import parameters_of
from tests.support import linear_model, peer_data, random_dataset, setting

INPUTS, FEATURES, CLASSES = 4, 5, 3
SHAPES = {
    "backbone.1.weight": (FEATURES, INPUTS),
    "backbone.1.bias": (FEATURES,),
    "head.weight": (CLASSES, FEATURES),
    "head.bias": (CLASSES,),
}
NUMBERS = sum(math.prod(shape) for shape in SHAPES.values())
HIDDEN, WIDTH = 10, 5
ENCODER = sum(HIDDEN * math.prod(shape[1:]) + HIDDEN + WIDTH * HIDDEN + WIDTH for shape in SHAPES.values())
CODE = WIDTH * sum(shape[0] for shape in SHAPES.values())
LINE = Topology.from_edges(3, [(0, 1), (1, 2)])


def hyper(**given: Any) -> Hyper:
    """All samples in one batch, so that an epoch is a step."""
    return Hyper.parse({"local_epochs": 2, "batch": 64, "lr": 0.5, "prune_round": None, **given})


def data_of(me: int) -> PeerData:
    return peer_data(random_dataset(20, classes=CLASSES, seed=me), range(6 + me), validation=range(15, 20))


def make(h: Hyper, peers: int = 3, *, features: int = FEATURES) -> list[MetaL2C]:
    """Return peers with equal linear networks."""
    made = [
        MetaL2C(h, setting(me, peers, linear_model(INPUTS, features, CLASSES, seed=7), data_of(me)))
        for me in range(peers)
    ]
    for peer in made:
        load_pretrained(peer)
    return made


def random_change(generator: torch.Generator) -> dict[str, Tensor]:
    return {name: torch.randn(shape, generator=generator) * 0.3 for name, shape in SHAPES.items()}


def random_encoder(seed: int) -> Encoder:
    """An encoder with weights large enough that codes differ."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        encoder = Encoder(parameters_of(linear_model(INPUTS, FEATURES, CLASSES)), HIDDEN, WIDTH)
        for parameter in encoder.parameters():
            torch.nn.init.normal_(parameter, std=0.5)
    return encoder
