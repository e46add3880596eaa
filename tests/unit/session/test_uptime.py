"""When peers are up, by a trace and by churn."""

from __future__ import annotations

import math

from p2pfl.run_file.time import Availability
from p2pfl.simulation.uptime import Uptime, uptimes

TRACE = [(10.0, 15.0), (20.0, 21.0)]


def test_a_peer_without_a_trace_is_always_up() -> None:
    uptime = Uptime()
    assert uptime.is_up(1e9)
    assert uptime.next_change(0.0) == math.inf
    assert uptime.after(3.0, 4.0) == 7.0


def test_a_peer_is_down_from_the_moment_that_it_goes_until_it_is_back() -> None:
    uptime = Uptime(TRACE)
    assert [uptime.is_up(when) for when in (0.0, 10.0, 14.9, 15.0, 20.5, 21.0)] == [
        True,
        False,
        False,
        True,
        False,
        True,
    ]
    assert [uptime.next_change(when) for when in (0.0, 10.0, 15.0, 21.0)] == [10.0, 15.0, 20.0, math.inf]


def test_seconds_pass_only_while_a_peer_is_up() -> None:
    uptime = Uptime(TRACE)
    assert uptime.after(4.0, 5.0) == 9.0
    assert uptime.after(4.0, 6.0) == 15.0  # it goes down at that moment: what follows, follows when it is back
    assert uptime.after(8.0, 4.0) == 17.0
    assert uptime.after(8.0, 8.0) == 22.0  # 2 s before it goes down, 5 s, and 1 s
    assert uptime.after(12.0, 0.0) == 15.0
    assert uptime.after(0.0, math.inf) == math.inf


def test_churn_is_stationary_and_drawn_from_the_seed() -> None:
    churn = Availability.model_validate({"churn": {"up": 20.0, "down": 10.0}})
    peers = uptimes(churn, 600, seed=1)
    for when in (0.0, 100.0):
        down = sum(not peer.is_up(when) for peer in peers)
        assert 150 < down < 250  # a third of them, within four standard deviations
    again = uptimes(churn, 600, seed=1)
    assert [peer.next_change(50.0) for peer in again] == [peer.next_change(50.0) for peer in peers]
    assert [peer.next_change(50.0) for peer in uptimes(churn, 600, seed=2)] != [
        peer.next_change(50.0) for peer in peers
    ]


def test_infinite_waits_end_never_despite_churn() -> None:
    (uptime,) = uptimes(Availability.model_validate({"churn": {"up": 20.0, "down": 10.0}}), 1, seed=1)
    assert uptime.after(0.0, math.inf) == math.inf
