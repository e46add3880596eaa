"""Shared test helpers: tiny datasets, peers built by hand, and rounds between them in this process."""

from __future__ import annotations

import asyncio
import copy
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from p2pfl.aggregation import Mean
from p2pfl.aggregation.aggregator import Aggregator
from p2pfl.algorithms.base import Algorithm
from p2pfl.algorithms.context import Context
from p2pfl.data import Dataset, Split, Subset
from p2pfl.learning.peer_data import PeerData
from p2pfl.messaging.conversation import Conversation
from p2pfl.messaging.endpoint import Endpoint
from p2pfl.messaging.inbox import MessageCounts
from p2pfl.messaging.neighborhood import Neighborhood
from p2pfl.messaging.net import Net
from p2pfl.messaging.newest import NewestMailbox, Take
from p2pfl.messaging.topology import Topology
from p2pfl.models import Model
from p2pfl.rng import Streams
from p2pfl.simulation.local_link import LocalHub
from tests.bodies import RUN_ID

CPU = torch.device("cpu")


def no_augmentation(images: torch.Tensor) -> torch.Tensor:
    return images


def random_dataset(
    samples: int, *, classes: int = 3, size: tuple[int, int] = (2, 2), seed: int = 0, tests: int = 4
) -> Dataset:
    """Return gray noise; sample n has the label n mod classes. The network input is the pixels / 255."""
    stream = np.random.default_rng(seed)

    def split(count: int) -> Split:
        images = stream.integers(0, 256, size=(count, 1, *size), dtype=np.uint8)
        return Split(images, np.arange(count) % classes)

    return Dataset("noise", split(samples), split(tests), classes, mean=(0.0,), std=(1.0,), mirror=False)


