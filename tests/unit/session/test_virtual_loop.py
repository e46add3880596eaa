"""An event loop whose clock jumps to the next timer."""

from __future__ import annotations

import asyncio

import pytest

from p2pfl.messaging.deadline import Deadline
from p2pfl.simulation.virtual_loop import VirtualLoop


def test_a_wait_in_virtual_time_takes_one_timer() -> None:
    turns = []

    async def wait() -> bool:
        return await Deadline(600.0).allows(asyncio.Event().wait())

    for stall in (float("inf"), None):
        loop = VirtualLoop(stall=stall)
        assert not loop.run_until_complete(wait())
        assert loop.time() == pytest.approx(600.0)
        turns.append(50_000 - loop._turns_left)
        loop.close()
    assert turns[0] < 10 < 300 < turns[1] < 500  # checks 10 s apart at first, and 1 s apart in the last minute


def test_timers_are_due_after_a_year_too() -> None:
    loop = VirtualLoop(max_turns=1000)  # a wait takes one for each day
    for seconds in (3e7, 1.0, 1e-3):
        loop.run_until_complete(asyncio.sleep(seconds))
    assert loop.time() == pytest.approx(3e7 + 1.001)
    loop.close()
