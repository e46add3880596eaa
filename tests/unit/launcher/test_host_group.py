"""Host processes that are slow, lie, or send what cannot be stored; the test stands in for them over a socket."""

from __future__ import annotations

import base64
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from launcher.backends import host_group, mirror
from launcher.backends.follow import PeerProcesses
from launcher.backends.group import Event
from launcher.backends.host_connection import PROTOCOL, Files
from launcher.backends.host_group import HostGroup
from launcher.backends.hosts import Host, HostStream
from launcher.errors import LaunchError
from launcher.facts.processes import HOST_LOST
from p2pfl.errors import WriteError
from peers.host import BEAT, HostProcess
from tests.launcher_fixtures import MakeFolder

VERSIONS = {"code": "1", "versions": {"p2pfl-mesh": "1", "torch": "2", "numpy": "2", "pyzmq": "27"}}


class ScriptedBackend:
    """One host; the test stands in for its process."""

    def hosts(self) -> list[Host]:
        return [Host("alpha", peers=(0, 1))]

    def start(self, host: Host, command: Sequence[str]) -> HostStream:
        ours, self.theirs = socket.socketpair()
        self.say(event="hello", protocol=PROTOCOL, cores=2, **VERSIONS)
        descriptor = ours.detach()
        return HostStream(descriptor, descriptor, lambda: "it has ended")

    def say(self, **event: Any) -> None:
        self.theirs.sendall((json.dumps(event) + "\n").encode())

    def saved(self) -> dict[str, Any]:
        return {}

    def close(self) -> None:
        self.theirs.close()


@pytest.fixture
def opened(make_folder: MakeFolder) -> Iterator[tuple[ScriptedBackend, HostGroup]]:
    """A group whose host has opened the run folder of two peers, and loads the run."""
    folder = make_folder(peers=2, results={0: None, 1: None})
    backend = ScriptedBackend()
    with HostGroup(backend, backend.hosts(), VERSIONS) as group:
        hosts = group.connect()
        backend.say(event="opened", shared=False, folder="/run", running={}, new=[])
        files = Files(folder, "token", {}, {}, lambda *given: [], lambda host: 0, [[1], [0]])
        group.open(hosts, files, probe=False, load=False)
        yield backend, group
        backend.close()  # the host process ends


def until(group: HostGroup, found: Callable[[list[Event]], bool]) -> list[Event]:
    events: list[Event] = []
    for _ in range(100):
        events += group.events(0.1)
        if found(events):
            return events
    raise AssertionError(f"not within 10 s: {events}")


class TwoHosts(ScriptedBackend):
    """Host alpha with peer 0, whose process the test stands in for, and beta with peer 1, whose process is slow to
    open the run."""

    def __init__(self) -> None:
        self.streams: dict[str, socket.socket] = {}

    def hosts(self) -> list[Host]:
        return [Host("alpha", peers=(0,)), Host("beta", peers=(1,))]

    def start(self, host: Host, command: Sequence[str]) -> HostStream:
        stream = super().start(host, command)
        self.streams[host.name] = self.theirs
        return stream

    def tell(self, host: str, **event: Any) -> None:
        self.theirs = self.streams[host]
        self.say(**event)

    def asked(self, host: str) -> list[str]:
        """Return the requests to a host since the last call."""
        with suppress(BlockingIOError):
            lines = self.streams[host].recv(1 << 20, socket.MSG_DONTWAIT).splitlines()
            return [json.loads(line)["do"] for line in lines]
        return []

    def close(self) -> None:
        for stream in self.streams.values():
            stream.close()


@pytest.mark.exhaustive
def test_a_host_is_sent_addresses_once_it_has_opened_the_run(make_folder: MakeFolder) -> None:
    folder = make_folder(peers=2, results={0: None, 1: None})
    backend = TwoHosts()
    opened = {"event": "opened", "shared": False, "folder": "/run", "running": {}, "new": []}
    with HostGroup(backend, backend.hosts(), VERSIONS) as group:
        hosts = group.connect()
        for host in ("alpha", "beta"):
            backend.tell(host, **opened)
        files = Files(folder, "token", {}, {}, lambda *given: [], lambda host: 0, [[1], [0]])
        group.open(hosts, files, probe=False, load=False)
        group.fork([1])
        backend.streams["beta"].close()  # its process ends; the next one takes its time
        until(group, lambda events: "beta" in " ".join(group.notices()))
        backend.streams["beta"] = backend.streams["alpha"]
        until(group, lambda events: backend.streams["beta"] is not backend.streams["alpha"])
        backend.tell("alpha", event="address", peer=0, address="tcp://10.0.0.2:4000")
        until(group, lambda events: group._addresses.get(0) is not None)
        until(group, lambda events: group._of_peer[1].state == "greeted")
        assert "address" not in (before := backend.asked("beta")), "its host process would fail"
        assert before == ["open"]
        backend.tell("beta", **opened)
        until(group, lambda events: group._of_peer[1].state == "opened")
        assert backend.asked("beta")[:2] == ["address", "load"]
        backend.close()


