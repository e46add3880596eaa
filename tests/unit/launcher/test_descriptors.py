"""Descriptors of files in memory and of ends of processes, with and without what some builds of Python lack."""

from __future__ import annotations

import errno
import os
import select
import subprocess
import threading
import time
from contextlib import closing
from typing import Any

import pytest

from launcher.descriptors import ProcessEnd, memory_file
from launcher.errors import LaunchError
from launcher.sweep.jobs import Job, wait
from tests.fast_python.fixture import FastPython

WAYS = ["as it is", "absent", "refused"]


@pytest.fixture(params=WAYS)
def way(request: Any, monkeypatch: pytest.MonkeyPatch) -> str:
    """How memfd_create and pidfd_open work: as here, not in Python, or not in a sandbox."""

    def refuse(*arguments: object) -> int:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    for name in ("memfd_create", "pidfd_open"):
        if request.param == "absent":
            monkeypatch.delattr(os, name)
        elif request.param == "refused":
            monkeypatch.setattr(os, name, refuse)
    return str(request.param)


@pytest.mark.usefixtures("way")
def test_a_file_in_memory_is_read_at_any_offset_and_has_no_name() -> None:
    descriptor = memory_file("p2pfl test")
    try:
        os.write(descriptor, b"an error message")
        assert os.pread(descriptor, 5, 3) == b"error"
        assert os.fstat(descriptor).st_nlink == 0
        assert not os.get_inheritable(descriptor)
    finally:
        os.close(descriptor)


def test_without_memory_and_disk_the_error_says_what_to_set(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(**options: object) -> Any:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.delattr(os, "memfd_create")
    monkeypatch.setattr("launcher.descriptors.tempfile.TemporaryFile", full)
    with pytest.raises(LaunchError, match="No space left on device; set TMPDIR to a folder with room"):
        memory_file("p2pfl test")


@pytest.mark.usefixtures("way")
def test_the_end_of_a_process_can_be_selected_and_leaves_its_exit_code() -> None:
    with subprocess.Popen(["sh", "-c", "read line; exit 7"], stdin=subprocess.PIPE) as process:
        assert process.stdin is not None
        with closing(ProcessEnd(process.pid)) as end:
            assert select.select([end], [], [], 0.05)[0] == []
            process.stdin.close()
            assert select.select([end], [], [], 60)[0] == [end]
            assert process.wait() == 7


@pytest.mark.usefixtures("way")
def test_the_end_of_a_process_that_was_waited_for_can_be_selected() -> None:
    process = subprocess.Popen(["true"])
    process.wait()
    with closing(ProcessEnd(process.pid)) as end:
        assert select.select([end], [], [], 60)[0] == [end]


@pytest.mark.usefixtures("way")
def test_waiting_for_jobs_ends_with_the_first_one_and_ignores_those_that_have_ended() -> None:
    """Else it would return at once, again and again, while peers of an ended command run."""
    jobs: list[Any] = []
    for _ in range(2):
        job: Any = Job.__new__(Job)
        job.process = subprocess.Popen(["sh", "-c", "read line; exit 7"], stdin=subprocess.PIPE)
        job.end = ProcessEnd(job.process.pid)
        jobs.append(job)
    ended, running = jobs
    try:
        ending = threading.Timer(0.1, ended.process.stdin.close)  # while `wait` waits
        ending.start()
        began = time.monotonic()
        wait(jobs, 60)
        assert time.monotonic() - began < 50
        assert ended.process.wait(60) == 7
        assert running.process.poll() is None
        selected = []
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(select, "select", lambda readers, *others: selected.append(readers))
            wait(jobs, 60)
        assert selected == [[running.end]]
    finally:
        for job in jobs:
            job.process.stdin.close()
            job.process.wait()
            job.close()


WARM = """
import errno, os, sys

def refuse(*arguments):
    raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

for name in ("memfd_create", "pidfd_open"):
    if sys.argv[1] == "absent":
        delattr(os, name)
    elif sys.argv[1] == "refused":
        setattr(os, name, refuse)

from launcher.backends.local import ThisHost

with ThisHost() as host:
    print(host.prepare(lambda: 41 + 1), [event.event for event in host.events(60)])
print(host._outcome)
"""
"""In a process without the threads of the tests', which a fork would not have."""


@pytest.mark.exhaustive
@pytest.mark.parametrize("way", WAYS)
def test_a_fork_becomes_the_warm_process_and_its_exit_is_noticed(way: str, fast_python: FastPython) -> None:
    done = subprocess.run([fast_python.executable, "-c", WARM, way], capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("42 ['ready']\nexited with code 0\n", "")
