"""A connection to a neighbor: whether a peer that has finished waits for it, and injected faults."""

from __future__ import annotations

from random import Random
from typing import Any
from unittest.mock import Mock

import pytest

from p2pfl.messaging import wire
from p2pfl.messaging.control import FOREVER, Hello, Id, Want
from p2pfl.messaging.edge import Writer
from p2pfl.messaging.journal import Journal, JournalEntry
from peers.connection import Connection
from peers.io_loop import IoLoop
from peers.receiver import Receiver
from tests.bodies import Word


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


def test_a_finished_peer_leaves_a_neighbor_only_once_it_makes_no_progress() -> None:
    journal = Journal([7])
    for t in (0, 1, FOREVER):
        journal.begin(t)
        journal.append(wire.encode(Word("…")), [7])
    io = Mock(endpoint=Mock(t=FOREVER, journal=journal), budget=1 << 16)
    connection = Connection(io, 7, Mock())
    connection.writer = Writer(journal, 7, Hello("d", "", ""))
    connection.writer.connected()
    loop: Any = Mock(closing_since=0.0, was_refused=False, connections={7: connection}, _leaving="finished")
    loop.transport.deadline = 10.0

    def done(now: float, t: int, durable: int) -> bool:
        connection.writer.want(Want(1, Id(t, 0), durable, 0, idle=False, references=False), now)
        loop.now = lambda: now
        return IoLoop._done(loop)

    # The time, the round that the neighbor reads, and what it has in its checkpoints.
    steps = [(0.0, 0, 0), (9.0, 1, 0), (18.0, 1, 1), (27.0, 1, 1)]
    assert [done(*step) for step in steps] == [False] * 4
    assert not loop.log.warning.called
    assert done(28.5, 1, 1)
    assert loop.log.warning.call_count == 1


def test_a_neighbor_that_returns_to_a_finished_peer_has_the_whole_deadline() -> None:
    journal = Journal([7])
    journal.append(wire.encode(Word("…")), [7])
    io = Mock(endpoint=Mock(t=FOREVER, journal=journal), budget=1 << 16)
    connection, other = Connection(io, 7, Mock()), Mock()
    other.must_wait.return_value, other.waits_without_progress.return_value = True, 0.0
    connection.writer = Writer(journal, 7, Hello("d", "", ""))
    loop: Any = Mock(closing_since=0.0, was_refused=False, connections={7: connection, 8: other}, _leaving="finished")
    loop.transport.deadline = 10.0

    def done(now: float, epoch: int) -> bool:
        connection.writer.want(Want(epoch, Id(0, 0), 0, 0, idle=False, references=False), now)
        loop.now = lambda: now
        return IoLoop._done(loop)

    connection.writer.connected()
    assert not done(0.0, 1)
    connection.writer.lost()
    connection.disconnected = True
    assert not done(9.0, 1), "the other one makes progress"
    connection.disconnected = False
    connection.writer.connected()
    other.must_wait.return_value = False
    assert not done(50.0, 2)
    assert not done(59.0, 2)
    assert done(61.0, 2)


@pytest.mark.parametrize(
    ("up", "disconnected", "taken"), [(True, True, True), (False, True, False), (True, False, False)]
)
def test_the_entry_of_a_returned_neighbor_takes_it_back(up: bool, disconnected: bool, taken: bool) -> None:
    """Its Want may have come before the Hello by which it returned, and the next comes half a minute later."""
    connection = Mock(up=up, disconnected=disconnected, peer=7)
    endpoint = Mock(neighbors=[7], converted=lambda message: message)
    receiver = Receiver(Mock(delivered={7: 0}, endpoint=endpoint))
    receiver._complete(connection, Id(3, 1), Mock(header=9, size=0, message=lambda *_: Mock(cost=1)), None)
    assert connection.reached.called is taken


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
