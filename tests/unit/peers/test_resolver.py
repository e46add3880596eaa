"""Host name resolution in the background."""

from __future__ import annotations

import logging
import threading
from collections import deque
from typing import Any

import pytest

from peers.resolver import ADDRESS_PERIOD, IDLE, REFRESH, Resolver, look_up_host

LOG = logging.getLogger("resolver")


class NameServer:
    """Gives the next of ``answers`` each time, and repeats the last one."""

    def __init__(self, *answers: list[str] | str) -> None:
        self.answers = deque(answers)
        self.asked: list[tuple[str, int]] = []
        self.answering = threading.Event()
        self.answering.set()

    def __call__(self, host: str, port: int) -> list[str]:
        self.answering.wait(1000)
        self.asked.append((host, port))
        answer = self.answers.popleft() if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, str):
            raise OSError(-2, answer)
        return answer


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def idle(resolver: Resolver, until: Any) -> None:
    until(lambda: not resolver._busy)


def test_resolves_names_in_the_background(clock: Clock, until: Any) -> None:
    server = NameServer(["10.0.0.7"])
    server.answering.clear()
    resolver = Resolver(clock, LOG, server)
    assert resolver.numeric("tcp://peer-3:5703") is None
    assert resolver.numeric("tcp://peer-3:5703") is None
    server.answering.set()
    idle(resolver, until)
    assert resolver.numeric("tcp://peer-3:5703") == "tcp://10.0.0.7:5703"
    assert resolver.numeric("tcp://peer-3:5704") == "tcp://10.0.0.7:5704"
    assert server.asked == [("peer-3", 5703)]


@pytest.mark.parametrize("address", ["tcp://10.0.0.7:5703", "tcp://[fd00::7]:5703"])
def test_keeps_numeric_addresses(clock: Clock, address: str) -> None:
    resolver = Resolver(clock, LOG, NameServer("nobody should ask"))
    assert resolver.numeric(address) == address
    assert not resolver._names


def test_resolves_a_host_that_has_moved(clock: Clock, until: Any) -> None:
    resolver = Resolver(clock, LOG, NameServer(["10.0.0.7"], "name server is down", ["10.0.0.9"]))
    resolver.numeric("tcp://peer-3:1")
    idle(resolver, until)
    seen = []
    for _ in range(3):
        clock.now += REFRESH + 0.1
        resolver.numeric("tcp://peer-3:1")
        idle(resolver, until)
        seen.append(resolver.numeric("tcp://peer-3:1"))
    assert seen == ["tcp://10.0.0.7:1", "tcp://10.0.0.9:1", "tcp://10.0.0.9:1"]


def test_logs_an_unknown_name_once_and_retries(clock: Clock, until: Any, caplog: Any) -> None:
    caplog.set_level(logging.INFO)
    server = NameServer("Name or service not known", "Name or service not known", ["fd00::7"])
    resolver = Resolver(clock, LOG, server)
    for _ in range(3):
        clock.now += REFRESH + 0.1
        resolver.numeric("tcp://peer-3:1")
        idle(resolver, until)
    assert len(server.asked) == 3
    assert resolver.numeric("tcp://peer-3:1") == "tcp://[fd00::7]:1"
    assert [record.message for record in caplog.records] == [
        "host name not resolved yet name=peer-3: Name or service not known"
    ]


def test_tries_each_address_of_a_host_from_the_first(clock: Clock, until: Any) -> None:
    resolver = Resolver(clock, LOG, NameServer(["fd00::7", "10.0.0.7"]))
    resolver.numeric("tcp://peer-3:1")
    idle(resolver, until)
    seen = []
    for _ in range(3):
        seen.append(resolver.numeric("tcp://peer-3:1"))
        idle(resolver, until)
        clock.now += 2 * ADDRESS_PERIOD
    assert seen == ["tcp://[fd00::7]:1", "tcp://10.0.0.7:1", "tcp://[fd00::7]:1"]
    idle(resolver, until)
    resolver.numeric("tcp://peer-3:1")
    clock.now += IDLE + 1
    assert resolver.numeric("tcp://peer-3:1") == "tcp://[fd00::7]:1"
    idle(resolver, until)


@pytest.mark.exhaustive
def test_two_peers_come_to_try_a_working_address_at_the_same_time(clock: Clock, until: Any) -> None:
    resolvers = [Resolver(clock, LOG, NameServer(["192.0.2.1", "127.0.0.1"])) for _ in range(2)]
    together = 0
    for step in range(2000):
        tried = set()
        # The second begins when the first has come to its second address: with equal periods, they never meet.
        for resolver in resolvers if step >= 20 else resolvers[:1]:
            resolver.numeric("tcp://peer-3:1")
            idle(resolver, until)
            tried.add(resolver.numeric("tcp://peer-3:1"))
        together += step >= 20 and tried == {"tcp://127.0.0.1:1"}
        clock.now += ADDRESS_PERIOD / 20
    assert together >= 20


def test_slow_lookup_does_not_delay_others(clock: Clock, until: Any) -> None:
    slow, quick = NameServer(["10.0.0.1"]), NameServer(["10.0.0.2"])
    slow.answering.clear()
    resolver = Resolver(clock, LOG, lambda host, port: (slow if host == "slow" else quick)(host, port))
    resolver.numeric("tcp://slow:1")
    until(lambda: resolver.numeric("tcp://quick:1") == "tcp://10.0.0.2:1")
    assert resolver.numeric("tcp://slow:1") is None
    slow.answering.set()
    idle(resolver, until)


def test_uses_the_systems_resolver() -> None:
    assert set(look_up_host("localhost", 1)) <= {"127.0.0.1", "::1"}
    for nothing in ("a..b", "x" * 70):
        with pytest.raises(OSError):  # noqa: PT011
            look_up_host(nothing, 1)


def test_tries_ipv4_first_if_peers_bind_that_only(clock: Clock, until: Any) -> None:
    resolver = Resolver(clock, LOG, NameServer(["fd00::7", "10.0.0.7", "fe80::1%eth0"]), ipv4_first=True)
    resolver.numeric("tcp://peer-3:1")
    idle(resolver, until)
    assert resolver.numeric("tcp://peer-3:1") == "tcp://10.0.0.7:1"
    assert resolver._names["peer-3"].addresses == ["10.0.0.7", "fd00::7", "fe80::1%eth0"]
