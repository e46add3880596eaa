"""The process that a launcher starts on each host: the folder of the run there."""

from __future__ import annotations

import base64
import json
import os
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from peers.host import HostProcess


class Events:
    """A host process whose events the test reads."""

    def __init__(self) -> None:
        self._read, self._write = os.pipe()
        self.process = HostProcess(self._write)
        self._events = os.fdopen(self._read)

    def ask(self, do: str, **fields: Any) -> None:
        self.process._obey({"do": do, **fields})

    def send(self, path: str, content: bytes) -> None:
        self.ask("file", path=path, mode=0o644, data=base64.b64encode(content).decode())

    def open(self, root: Path, run: str) -> None:
        self.ask("open", folder=str(root), run=run, token="token", peers=[0], have={})

    def next(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self._events.readline())
        return found

    def close(self) -> list[str]:
        """Return the events that are left."""
        os.close(self._write)
        with self._events as events:
            return list(events)


@pytest.fixture
def host() -> Iterator[Events]:
    started = Events()
    yield started
    started.close()


def test_a_folder_with_another_run_stays_as_it_is(tmp_path: Path) -> None:
    """Its peers may be running, and start again from its files."""
    (tmp_path / "run.json").write_text('{"id": "first"}')
    (tmp_path / "run.yaml").write_text("seed: 1\n")
    host = Events()
    host.open(tmp_path, "second")
    host.send("run.yaml", b"seed: 2\n")
    host.send("run.json", b'{"id": "second"}')
    (event,) = map(json.loads, host.close())
    assert event["event"] == "failed"
    assert event["error"].endswith("contains another run; give another folder by --host-dir, or remove it there")
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {
        "run.json": '{"id": "first"}',
        "run.yaml": "seed: 1\n",
    }


def test_hosts_that_share_a_folder_may_write_the_same_files_at_once(tmp_path: Path) -> None:
    hosts = [Events() for _ in range(4)]
    for host in hosts:
        host.open(tmp_path, "run")
        assert host.next()["event"] == "opened"
    together = threading.Barrier(len(hosts))

    def write(host: Events) -> None:
        for version in range(50):
            together.wait(60)
            host.send("run.yaml", b"%d\n" % version * 1000)

    threads = [threading.Thread(target=write, args=(host,)) for host in hosts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [host.close() for host in hosts] == [[]] * len(hosts), "nothing has failed"
    assert (tmp_path / "run.yaml").read_bytes() == b"49\n" * 1000
    assert list(tmp_path.glob(".*.new")) == []


def test_a_file_that_cannot_be_written_while_peers_run_is_written_later(host: Events, tmp_path: Path) -> None:
    """Its peers train on: the launcher must not give up the host."""
    host.open(tmp_path, "run")
    host.next()
    host.process._loaded = True
    (tmp_path / "addresses").rmdir()
    for address in ("tcp://10.0.0.3:1", "tcp://10.0.0.3:2"):
        host.ask("address", peer=7, address=address)
        event = host.next()
        assert event["event"] == "notice"
        assert event["text"].endswith("trying again")
        assert "addresses" in event["text"]
    host.process._write_again()
    (tmp_path / "addresses").mkdir()
    host.process._write_again()
    assert (tmp_path / "addresses/07").read_text() == "tcp://10.0.0.3:2"
    host.ask("address", peer=7, address="tcp://10.0.0.3:3")
    host.process._write_again()
    assert (tmp_path / "addresses/07").read_text() == "tcp://10.0.0.3:3"


def test_a_name_without_an_ipv4_address_is_no_connection(host: Events, monkeypatch: pytest.MonkeyPatch) -> None:
    """Peers listen at IPv4 addresses unless their host's address is an IPv6 address."""

    def getaddrinfo(name: str, port: int, family: int = 0, *_: Any) -> list[Any]:
        if family == socket.AF_INET:
            raise socket.gaierror(socket.EAI_NODATA, "No address associated with hostname")
        return [(socket.AF_INET6, socket.SOCK_STREAM, 0, "", ("::1", port, 0, 0))]

    host.ask("listen", port=0)
    port = host.next()["port"]
    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    host.ask("probe", hosts={"beta": ("beta6.example.org", port)})
    assert host.next()["failures"]["beta"].startswith(
        "No address associated with hostname (peers resolve names to IPv4"
    )
    assert host.process._listener is not None
    host.process._listener.close()
