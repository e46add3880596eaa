"""Peers that are looked for on other hosts are not started on this one."""

from __future__ import annotations

import socket

import psutil
import pytest

from launcher.here import elsewhere
from p2pfl.addresses import AddressBook

NUMBERS = {"alpha": ["192.0.2.9", "127.0.0.5"], "beta": ["192.0.2.9"], "gamma": ["fd00::77"]}


@pytest.fixture(autouse=True)
def names(monkeypatch):
    """A name server, and a host with a number of its own."""

    def getaddrinfo(host, port):
        if host not in NUMBERS and not host[0].isdigit() and ":" not in host:
            raise socket.gaierror(-2, "Name or service not known")
        return [(None, None, 0, "", (number, 0)) for number in NUMBERS.get(host, [host])]

    interface = psutil.net_if_addrs()["lo"][0]._replace(address="fd00::77%eth0")
    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: {"eth0": [interface]})


@pytest.mark.parametrize(
    ("host", "here"),
    [
        ("127.0.0.1", True), ("[::1]", True), ("0.0.0.0", True), ("[fd00::77]", True), ("gamma", True),
        ("alpha", True), ("beta", False), ("192.0.2.9", False), ("nobody", False), ("{hostname}", True),
    ],
)  # fmt: skip
def test_what_this_host_is(host, here):
    book = AddressBook({1: f"tcp://{host}:{{port}}"}, port=5700)
    assert list(elsewhere(book, range(3))) == ([] if here else [(1, f"tcp://{host}:5701")])


def test_only_the_peers_to_be_started_here_count():
    book = AddressBook({peer: f"tcp://{host}:{{port}}" for peer, host in enumerate(("alpha", "beta"))}, port=5700)
    assert list(elsewhere(book, [0])) == []
    assert [peer for peer, _ in elsewhere(book, [0, 1])] == [1]


@pytest.mark.parametrize(
    ("transport", "expected"),
    [
        ("{port: 5700, hosts: {0-1: beta}}", "run.yaml:6: transport.hosts: peer 0 is looked for at tcp://beta:5700"),
        ("{port: 5700, address: 'tcp://peer-{id}:{port}'}", "run.yaml:6: transport.address: peer 0 is looked for at"),
    ],
)
def test_a_launch_of_peers_that_belong_elsewhere_starts_nothing(tmp_path, invoke, transport, expected):
    file = tmp_path / "run.yaml"
    text = "name: toy\nrounds: 2\npeers: 2\nalgorithm: local\ndata: {dataset: digits}\n"
    file.write_text(f"{text}transport: {transport}\n")
    outcome = invoke("launch", file, "--run-dir", tmp_path / "run")
    assert outcome.exit_code == 2
    assert expected in outcome.stderr
    assert not (tmp_path / "run").exists()
