"""Assignment: the same on every peer, drawn as the paper draws them; and the longest possible waits."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

import networkx as nx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from p2pfl.algorithms.aggregator_roles import AggregatorSchedule, Assignment
from p2pfl.messaging.net import Net
from p2pfl.messaging.topology import Topology
from tests.bodies import net_of

property_of = settings(deadline=None, max_examples=20)

SEED = 5


def nets(topology: Topology, t: int, joins: Mapping[int, int] | None = None) -> list[Net]:
    """Every peer's view of round ``t``."""
    # Each with a graph of its own: launched peers share no memory.
    return [net_of(me, replace(topology), t, SEED, joins) for me in range(topology.peers)]


def complete(peers: int) -> Topology:
    return Topology.from_edges(peers, [(i, j) for i in range(peers) for j in range(i)])


@st.composite
def topologies(draw: st.DrawFn) -> Topology:
    peers = draw(st.integers(2, 8))
    pairs = [(i, j) for i in range(peers) for j in range(i)]
    return Topology.from_edges(peers, draw(st.lists(st.sampled_from(pairs))))


subsets = st.sampled_from([0.01, 0.25, 0.5, 0.8, 1.0])


# ---- who does what -------------------------------------------------------------------------------------------


@property_of
@given(topologies(), subsets, st.integers(0, 50))
def test_peers_draw_equal_assignments_and_senders_are_neighbors(
    topology: Topology, participation: float, t: int
) -> None:
    drawn = [AggregatorSchedule(SEED, participation).assignment(t, net) for net in nets(topology, t)]
    assert len(set(drawn)) == 1
    assignment = drawn[0]
    near = topology.neighbors[assignment.aggregator]
    assert set(assignment.senders) <= set(near)
    assert len(assignment.senders) == min(max(1, round(participation * topology.peers)), len(near))
    assert list(assignment.senders) == sorted(set(assignment.senders))
    assert list(assignment.participants) == sorted({assignment.aggregator, *assignment.senders})


@pytest.mark.exhaustive
def test_peer_0_aggregates_first_and_later_all_equally_often() -> None:
    net, schedule, rounds = nets(complete(6), 0)[0], AggregatorSchedule(SEED, 0.5), 3000
    drawn = [schedule.assignment(t, net) for t in range(1, rounds + 1)]
    assert schedule.assignment(0, net).aggregator == 0
    aggregating = Counter(assignment.aggregator for assignment in drawn)
    sending = Counter(sender for assignment in drawn for sender in assignment.senders)
    # Five standard deviations of the binomial distribution.
    for counts, participation in ((aggregating, 1 / 6), (sending, 3 / 6)):
        tolerance = 5 * (rounds * participation * (1 - participation)) ** 0.5
        assert all(abs(counts[peer] - rounds * participation) < tolerance for peer in range(6))
    pairs = Counter((assignment.aggregator, sender) for assignment in drawn for sender in assignment.senders)
    assert len(pairs) == 6 * 5


def test_fixed_aggregator_is_peer_0_with_changing_senders() -> None:
    net, schedule = nets(complete(6), 0)[3], AggregatorSchedule(SEED, 0.5, fixed=True)
    drawn = [schedule.assignment(t, net) for t in range(20)]
    assert {assignment.aggregator for assignment in drawn} == {0}
    assert len({assignment.senders for assignment in drawn}) > 5


@pytest.mark.parametrize("fixed", [True, False])
def test_peers_take_part_from_the_round_in_which_they_join(fixed: bool) -> None:
    net, schedule = nets(complete(6), 0, joins={0: 5, 4: 3})[1], AggregatorSchedule(SEED, 0.5, fixed)
    drawn = [schedule.assignment(t, net) for t in range(60)]
    assert drawn[0].aggregator == 1
    assert [len(assignment.senders) for assignment in drawn[:6]] == [2, 2, 2, 2, 2, 3]  # half of 4, of 5, and of 6
    joined = [set(range(6)) - {peer for peer, at in ((0, 5), (4, 3)) if t < at} for t in range(60)]
    assert all(set(assignment.participants) <= there for assignment, there in zip(drawn, joined, strict=True))
    last = {assignment.aggregator for assignment in drawn[5:]}
    assert last == ({0} if fixed else set(range(6)))


