"""A connection to a neighbor: whether a peer that has finished waits for it, and injected faults."""

from __future__ import annotations

from random import Random
from unittest.mock import Mock

import pytest

from p2pfl.messaging.control import Id
from p2pfl.messaging.journal import JournalEntry
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
    connection.lost_at = 1.0  # to something that accepts connections before the neighbor has started
    assert connection.must_wait(finished=True, closing_for=closing_for) is waits


def delays(sizes: list[int], now: list[float], **faults: float | None) -> list[float]:
    """Return for how long new entries of these sizes are delayed, all announced at once."""
    io = Mock(endpoint=Mock(t=0), budget=1 << 16, random=Random(3))
    io.now = lambda: now[0]
    io.faults = Mock(**{"delay": 0.0, "jitter": 0.0, "bandwidth": None, **faults})
    connection = Connection(io, 7, Mock())
    entries = [JournalEntry(Id(0, n), b"", size, None, (7,)) for n, size in enumerate(sizes)]
    for entry in entries:
        connection.announce(entry)
    now[0] += 1.0
    return [connection._delay(entry.id) for entry in entries]


def test_injected_delay_and_bandwidth_hold_entries_back() -> None:
    assert delays([5, 5], [100.0]) == [0.0, 0.0]
    assert delays([5, 5], [100.0], delay=3.0) == [2.0, 2.0]
    assert delays([200, 400], [100.0], bandwidth=100.0) == [1.0, 5.0]  # one after the other
    assert delays([200, 400], [100.0], bandwidth=100.0, delay=3.0) == [4.0, 8.0]


def test_injected_jitter_keeps_the_order() -> None:
    found = delays([5] * 50, [100.0], jitter=10.0)
    assert found == sorted(found)
    assert 5.0 < max(found) <= 9.0
    assert min(found) >= -1.0
