"""What several tests of the library need: tiny datasets, peers made by hand, and rounds between them."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from p2pfl.algorithms.base import Algorithm, Setting
from p2pfl.data import Dataset, Share, Split
from p2pfl.models import Model
from p2pfl.net import Counts, Endpoint, LocalHub
from p2pfl.rng import Streams
from p2pfl.topology import Topology
from p2pfl.training import PeerData
from tests.bodies import RUN_ID

CPU = torch.device("cpu")


def no_augmentation(images: torch.Tensor) -> torch.Tensor:
    return images


def random_dataset(
    samples: int, *, classes: int = 3, size: tuple[int, int] = (2, 2), seed: int = 0, tests: int = 4
) -> Dataset:
    """Grey noise; sample n has the label n mod classes. Pixels become network input unchanged but for the 255."""
    stream = np.random.default_rng(seed)

    def split(count: int) -> Split:
        images = stream.integers(0, 256, size=(count, 1, *size), dtype=np.uint8)
        return Split(images, np.arange(count) % classes)

    return Dataset("noise", split(samples), split(tests), classes, mean=(0.0,), std=(1.0,), mirror=False)


def share(train: Iterable[int], test: Iterable[int] = (), validation: Iterable[int] = ()) -> Share:
    indices = [np.array(list(part), dtype=np.int64) for part in (train, validation, test)]
    return Share(*indices)


def peer_data(
    dataset: Dataset,
    train: Iterable[int] | None = None,
    test: Iterable[int] = (),
    augment: Callable[[torch.Tensor], torch.Tensor] = no_augmentation,
    validation: Iterable[int] = (),
) -> PeerData:
    """A peer with these training samples, by default all."""
    mine = range(len(dataset.train)) if train is None else train
    return PeerData(dataset, share(mine, test, validation), augment, CPU)


def softmax_regression(inputs: int, classes: int, seed: int = 0) -> Model:
    """No backbone to speak of: the pixels are the features. The head starts with small multiples of 1/64."""
    model = Model("flat", nn.Flatten(), inputs, classes)
    values = np.random.default_rng(seed).integers(-32, 33, size=(classes, inputs + 1)) / 64
    with torch.no_grad():
        model.head.weight.copy_(torch.from_numpy(values[:, 1:]))
        model.head.bias.copy_(torch.from_numpy(values[:, 0]))
    return model


def linear_model(inputs: int, features: int, classes: int, seed: int = 0) -> Model:
    """A linear backbone."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Model("linear", nn.Sequential(nn.Flatten(), nn.Linear(inputs, features)), features, classes)


def setting(me: int, peers: int, model: Model, data: PeerData, seed: int = 0) -> Setting:
    def build(peer: int) -> Model:
        return copy.deepcopy(model)

    return Setting(me, peers, seed, model, data, Streams(seed, me), CPU, (model.name,) * peers, build)


@dataclass(frozen=True)
class Spoken:
    """One peer's traffic in one round, as the session would record it."""

    out: Counts
    inn: Counts
    missing: Mapping[str, Sequence[int]]
    sources: tuple[int, ...]
    listeners: tuple[int, ...]


def messages(counts: Counts, kind: str | None = None) -> int:
    return sum(entry[0] for kinds in counts.values() for name, entry in kinds.items() if kind in (None, name))


def payload(counts: Counts) -> int:
    return sum(entry[1] for kinds in counts.values() for entry in kinds.values())


def play(
    algorithms: Sequence[Algorithm[Any]],
    topology: Topology,
    rounds: int,
    *,
    silent: Iterable[int] = (),
    after: Callable[[Algorithm[Any], int], None] = lambda algorithm, t: None,
) -> list[list[Spoken]]:
    """Drive the peers, one per entry, through ``rounds`` rounds in this process; their traffic by peer and round.

    Peers in ``silent`` are dead from the start, and the others know it. ``after`` is called after each round of
    each peer. A method that ends the run early ends it here too.
    """
    return asyncio.run(_play(algorithms, topology, rounds, set(silent), after))


async def _play(
    algorithms: Sequence[Algorithm[Any]],
    topology: Topology,
    rounds: int,
    silent: set[int],
    after: Callable[[Algorithm[Any], int], None],
) -> list[list[Spoken]]:
    hub = LocalHub()
    endpoints = [
        Endpoint(algorithm.me, topology, RUN_ID, algorithm.seed, algorithm.layouts(), stow=algorithm.stow)
        for algorithm in algorithms
    ]
    for endpoint in endpoints:
        hub.join(endpoint)
        for peer in silent:
            endpoint.mailbox.lost(peer)
    spoken: list[list[Spoken]] = [[] for _ in algorithms]

    async def one(algorithm: Algorithm[Any], endpoint: Endpoint) -> None:
        try:
            for t in range(0 if algorithm.me in silent else rounds):
                net = endpoint.begin(t)
                sources, listeners = net.sources, net.listeners
                await algorithm.round(t, net)
                await endpoint.finish(t)
                spoken[algorithm.me].append(Spoken(endpoint.out, endpoint.inn, endpoint.missing, sources, listeners))
                after(algorithm, t)
                if algorithm.finished:
                    return
        finally:
            hub.finish(algorithm.me)

    async with asyncio.TaskGroup() as group:
        for algorithm, endpoint in zip(algorithms, endpoints, strict=True):
            group.create_task(one(algorithm, endpoint))
    return spoken
