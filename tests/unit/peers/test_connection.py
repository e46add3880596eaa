"""The connection to a neighbor, without sockets: what it sends, when it gives up, and what closing waits for."""

from __future__ import annotations

import logging
from random import Random
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from p2pfl.errors import JournalError
from p2pfl.messaging import control
from p2pfl.messaging.control import CHUNK, FOREVER, Entry, Hello, Id, Refused, Start, Want
from p2pfl.messaging.edge import OPTIONAL_DELAY
from p2pfl.messaging.journal import JournalEntry
from p2pfl.run_file.faults import LinkFaults
from peers.connection import Connection
from peers.delays import Delays
from peers.effects import CaughtUp, Close, Disconnected, Failed, Reconnected, Send
from peers.io_loop import IoLoop
from tests.bodies import RUN_ID, Block, Word
from tests.link_ends import ADDRESS, LinkEnd

OTHER_RUN = "f" * 16


def wants(end: LinkEnd, next: Id = Id(0, 0), *, epoch: int = 1, durable: int = 0, window: int = 1 << 40) -> Want:
    number = end.connections[1].writer._hello.number
    return Want(epoch, next, durable, window, idle=False, references=False, hello=number)


def connected(**options: Any) -> LinkEnd:
    """Return an end to which its neighbor has sent a Want."""
    end = LinkEnd(**options)
    end.connections[1].connect(ADDRESS, end.now)
    end.sends(1)
    end.connections[1].want(wants(end), end.now)
    end.effects()
    return end


# ---- sending


def test_greets_and_sends_what_the_neighbor_wants() -> None:
    end = LinkEnd()
    end.append(Word("a"))
    assert end.sends(1) == []
    end.connections[1].connect(ADDRESS, end.now)
    assert end.effects() == [Send(1)]
    assert [type(each) for each in end.sends(1)] == [Hello]
    assert end.sends(1) == []
    end.connections[1].want(wants(end), end.now)
    assert end.effects() == [Send(1)]
    start, entry = end.sends(1)
    assert start == Start(1, 0, 0)
    assert isinstance(entry, Entry)
    assert entry.id == Id(0, 0)


def test_sends_again_what_the_socket_had_no_room_for() -> None:
    end = connected()
    for text in "abc":
        end.append(Word(text))
    sent = [*end.sends(1, room=2), *end.sends(1, room=0), *end.sends(1, room=1), *end.sends(1)]
    assert [each.id.number for each in sent if isinstance(each, Entry)] == [0, 1, 2]


