"""What a peer makes of its neighbors' messages, without sockets."""

from __future__ import annotations

import logging
from random import Random
from typing import Any

import pytest
import torch

from p2pfl.messaging import edge, wire
from p2pfl.messaging.control import BEFORE, FOREVER, Entry, Hello, Id, Nothing, Start, Want
from p2pfl.messaging.directions import Begin
from p2pfl.messaging.wire import Buffer
from peers import receiver
from peers.effects import Deliver, Disconnected, Effect, Look, Lost, News, NothingComes, Reconnected, Refuse, Send
from tests.bodies import Block, Word
from tests.link_ends import ADDRESS, LinkEnd
from tests.simulation.planted_bugs import PLANTED_BUGS

HELLO = Hello("d", "boot", "token-1", 7)
BODY = Block(torch.arange(3.0))


def reading(**options: Any) -> tuple[LinkEnd, int]:
    """Return an end that reads from its neighbor, and the epoch."""
    end = LinkEnd(**options)
    end.connections[1].connect(ADDRESS, end.now)
    end.receive(1, HELLO)
    epoch = asked(end).epoch
    assert end.receive(1, Start(epoch, 0, 0)) == []
    return end, epoch


def asked(end: LinkEnd) -> Want:
    (want,) = [message for message in end.sends(1) if isinstance(message, Want)]
    return want


def entry(body: Any, epoch: int, id: Id = Id(0, 0), previous: Id = BEFORE) -> tuple[Entry, bytes, bytes]:
    """Return an entry, its header and its body."""
    encoded = wire.encode(body)
    return Entry(epoch, id, previous, encoded.size), encoded.header, b"".join(encoded.parts())


def delivered(effects: list[Effect | News]) -> list[Any]:
    return [(effect.message.t, effect.message.body) for effect in effects if isinstance(effect, Deliver)]


# ---- entries


def test_delivers_an_entry_once() -> None:
    end, epoch = reading()
    message, header, _ = entry(Word("a"), epoch)
    assert delivered(end.receive(1, message, header)) == [(0, Word("a"))]
    assert end.receive(1, message, header) == []
    assert end.connections[1].pending() == wire.cost(len(header), 0)


def test_joins_the_chunks_of_a_body(monkeypatch: Any) -> None:
    monkeypatch.setattr(edge, "CHUNK", 8)
    end, epoch = reading()
    message, header, body = entry(BODY, epoch)
    assert end.receive(1, message, header, body[:8]) == []
    (found,) = delivered(end.receive(1, Entry(epoch, message.id, BEFORE, len(body), 8), body[8:]))
    assert torch.equal(found[1].x, BODY.x)


def test_asks_anew_if_a_chunk_is_missing(monkeypatch: Any) -> None:
    monkeypatch.setattr(edge, "CHUNK", 4)
    end, epoch = reading()
    message, header, body = entry(BODY, epoch)
    end.receive(1, message, header, body[:4])
    assert end.receive(1, Entry(epoch, message.id, BEFORE, len(body), 8), body[8:]) == [Send(1)]
    assert asked(end).epoch != epoch
    assert end.endpoint.dropped == {1: 1}


def test_asks_anew_after_a_gap() -> None:
    end, epoch = reading()
    message, header, _ = entry(Word("b"), epoch, Id(0, 2), previous=Id(0, 1))
    assert end.receive(1, message, header) == [Send(1)]
    assert asked(end).next == Id(0, 0)


def test_opens_a_body_in_the_neighbors_journal() -> None:
    end, epoch = reading()
    message, header, body = entry(BODY, epoch)
    end.bodies[3, 64] = body
    reference = Entry(epoch, message.id, BEFORE, len(body), 0, 3, 64)
    (found,) = delivered(end.receive(1, reference, header))
    assert torch.equal(found[1].x, BODY.x)


def test_asks_for_bodies_if_the_journal_cannot_be_opened(caplog: Any) -> None:
    caplog.set_level(logging.INFO)
    end, epoch = reading()
    message, header, body = entry(BODY, epoch)
    assert end.receive(1, Entry(epoch, message.id, BEFORE, len(body), 0, 3, 64), header) == [Send(1)]
    assert not asked(end).references
    assert "body cannot be opened peer=1 segment=3: No such file or directory" in caplog.text


@pytest.mark.parametrize("same_host", [True, False])
def test_asks_for_references_only_if_it_may(same_host: bool) -> None:
    end = LinkEnd(same_host=same_host)
    end.connections[1].connect(ADDRESS, end.now)
    end.receive(1, HELLO)
    assert asked(end).references is same_host


def test_passes_on_what_will_not_come() -> None:
    end, epoch = reading()
    assert end.receive(1, Nothing(epoch, 4)) == [NothingComes(1, 4)]
    assert end.receive(1, Nothing(epoch + 1, 5)) == []
    end.receive(1, HELLO)
    assert end.receive(1, Start(asked(end).epoch, 3, 6)) == [Lost(1, 3), NothingComes(1, 5)]


