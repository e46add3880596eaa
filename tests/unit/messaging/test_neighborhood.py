"""A peer's place in the graph of each round."""

from __future__ import annotations

from p2pfl.messaging.neighborhood import Neighborhood
from p2pfl.messaging.topology import Topology, WeightedTopology
from tests.bodies import line

ONE_WAY = WeightedTopology.averaging(3, [(0, 1), (1, 2)])
PAIR = Topology.from_edges(3, [(0, 1)])


def test_late_joiners_are_not_part_of_a_rounds_graph() -> None:
    place = Neighborhood(1, line(3), lambda t: PAIR if t % 2 else ONE_WAY, {0: 2})
    assert place.topology_at(0).sources[1] == ()
    assert place.topology_at(0).receivers[1] == (2,)
    assert place.topology_at(1).edges == []
    assert place.topology_at(0) is place.topology_at(0)
    assert place.topology_at(2) == ONE_WAY
    assert [place.joined(t) for t in range(3)] == [[2], [2], [0, 2]]