def test_sends_a_large_body_in_chunks_and_reports_a_deleted_one() -> None:
    """R10."""
    end = connected()
    entry = end.append(Block(torch.zeros(CHUNK // 2)))
    start, *chunks = end.outgoing(1)
    assert [len(frames) for frames in (start, *chunks)] == [1, 2, 2]
    assert [len(frames[-1]) for frames in chunks] == [CHUNK, CHUNK]
    end.connections[1].want(wants(end, epoch=2), end.now)
    assert entry.place is not None
    end.endpoint.journal.store.release(entry.place.segment)
    with pytest.raises(JournalError, match="peer 1 still needs a message"):
        end.outgoing(1)
    end.endpoint.journal.drop(1, 1)
    assert end.outgoing(1) == []


def test_holds_an_optional_entry_until_its_time() -> None:
    end = connected()
    assert end.sends(1) == [Start(1, 0, 0)]
    end.append(Word("…"), optional=True)
    assert end.sends(1) == []
    end.now = end.connections[1].due_at
    assert end.now == pytest.approx(100.0 + OPTIONAL_DELAY)
    assert len(end.sends(1)) == 1


def test_says_when_a_neighbor_that_is_waited_for_catches_up() -> None:
    end = connected(queue=2)
    for _ in range(4):
        end.append(Word("…"))
    connection = end.connections[1]
    connection.behind = connection.is_behind()
    end.sends(1, room=2)
    assert (connection.behind, end.effects()) == (True, [])
    end.sends(1)
    assert (connection.behind, end.effects()) == (False, [CaughtUp()])


def test_a_lost_message_loses_the_connection(caplog: Any) -> None:
    caplog.set_level(logging.INFO)
    end = connected(faults=LinkFaults(loss=0.999999999999))
    end.append(Word("…"))
    assert end.sends(1) == [Start(1, 0, 0)]
    assert end.effects() == [Close(1)]
    assert end.connections[1].address == ""
    assert "fault injected: message and connection lost peer=1 t=0" in caplog.text


# ---- connecting


def test_greets_again_on_a_new_connection_of_the_same_socket() -> None:
    end = connected()
    end.append(Word("a"))
    connection = end.connections[1]
    connection.event("lost", 101.0)
    assert (connection.up, connection.lost_at, end.sends(1)) == (False, 101.0, [])
    connection.event("connected", 102.0)
    assert end.effects() == [Send(1)]
    (hello,) = end.sends(1)
    assert isinstance(hello, Hello)
    connection.want(wants(end, epoch=2), 102.0)
    assert [type(each) for each in end.sends(1)] == [Start, Entry]
    assert connection.lost_at is None


@pytest.mark.parametrize(
    ("run", "fixed", "reached", "fails"),
    [
        (RUN_ID, False, False, True),
        (RUN_ID, False, True, False),  # it was the neighbor's address, and is another process's now
        (OTHER_RUN, False, False, False),
        (OTHER_RUN, True, False, True),  # the run file says that the neighbor is there
    ],
)
def test_fails_only_if_the_neighbor_itself_refuses(
    run: str, fixed: bool, reached: bool, fails: bool, caplog: Any
) -> None:
    end = connected() if reached else LinkEnd()
    connection = end.connections[1]
    if not reached:
        connection.connect(ADDRESS, end.now)
    end.effects()
    connection.answered([control.pack(Refused("no\n way"), run)], fixed=fixed)
    (effect,) = end.effects()
    if fails:
        assert isinstance(effect, Failed)
        assert str(effect.error) == f"peer 1 at {ADDRESS} refused peer 0: no? way"
    else:
        assert effect == Close(1)
        assert connection.wrong_peer_answered
        assert f"another process has the address peer=1 address={ADDRESS}: no? way" in caplog.text


def test_drops_an_answer_that_is_none() -> None:
    end = connected()
    end.connections[1].answered([b"\xc1"], fixed=False)
    assert end.endpoint.dropped == {1: 1}
    assert end.effects() == []


def test_logs_a_failed_handshake_once_for_each_address(caplog: Any) -> None:
    end = LinkEnd()
    for address in (ADDRESS, ADDRESS, "tcp://10.0.0.3:5700"):
        end.connections[1].connect(address, end.now)
        end.connections[1].event("unproven", end.now)
    assert caplog.text.count("CURVE handshake failed peer=1") == 2


# ---- declaring dead


@pytest.mark.parametrize(("reached", "seconds"), [(False, 30.0), (True, 5.0)])
def test_declares_a_neighbor_dead_and_takes_it_back(reached: bool, seconds: float) -> None:
    options: dict[str, Any] = {"deadline": 30.0, "give_up": 5.0}
    end = connected(**options) if reached else LinkEnd(**options)
    connection = end.connections[1]
    if reached:
        connection.event("lost", end.now)
    connection.check(end.now + seconds)
    assert end.effects() == [Send(1)]
    connection.check(end.now + seconds + 0.1)
    assert end.effects() == [Send(1), Disconnected(1, finished=False)]
    connection.check(end.now + seconds + 0.2)
    assert end.effects() == [Send(1)]
    connection.connect(ADDRESS, end.now + 60.0)
    end.effects()
    connection.want(wants(end, epoch=2), end.now + 60.0)
    assert end.effects() == [Send(1), Reconnected(1)]


def test_keeps_two_rounds_for_a_neighbor_declared_dead() -> None:
    end = LinkEnd()
    end.connections[1].declare_dead("…")
    for t in range(5):
        end.endpoint.t = t
        end.endpoint.journal.begin(t)
        end.append(Word("…"))
    assert end.endpoint.journal.waiting(1, Id(0, 0)) == 2


# ---- closing


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
    end = LinkEnd(give_up=10.0)
    end.append(Word("…"))
    end.endpoint.received_from = {1} if received else set()
    connection = end.connections[1]
    connection.lost_at = 101.0  # to something that accepts connections before the neighbor has started
    assert connection.must_wait(True, closing_for, lambda peer: withdrawn) is waits


def closing(end: LinkEnd, connections: dict[int, Any]) -> Any:
    loop: Any = Mock(closing_since=0.0, connections=connections, _leaving="finished")
    loop.context, loop.log = end.context, Mock()
    return loop


def test_a_finished_peer_leaves_a_neighbor_only_once_it_makes_no_progress() -> None:
    end = LinkEnd(deadline=10.0)
    for t in (0, 1, FOREVER):
        end.endpoint.journal.begin(t)
        end.append(Word("…"))
    end.endpoint.t = FOREVER
    end.connections[1].connect(ADDRESS, 0.0)
    loop = closing(end, end.connections)

    def done(now: float, t: int, durable: int) -> bool:
        end.connections[1].want(wants(end, Id(t, 0), durable=durable), now)
        loop.now = lambda: now
        return IoLoop._done(loop)

    # The time, the round that the neighbor reads, and what it has in its checkpoints.
    steps = [(0.0, 0, 0), (9.0, 1, 0), (18.0, 1, 1), (27.0, 1, 1)]
    assert [done(*step) for step in steps] == [False] * 4
    assert not loop.log.warning.called
    assert done(28.5, 1, 1)
    assert loop.log.warning.call_count == 1


def test_a_neighbor_that_returns_to_a_finished_peer_has_the_whole_deadline() -> None:
    end, other = LinkEnd(deadline=10.0), Mock(refused=False)
    end.append(Word("…"))
    end.endpoint.t = FOREVER
    other.must_wait.return_value, other.waits_without_progress.return_value = True, 0.0
    connection = end.connections[1]
    loop = closing(end, {1: connection, 2: other})

    def done(now: float, epoch: int) -> bool:
        connection.want(wants(end, epoch=epoch), now)
        loop.now = lambda: now
        return IoLoop._done(loop)

    connection.connect(ADDRESS, 0.0)
    assert not done(0.0, 1)
    connection.event("lost", 1.0)
    connection.disconnected = True
    assert not done(9.0, 1), "the other one makes progress"
    connection.connect(ADDRESS, 40.0)
    other.must_wait.return_value = False
    assert not done(50.0, 2)
    assert not done(59.0, 2)
    assert done(61.0, 2)


@pytest.mark.parametrize(
    ("up", "disconnected", "taken"), [(True, True, True), (False, True, False), (True, False, False)]
)
def test_the_entry_of_a_returned_neighbor_takes_it_back(up: bool, disconnected: bool, taken: bool) -> None:
    """Its Want may have come before the Hello by which it returned, and the next comes half a minute later."""
    end = connected()
    connection: Connection = end.connections[1]
    if not up:
        connection.event("lost", end.now)
    connection.disconnected = disconnected
    connection.deliver(Mock(cost=1))
    assert (Reconnected(1) in end.effects()) is taken
    assert connection.pending() == 1


# ---- injected faults


def delays(sizes: list[int], **faults: float) -> list[float]:
    """Return for how long new entries of these sizes are still delayed a second after all were announced at once."""
    found = Delays(LinkFaults(**faults), Random(3))
    entries = [JournalEntry(Id(0, n), b"", size, None, (7,)) for n, size in enumerate(sizes)]
    for entry in entries:
        found.add(entry, 100.0)
    return [max(found.due_at(entry.id) - 101.0, -1.0) for entry in entries]


def test_injected_delay_and_bandwidth_hold_entries_back() -> None:
    assert delays([5, 5]) == [-1.0, -1.0]
    assert delays([5, 5], delay=3.0) == [2.0, 2.0]
    assert delays([200, 400], bandwidth=100.0) == [1.0, 5.0]  # one after the other
    assert delays([200, 400], bandwidth=100.0, delay=3.0) == [4.0, 8.0]


def test_injected_jitter_keeps_the_order() -> None:
    found = delays([5] * 50, jitter=10.0)
    assert found == sorted(found)
    assert 5.0 < max(found) <= 9.0
    assert min(found) >= -1.0


def test_sends_a_delayed_entry_when_it_is_due() -> None:
    end = connected(faults=LinkFaults(delay=3.0))
    end.append(Block(torch.zeros(3)))
    assert end.sends(1) == [Start(1, 0, 0)]
    assert end.connections[1].due_at == 103.0
    end.now = 103.0
    assert len(end.sends(1)) == 1
