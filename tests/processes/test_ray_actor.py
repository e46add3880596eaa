"""The subprocesses of a Ray actor; needs no Ray."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import psutil
import pytest

from launcher.backends.ray import host_actor
from launcher.backends.ray.host_actor import HostActor, _Process

CHILD = (
    "import subprocess, sys; child = subprocess.Popen(['sleep', '1000']); print(child.pid, flush=True); child.wait()"
)
"""In place of a host process with a peer."""
ACTOR = f"""
import json, sys, threading
from launcher.backends.ray.host_actor import _Process
process = _Process([sys.executable, "-c", {CHILD!r}], {{}})
with process.changed:
    process.changed.wait_for(lambda: process.output.endswith(b"\\n"))
print(json.dumps([process.popen.pid, int(process.output)]), flush=True)
threading.Event().wait()
"""


def alive(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def test_peers_die_with_the_process_of_the_actor(until: Any) -> None:
    """Otherwise Ray might start their successors while they run."""
    actor = subprocess.Popen([sys.executable, "-c", ACTOR], stdout=subprocess.PIPE, text=True)
    assert actor.stdout is not None
    host, peer = json.loads(actor.stdout.readline())
    assert alive(host)
    assert alive(peer)
    actor.kill()
    actor.wait()
    actor.stdout.close()
    until(lambda: not alive(host) and not alive(peer), "the guard kills the host process and the peer")


def read_all(actor: HostActor, key: str, step: int) -> bytes:
    """Read as a launcher does that acknowledges ``step`` bytes at a time."""
    found = b""
    while chunk := actor.read(key, len(found), 10.0):
        found += chunk[:step]
    return found


def end(process: _Process) -> None:
    process.kill()
    process.close_requests()
    for child in (process.popen, process.guard):
        assert child.stdin is not None
        child.stdin.close()
        child.wait()
    assert process.popen.stdout is not None
    with process.changed:
        process.changed.wait_for(lambda: process.ended)
    process.popen.stdout.close()
    process.errors.close()


@pytest.fixture
def started() -> Iterator[Callable[[str], HostActor]]:
    """``started(code)``: an actor with a host process that runs this code."""
    processes: list[_Process] = []

    def start(command: str) -> HostActor:
        actor = HostActor.__new__(HostActor)  # without the guards, which watch Ray
        actor._asked = 0.0
        actor._processes = {"key": _Process([sys.executable, "-c", command], {"VALUE": "5"})}
        processes.extend(actor._processes.values())
        return actor

    yield start
    for process in processes:
        end(process)


def test_relays_every_byte_once_whatever_was_acknowledged(started: Any) -> None:
    actor = started("import sys; sys.stdout.buffer.write(sys.stdin.buffer.read() * 3)")
    assert actor.write("key", b"abc" * 50_000)
    actor.close_requests("key")
    assert read_all(actor, "key", 10_001) == b"abc" * 150_000


def test_reports_the_end_of_the_error_output_as_outcome(started: Any, until: Any) -> None:
    actor = started("import os, sys; sys.exit('one\\ntwo\\nthree\\nno torch: ' + os.environ['VALUE'])")
    assert actor.read("key", 0, 10.0) == b""
    assert actor.outcome("key") == "two; three; no torch: 5"
    until(lambda: not actor.busy(), "it has ended")


def test_a_host_process_without_a_launcher_ends_though_nobody_reads(
    started: Any, until: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_actor, "MAX_BUFFER", 1000)
    actor = started("import sys; sys.stdout.buffer.write(b'a' * 1_000_000); sys.stdout.flush(); sys.stdin.read()")
    process = actor._processes["key"]
    until(lambda: len(process.output) >= 1000, "the buffer is full")
    process.abandon()
    until(lambda: not actor.busy(), "it has ended")
    assert 1000 <= len(read_all(actor, "key", 1 << 20)) < 1_000_000  # what was kept, to its end


def test_a_launcher_that_was_only_suspended_gets_every_byte(started: Any, until: Any) -> None:
    actor = started("import sys; sys.stdin.read(); sys.stdout.buffer.write(b'abc' * 50_000)")
    actor._processes["key"].abandon()
    until(lambda: not actor.busy(), "it has ended")
    assert read_all(actor, "key", 10_001) == b"abc" * 50_000


def test_a_killed_host_process_is_named(started: Any) -> None:
    actor = started("import time; time.sleep(1000)")
    assert actor.busy()
    os.kill(actor._processes["key"].popen.pid, signal.SIGKILL)
    assert actor.read("key", 0, 10.0) == b""
    assert actor.outcome("key") == "the host process exited with code -9"
    assert not actor.write("key", b"x" * (1 << 20))
