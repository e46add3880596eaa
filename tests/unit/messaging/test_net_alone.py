"""Net with a scripted endpoint: no journal, no mailbox, no link."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import pytest

from p2pfl.messaging import wire
from p2pfl.messaging.neighborhood import Neighborhood
from p2pfl.messaging.net import Net
from p2pfl.messaging.schema import Body, MessageSchema
from p2pfl.messaging.topology import Topology
from p2pfl.messaging.wire import Message
from p2pfl.tensors import Tensors
from tests.bodies import LAYOUTS, Word, complete, line, net_of, star, stored, vector


@pytest.mark.parametrize(
    ("peers", "fraction", "count"),
    [(10, 1.0, 10), (10, 0.01, 1), (10, 0.25, 2), (10, 0.39, 3), (10, 0.55, 5), (15, 0.5, 7), (100, 0.29, 29)],
)
def test_participants_are_equal_on_every_peer_new_each_round_and_rounded_down(
    peers: int, fraction: float, count: int
) -> None:
    drawn = [[net_of(me, complete(peers), t, 5).participants(fraction) for t in range(4)] for me in (0, 7)]
    assert drawn[0] == drawn[1]
    assert all(len(chosen) == count and list(chosen) == sorted(set(chosen)) for chosen in drawn[0])
    assert (len(set(drawn[0])) > 1) == (fraction < 1.0)


class ScriptedEndpoint:
    """Receives what a test says, and records what is sent."""

    prunes = False
    waits_for_rounds = True
    staleness = 0.0
    taken_ages: dict[str, dict[int, int]] = {}  # noqa: RUF012
    memo: dict[str, Tensors] | None = None

    def __init__(self, me: int, topology: Topology, received: Mapping[int, Message] = MappingProxyType({})) -> None:
        self.neighborhood = Neighborhood(me, topology)
        self.sources = self.all_sources = self.expected_receivers = set(topology.neighbors[me])
        self.received = received
        self.sent: list[tuple[list[int], Body, int | None]] = []
        self.missing: list[tuple[str, list[int]]] = []

    async def receivers(self) -> set[int]:
        return self.expected_receivers

    async def see_first(self, kind: str, senders: Collection[int], deadline_factor: float = 1.0) -> None:
        pass

    async def send(
        self, to: Iterable[int], body: Any, count: int | None = None, *, stored: bool = False, checked: bool = False
    ) -> None:
        self.sent.append((list(to), body, count))

    async def take(
        self, kind: str, senders: Sequence[int], t: int, deadline_factor: float = 1.0, *, addressed: bool = False
    ) -> dict[int, Message]:
        return {sender: self.received[sender] for sender in sorted(senders) if sender in self.received}

    async def collect(
        self, kind: str, senders: Collection[int], t: int, awaited: Collection[int], *, replies: bool = False
    ) -> dict[int, list[Message]]:
        return {sender: [message] for sender, message in (await self.take(kind, sorted(senders), t)).items()}

    def count_as_missing(self, kind: str, senders: Iterable[int]) -> None:
        self.missing.append((kind, list(senders)))

    def receive_only_from(self, senders: Iterable[int]) -> None:
        raise AssertionError


def sum_of(sender: int, *values: float, count: int = 1) -> Message:
    encoded = wire.encode(vector(*values), count)
    return wire.check(encoded.header, MessageSchema(LAYOUTS)).message(0, sender, stored(encoded))


async def test_an_allreduce_sends_partial_sums_up_and_the_total_down() -> None:
    """Peer 1 of a line: its child is 2, its parent 0."""
    received = {0: sum_of(0, 9, 9, 9, count=3), 2: sum_of(2, 1, 2, 3)}
    endpoint = ScriptedEndpoint(1, line(3), received)
    mean = await Net(endpoint, 0, 5).allreduce(vector(1, 1, 1))
    (up, partial, first), (down, total, last) = endpoint.sent
    assert (up, partial.x.tolist(), first) == ([0], [2.0, 3.0, 4.0], 2)  # type: ignore[attr-defined]
    assert (down, total.x.tolist(), last) == ([2], [9.0, 9.0, 9.0], 3)  # type: ignore[attr-defined]
    assert mean.x.tolist() == [3.0, 3.0, 3.0]


async def test_an_allreduce_leaves_out_a_child_that_claims_more_peers_than_its_subtree_has() -> None:
    endpoint = ScriptedEndpoint(0, line(2), {1: sum_of(1, 5, 5, 5, count=2)})
    assert (await Net(endpoint, 0, 5).allreduce(vector(1, 1, 1))).x.tolist() == [1.0, 1.0, 1.0]
    assert endpoint.missing == [("Vector", [1])]


async def test_scatter_groups_receivers_by_the_body_they_get() -> None:
    endpoint, same, other = ScriptedEndpoint(0, star(4)), Word("same"), Word("same")
    await Net(endpoint, 0, 5).scatter({3: same, 2: other, 1: same})
    assert endpoint.sent == [([1, 3], same, None), ([2], other, None)]
