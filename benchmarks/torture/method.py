"""A method that learns nothing and forgets nothing: its state is a digest of all that it ever heard, in order."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from random import Random
from types import SimpleNamespace
from typing import Any, Protocol, cast

import torch
from torch import Tensor

from benchmarks.torture.schedule import Schedule
from p2pfl.algorithms.base import Algorithm, Setting
from p2pfl.net import Net
from p2pfl.options import Options
from p2pfl.rng import Streams
from p2pfl.runfolder import PeerId
from p2pfl.wire import Body, Layout


@dataclass(frozen=True)
class Said(Body):
    """Says what it is, so that whoever gets it can tell whether it is what it asked for. ``part``: place among the
    verbs of the round. ``to``: -1 if to all."""

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


@dataclass(frozen=True)
class Sum(Body):
    x: Tensor


class Host(Protocol):
    """Where the method runs: lets it train, and looks at what it hears."""

    schedule: Schedule

    async def train(self) -> None: ...

    def speaks(self, net: Net, part: int, patience: float, said: Sequence[Said]) -> None:
        """It is about to say this, and wait for so many deadlines."""

    def heard(self, net: Net, part: int, expected: Sequence[PeerId], bodies: Mapping[PeerId, Body]) -> None:
        """It has heard this, and ``expected`` to hear from these."""


class Digesting(Algorithm[Options]):
    name = "digesting"
    Hyper = Options
    state = ("digest",)

    def __init__(self, host: Host, me: PeerId, streams: Streams) -> None:
        self.host = host
        nothing = cast(Any, SimpleNamespace(name="digest", group=0))
        peers = host.schedule.topology.peers
        device = torch.device("cpu")
        super().__init__(
            Options(),
            Setting(me, peers, 0, nothing, nothing, streams, device, ("digest",) * peers, lambda _: nothing),
        )

    def setup(self) -> None:
        self.digest = _sha(f"peer {self.me}")

    async def round(self, t: int, net: Net) -> None:
        await self.host.train()
        self.after_batch()
        for part, verb in enumerate(self.host.schedule.verbs[t]):
            if verb == "sum":
                await self._sum(net, part)
            elif verb == "reply":
                await self._reply(net, part)
            else:
                # Twice the same kind in one round only where nothing gets left out.
                kind = {"exchange": Said, "again": Said if self.host.schedule.patient else Again, "some": Some}[verb]
                await self._exchange(net, part, kind, net.participants(0.5) if verb == "some" else None)
        if t in self.host.schedule.prunes:
            net.listen_to(j for j in net.sources if Random(f"{self.digest} {j}").random() < 0.6)

    async def _exchange(self, net: Net, part: int, kind: type[Said], among: Sequence[PeerId] | None) -> None:
        body = kind(self.me, -1, net.t, part, self.digest)
        speaks = among is None or self.me in among
        sources = [j for j in net.sources if among is None or j in among]
        self.host.speaks(net, part, 1.0, [body] if speaks else [])
        self._digest(net, part, sources, await net.exchange(body, among))

    async def _reply(self, net: Net, part: int) -> None:
        bodies = {to: Reply(self.me, to, net.t, part, _sha(f"{self.digest} {to}")) for to in net.listeners}
        self.host.speaks(net, part, 1.0, list(bodies.values()))
        await net.scatter(bodies)
        self._digest(net, part, net.sources, await net.gather(Reply))

    async def _sum(self, net: Net, part: int) -> None:
        tree = net._endpoint.topology_at(net.t).spanning_tree  # to know how long it may take
        self.host.speaks(net, part, tree.height[self.me] + tree.height[tree.root[self.me]] + 1.0, [])
        x = torch.tensor([int(self.digest[:8], 16), 1], dtype=torch.float64)
        total = await net.allreduce(Sum(x), "sum")
        self._digest(net, part, (), {self.me: total})

    def _digest(self, net: Net, part: int, expected: Sequence[PeerId], bodies: Mapping[PeerId, Body]) -> None:
        self.host.heard(net, part, expected, bodies)
        self.digest = _sha(f"{self.digest} {net.t} {part} {told(bodies)}")

    def loss(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        return {}

    def layouts(self) -> Sequence[Layout]:
        said = (0, 0, 0, 0, "")
        return [
            *(Layout.of(kind(*said)) for kind in (Said, Again, Reply, Some)),
            Layout.of(Sum(torch.zeros(2, dtype=torch.float64))),
        ]


def told(bodies: Mapping[PeerId, Body]) -> str:
    """What they say, in a few words, or exactly if they are numbers."""
    parts = []
    for sender, body in bodies.items():
        words = body.x.tolist() if isinstance(body, Sum) else cast(Said, body).digest[:8]
        parts.append(f"{sender}: {words}")
    return ", ".join(parts)


def _sha(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