def numbered_dataset(samples: int, classes: int = 3) -> Dataset:
    """Sample n has label n mod ``classes`` and encodes n in two pixels, so that tests can identify it."""
    numbers = np.arange(samples)
    images = np.stack([numbers % 256, numbers // 256], axis=1).astype(np.uint8).reshape(samples, 1, 1, 2)
    split = Split(images, numbers % classes)
    return Dataset("numbered", split, split, classes, mean=(0.0,), std=(1.0,), mirror=False)


def sample_numbers(images: torch.Tensor) -> list[int]:
    """The numbers of samples of ``numbered_dataset``."""
    return [int(low) + 256 * int(high) for low, high in images.reshape(-1, 2).tolist()]


def share(train: Iterable[int], test: Iterable[int] = (), validation: Iterable[int] = ()) -> Subset:
    def indices(positions: Iterable[int]) -> NDArray[np.int64]:
        return np.array(list(positions), dtype=np.int64)

    return Subset(indices(train), indices(validation), indices(test))


def peer_data(
    dataset: Dataset,
    train: Iterable[int] | None = None,
    test: Iterable[int] = (),
    augment: Callable[[torch.Tensor], torch.Tensor] = no_augmentation,
    validation: Iterable[int] = (),
) -> PeerData:
    """Return a peer's data with these training samples; default all."""
    local = range(len(dataset.train)) if train is None else train
    return PeerData(dataset, share(local, test, validation), augment, CPU)


def softmax_regression(inputs: int, classes: int, seed: int = 0) -> Model:
    """Return a model whose features are the pixels. The head's initial parameters are small multiples of 1/64."""
    model = Model("flat", nn.Flatten(), inputs, classes)
    head = model.linear_head
    values = np.random.default_rng(seed).integers(-32, 33, size=(classes, inputs + 1)) / 64
    with torch.no_grad():
        head.weight.copy_(torch.from_numpy(values[:, 1:]))
        head.bias.copy_(torch.from_numpy(values[:, 0]))
    return model


def linear_model(inputs: int, features: int, classes: int, seed: int = 0) -> Model:
    """Return a model with a linear backbone."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Model("linear", nn.Sequential(nn.Flatten(), nn.Linear(inputs, features)), features, classes)


def mean_at(me: int = 0) -> Aggregator:
    """Return what a peer combines by where the run file names no rule."""
    return Aggregator(Mean(), me, rounds=1)


def setting(me: int, peers: int, model: Model, data: PeerData, seed: int = 0, rounds: int = 0) -> Context:
    """Return the context of a peer in a run whose peers have at most 1000 training samples each."""

    def build(peer: int) -> Model:
        return copy.deepcopy(model)

    return Context(
        me,
        peers,
        seed,
        model,
        data,
        Streams(seed, me),
        CPU,
        (model.name,) * peers,
        build,
        (1000,) * peers,
        rounds=rounds,
    )


def peers_of(
    method: Callable[[Any, Context], Any],
    hyper: Any,
    model: Callable[[int], Model],
    peers: int = 3,
    *,
    more: int = 2,
    test: Iterable[int] = (),
    rounds: int = 0,
) -> list[Any]:
    """Return the peers of a run: peer i has the model ``model(i)``, and 6 + ``more`` · i samples of noise."""

    def context(me: int) -> Context:
        start = model(me)
        data = random_dataset(6 + more * me, classes=start.classes, seed=me)
        return setting(me, peers, start, peer_data(data, test=test), rounds=rounds)

    return [method(hyper, context(me)) for me in range(peers)]


@dataclass(frozen=True)
class Traffic:
    """One peer's messages in one round, as the session records them."""

    sent: MessageCounts
    received: MessageCounts
    missing: Mapping[str, Sequence[int]]
    sources: tuple[int, ...]
    receivers: tuple[int, ...]


def messages(counts: MessageCounts, kind: str | None = None) -> int:
    """Return the number of messages, optionally of one kind."""
    return sum(entry[0] for kinds in counts.values() for name, entry in kinds.items() if kind in (None, name))


def payload(counts: MessageCounts) -> int:
    """Return the payload in bytes."""
    return sum(entry[1] for kinds in counts.values() for entry in kinds.values())


def run_rounds(
    algorithms: Sequence[Algorithm[Any]],
    topology: Topology,
    rounds: int,
    *,
    silent: Iterable[int] = (),
    after: Callable[[Algorithm[Any], int], None] = lambda algorithm, t: None,
    orders: Mapping[int, Sequence[Take]] | None = None,
) -> list[list[Traffic]]:
    """Run ``rounds`` rounds of the peers' algorithms in this process; return their traffic by peer and round.

    Args:
        silent: peers that are disconnected from the start, as the others know.
        after: called after each round of each peer.
        orders: what the rounds of each peer take, where they do not wait for one another.
    """
    return asyncio.run(_run_rounds(algorithms, topology, rounds, set(silent), after, orders))


async def _run_rounds(
    algorithms: Sequence[Algorithm[Any]],
    topology: Topology,
    rounds: int,
    silent: set[int],
    after: Callable[[Algorithm[Any], int], None],
    orders: Mapping[int, Sequence[Take]] | None,
) -> list[list[Traffic]]:
    hub, endpoints = LocalHub(), []
    for algorithm in algorithms:
        place = Neighborhood(algorithm.me, topology)
        conversation = Conversation(algorithm.layouts(), algorithm.prunes, algorithm.on_receive)
        mailbox = None
        if orders is not None:
            mailbox = NewestMailbox(place.neighbors, math.inf, conversation.once)
            mailbox.repeat(orders[algorithm.me])
        endpoints.append(Endpoint(place, RUN_ID, conversation, mailbox=mailbox))
    for endpoint in endpoints:
        hub.join(endpoint)
        for peer in silent:
            endpoint.mailbox.mark_disconnected(peer)
    for endpoint in endpoints:
        if endpoint.me not in silent:
            endpoint.open(0)
    traffic: list[list[Traffic]] = [[] for _ in algorithms]

    async def run_peer(algorithm: Algorithm[Any], endpoint: Endpoint) -> None:
        try:
            for t in range(0 if algorithm.me in silent else rounds):
                endpoint.begin(t)
                net = Net(endpoint, t, algorithm.seed)
                sources = net.sources
                algorithm.aggregation.t = t
                await algorithm.round(t, net)
                receivers = net.receivers
                endpoint.finish(t)
                traffic[algorithm.me].append(
                    Traffic(endpoint.sent, endpoint.received, endpoint.missing, sources, receivers)
                )
                after(algorithm, t)
                if algorithm.finished:
                    return
        finally:
            hub.finish(algorithm.me)

    async with asyncio.TaskGroup() as group:
        for algorithm, endpoint in zip(algorithms, endpoints, strict=True):
            group.create_task(run_peer(algorithm, endpoint))
    return traffic
