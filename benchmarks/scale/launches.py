"""Which launches are measured, and which of them the model is fitted to."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from benchmarks.bench import runs
from benchmarks.bench.measuring import RunTree

SMALL, LARGE = "tiny-cnn", "mlp-1024-512"
"""Models of 144 kB and 2.4 MB; a message has the model of its sender."""
FIT_PEERS = 128
"""Most peers of a launch that the model is fitted to."""
ENDLESS = 100_000
"""Rounds of the run file: a launch is ended from outside when it has been measured."""


@dataclass(frozen=True)
class Launch:
    """One launch: peers on a graph, on one host or on several network namespaces.

    Attributes:
        degree: neighbors of each peer; ``peers - 1`` makes a complete graph.
        rounds: after which the processes are stopped and counted.
        delay: seconds by which peers delay each message, so that they wait.
        use: whether the model is fitted to it, or only compared with it.
    """

    peers: int
    degree: int = 4
    hosts: int = 1
    model: str = SMALL
    rounds: int = 16
    delay: float = 0.0
    use: Literal["fit", "held out"] = "fit"

    @property
    def name(self) -> str:
        large = "-large" if self.model == LARGE else ""
        slow = "-delayed" if self.delay else ""
        return f"{self.peers}x{self.degree}{large}{slow}-on-{self.hosts}"

    @property
    def peers_per_host(self) -> float:
        return self.peers / self.hosts

    def tree(self) -> RunTree:
        graph: Any = "complete"
        if self.degree < self.peers - 1:
            graph = {"name": "regular", "degree": self.degree}
        tree = runs.light(self.peers, graph, ENDLESS, self.model)
        return {**tree, "chaos": {"link": {"delay": self.delay}}} if self.delay else tree


LAUNCHES = [
    *(Launch(peers) for peers in (16, 32, 64)),
    Launch(128, rounds=12),
    *(Launch(32, degree) for degree in (2, 8, 16)),
    *(Launch(32, degree, rounds=8, delay=8.0) for degree in (4, 16)),
    Launch(64, 8, rounds=12),
    Launch(32, model=LARGE, rounds=12),
    Launch(32, 8, model=LARGE, rounds=12),
    Launch(32, hosts=2),
    Launch(32, 8, hosts=2),
    Launch(64, hosts=4),
    Launch(32, model=LARGE, hosts=2, rounds=12),
    Launch(128, hosts=2, rounds=12),
    *(Launch(peers, rounds=8, use="held out") for peers in (256, 500)),
    Launch(32, 31, use="held out"),
    Launch(128, 8, rounds=12, use="held out"),
    Launch(128, 8, 2, rounds=12, use="held out"),
    Launch(128, hosts=4, rounds=12, use="held out"),
    Launch(128, hosts=8, rounds=12, use="held out"),
    Launch(256, hosts=8, rounds=8, use="held out"),
    Launch(64, 8, 4, LARGE, rounds=8, use="held out"),
]


def chosen(names: tuple[str, ...]) -> Iterator[Launch]:
    """Yield the launches of these names, in this order; all without names. Raises KeyError."""
    known = {launch.name: launch for launch in LAUNCHES}
    assert len(known) == len(LAUNCHES)
    yield from (known[name] for name in names) if names else LAUNCHES
