"""A neighbor that sends more than its window allows."""

from __future__ import annotations

import itertools
import logging
from unittest.mock import Mock

import pytest

from p2pfl.messaging import control, wire
from p2pfl.messaging.control import BEFORE, Control, Entry, Hello, Id, Start, Want
from p2pfl.messaging.endpoint import Endpoint
from p2pfl.messaging.receivers import Begin
from p2pfl.messaging.schema import Body, Layout
from p2pfl.run_file.faults import LinkFaults
from p2pfl.run_file.schema import Transport
from peers.io_loop import IoLoop
from tests.bodies import PAIR, RUN_ID, Word

IDENTITY = b"1>0"


class Neighbor:
    """Peer 1, which hands messages to the receiver of peer 0 directly."""

    def __init__(self) -> None:
        self.endpoint = Endpoint(0, PAIR, RUN_ID, 0, [Layout.of(Word(""))])
        world = Mock()
        world.journals.own = "", ""
        world.now.return_value = 0.0
        world.journals.can_open.return_value = False
        world.new_epoch.side_effect = itertools.count()
        world.dealer.return_value.send.side_effect = self._sent
        log = logging.getLogger("test")
        self.io = IoLoop(self.endpoint, Transport(), "d", log, world, LinkFaults(), link=Mock())
        self.io.start(Mock())
        self.io.connections[1].address = "tcp://127.0.0.1:1"
        self.wants: list[Want] = []

    def _sent(self, frames: list[bytes]) -> bool:
        message, _ = control.unpack(frames, RUN_ID, (Want, *control.FROM_WRITER))
        if isinstance(message, Want):
            self.wants.append(message)
        return True

    def send(self, message: Control, *frames: bytes) -> None:
        self.io.receiver.receive(IDENTITY, [control.pack(message, RUN_ID), *frames])
        for notification in self.io._notifications:
            notification()
        self.io._notifications.clear()

    def begin(self) -> None:
        self.send(Hello("d", "", ""))
        self.send(Start(self.wants[-1].epoch, 0, 0))

    def send_entries(self, body: Body, rounds: range) -> None:
        encoded = wire.encode(body)
        previous = BEFORE
        for t in rounds:
            self.send(Entry(self.wants[-1].epoch, Id(t, 1), previous, encoded.size), encoded.header)
            previous = Id(t, 1)


@pytest.fixture
def neighbor() -> Neighbor:
    found = Neighbor()
    found.begin()
    return found


def test_a_window_that_was_used_up_opens_again(neighbor: Neighbor) -> None:
    large = Word("x" * (1 << 19))
    neighbor.send_entries(large, range(100))
    neighbor.endpoint.begin(1000)  # nothing of earlier rounds will be taken
    neighbor.send(Hello("d", "", ""))
    neighbor.send(Start(neighbor.wants[-1].epoch, 0, 0))
    neighbor.send_entries(large, range(1000, 1001))
    assert neighbor.io.pending(1) > 0


def test_announced_rounds_use_no_window_once_they_are_noted(neighbor: Neighbor) -> None:
    neighbor.send_entries(Begin(()), range(20_000))
    assert neighbor.io.pending(1) == 0
    assert neighbor.endpoint.mailbox.sender_round(1) == 19_999


def test_entries_beyond_the_window_are_dropped(neighbor: Neighbor) -> None:
    large = Word("x" * (1 << 19))
    neighbor.send_entries(large, range(1000))
    assert 0 < neighbor.io.pending(1) <= neighbor.io.budget
    assert neighbor.io.endpoint.dropped[1] > 0