def test_a_neighbor_that_has_finished_may_return() -> None:
    end, epoch = reading()
    greeted = end.connections[1].writer._hello.number
    end.receive(1, Want(1, Id(0, 0), 0, 1 << 40, idle=False, references=False, hello=greeted))
    last, header, _ = entry(Begin(()), epoch, Id(FOREVER, 0))
    assert end.receive(1, last, header) == [Send(1), Disconnected(1, finished=True)]
    end.receive(1, HELLO)
    epoch = asked(end).epoch
    end.receive(1, Start(epoch, 0, 0))
    message, header, _ = entry(Word("again"), epoch)
    back, *others = end.receive(1, message, header)
    assert back == Reconnected(1)
    assert delivered(others) == [(0, Word("again"))]


# ---- what is refused


def test_drops_messages_of_strangers_and_counts_those_of_neighbors(caplog: Any) -> None:
    end, epoch = reading()
    end.receiver.receive(b"9>0", [b"\xc1"], end.now)
    end.receiver.receive(b"", [b"\xc1"], end.now)
    end.receiver.receive(b"1>0", [b"\xc1"], end.now)
    assert end.effects() == []
    assert end.endpoint.dropped == {1: 1}
    assert "message from unknown sender dropped identity=b'9>0'" in caplog.text
    message, header, _ = entry(Word("a"), epoch)
    assert delivered(end.receive(1, message, header)) == [(0, Word("a"))]


def test_refuses_another_run_and_another_run_file() -> None:
    end = LinkEnd()
    (refuse,) = end.receive(1, HELLO, run="f" * 16)
    assert isinstance(refuse, Refuse)
    assert (refuse.identity, "this peer is in run" in refuse.reason) == (b"1>0", True)
    look, refuse = end.receive(1, Hello("other", "", "", 7))
    assert look == Look(), "it may listen at a new address"
    assert isinstance(refuse, Refuse)
    assert "run file" in refuse.reason


def test_pauses_after_too_many_useless_messages(monkeypatch: Any) -> None:
    monkeypatch.setattr(receiver, "USELESS_RATE", 10.0)
    end, _ = reading()
    while not end.receiver.paused:
        end.receiver.receive(b"1>0", [b"\xc1"], end.now)
    assert 5 < end.endpoint.dropped[1] <= 11
    assert not end.receiver.end_pause(end.now)
    assert end.receiver.end_pause(end.now + end.receiver.pause_left(end.now) + 0.001)
    assert not end.receiver.paused


# ---- two ends


def is_exact(seed: int) -> bool:
    """Exchange entries while connections break and lose what was on its way. Return whether each arrives in order."""
    random = Random(seed)
    ends = [LinkEnd(me, same_host=False) for me in range(2)]
    on_way: list[list[list[Buffer]]] = [[], []]
    """Messages on their way to each of them."""
    received: list[list[int]] = [[], []]
    sent, noticed_at = [0, 0], [1000, 1000]
    for step in range(400):
        me = random.randrange(2)
        end, other, connection = ends[me], 1 - me, ends[me].connections[1 - me]
        end.now = ends[other].now = end.now + 0.05
        if step < 200 and random.random() < 0.3:
            sent[me] += 1
            end.append(Block(torch.full((3,), float(sent[me]))))
        if step < 200 and random.random() < 0.05:
            del on_way[other][random.randint(0, len(on_way[other])) :]
            noticed_at[me] = step + random.randrange(20)  # until then, libzmq sends on a new connection
        if step >= noticed_at[me]:
            noticed_at[me] = 1000
            connection.event("lost", end.now)
        elif not connection.address:
            connection.connect(ADDRESS, end.now)
        elif connection.lost_at is not None and random.random() < 0.5:
            connection.event("connected", end.now)
        connection.check(end.now)
        while on_way[me] and random.random() < 0.9:
            end.receiver.receive(f"{other}>{me}".encode(), on_way[me].pop(0), end.now)
        received[me] += [int(body.x[0]) for _, body in delivered(end.effects())]
        on_way[other] += end.outgoing(other, random.randrange(6) if step < 200 else 100)
    return received == [list(range(1, sent[1] + 1)), list(range(1, sent[0] + 1))]


@pytest.mark.exhaustive
def test_delivers_each_entry_once_in_order_whatever_is_lost(monkeypatch: Any) -> None:
    monkeypatch.setattr(edge, "CHUNK", 8)
    assert [seed for seed in range(25) if not is_exact(seed)] == []


@pytest.mark.parametrize("bug", ["duplicates", "gaps", "want-late", "replay-late"])
def test_the_search_without_sockets_finds_planted_bugs(bug: str, monkeypatch: Any) -> None:
    monkeypatch.setattr(edge, "CHUNK", 8)
    with PLANTED_BUGS[bug].planted():
        assert not all(is_exact(seed) for seed in range(25))
