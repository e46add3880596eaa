"""Warnings at a bounded rate."""

from __future__ import annotations

import logging

import pytest

from peers.limited_log import LINES, PERIOD, LimitedLog


@pytest.fixture
def clock() -> list[float]:
    return [100.0]


def test_logs_the_first_warnings_of_a_category_and_counts_the_others(
    clock: list[float], caplog: pytest.LogCaptureFixture
) -> None:
    log = LimitedLog(logging.getLogger("peer"), lambda: clock[0])
    for number in range(1000):
        log.warning("strangers", f"refused stranger {number}")
        clock[0] += 0.01
    log.warning("others", "refused another")
    log.summarize()
    assert caplog.messages == [*(f"refused stranger {number}" for number in range(LINES)), "refused another"]
    caplog.clear()
    clock[0] += PERIOD
    log.summarize()
    assert caplog.messages == [f"warnings suppressed count={1000 - LINES} seconds=70: strangers"]
    caplog.clear()
    log.summarize(last=True)
    assert caplog.messages == []


def test_logs_again_after_a_period(clock: list[float], caplog: pytest.LogCaptureFixture) -> None:
    log = LimitedLog(logging.getLogger("peer"), lambda: clock[0])
    for _ in range(LINES + 1):
        log.warning("strangers", "refused")
    clock[0] += PERIOD
    log.summarize()
    log.warning("strangers", "refused again")
    assert caplog.messages[-2:] == ["warnings suppressed count=1 seconds=60: strangers", "refused again"]


def test_logs_the_counts_at_the_end(clock: list[float], caplog: pytest.LogCaptureFixture) -> None:
    log = LimitedLog(logging.getLogger("peer"), lambda: clock[0])
    for _ in range(LINES + 5):
        log.warning("strangers", "refused")
    log.summarize(last=True)
    assert caplog.messages[-1] == "warnings suppressed count=5 seconds=0: strangers"
