"""Processes that plug-ins start: a metric or a loader with a pool of workers, subprocesses, joblib.

Without preparation, forks inherit this process's signal handlers, so that a pool cannot end its workers by SIGTERM,
and wait for OpenMP's threads, which are not copied. Forks end with this process, also if it is killed.
"""

from __future__ import annotations

import ctypes
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing import resource_tracker  # noqa: TID251  # starts nothing
from pathlib import Path

import psutil
import torch

from p2pfl.stop_signals import stop_signals

PR_SET_PDEATHSIG = 1

_depth = 0
_fork = threading.local()
"""Set by the thread that forks: its signal mask, and this process's id if it is the main thread."""


@contextmanager
def children_of_plugins(*, kill: bool = True) -> Iterator[None]:
    """Prepare processes that are forked inside, and kill those that plug-ins have left running at the end.

    Args:
        kill: this process is p2pfl's, so that what starts inside belongs to plug-ins. Otherwise nothing is killed.
    """
    global _depth
    before = _children() if kill else set()
    _depth += 1
    try:
        yield
    finally:
        _depth -= 1
        for pid in _children() - before if kill else ():
            with suppress(OSError):
                os.kill(pid, signal.SIGKILL)


def _children() -> set[int]:
    """Return the descendants of this process, except multiprocessing's tracker of shared memory.

    psutil reads all processes of the host, which is slow with many peers: use it only where /proc lists no children.
    """
    if not os.path.exists("/proc/thread-self/children"):
        with suppress(psutil.Error):
            return {child.pid for child in psutil.Process().children(recursive=True)}
        return set()
    found: set[int] = set()
    todo = [os.getpid()]
    while todo:
        for file in Path(f"/proc/{todo.pop()}/task").glob("*/children"):
            with suppress(OSError):  # a thread or process that has just ended
                todo += (new := {int(pid) for pid in file.read_text().split()} - found)
                found |= new
    return found - {getattr(resource_tracker._resource_tracker, "_pid", None)}


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
        if signal.getsignal(number) is not signal.SIG_IGN:  # its parent ends it
            signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, numbers)
    torch.set_num_threads(1)
    if _fork.parent is not None:  # otherwise it would be killed at the end of the thread that has forked it
        with suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != _fork.parent:  # it was killed before that
            os._exit(1)


os.register_at_fork(before=_before_fork, after_in_parent=_after_fork, after_in_child=_in_fork)
