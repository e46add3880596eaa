"""Signals that ask a process to end: SIGTERM, SIGINT (Ctrl-C), and SIGHUP (its terminal has closed).

Under ``nohup``, SIGHUP stays ignored: the run should outlive its terminal.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import asyncio

Handler = Callable[[int, FrameType | None], None]


def stop_signals() -> tuple[signal.Signals, ...]:
    """Return the signals that stop this process; SIGHUP is one unless it is ignored."""
    ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return (signal.SIGTERM, signal.SIGINT) if ignored else (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def nothing(number: int, frame: FrameType | None) -> None:
    """Handle a signal by doing nothing. Unlike SIG_IGN, processes that this one starts do not inherit it."""


def asks_to_kill(received: Sequence[int]) -> bool:
    """Return whether the signals received so far ask to kill what the first one has stopped.

    SIGHUP does not count: when a terminal closes, its shell sends one and the kernel another.
    """
    return sum(number != signal.SIGHUP for number in received) > 1


@contextmanager
def handling(handler: Handler, numbers: Collection[signal.Signals] | None = None) -> Iterator[None]:
    """Install ``handler`` for these of the stop signals, by default all, and restore the previous ones at the end.

    After a SIGHUP, further ones do nothing, so that the code after the block ends undisturbed.
    """
    hung_up = False

    def handle(number: int, frame: FrameType | None) -> None:
        nonlocal hung_up
        hung_up = hung_up or number == signal.SIGHUP
        handler(number, frame)

    wanted = [number for number in stop_signals() if numbers is None or number in numbers]
    before = {number: signal.signal(number, handle) for number in wanted}
    try:
        yield
    finally:
        for number, previous in before.items():
            signal.signal(number, nothing if hung_up and number == signal.SIGHUP else previous)


@contextmanager
def waking(loop: asyncio.AbstractEventLoop) -> Iterator[None]:
    """Have every signal wake the event loop, so that its handler runs at once. Main thread only.

    Python calls a handler between two bytecodes of the main thread. If the signal arrives when the loop is just about
    to sleep, or on another thread, the handler would otherwise wait until something else wakes the loop.
    """
    woken, wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    loop.add_reader(woken, os.read, woken, 4096)
    before = signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    try:
        yield
    finally:
        signal.set_wakeup_fd(before)
        loop.remove_reader(woken)
        os.close(woken)
        os.close(wake)


@contextmanager
def counted_interrupts(*others: signal.Signals) -> Iterator[list[int]]:
    """Collect SIGINT (Ctrl-C), SIGHUP, and ``others``, in a list instead of raising KeyboardInterrupt."""
    received: list[int] = []
    with handling(lambda number, frame: received.append(number), {signal.SIGINT, signal.SIGHUP, *others}):
        yield received


def interrupt_by(*numbers: signal.Signals) -> None:
    """Have the first of these signals interrupt this process as Ctrl-C does, and the next ones do nothing."""
    wanted = [number for number in stop_signals() if number in numbers]

    def interrupt(number: int, frame: FrameType | None) -> None:
        for each in wanted:
            signal.signal(each, nothing)
        signal.raise_signal(signal.SIGINT)

    for number in wanted:
        signal.signal(number, interrupt)