def test_assignments_depend_on_seed_and_not_on_query_order() -> None:
    net = nets(complete(6), 0)[0]
    forth, back, other = (
        AggregatorSchedule(SEED, 0.5),
        AggregatorSchedule(SEED, 0.5),
        AggregatorSchedule(SEED + 1, 0.5),
    )
    ascending = [forth.assignment(t, net) for t in range(10)]
    assert ascending == [back.assignment(t, net) for t in reversed(range(10))][::-1]
    assert ascending != [other.assignment(t, net) for t in range(10)]


def test_aggregator_without_neighbors_has_no_senders() -> None:
    topology = Topology.from_edges(3, [(1, 2)])
    assert AggregatorSchedule(SEED, 0.5).assignment(0, nets(topology, 0)[1]) == Assignment(0, ())


# ---- how long they wait --------------------------------------------------------------------------------------


def expected_pending_rounds(drawn: Sequence[Assignment], me: int) -> int:
    """The longest path, in meetings, to the last round of ``drawn`` among those that are no ancestors of my last."""
    meetings: nx.DiGraph = nx.DiGraph()
    last: dict[int, int] = {}
    for t, assignment in enumerate(drawn[:-1]):
        meetings.add_node(t)
        for peer in assignment.participants:
            if peer in last:
                meetings.add_edge(last[peer], t)
            last[peer] = t
    over = {last[me]} | nx.ancestors(meetings, last[me]) if me in last else set()
    ends = {last[peer] for peer in drawn[-1].participants if peer in last}
    needed = ends.union(*(nx.ancestors(meetings, end) for end in ends)) - over
    return len(nx.dag_longest_path(meetings.subgraph(needed))) if needed else 0


@pytest.mark.exhaustive
@property_of
@given(topologies(), subsets, st.integers(0, 25))
def test_pending_rounds_is_the_longest_path_of_unfinished_rounds(
    topology: Topology, participation: float, t: int
) -> None:
    for net in nets(topology, t):
        schedule = AggregatorSchedule(SEED, participation)
        drawn = [schedule.assignment(earlier, net) for earlier in range(t + 1)]
        if net.me in drawn[-1].participants:
            assert schedule.pending_rounds(net) == expected_pending_rounds(drawn, net.me)


@pytest.mark.exhaustive
@property_of
@given(topologies(), subsets, st.floats(0.1, 5.0), st.integers(0, 2**32 - 1))
def test_no_wait_times_out_if_every_step_meets_its_deadline(
    topology: Topology, participation: float, factor: float, seed: int
) -> None:
    """A run by the clock: each local training takes up to 1 deadline, each aggregation up to ``factor``."""
    stream = np.random.default_rng(seed)
    ready = np.zeros(topology.peers)
    schedule = AggregatorSchedule(SEED, participation, deadline_factor=factor)
    for t in range(20):
        views = nets(topology, t)
        assignment = schedule.assignment(t, views[0])
        in_time = stream.choice([0.0, 0.5, 1.0], size=topology.peers)
        trained = {peer: ready[peer] + in_time[peer] for peer in assignment.participants}
        come = max(trained.values())
        back = come + factor * stream.choice([0.0, 1.0])
        for peer in assignment.participants:
            if peer == assignment.aggregator:
                assert come - trained[peer] <= schedule.models_deadlines(views[peer]) + 1e-9
            else:
                assert back - trained[peer] <= schedule.reply_deadlines(views[peer]) + 1e-9
            ready[peer] = back


def test_first_round_waits_one_deadline() -> None:
    views = nets(complete(4), 0)
    schedule = AggregatorSchedule(SEED, 0.3, deadline_factor=2.0)
    assert [schedule.models_deadlines(net) for net in views] == [1.0] * 4
    assert [schedule.reply_deadlines(net) for net in views] == [3.0] * 4


def test_full_participation_leaves_no_pending_rounds() -> None:
    topology = complete(5)
    for t in range(1, 30):
        schedule = AggregatorSchedule(SEED, 1.0)
        assert [schedule.pending_rounds(net) for net in nets(topology, t)] == [0] * 5


@pytest.mark.parametrize("t", [60])
def test_waits_stay_short_at_half_participation(t: int) -> None:
    schedule = AggregatorSchedule(SEED, 0.5)
    for net in nets(complete(10), t):
        if net.me in schedule.assignment(t, net).participants:
            assert schedule.pending_rounds(net) <= 12
