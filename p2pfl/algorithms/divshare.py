"""DivShare: asynchronous decentralized learning with models divided into fragments.

Sayan Biswas, Anne-Marie Kermarrec, Alexis Marouani, Rafael Pires, Rishi Sharma, Martijn de Vos: "Boosting
Asynchronous Decentralized Learning with Model Fragmentation", WWW 2025. https://arxiv.org/abs/2410.12918

Algorithm 1, in round t on peer i, whose model x_i consists of ⌈1/Ω⌉ fragments of equal size:

    1  train x_i on the local samples
    2  replace what is still to be sent by the fragments of x_i, each of them to J random neighbors, in random order
    3  for each parameter, with the fragments that have arrived since the last round, of one sender's the newest:
           x_i ← (x_i + Σ_j x_j) / (1 + number of senders)

A slow link carries some fragments of a round, where it would carry no whole model. With ``synchrony: none`` peers
never wait, as in the paper; with rounds, each waits for the fragments of its round that are sent to it.

Differs from the paper:

- Line 3 ends a round, as in the authors' code, where the paper begins the next one with it.
- A fragment is a range of the parameters in their order. In the authors' code, its parameters are drawn at random,
  the same on all peers and in all rounds.
- The neighbors are those of the graph; in the paper, all peers.
- A link to one neighbor does not wait for another one; the paper's sender has one queue for all of them.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache

from pydantic import PositiveInt
from torch import Tensor

from p2pfl import PeerId, rng
from p2pfl.algorithms.base import Algorithm, Fraction
from p2pfl.algorithms.registration import algorithm
from p2pfl.algorithms.shared_model import SharedModel, shared_tensors
from p2pfl.messaging.net import Net
from p2pfl.messaging.schema import Body, Layout
from p2pfl.tensors import Tensors, assign


@dataclass(frozen=True)
class Hyper(SharedModel):
    fragment: Fraction = 0.1
    """Ω, fraction of the parameters in a fragment."""
    receivers: PositiveInt = 6
    """J, neighbors to which a peer sends each fragment; all of them if it has fewer."""


@dataclass(frozen=True)
class Fragment(Body):
    """A fragment of x_j: consecutive entries of some of its tensors by name, flat."""

    counts = "current"

    values: dict[str, Tensor]


@cache
def kind_of(number: int) -> type[Fragment]:
    """Return the class of the bodies that hold fragment ``number``: each is sent, and replaced, separately."""
    return type(f"Fragment{number}", (Fragment,), {})


def divided(tensors: Tensors, count: int) -> list[dict[str, Tensor]]:
    """Divide flat tensors, one after the other, into fragments whose sizes differ by one entry at most.

    Returns:
        {name: consecutive entries} of each fragment, without a copy.
    """
    total = sum(x.numel() for x in tensors.values())
    bounds = [number * total // count for number in range(count + 1)]
    fragments: list[dict[str, Tensor]] = [{} for _ in range(count)]
    start = 0
    for name, x in tensors.items():
        for number, fragment in enumerate(fragments):
            first, end = max(0, bounds[number] - start), min(x.numel(), bounds[number + 1] - start)
            if first < end:
                fragment[name] = x[first:end]
        start += x.numel()
    return fragments


def drawn(net: Net, t: int, sender: PeerId, fragments: int, receivers: int) -> dict[int, list[PeerId]]:
    """Return to whom a peer sends each fragment in round ``t``, in the order of sending; everybody draws the same."""
    stream, neighbors = rng.shared(net.seed, f"divshare.sender {sender}", t), net.receivers_of(sender, t)
    order = stream.permutation(fragments)
    chosen = stream.random((fragments, len(neighbors))).argsort(axis=1)[:, :receivers]
    return {int(number): sorted(neighbors[k] for k in chosen[number]) for number in order}


@algorithm("divshare")
class DivShare(Algorithm[Hyper]):
    """DivShare, Algorithm 1."""

    summary = "fragments of the model are sent to random neighbors each; those that arrive are averaged"
    title = "Boosting Asynchronous Decentralized Learning with Model Fragmentation"
    authors = "Biswas, Kermarrec, Marouani, Pires, Sharma, de Vos"
    venue = "WWW 2025"
    url = "https://arxiv.org/abs/2410.12918"
    Hyper = Hyper
    homogeneous = asynchronous = sends_parts = True
    state = ("model", "optimizer", "row")

    def setup(self) -> None:
        self.optimizer = self.hyper.make_optimizer(self.model.parameters())
        self.row: dict[PeerId, float] = {}
        """The weight of each sender in the last round, on average over the parameters."""

    async def round(self, t: int, net: Net) -> None:
        self.train(epochs=self.hyper.local_epochs, batch=self.hyper.batch)  # line 1
        x = shared_tensors(self.model, self.hyper)
        flat = {name: tensor.reshape(-1) for name, tensor in x.items()}
        fragments = self.fragments_of(flat)

        @cache
        def plan(t: int, sender: PeerId) -> dict[int, list[PeerId]]:
            return drawn(net, t, sender, len(fragments), self.hyper.receivers)

        def senders(number: int) -> Callable[[int], list[PeerId]]:
            return lambda t: [j for j in net.neighbors_of(self.me, t) if self.me in plan(t, j)[number]]

        for number, receivers in plan(t, self.me).items():
            await net.broadcast(fragments[number], to=receivers)  # line 2
        total, row = sum(tensor.numel() for tensor in flat.values()), defaultdict[PeerId, float](float)
        diverged = False
        for number, local in enumerate(fragments):
            arrived = await net.collect(type(local), senders(number))
            found = self.including_local({j: bodies[-1] for j, bodies in arrived.items()}, local)
            diverged |= self.me not in found
            if found:
                self.aggregation.combine(found, out=local.values)  # line 3
            for j in found:
                row[j] += sum(part.numel() for part in local.values.values()) / total / len(found)
        assign(x, {name: flat[name].view(tensor.shape) for name, tensor in x.items()})  # unless they share memory
        if diverged:
            self.reset_after_divergence()
        self.row = dict(sorted(row.items()))

    def fragments_of(self, flat: Tensors) -> list[Fragment]:
        """Return the ⌈1/Ω⌉ fragments of flat tensors, or as many as these have entries."""
        count = math.ceil(1.0 / self.hyper.fragment - 1e-9)
        parts = divided(flat, min(count, sum(tensor.numel() for tensor in flat.values())))
        return [kind_of(number)(part) for number, part in enumerate(parts)]

    def layouts(self) -> Sequence[Layout]:
        flat = {name: tensor.reshape(-1) for name, tensor in shared_tensors(self.model, self.hyper).items()}
        return [Layout.of(fragment) for fragment in self.fragments_of(flat)]

    def weights(self) -> Mapping[PeerId, float]:
        return self.row