def test_requests_that_no_host_has_got_can_be_withdrawn(opened: Any) -> None:
    _, group = opened
    group.fork([0, 1])
    group.cancel()
    assert group.events(0.0) == [Event("vanished", 0), Event("vanished", 1)]


@pytest.mark.parametrize(
    ("event", "reason"),
    [
        ({"event": "exited", "peer": 7, "code": 0, "error": ""}, "reports peer 7, which is not one of its peers"),
        ({"event": "exited", "peer": 0}, "an invalid event: KeyError: 'code'"),
        ({"event": "file", "path": "peers/00/peer.log", "at": 0, "data": "a"}, "an invalid event: Error"),
    ],
)
def test_a_host_that_sends_what_it_must_not_is_given_up_by_name(
    opened: Any, event: dict[str, Any], reason: str
) -> None:
    backend, group = opened
    group.fork([0])
    backend.say(**event)
    events = until(group, lambda events: any(event.event == "exited" for event in events))
    assert [(event.peer, event.error) for event in events] == [(0, "host alpha is lost")]
    assert reason in " ".join(group.notices())


def test_a_full_disk_here_does_not_end_the_peers_there(opened: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    backend, group = opened

    def full(self: object, event: object) -> None:
        raise WriteError(Path("peer.log"), OSError(28, "No space left on device"))

    monkeypatch.setattr(mirror.Mirror, "write", full)
    data = base64.b64encode(b"line\n").decode()
    for _ in range(2):
        backend.say(event="file", path="peers/00/peer.log", at=0, data=data, clock=1.0)
    backend.say(event="started", peer=0, pid=4711)
    assert until(group, bool) == [Event("started", 0, pid=4711)]
    (notice,) = group.notices()
    assert notice.startswith("host alpha: files of its peers are no longer copied here: ")


def test_what_a_host_could_not_write_becomes_a_notice(opened: Any) -> None:
    backend, group = opened
    backend.say(event="notice", text="address 3: No space left on device\x1b[2J; trying again")
    backend.say(event="started", peer=0, pid=4711)
    assert until(group, bool) == [Event("started", 0, pid=4711)]
    (notice,) = group.notices()
    assert notice.startswith("host alpha: address 3: No space left on device")
    assert "\x1b" not in notice


def test_a_host_that_does_not_send_its_files_in_time_is_named(opened: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    _, group = opened
    monkeypatch.setattr(host_group, "SYNC_TIMEOUT", 0.0)
    with pytest.raises(LaunchError, match="hosts alpha: no answer within 0 s"):
        group.sync()


def test_a_host_whose_process_keeps_ending_is_started_ever_more_rarely(
    opened: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend, group = opened
    now = [1000.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    starts: list[float] = []

    def start(host: Host, command: Sequence[str]) -> HostStream:
        starts.append(now[0])
        raise LaunchError("unreachable")

    monkeypatch.setattr(backend, "start", start)
    monkeypatch.setattr(group, "_keep_trying", True)
    group.fork([0])
    backend.theirs.close()
    events: list[Event] = []
    while now[0] < 1400.0:
        events += group.events(0.0)
        now[0] += 1.0
    assert events == [], "no peer is reported as lost"
    waits = [round(after - before) for before, after in pairwise(starts)]
    assert waits[-2:] == [61, 61]
    assert waits == sorted(waits)
    monkeypatch.setattr(group, "_keep_trying", False)
    now[0] += 61.0
    lost = group.events(0.0) + group.events(0.0)
    assert [(event.peer, event.code) for event in lost] == [(0, HOST_LOST)]


def test_a_host_whose_process_hangs_at_its_start_is_lost(opened: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each attempt takes longer than a host must have been ready for its failures to be forgotten."""
    backend, group = opened
    now = [1000.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    starts: list[socket.socket] = []

    def start(host: Host, command: Sequence[str]) -> HostStream:
        ours, theirs = socket.socketpair()
        starts.append(theirs)
        descriptor = ours.detach()
        return HostStream(descriptor, descriptor, lambda: "it has ended")

    monkeypatch.setattr(backend, "start", start)
    group.fork([0])
    backend.theirs.close()
    events: list[Event] = []
    while not events and now[0] < 5000.0:
        events = group.events(0.0)
        now[0] += 10.0
    assert [(event.peer, event.code) for event in events] == [(0, HOST_LOST)]
    assert len(starts) == host_group.MAX_FAILURES
    for stream in starts:
        stream.close()


def test_preparing_the_run_does_not_count_as_time_of_the_hosts(
    make_folder: MakeFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may download a dataset."""
    folder, backend, now = make_folder(peers=2, results={0: None, 1: None}), ScriptedBackend(), [1000.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    with HostGroup(backend, backend.hosts(), VERSIONS) as group:
        hosts = group.connect()
        now[0] += 2 * host_group.LOAD_TIMEOUT
        backend.say(event="opened", shared=False, folder="/run", running={}, new=[])
        files = Files(folder, "token", {}, {}, lambda *given: [], lambda host: 0, [[1], [0]])
        group.open(hosts, files, probe=False, load=False)
        backend.close()


def test_to_end_a_silent_host_takes_no_other_with_it(
    make_folder: MakeFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, backend, now = make_folder(peers=2, results={0: None, 1: None}), TwoHosts(), [1000.0]
    with HostGroup(backend, backend.hosts(), VERSIONS) as group:
        hosts = group.connect()
        for host in ("alpha", "beta"):
            backend.tell(host, event="opened", shared=False, folder="/run", running={}, new=[])
        files = Files(folder, "token", {}, {}, lambda *given: [], lambda host: 0, [[1], [0]])
        group.open(hosts, files, probe=False, load=False)
        for host in ("alpha", "beta"):
            backend.tell(host, event="ready")
        until(group, lambda events: all(group._of_peer[peer].state == "ready" for peer in (0, 1)))
        monkeypatch.setattr("time.monotonic", lambda: now[0])
        alpha, beta = (group._of_peer[peer] for peer in (0, 1))
        alpha.last_event_at, beta.last_event_at = now[0], now[0] + 4.0
        assert alpha.stream is not None
        now[0] += host_group.SILENCE + 1.0

        def kill() -> None:  # it does not end at once
            now[0] += 5.0

        monkeypatch.setattr(alpha.stream, "kill", kill)
        group.events(0.0)
        assert (alpha.state, beta.state) == ("ended", "ready")
        backend.close()


def test_a_signal_is_sent_again_to_a_peer_whose_host_has_come_back(
    opened: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, group = opened
    sent: list[tuple[list[int], int]] = []
    monkeypatch.setattr(group, "signal", lambda peers, number: sent.append((sorted(peers), number)))
    processes = PeerProcesses(group)
    processes.update([Event("started", 0, pid=10), Event("started", 1, pid=11)])
    processes.stop(kill=False)
    processes.stop(kill=False)
    assert sent == [([0, 1], signal.SIGTERM), ([], signal.SIGTERM)]
    processes.update([Event("started", 1, pid=11)])  # its host was not connected when the signal was sent
    processes.stop(kill=False)
    assert sent[2:] == [([1], signal.SIGTERM)]


@pytest.mark.parametrize("address", ["127.0.0.1", "::1"])
def test_hosts_can_be_probed_by_both_versions_of_ip(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    read, write = os.pipe()
    process = HostProcess(write)
    process._do_listen(0)
    with os.fdopen(read) as events:
        port = json.loads(events.readline())["port"]
        process._do_probe({"alpha": (address, port)})
        assert json.loads(events.readline()) == {"event": "probed", "failures": {}}
        assert process._listener is not None
        process._listener.close()
        process._do_probe({"alpha": (address, port)})
        assert json.loads(events.readline())["failures"] == {"alpha": "Connection refused"}
    os.close(write)


def test_a_host_that_never_loads_the_run_is_ended(opened: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    _, group = opened
    group.fork([0])
    monkeypatch.setattr(host_group, "LOAD_TIMEOUT", 0.0)
    group.events(0.0)
    assert "opened, and no answer within 0 s" in " ".join(group.notices())


def test_a_host_process_gives_signs_of_life_while_its_files_are_slow(
    make_folder: MakeFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [1000.0]
    monkeypatch.setattr("peers.host.monotonic", lambda: now[0])
    read, write = os.pipe()
    process = HostProcess(write)
    process._folder, process._peers = make_folder(peers=4), [0, 1, 2, 3]

    def report(peer: int) -> None:
        now[0] += BEAT * 1.1

    monkeypatch.setattr(process, "_report", report)
    process._look()
    os.close(write)
    with os.fdopen(read) as events:
        assert [json.loads(line)["event"] for line in events] == ["beat"] * 4


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("look", "expected"),
    [
        ("time.sleep(0.2); self.send({'event': 'look'})", "look"),  # the others on the host have the cores
        ("while time.process_time() < 2: pass", "beat"),  # so that the next look is due in half a minute
    ],
)
def test_a_busy_host_process_gives_signs_of_life(look: str, expected: str) -> None:
    program = (
        f"import time\nimport peers.host as host\ndef look(self):\n    {look}\n"
        "host.HostProcess._look = look\nhost.BEAT = 0.3\nhost.serve()\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdin
    assert process.stdout
    deadline = threading.Timer(200.0, process.kill)
    deadline.start()
    try:
        events = [json.loads(process.stdout.readline())["event"] for _ in range(6)]
        assert events[:1] == ["hello"]
        assert events.count(expected) >= 3
    finally:
        deadline.cancel()
        process.stdin.close()
        process.wait(200)
        process.stdout.close()
