"""Messages over plain pyzmq."""

from __future__ import annotations

import pytest

from benchmarks.bench import raw_zmq


@pytest.mark.parametrize("curve", [False, True])
def test_processes_exchange_messages_and_count_their_time(curve: bool) -> None:
    cost = raw_zmq.exchange(3, 2440, 5, curve=curve)
    assert cost.seconds > 0
    assert cost.cpu > 0
