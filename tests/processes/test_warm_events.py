"""The warm process as the launcher sees it: events in pieces, its end, and peers that outlive it. They are fake."""

from __future__ import annotations

import json
import os
import signal
from typing import Any

import psutil
import pytest

from launcher.backends.local import ThisHost
from tests.launcher_fixtures import MakeFolder, replace_peers


def test_parses_events_that_arrive_in_pieces(fake_peers: Any) -> None:
    with ThisHost(fake_peers(["waits"])) as host:
        host.start()
        assert host._process is not None
        host._pending = json.dumps({"event": "exited", "peer": 4, "code": -9}).encode()[:10]
        rest = json.dumps({"event": "exited", "peer": 4, "code": -9}).encode()[10:]
        read, write = os.pipe()
        os.write(write, rest + b'\n{"event": "ready"}\n{"ev')
        os.close(write)
        real, host._process.stdout = host._process.stdout, os.fdopen(read, "rb", buffering=0)
        try:
            events = host._messages(1)
        finally:
            host._process.stdout.close()
            host._process.stdout = real
    assert [(event.event, event.peer, event.code) for event in events] == [("exited", 4, -9), ("ready", -1, 0)]


def test_events_of_a_dead_warm_process_are_read_before_its_end_counts(
    make_folder: MakeFolder, fake_peers: Any
) -> None:
    with ThisHost(fake_peers(["waits"])) as host:
        host.start()
        assert host._process is not None
        host._process.kill()
        host._process.wait()
        read, write = os.pipe()
        os.write(write, json.dumps({"event": "exited", "peer": 4, "code": 3}).encode() + b"\n")
        os.close(write)
        assert host._process.stdout is not None
        host._process.stdout.close()
        host._process.stdout = os.fdopen(read, "rb", buffering=0)
        host._folder = make_folder()
        host.fork([0])
        assert [(event.peer, event.code) for event in host._messages(1)] == [(4, 3)]
        assert not host._exited
        assert host._messages(1) == []
        assert host._exited


def test_does_not_wait_for_the_peers_of_a_forked_warm_process(
    make_folder: MakeFolder, fake_peers: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They outlive it, and hold nothing open that others wait for."""
    replace_peers(fake_peers(["waits"]), monkeypatch)
    read, write = os.pipe()
    with ThisHost() as host, os.fdopen(read, "rb") as pipe:
        host.prepare(lambda: None)
        os.close(write)
        host._folder = make_folder(peers=1, results={0: None})
        host.fork([0])
        while not (started := [event.pid for event in host.events(1) if event.event == "started"]):
            pass
        try:
            assert host._process is not None
            host._process.kill()
            assert host._process.wait(100) == -signal.SIGKILL
            assert pipe.read() == b""
            assert psutil.Process(started[0]).is_running()
        finally:
            os.kill(started[0], signal.SIGKILL)
