"""What the log says of refusals, and how much of it."""

from __future__ import annotations

import logging

import pytest

from peers.refusals import LINES, PERIOD, Refusals


@pytest.fixture
def clock() -> list[float]:
    return [100.0]


def test_the_first_of_each_sort_are_said_and_the_others_counted(
    clock: list[float], caplog: pytest.LogCaptureFixture
) -> None:
    refusals = Refusals(logging.getLogger("peer"), lambda: clock[0])
    for number in range(1000):
        refusals.say("strangers", f"refused stranger {number}")
        clock[0] += 0.01
    refusals.say("others", "refused another")
    refusals.sum_up()
    assert caplog.messages == [*(f"refused stranger {number}" for number in range(LINES)), "refused another"]
    caplog.clear()
    clock[0] += PERIOD
    refusals.sum_up()
    assert caplog.messages == [f"strangers: {1000 - LINES} more within 70 s"]
    caplog.clear()
    refusals.sum_up(last=True)
    assert caplog.messages == []


def test_after_a_while_they_are_said_again(clock: list[float], caplog: pytest.LogCaptureFixture) -> None:
    refusals = Refusals(logging.getLogger("peer"), lambda: clock[0])
    for _ in range(LINES + 1):
        refusals.say("strangers", "refused")
    clock[0] += PERIOD
    refusals.sum_up()
    refusals.say("strangers", "refused again")
    assert caplog.messages[-2:] == ["strangers: 1 more within 60 s", "refused again"]


def test_at_the_end_nothing_is_left_unsaid(clock: list[float], caplog: pytest.LogCaptureFixture) -> None:
    refusals = Refusals(logging.getLogger("peer"), lambda: clock[0])
    for _ in range(LINES + 5):
        refusals.say("strangers", "refused")
    refusals.sum_up(last=True)
    assert caplog.messages[-1] == "strangers: 5 more within 0 s"
