"""The warm process as the launcher sees it: events in pieces, its end, and peers that outlive it. They are fake."""

from __future__ import annotations

import json
import os
import signal
from typing import Any

import psutil
import pytest

from launcher.backends.warm import WarmProcess
from tests.launcher_fixtures import MakeFolder, replace_peers


def test_parses_events_that_arrive_in_pieces(fake_peers: Any) -> None:
    with WarmProcess(fake_peers(["waits"])) as warm:
        warm._pending = json.dumps({"event": "exited", "peer": 4, "code": -9}).encode()[:10]
        rest = json.dumps({"event": "exited", "peer": 4, "code": -9}).encode()[10:]
        read, write = os.pipe()
        os.write(write, rest + b'\n{"event": "ready"}\n{"ev')
        os.close(write)
        real, warm._process.stdout = warm._process.stdout, os.fdopen(read, "rb", buffering=0)
        try:
            events = warm.events(1)
        finally:
            warm._process.stdout.close()
            warm._process.stdout = real
    assert [(event.event, event.peer, event.code) for event in events] == [("exited", 4, -9), ("ready", -1, 0)]


def test_events_of_a_dead_warm_process_are_read_before_its_end_counts(
    make_folder: MakeFolder, fake_peers: Any
) -> None:
    with WarmProcess(fake_peers(["waits"])) as warm:
        warm._process.kill()
        warm._process.wait()
        read, write = os.pipe()
        os.write(write, json.dumps({"event": "exited", "peer": 4, "code": 3}).encode() + b"\n")
        os.close(write)
        assert warm._process.stdout is not None
        warm._process.stdout.close()
        warm._process.stdout = os.fdopen(read, "rb", buffering=0)
        warm.fork(make_folder(), [0])
        assert [(event.peer, event.code) for event in warm.events(1)] == [(4, 3)]
        assert not warm.exited
        assert warm.events(1) == []
        assert warm.exited


def test_does_not_wait_for_the_peers_of_a_forked_warm_process(
    make_folder: MakeFolder, fake_peers: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They outlive it, and hold nothing open that others wait for."""
    replace_peers(fake_peers(["waits"]), monkeypatch)
    read, write = os.pipe()
    warm, _ = WarmProcess.after(lambda: None)
    os.close(write)
    with warm, os.fdopen(read, "rb") as pipe:
        warm.fork(make_folder(peers=1, results={0: None}), [0])
        while not (started := [event.pid for event in warm.events(1) if event.event == "started"]):
            pass
        try:
            warm._process.kill()
            assert warm._process.wait(100) == -signal.SIGKILL
            assert pipe.read() == b""
            assert psutil.Process(started[0]).is_running()
        finally:
            os.kill(started[0], signal.SIGKILL)
