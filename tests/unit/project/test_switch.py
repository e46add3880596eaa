"""The software switch of benchmarks/hosts.py: which frames arrive where and when, and which are lost."""

from __future__ import annotations

import socket
import struct
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from time import monotonic

import pytest

from benchmarks.switch import LinkConditions, Switch

ALL = 0xFFFFFFFFFFFF


class Cables:
    """Three cables, with the hosts' ends in ``hosts`` and the switch's in ``ports``."""

    def __init__(self) -> None:
        pairs = [socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(3)]
        self.hosts, self.ends = zip(*pairs, strict=True)
        for end in self.ends:
            end.setblocking(False)
        for host in self.hosts:
            host.settimeout(200)

    @property
    def ports(self) -> list[int]:
        return [end.fileno() for end in self.ends]

    def send(self, source: int, to: int, text: bytes = b"") -> bytes:
        """Host i has address 1 << i: two or more bits would be a group."""
        frame = to.to_bytes(6, "big") + (1 << source).to_bytes(6, "big") + struct.pack(">H", 0x88B5) + text
        self.hosts[source].send(frame)
        return frame

    def receive(self, host: int) -> bytes:
        frame: bytes = self.hosts[host].recv(1 << 16)
        return frame

    def close(self) -> None:
        for end in (*self.hosts, *self.ends):
            end.close()


@pytest.fixture
def cables() -> Iterator[Cables]:
    with closing(Cables()) as made:
        yield made


def test_learns_addresses(cables: Cables) -> None:
    with Switch(cables.ports, LinkConditions()) as switch:
        to_all = cables.send(0, ALL, b"who is there?")
        assert cables.receive(1) == cables.receive(2) == to_all
        answer = cables.send(1, 1 << 0, b"I am")
        assert cables.receive(0) == answer
        back = cables.send(0, 1 << 1, b"hello")
        assert cables.receive(1) == back
        last = cables.send(1, ALL)
        assert cables.receive(2) == last  # and nothing of what the other two sent
        assert (switch.traffic.frames, switch.traffic.lost, switch.traffic.cut) == (6, 0, 0)


def test_delays_and_reorders_frames(cables: Cables) -> None:
    with Switch(cables.ports, LinkConditions(delay=0.05, jitter=0.05)):
        start = monotonic()
        sent = [cables.send(0, 1 << 1, bytes([number])) for number in range(40)]
        first = cables.receive(1)
        assert monotonic() - start >= 0.05
        came = [first, *(cables.receive(1) for _ in sent[1:])]
        assert Counter(came) == Counter(sent)
        assert came != sent


def test_same_seed_loses_the_same_frames() -> None:
    def arrived(seed: int) -> list[int]:
        end = 0xFF
        with closing(Cables()) as cables, Switch(cables.ports, LinkConditions(loss=0.3), seed):
            for number in (*range(100), *[end] * 50):  # of which one arrives
                cables.send(0, 1 << 1, bytes([number]))
            return list(iter(lambda: cables.receive(1)[-1], end))

    once = arrived(7)
    assert 40 <= len(once) < 100
    assert once == arrived(7) != arrived(8)


def test_unplugged_port_neither_sends_nor_receives(cables: Cables) -> None:
    with Switch(cables.ports, LinkConditions()) as switch:
        switch.unplug(1)
        seen = cables.send(0, ALL, b"to all")
        assert cables.receive(2) == seen
        cables.send(1, 1 << 0, b"from the unplugged one")
        received = cables.send(2, 1 << 0, b"from another")
        assert cables.receive(0) == received
        switch.plug(1)
        again = cables.send(0, ALL, b"again")
        assert cables.receive(1) == again
        assert switch.traffic.cut >= 1
