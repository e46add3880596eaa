"""Roles: the same on every peer, drawn as the paper draws them; and how long anybody may have to wait."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import networkx as nx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from p2pfl.algorithms.roles import Roles, Roster
from p2pfl.net import Endpoint, Net
from p2pfl.topology import Topology
from tests.p2pfl.support import RUN_ID

property_of = settings(deadline=None, max_examples=50)

SEED = 5


def nets(topology: Topology, t: int) -> list[Net]:
    """Every peer's view of round ``t``."""
    return [Endpoint(me, topology, RUN_ID, SEED, []).begin(t) for me in range(topology.peers)]


def complete(peers: int) -> Topology:
    return Topology.from_edges(peers, [(i, j) for i in range(peers) for j in range(i)])


@st.composite
def topologies(draw: st.DrawFn) -> Topology:
    peers = draw(st.integers(2, 8))
    pairs = [(i, j) for i in range(peers) for j in range(i)]
    return Topology.from_edges(peers, draw(st.lists(st.sampled_from(pairs))))


shares = st.sampled_from([0.01, 0.25, 0.5, 0.8, 1.0])


# ---- who does what -----------------------------------------------------------------------------------------


@property_of
@given(topologies(), shares, st.integers(0, 50))
def test_every_peer_draws_the_same_roles_and_senders_are_neighbours(topology: Topology, share: float, t: int) -> None:
    drawn = [Roster(SEED, share).roles(t, net) for net in nets(topology, t)]
    assert len(set(drawn)) == 1
    roles = drawn[0]
    near = topology.neighbors[roles.aggregator]
    assert set(roles.senders) <= set(near)
    assert len(roles.senders) == min(max(1, round(share * topology.peers)), len(near))
    assert list(roles.senders) == sorted(set(roles.senders))
    assert list(roles.participants) == sorted({roles.aggregator, *roles.senders})


def test_the_lowest_id_begins_and_afterwards_all_aggregate_and_send_equally_often() -> None:
    net, roster, rounds = nets(complete(6), 0)[0], Roster(SEED, 0.5), 3000
    drawn = [roster.roles(t, net) for t in range(1, rounds + 1)]
    assert roster.roles(0, net).aggregator == 0
    aggregating = Counter(roles.aggregator for roles in drawn)
    sending = Counter(sender for roles in drawn for sender in roles.senders)
    # Five standard deviations of the binomial distribution.
    for counts, share in ((aggregating, 1 / 6), (sending, 3 / 6)):
        tolerance = 5 * (rounds * share * (1 - share)) ** 0.5
        assert all(abs(counts[peer] - rounds * share) < tolerance for peer in range(6))
    pairs = Counter((roles.aggregator, sender) for roles in drawn for sender in roles.senders)
    assert len(pairs) == 6 * 5


def test_a_fixed_aggregator_is_peer_0_and_its_senders_change() -> None:
    net, roster = nets(complete(6), 0)[3], Roster(SEED, 0.5, fixed=True)
    drawn = [roster.roles(t, net) for t in range(20)]
    assert {roles.aggregator for roles in drawn} == {0}
    assert len({roles.senders for roles in drawn}) > 5


def test_roles_depend_on_the_seed_and_not_on_the_order_of_asking() -> None:
    net = nets(complete(6), 0)[0]
    forth, back, other = Roster(SEED, 0.5), Roster(SEED, 0.5), Roster(SEED + 1, 0.5)
    ascending = [forth.roles(t, net) for t in range(10)]
    assert ascending == [back.roles(t, net) for t in reversed(range(10))][::-1]
    assert ascending != [other.roles(t, net) for t in range(10)]


def test_whoever_has_no_neighbour_aggregates_alone() -> None:
    topology = Topology.from_edges(3, [(1, 2)])
    assert Roster(SEED, 0.5).roles(0, nets(topology, 0)[1]) == Roles(0, ())


# ---- how long they wait ------------------------------------------------------------------------------------


def chain_by_graph(drawn: Sequence[Roles], me: int) -> int:
    """The longest path, in meetings, to the last round of ``drawn`` among those that are no ancestors of my last."""
    meetings: nx.DiGraph = nx.DiGraph()
    last: dict[int, int] = {}
    for t, roles in enumerate(drawn[:-1]):
        meetings.add_node(t)
        for peer in roles.participants:
            if peer in last:
                meetings.add_edge(last[peer], t)
            last[peer] = t
    over = {last[me]} | nx.ancestors(meetings, last[me]) if me in last else set()
    ends = {last[peer] for peer in drawn[-1].participants if peer in last}
    needed = ends.union(*(nx.ancestors(meetings, end) for end in ends)) - over
    return len(nx.dag_longest_path(meetings.subgraph(needed))) if needed else 0


@property_of
@given(topologies(), shares, st.integers(0, 25))
def test_how_many_meetings_lie_ahead_is_the_longest_path_through_them(
    topology: Topology, share: float, t: int
) -> None:
    for net in nets(topology, t):
        roster = Roster(SEED, share)
        drawn = [roster.roles(earlier, net) for earlier in range(t + 1)]
        if net.me in drawn[-1].participants:
            assert roster.ahead(net) == chain_by_graph(drawn, net.me)


@property_of
@given(topologies(), shares, st.floats(0.1, 5.0), st.integers(0, 2**32 - 1))
def test_nobody_waits_longer_than_its_patience_if_each_step_keeps_its_deadline(
    topology: Topology, share: float, patience: float, seed: int
) -> None:
    """A run by the clock: each local training takes up to 1 deadline, each aggregation up to ``patience``."""
    stream = np.random.default_rng(seed)
    ready = np.zeros(topology.peers)
    roster = Roster(SEED, share, patience=patience)
    for t in range(20):
        views = nets(topology, t)
        roles = roster.roles(t, views[0])
        in_time = stream.choice([0.0, 0.5, 1.0], size=topology.peers)
        trained = {peer: ready[peer] + in_time[peer] for peer in roles.participants}
        come = max(trained.values())
        back = come + patience * stream.choice([0.0, 1.0])
        for peer in roles.participants:
            if peer == roles.aggregator:
                assert come - trained[peer] <= roster.coming(views[peer]) + 1e-9
            else:
                assert back - trained[peer] <= roster.returning(views[peer]) + 1e-9
            ready[peer] = back


def test_in_the_first_round_nobody_is_late_and_a_newcomer_waits_for_those_who_have_met() -> None:
    views = nets(complete(4), 0)
    roster = Roster(SEED, 0.3, patience=2.0)
    assert [roster.coming(net) for net in views] == [1.0] * 4
    assert [roster.returning(net) for net in views] == [3.0] * 4


def test_waits_do_not_grow_with_the_rounds_where_everybody_meets() -> None:
    topology = complete(5)
    for t in range(1, 30):
        roster = Roster(SEED, 1.0)
        assert [roster.ahead(net) for net in nets(topology, t)] == [0] * 5


@pytest.mark.parametrize("t", [60])
def test_waits_stay_short_at_half_participation(t: int) -> None:
    roster = Roster(SEED, 0.5)
    for net in nets(complete(10), t):
        if net.me in roster.roles(t, net).participants:
            assert roster.ahead(net) <= 12
