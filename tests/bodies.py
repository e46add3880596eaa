"""What peers say to each other in tests of several sorts, and in which run and graph."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from p2pfl.topology import Topology
from p2pfl.wire import Body

RUN_ID = "0123456789abcdef"
PAIR = Topology.from_edges(2, [(0, 1)])


@dataclass(frozen=True)
class Word(Body):
    text: str


@dataclass(frozen=True)
class Block(Body):
    x: Tensor
