"""Bodies, layouts and graphs for the tests of several rooms."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from p2pfl import PeerId
from p2pfl.messaging import wire
from p2pfl.messaging.conversation import Conversation
from p2pfl.messaging.endpoint import Endpoint
from p2pfl.messaging.neighborhood import Neighborhood
from p2pfl.messaging.net import Net
from p2pfl.messaging.schema import Body, Layout, MessageSchema
from p2pfl.messaging.topology import Topology

RUN_ID = "0123456789abcdef"
SEED = 5
GENEROUS_DEADLINE = 100.0
"""Seconds of a deadline that nothing misses, however slow the machine, unless it hangs."""
PAIR = Topology.from_edges(2, [(0, 1)])


def complete(peers: int) -> Topology:
    return Topology.from_edges(peers, [(i, j) for i in range(peers) for j in range(i)])


def line(peers: int) -> Topology:
    return Topology.from_edges(peers, [(i, i + 1) for i in range(peers - 1)])


def star(peers: int, hub: int = 0) -> Topology:
    return Topology.from_edges(peers, [(hub, i) for i in range(peers) if i != hub])


@dataclass(frozen=True)
class Word(Body):
    text: str


@dataclass(frozen=True)
class Block(Body):
    x: Tensor


@dataclass(frozen=True)
class Named(Body):
    x: Mapping[str, Tensor]


@dataclass(frozen=True)
class Vector(Body):
    x: Tensor


LAYOUTS = [Layout.of(Vector(torch.zeros(3))), Layout.of(Word(""))]


def round_of(endpoint: Endpoint, t: int) -> Net:
    """Begin round ``t`` of a peer, and return what its algorithm is given."""
    endpoint.begin(t)
    return Net(endpoint, t, SEED)


def net_of(me: PeerId, topology: Topology, t: int, seed: int, joins: Mapping[PeerId, int] | None = None) -> Net:
    """Return round ``t`` of a peer that nobody is connected to: its graph, and what all peers draw alike."""
    return Net(Endpoint(Neighborhood(me, topology, joins=joins or {}), RUN_ID, Conversation()), t, seed)


def vector(*values: float) -> Vector:
    return Vector(torch.tensor(values, dtype=torch.float32))


def texts(received: dict[int, Word]) -> dict[int, str]:
    return {sender: body.text for sender, body in received.items()}


def stored(encoded: wire.Encoded) -> Tensor | None:
    """Return the body as a receiver holds it, uint8 [size], in memory of its own; None if it is empty."""
    if not encoded.size:
        return None
    return torch.frombuffer(bytearray().join(encoded.parts()), dtype=torch.uint8).clone()


def arrive(body: Body, layouts: Iterable[Layout]) -> Any:
    """Return ``body`` as a receiver decodes it. Raises WireError."""
    encoded = wire.encode(body)
    return wire.check(encoded.header, MessageSchema(layouts)).message(0, 1, stored(encoded)).body
