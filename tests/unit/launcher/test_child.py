"""Functions called in a child process."""

from __future__ import annotations

import gc
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from launcher.child import in_child
from launcher.errors import LaunchError
from p2pfl.errors import HandshakeError, MissingExtra, P2pflError, Problem, RunFileError, WriteError

ERRORS = [
    RunFileError([Problem("run.yaml:3", "algorithm.lr", "too large"), Problem("run.yaml:4", "peers", "missing")]),
    WriteError(Path("/no/such/folder/file"), OSError(28, "No space left on device")),
    MissingExtra("vl-convert-python", "report", "drawing"),
    HandshakeError("another run"),
]


@pytest.mark.exhaustive
def test_returns_what_the_function_returns_in_another_process() -> None:
    gc.collect()  # what other tests have left may have descriptors
    before = len(os.listdir("/proc/self/fd"))
    pid, value = in_child(lambda: (os.getpid(), {"a": [1, 2]}))
    assert pid != os.getpid()
    assert value == {"a": [1, 2]}
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.exhaustive
@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_raises_the_error_that_the_function_raises(error: P2pflError) -> None:
    def fail() -> None:
        raise error

    with pytest.raises(type(error)) as caught:
        in_child(fail)
    assert type(caught.value) is type(error)
    assert str(caught.value) == str(error)
    assert vars(caught.value) == vars(error)


def test_prints_an_unexpected_error_and_exits(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        in_child(lambda: 1 // 0)
    assert caught.value.code == 1
    assert "ZeroDivisionError" in capfd.readouterr().err


def test_names_the_signal_that_killed_the_child() -> None:
    with pytest.raises(LaunchError, match="killed by SIGKILL"):
        in_child(lambda: os.kill(os.getpid(), signal.SIGKILL))


@pytest.fixture
def interrupts() -> Iterator[None]:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_an_interrupt_ends_the_child_without_a_word(interrupts: None, capfd: pytest.CaptureFixture[str]) -> None:
    def interrupted() -> None:
        parent = psutil.Process(os.getppid())
        while parent.status() != psutil.STATUS_SLEEPING:  # while it forks, Python ignores exceptions
            time.sleep(0.01)
        parent.send_signal(signal.SIGINT)
        signal.pause()

    with pytest.raises(KeyboardInterrupt):
        in_child(interrupted)
    assert capfd.readouterr() == ("", "")
