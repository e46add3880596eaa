"""Processes that plug-ins start: a metric or a loader with a pool of workers, subprocesses, joblib.

Forks would inherit how this process handles signals, so that a pool could not end its workers by SIGTERM, and wait
for OpenMP's threads, which are not copied. They end with this process, also if that is killed.
"""

from __future__ import annotations

import ctypes
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import psutil
import torch

from p2pfl.stop_signals import stop_signals

PR_SET_PDEATHSIG = 1

_depth = 0
_fork = threading.local()
"""Of the thread that forks: its mask of signals, and this process's id if it is the main thread."""


@contextmanager
def children_of_plugins() -> Iterator[None]:
    """Prepare what is forked inside, and kill what still runs at the end of those that plug-ins have started."""
    global _depth
    before = _children()
    _depth += 1
    try:
        yield
    finally:
        _depth -= 1
        for child in _children() - before:
            with suppress(psutil.Error):
                child.kill()


def _children() -> set[psutil.Process]:
    with suppress(psutil.Error):
        return set(psutil.Process().children(recursive=True))
    return set()


def _before_fork() -> None:
    if _depth:
        # Until the fork has other handlers: one that is inherited would take the signal that ends the fork.
        _fork.mask = signal.pthread_sigmask(signal.SIG_BLOCK, stop_signals())
        _fork.parent = os.getpid() if threading.current_thread() is threading.main_thread() else None


def _after_fork() -> None:
    if _depth:
        signal.pthread_sigmask(signal.SIG_SETMASK, _fork.mask)


def _in_fork() -> None:
    if not _depth:
        return
    signal.set_wakeup_fd(-1)
    numbers = stop_signals()
    for number in numbers:
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, numbers)
    torch.set_num_threads(1)
    if _fork.parent is not None:  # otherwise it would be killed at the end of the thread that has forked it
        with suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != _fork.parent:  # it was killed before that
            os._exit(1)


os.register_at_fork(before=_before_fork, after_in_parent=_after_fork, after_in_child=_in_fork)
