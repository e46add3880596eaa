"""Which addresses are those of this host."""

from __future__ import annotations

import socket
from typing import Any

import psutil
import pytest

from launcher.backends.checks import remote_peers
from p2pfl.run_file.addresses import AddressBook

NUMBERS = {"alpha": ["192.0.2.9", "127.0.0.5"], "beta": ["192.0.2.9"], "gamma": ["fd00::77"]}


@pytest.fixture(autouse=True)
def names(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fake name server, and a host with the address fd00::77."""

    def getaddrinfo(host: str, port: None) -> list[Any]:
        if host not in NUMBERS and not host[0].isdigit() and ":" not in host:
            raise socket.gaierror(-2, "Name or service not known")
        return [(None, None, 0, "", (number, 0)) for number in NUMBERS.get(host, [host])]

    interface = psutil.net_if_addrs()["lo"][0]._replace(address="fd00::77%eth0")
    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: {"eth0": [interface]})


@pytest.mark.parametrize(
    ("host", "is_local"),
    [
        ("127.0.0.1", True), ("[::1]", True), ("0.0.0.0", True), ("[fd00::77]", True), ("gamma", True),
        ("alpha", True), ("beta", False), ("192.0.2.9", False), ("nobody", False), ("{hostname}", True),
    ],
)  # fmt: skip
def test_recognizes_addresses_of_this_host(host: str, is_local: bool) -> None:
    book = AddressBook({1: f"tcp://{host}:{{port}}"}, port=5700)
    assert list(remote_peers(book, range(3))) == ([] if is_local else [(1, f"tcp://{host}:5701")])


def test_checks_only_the_given_peers() -> None:
    book = AddressBook({peer: f"tcp://{host}:{{port}}" for peer, host in enumerate(("alpha", "beta"))}, port=5700)
    assert list(remote_peers(book, [0])) == []
    assert [peer for peer, _ in remote_peers(book, [0, 1])] == [1]
