"""Addresses of peers: templates, the table of hosts, the environment, and their errors."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import pytest

from p2pfl.errors import RunFileError
from p2pfl.run_file.addresses import AddressBook, is_ipv6, is_loopback, join, problems, split
from p2pfl.run_file.addresses import book as made
from p2pfl.run_file.load import load


def book(address: str | None = None, port: int | None = 5700, peers: int = 12, **hosts: str) -> AddressBook:
    table = {entry.removeprefix("_").replace("_", "-"): host for entry, host in hosts.items()}
    assert list(problems(peers, port, address, table)) == []
    return made(peers, port, address, table)


def test_advertises_the_bound_address_by_default() -> None:
    assert [book(port=None).address_of(3), book().address_of(3)] == [None, None]
    assert book().advertised(3, "tcp://127.0.0.1:40123") == "tcp://127.0.0.1:40123"


def test_template_gives_the_address_of_each_peer() -> None:
    known = book("tcp://peer-{id}:{port}")
    assert known.address_of(3) == known.advertised(3, "tcp://0.0.0.0:5703") == "tcp://peer-3:5703"
    assert book("tcp://10.0.0.{id}:5700", port=None).address_of(3) == "tcp://10.0.0.3:5700"
    assert book("tcp://[fd00::{id}]:{port}").address_of(9) == "tcp://[fd00::9]:5709"


@pytest.mark.parametrize(
    ("template", "port", "advertised"),
    [
        ("tcp://peer-{id}:{port}", None, "tcp://peer-3:40123"),
        ("tcp://{hostname}:{port}", 5700, f"tcp://{socket.gethostname()}:40123"),
    ],
)
def test_peer_advertises_what_only_it_can_determine(template: str, port: int | None, advertised: str) -> None:
    known = book(template, port)
    assert known.address_of(3) is None
    assert known.advertised(3, "tcp://0.0.0.0:40123") == advertised


def test_hosts_override_the_template() -> None:
    known = book(
        "tcp://peer-{id}:{port}", _4="beta.example", _2_5="alpha.example", _6="fd00::2", _7="[fd00::3]",
        _8="tcp://203.0.113.7:9000", _9="tcp://gate:{port}",
    )  # fmt: skip
    assert [known.address_of(peer) for peer in range(1, 11)] == [
        "tcp://peer-1:5701",
        "tcp://alpha.example:5702",
        "tcp://alpha.example:5703",
        "tcp://beta.example:5704",
        "tcp://alpha.example:5705",
        "tcp://[fd00::2]:5706",
        "tcp://[fd00::3]:5707",
        "tcp://203.0.113.7:9000",
        "tcp://gate:5709",
        "tcp://peer-10:5710",
    ]
    assert known.bound_port(8) == 5708


def test_splits_and_joins_addresses() -> None:
    assert split("tcp://peer-3:5703") == ("peer-3", 5703)
    assert split("tcp://[fd00::2]:1") == ("fd00::2", 1)
    assert join(*split("tcp://[fd00::2]:1")) == "tcp://[fd00::2]:1"
    assert join("0.0.0.0", "*") == "tcp://0.0.0.0:*"
    assert [is_ipv6(host) for host in ("::", "[::1]", "127.0.0.1", "peer-3")] == [True, True, False, False]
    for wrong in (
        "peer-3:5703",
        "tcp://peer-3",
        "tcp://:5703",
        "tcp://a:0",
        "tcp://a:65536",
        "tcp://a b:1",
        "ipc://x:1",
    ):
        with pytest.raises(ValueError, match="not of the form tcp://host:port"):
            split(wrong)


@pytest.mark.parametrize("host", ["127.0.0.1", "127.1.2.3", "localhost", "::1", "[::1]", "lo"])
def test_recognizes_loopback_hosts(host: str) -> None:
    assert is_loopback(host)


@pytest.mark.parametrize(
    "host", ["0.0.0.0", "*", "10.0.0.1", "::", "eth0", "localhost.example.org", "", "127.0.0.1.x"]
)
def test_other_hosts_are_not_loopback(host: str) -> None:
    assert not is_loopback(host)


# ---- in a run file

TEXT = """\
name: toy
rounds: 2
peers: 4
algorithm: local
data: {dataset: digits}
"""


@pytest.fixture
def read(tmp_path: Path) -> Any:
    def read(transport: str, *sets: str, **environment: str) -> Any:
        file = tmp_path / "run.yaml"
        file.write_text(f"{TEXT}transport:\n{transport}")
        return load(file, sets, environment).file.transport

    return read


@pytest.mark.parametrize(
    ("transport", "expected"),
    [
        ("  port: 65533\n", "7: transport.port: peer 3 would bind port 65536; the highest port is 65535"),
        ("  address: peer-{id}\n", ": 'peer-{id}' is not of the form tcp://host:port, e.g. tcp://peer-{id}:{port}"),
        ("  address: tcp://{name}:1\n", "unknown {name} in 'tcp://{name}:1'; known: {id}, {port}, {hostname}"),
        ("  address: tcp://{id:03}:1\n", "unknown {id} in 'tcp://{id:03}:1'"),
        ("  address: tcp://{id:1\n", "transport.address: 'tcp://{id:1': "),
        (
            "  address: tcp://gate:5700\n",
            ".address: peers 0 and 1 would have the same address tcp://gate:5700; use {port} or {id}",
        ),
        (
            "  hosts:\n    0-1: tcp://gate:57\n",
            "transport.hosts: peers 0 and 1 would have the same address tcp://gate:57",
        ),
        ("  hosts:\n    0: alpha\n    1-7: beta\n", "9: transport.hosts.1-7: no peer 7; the 4 peers are 0 to 3"),
        ("  hosts:\n    3-1: alpha\n", "8: transport.hosts.3-1: the end of the range is below its start"),
        ("  hosts:\n    peer-1: alpha\n", "8: transport.hosts.peer-1: should be a peer, e.g. 3, or a range of peers"),
        ("  hosts:\n    0-2: alpha\n    1-3: beta\n", "9: transport.hosts.1-3: overlaps 0-2"),
        ("  address: tcp://gate:{id}\n", "'tcp://gate:{id}' is not an address of peer 0: 'tcp://gate:0' is not of"),
        (
            "  port: 5700\n  address: tcp://gate:7{port}\n",
            "is not an address of peer 0: 'tcp://gate:75700'",
        ),
        (
            "  port: 5534\n  hosts:\n    0-3: tcp://gate:6{port}\n",
            "transport.hosts.0-3: 'tcp://gate:6{port}' is not an address of peer 2: 'tcp://gate:65536' is not of the",
        ),
        ("  hosts:\n    1: a b\n", "8: transport.hosts.1: 'tcp://a b:{port}' is not of the form tcp://host:port"),
    ],
)
def test_reports_problems_with_file_line_and_key(read: Any, transport: str, expected: str) -> None:
    with pytest.raises(RunFileError) as caught:
        read(transport)
    assert expected in str(caught.value)
    assert "run.yaml:" in str(caught.value)


def test_templates_are_checked_with_the_ids_and_ports_that_they_are_for(read: Any) -> None:
    assert read("  port: 5700\n  address: tcp://gate:1{port}\n").book(4).address_of(1) == "tcp://gate:15701"
    assert read("  hosts:\n    1-3: tcp://gate:{id}\n").book(4).address_of(3) == "tcp://gate:3"


def test_addresses_survive_writing_and_loading_the_run_file(read: Any, tmp_path: Path) -> None:
    transport = read("  port: 5700\n  hosts:\n    0-2: alpha\n    3: fd00::2\n")
    assert transport.book(4).address_of(2) == "tcp://alpha:5702"
    again = tmp_path / "again.yaml"
    again.write_text(load(tmp_path / "run.yaml").to_yaml())
    assert load(again).file.transport == transport


def test_environment_overrides_the_file_and_set_overrides_both(read: Any, tmp_path: Path) -> None:
    file = "  host: 127.0.0.2\n  port: 1\n  hosts:\n    3: gamma\n"
    here = {"P2PFL_PORT": "5700", "P2PFL_ADDRESS": "tcp://peer-{id}:{port}", "P2PFL_ADDRESS_3": "tcp://delta:9"}
    transport = read(file, **here, P2PFL_HOST="::1", P2PFL_DATA="/data")
    assert (transport.host, transport.port) == ("::1", 5700)
    assert [transport.book(4).address_of(peer) for peer in (2, 3)] == ["tcp://peer-2:5702", "tcp://delta:9"]
    assert read(file, "transport.port=7", **here).port == 7
    assert read(file, P2PFL_KEYS=str(tmp_path)).keys == tmp_path


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("P2PFL_PORT", "many", "P2PFL_PORT: transport.port: should be an integer (found 'many')"),
        ("P2PFL_HOST", "0.0.0.0", "P2PFL_HOST: transport.host: '0.0.0.0' is reachable from other hosts"),
        ("P2PFL_ADDRESS_4", "tcp://a:1", "P2PFL_ADDRESS_4: transport.hosts.4: no peer 4; the 4 peers are 0 to 3"),
        ("P2PFL_ADDRESS_x", "tcp://a:1", "P2PFL_ADDRESS_x: transport.hosts.x: should be a peer, e.g. 3"),
    ],
)
def test_reports_problems_in_environment_variables(read: Any, name: str, value: str, expected: str) -> None:
    with pytest.raises(RunFileError) as caught:
        read("  port: 5700\n", **{name: value})
    assert expected in str(caught.value)
