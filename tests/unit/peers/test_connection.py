"""Whether a peer that has finished must wait for a neighbor that is not connected."""

from __future__ import annotations

from unittest.mock import Mock

import pytest

from peers.connection import Connection


@pytest.mark.parametrize(
    ("received", "withdrawn", "closing_for", "waits"),
    [
        (False, True, 9.0, True),  # it starts only now, and needs what this peer has sent
        (False, True, 11.0, False),
        (True, True, 0.0, False),  # it has finished before this process started
        (True, False, 9.0, True),  # it was killed
    ],
)
def test_waits_for_a_neighbor_that_may_not_have_started(
    received: bool, withdrawn: bool, closing_for: float, waits: bool
) -> None:
    """In a time-varying graph, a peer may be far ahead of a neighbor, and be restarted, before that one starts."""
    endpoint = Mock(t=2, received_from={7} if received else set())
    endpoint.journal.keeps_for = lambda peer: True
    io = Mock(endpoint=endpoint, budget=1 << 16)
    io.transport.give_up = 10.0
    io.world.addresses.is_withdrawn = lambda peer: withdrawn
    connection = Connection(io, 7, Mock())
    assert connection.must_wait(finished=True, closing_for=closing_for) is waits
