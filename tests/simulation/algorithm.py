"""An algorithm that learns nothing: its state is a digest of every message that it ever received, in order."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from random import Random
from types import SimpleNamespace
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn

from p2pfl import PeerId
from p2pfl.algorithms.base import Algorithm
from p2pfl.algorithms.context import Context
from p2pfl.learning.peer_data import TestedOn
from p2pfl.messaging.net import Net
from p2pfl.messaging.schema import Body, Layout
from p2pfl.models import Model
from p2pfl.options import Options
from p2pfl.rng import Streams
from tests.simulation.schedule import Schedule


# The names of these classes are message kinds; their bytes are pinned in tests/golden.
@dataclass(frozen=True)
class Said(Body):
    """A message that identifies itself, so that the receiver can check that it is the expected one.

    Attributes:
        to: the receiver; -1 if sent to all neighbors.
        part: index of the operation in the round.
        digest: what the sender has received so far.
    """

    sender: int
    to: int
    t: int
    part: int
    digest: str


class Again(Said):
    pass


class Reply(Said):
    pass


class Some(Said):
    pass


class Gossip(Said):
    counts = "arrived"


class Every(Said):
    counts = "all"


class Question(Said):
    counts = "arrived"


class Answer(Said):
    counts = "arrived"


@dataclass(frozen=True)
class Sum(Body):
    x: Tensor


class Host(Protocol):
    """Where the algorithm runs: simulates training and checks messages."""

    schedule: Schedule

    async def train(self) -> None: ...

    def on_send(self, net: Net, part: int, deadlines: float, bodies: Sequence[Said]) -> None:
        """The algorithm is about to send ``bodies`` and to wait for at most ``deadlines`` times the deadline."""

    def on_received(self, net: Net, part: int, sources: Sequence[PeerId], bodies: Mapping[PeerId, Body]) -> None:
        """The algorithm waited for messages from ``sources`` and received ``bodies``."""

    def on_collected(self, net: Net, part: int, bodies: Mapping[PeerId, Sequence[Said]]) -> None:
        """The algorithm has collected ``bodies``, which count once."""


class DigestAlgorithm(Algorithm[Options]):
    name = "digesting"
    Hyper = Options
    state = ("digest",)

    def __init__(self, host: Host, me: PeerId, streams: Streams) -> None:
        self.host = host
        self.prunes = bool(host.schedule.prune_rounds)  # type: ignore[misc]
        model = Model("digest", nn.Identity(), 1, 1, nn.Identity())
        data = cast(Any, SimpleNamespace(group=0, tested_on=TestedOn("", "", "")))
        peers = host.schedule.topology.peers
        device = torch.device("cpu")
        super().__init__(
            Options(),
            Context(me, peers, 0, model, data, streams, device, ("digest",) * peers, lambda _: model),
        )

    def setup(self) -> None:
        self.digest = _sha(f"peer {self.me}")

    async def round(self, t: int, net: Net) -> None:
        await self.host.train()
        self.after_batch()
        for part, operation in enumerate(self.host.schedule.operations[t]):
            if operation == "sum":
                await self._sum(net, part)
            elif operation == "reply":
                await self._reply(net, part)
            elif operation == "some":
                await self._exchange(net, part, Some, net.participants(0.5))
            elif operation == "gossip":
                await self._send(net, part, Gossip, chosen(net, t, self.me))
                await self._collect(net, part, Gossip, partial(choosers, net))
            elif operation == "every":
                await self._send(net, part, Every, net.receivers)
                await self._collect(net, part, Every)
            elif operation == "ask":
                await self._ask(net, part)
            elif operation == "again" and not self.host.schedule.waits_forever:
                # Two messages of one kind in a round are distinguishable only if none is ever missing.
                await self._exchange(net, part, Again, None)
            else:
                await self._burst(net, part)
        if t in self.host.schedule.prune_rounds:
            net.receive_only_from(j for j in net.sources if Random(f"{self.digest} {j}").random() < 0.6)

    async def _exchange(self, net: Net, part: int, kind: type[Said], among: Sequence[PeerId] | None) -> None:
        body = kind(self.me, -1, net.t, part, self.digest)
        sends = among is None or self.me in among
        sources = [j for j in net.sources if among is None or j in among]
        self.host.on_send(net, part, 1.0, [body] if sends else [])
        self._update(net, part, sources, await net.exchange(body, among))

    async def _burst(self, net: Net, part: int) -> None:
        """As ``_exchange`` with all, but with several messages, whose parts are 100 apart."""
        parts = range(part, 100 * self.host.schedule.burst, 100)
        bodies = [Said(self.me, -1, net.t, each, self.digest) for each in parts]
        self.host.on_send(net, part, 1.0, bodies)
        for body in bodies:
            await net.broadcast(body)
        for each in parts:
            self._update(net, each, net.sources, await net.gather(Said))

    async def _reply(self, net: Net, part: int) -> None:
        bodies = {to: Reply(self.me, to, net.t, part, _sha(f"{self.digest} {to}")) for to in net.receivers}
        self.host.on_send(net, part, 1.0, list(bodies.values()))
        await net.scatter(bodies)
        self._update(net, part, net.sources, await net.gather(Reply))

    async def _ask(self, net: Net, part: int) -> None:
        """Peers of one side ask, the others answer: nobody waits in a circle."""
        if net.sides[self.me] == 0:
            await self._send(net, part, Question, chosen(net, net.t, self.me, across=True))
            await self._collect(net, part, Answer, partial(chosen, net, sender=self.me, across=True), replies=True)
        else:
            self.host.on_send(net, part, 1.0, [])
            for asking in await self._collect(net, part, Question, partial(choosers, net, across=True)):
                body = Answer(self.me, asking, net.t, part, self.digest)
                self.host.on_send(net, part, 1.0, [body])
                await net.reply(asking, body)

    async def _send(self, net: Net, part: int, kind: type[Said], to: Sequence[PeerId]) -> None:
        body = kind(self.me, -1, net.t, part, self.digest)
        self.host.on_send(net, part, 2.0, [body])
        await net.broadcast(body, to)

    async def _collect(
        self,
        net: Net,
        part: int,
        kind: type[Said],
        senders: Callable[[int], Sequence[PeerId]] | None = None,
        *,
        replies: bool = False,
    ) -> list[PeerId]:
        """Collect bodies, and return their senders."""
        bodies = await net.collect(kind, senders, replies=replies)
        self.host.on_collected(net, part, bodies)
        self.digest = _sha(f"{self.digest} {net.t} {part} {collected(bodies)}")
        return list(bodies)

    async def _sum(self, net: Net, part: int) -> None:
        tree = net._place.topology_at(net.t).spanning_tree  # its height bounds the wait
        self.host.on_send(net, part, tree.height[self.me] + tree.height[tree.root[self.me]] + 1.0, [])
        x = torch.tensor([int(self.digest[:8], 16), 1], dtype=torch.float64)
        total = await net.allreduce(Sum(x), "sum")
        self._update(net, part, (), {self.me: total})

    def _update(self, net: Net, part: int, sources: Sequence[PeerId], bodies: Mapping[PeerId, Body]) -> None:
        self.host.on_received(net, part, sources, bodies)
        self.digest = _sha(f"{self.digest} {net.t} {part} {summary(bodies)}")

    def loss(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        return {}

    def layouts(self) -> Sequence[Layout]:
        example = (0, 0, 0, 0, "")
        return [
            *(Layout.of(kind(*example)) for kind in (Said, Again, Reply, Some, Gossip, Every, Question, Answer)),
            Layout.of(Sum(torch.zeros(2, dtype=torch.float64))),
        ]


def chosen(net: Net, t: int, sender: PeerId, across: bool = False) -> list[PeerId]:
    """Return the one random receiver of a peer in a round, if there is any, also where the graph is not bipartite.

    Args:
        across: only among those on the other side, and only if the sender is on side 0.
    """
    sides = net.sides
    to = [j for j in net.receivers_of(sender, t) if not across or sides[sender] < sides[j]]
    return to and [Random(f"{net.seed} {t} {sender}").choice(to)]


def choosers(net: Net, t: int, across: bool = False) -> list[PeerId]:
    """Return the peers that send to this one in a round."""
    return [j for j in net.neighbors_of(net.me, t) if net.me in chosen(net, t, j, across)]


def collected(bodies: Mapping[PeerId, Sequence[Said]]) -> str:
    """Return the contents of messages that count once, as ``summary`` does."""
    found = (f"{sender}: {' '.join(f'{each.t} {each.digest[:8]}' for each in bodies[sender])}" for sender in bodies)
    return ", ".join(found)


def summary(bodies: Mapping[PeerId, Body]) -> str:
    """Return the contents of messages: a digest's beginning, or the exact numbers. Part of the algorithm's state."""
    parts = []
    for sender, body in bodies.items():
        content = body.x.tolist() if isinstance(body, Sum) else cast(Said, body).digest[:8]
        parts.append(f"{sender}: {content}")
    return ", ".join(parts)


def _sha(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
