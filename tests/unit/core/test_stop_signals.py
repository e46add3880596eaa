"""Signals that stop a process, and those that do not."""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

import pytest

from p2pfl.stop_signals import asks_to_kill, handling, interrupt_by, stop_signals, waking

HUP, INT, TERM = signal.SIGHUP, signal.SIGINT, signal.SIGTERM


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in (HUP, INT, TERM)}
    signal.signal(HUP, signal.SIG_DFL)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize(
    ("received", "kills"),
    [([INT], False), ([INT, INT], True), ([TERM, INT], True), ([HUP] * 3, False), ([HUP, TERM], False)],
)
def test_a_terminal_that_closes_never_asks_to_kill(received: list[int], kills: bool) -> None:
    assert asks_to_kill(received) == kills


def test_a_second_hang_up_does_not_disturb_what_follows_the_first() -> None:
    received: list[int] = []
    with handling(lambda number, frame: received.append(number)):
        signal.raise_signal(HUP)
        signal.raise_signal(TERM)
    signal.raise_signal(HUP)  # by default, it would kill this process
    assert received == [HUP, TERM]


def test_the_first_of_several_signals_interrupts_once() -> None:
    interrupt_by(HUP, TERM)
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(TERM)
    signal.raise_signal(HUP)
    signal.raise_signal(TERM)


def test_nothing_replaces_what_nohup_has_set() -> None:
    signal.signal(HUP, signal.SIG_IGN)
    interrupt_by(HUP)
    with handling(lambda number, frame: None):
        assert signal.getsignal(HUP) is signal.SIG_IGN
    assert HUP not in stop_signals()
    assert signal.getsignal(HUP) is signal.SIG_IGN


def test_a_signal_wakes_a_sleeping_event_loop_even_on_another_thread() -> None:
    """As if it had arrived just before the loop went to sleep: in both cases, no system call is interrupted."""
    main = threading.get_native_id()
    sent: list[int] = []
    rescued: list[bool] = []

    async def wait_for_signal() -> None:
        loop, stopped = asyncio.get_running_loop(), asyncio.Event()

        def stop(number: int, frame: FrameType | None) -> None:
            loop.call_soon_threadsafe(stopped.set)

        def send() -> None:
            while "poll" not in Path(f"/proc/self/task/{main}/wchan").read_text():
                if rescued:
                    return
            sent.append(TERM)
            signal.pthread_kill(threading.get_ident(), TERM)

        def rescue() -> None:
            rescued.append(True)
            loop.call_soon_threadsafe(stopped.set)

        rescuer = threading.Timer(20, rescue)
        with waking(loop), handling(stop, {TERM}):
            sender = threading.Thread(target=send)
            rescuer.start()
            loop.call_soon(sender.start)
            await stopped.wait()
            sender.join()
            rescuer.cancel()

    asyncio.run(wait_for_signal())
    if not sent:
        pytest.skip("this kernel does not say what a thread waits for")
    assert not rescued
    assert signal.set_wakeup_fd(-1) == -1
