"""Def-KT's pairs: the same on every peer, along the graph's edges; and the longest possible waits."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from p2pfl.algorithms.pairs import PairSchedule
from p2pfl.messaging.net import Net
from p2pfl.messaging.topology import Topology, WeightedTopology
from tests.bodies import net_of

SEED = 5
property_of = settings(deadline=None, max_examples=30)

Job = tuple[int, int]
"""Round and peer."""


def net(topology: Topology, me: int, t: int) -> Net:
    return net_of(me, topology, t, SEED)


def complete(peers: int) -> Topology:
    return Topology.from_edges(peers, [(i, j) for i in range(peers) for j in range(i)])


@st.composite
def topologies(draw: st.DrawFn) -> Topology:
    peers = draw(st.integers(2, 8))
    arcs = draw(st.lists(st.sampled_from([(i, j) for i in range(peers) for j in range(peers) if i != j])))
    if draw(st.booleans()):
        return Topology.from_edges(peers, arcs)
    return WeightedTopology.averaging(peers, arcs)


@property_of
@given(topologies(), st.sampled_from([0.01, 0.25, 0.5]), st.integers(0, 50))
def test_peers_draw_equal_pairs_of_different_peers_along_edges(
    topology: Topology, participation: float, t: int
) -> None:
    # Each with a graph of its own: launched peers share no memory.
    nets = [net(replace(topology), me, t) for me in range(topology.peers)]
    drawn = [PairSchedule(SEED, participation).pairs(t, net) for net in nets]
    assert all(pairs == drawn[0] for pairs in drawn)
    both = [*drawn[0], *drawn[0].values()]
    assert len(set(both)) == len(both)
    assert all(receiver in topology.receivers[sender] for sender, receiver in drawn[0].items())
    assert len(drawn[0]) <= max(1, round(participation * topology.peers))


@pytest.mark.parametrize(
    ("peers", "participation", "count"), [(6, 0.5, 3), (5, 0.5, 2), (8, 0.25, 2), (9, 0.01, 1), (1, 0.5, 0)]
)
def test_complete_graph_has_as_many_pairs_as_asked_for(peers: int, participation: float, count: int) -> None:
    schedule = PairSchedule(SEED, participation)
    assert [len(schedule.pairs(t, net(complete(peers), 0, t))) for t in range(5)] == [count] * 5


def test_every_pair_of_a_complete_graph_is_equally_likely() -> None:
    schedule, one = PairSchedule(SEED, 0.5), net(complete(4), 0, 0)
    counts = Counter(pair for t in range(1200) for pair in schedule.pairs(t, one).items())
    assert len(counts) == 12
    assert all(150 < count < 250 for count in counts.values())


def test_receiver_finds_its_sender() -> None:
    schedule, one = PairSchedule(SEED, 0.5), net(complete(4), 0, 3)
    (a, b), (c, d) = schedule.pairs(3, one).items()
    assert [schedule.sender_to(peer, 3, one) for peer in (a, b, c, d)] == [None, a, None, c]


# ---- how long a receiver waits -------------------------------------------------------------------------------


def scheduled(drawn: Mapping[int, dict[int, int]], deadline_factor: float) -> PairSchedule:
    class Given(PairSchedule):
        def pairs(self, t: int, net: Net) -> dict[int, int]:
            return drawn[t]

    return Given(SEED, 0.5, deadline_factor)


@pytest.mark.parametrize(
    ("drawn", "me", "deadlines"),
    [
        ({0: {0: 1}}, 1, 1.0),  # only the sender's training
        ({0: {0: 1}, 1: {1: 2}, 2: {2: 3}}, 3, 9.0),  # 0 trains, 1 learns, trains, 2 learns, trains: 3 + 2 · 3
        ({0: {0: 1}, 1: {0: 1}}, 1, 1.0),  # it received from the sender in the round before
        ({0: {0: 1}, 1: {1: 2}, 2: {0: 2}}, 2, 1.0),  # and here from somebody who had
        ({0: {0: 1}, 1: {0: 2}, 2: {0: 3}}, 3, 3.0),  # three trainings of the sender
    ],
)
def test_receiver_waits_for_the_work_that_its_sender_may_still_have(
    drawn: dict[int, dict[int, int]], me: int, deadlines: float
) -> None:
    t = max(drawn)
    (sender,) = drawn[t]
    assert scheduled(drawn, deadline_factor=3.0).deadlines(sender, net(complete(4), me, t)) == deadlines


def expected_deadlines(
    drawn: Mapping[int, dict[int, int]], me: int, sender: int, t: int, deadline_factor: float
) -> float:
    """The longest path to the sender's training, in the graph of what waits for what, without what is over."""
    sent_to = {(at, r): (at, s) for at, pairs in drawn.items() for s, r in pairs.items()}
    jobs = {*sent_to, *sent_to.values()}

    def needs(job: Job) -> list[Job]:
        at, peer = job
        earlier = [other for other in jobs if other[1] == peer and other[0] < at]
        return [*([max(earlier)] if earlier else []), *([sent_to[job]] if job in sent_to else [])]

    over: set[Job] = set()

    def finish(job: Job) -> None:
        over.add(job)
        for other in needs(job):
            finish(other)

    for job in needs((t, me))[:-1]:
        finish(job)

    def length(job: Job) -> float:
        if job in over:
            return 0.0
        return (deadline_factor if job in sent_to else 1.0) + max(map(length, needs(job)), default=0.0)

    return length((t, sender))


@property_of
@given(st.integers(2, 6), st.sampled_from([0.01, 0.3, 0.5]), st.integers(0, 7), st.integers(0, 1000))
def test_wait_is_the_longest_chain_of_unfinished_work(peers: int, participation: float, t: int, seed: int) -> None:
    schedule = PairSchedule(seed, participation, 2.5)
    drawn = {at: schedule.pairs(at, net(complete(peers), 0, at)) for at in range(t + 1)}
    for sender, me in drawn[t].items():
        found = schedule.deadlines(sender, net(complete(peers), me, t))
        assert found == expected_deadlines(drawn, me, sender, t, 2.5)
