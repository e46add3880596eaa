"""The launcher's side of the Ray driver process; needs no Ray."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress

import pytest

from launcher.backends.hosts import Host, HostStream
from launcher.backends.ray.backend import Driver, Ray
from launcher.backends.ray.plan import RayOptions
from launcher.errors import LaunchError

DRIVER = """
import json, os, socket, sys
connection = socket.socket(fileno=int(sys.argv[1]))
answers = json.loads(sys.argv[2])
while data := connection.recv(65536):
    do = json.loads(data)["do"]
    if do == "die":
        sys.exit("out of memory")
    if do in answers:
        connection.sendall((json.dumps({"ok": answers[do]}) + "\\n").encode())
"""
"""In place of driver.py: answers some requests, and none of the others."""

MakeDriver = Callable[..., Driver]


@pytest.fixture
def make_driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[MakeDriver]:
    made: list[Driver] = []

    def make(**answers: object) -> Driver:
        driver = Driver()
        made.append(driver)

        def start() -> socket.socket:
            driver._socket, theirs = socket.socketpair()
            with theirs:
                command = [sys.executable, "-c", DRIVER, str(theirs.fileno()), json.dumps(answers)]
                driver._process = subprocess.Popen(
                    command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, stderr=driver._errors
                )
            return driver._socket

        monkeypatch.setattr(driver, "_start", start)
        return driver

    yield make
    for driver in made:
        driver.close(0.0)


def launched(driver: Driver) -> Ray:
    """Return the backend of a run with one host."""
    ray = Ray(RayOptions(), namespace="p2pfl-0", bundles=[{"CPU": 1.0}], nodes=["10.0.0.7"])
    ray._driver = driver
    return ray


def start(ray: Ray) -> HostStream:
    return ray.start(Host("ray-0"), Host("ray-0").command)


@pytest.mark.exhaustive
def test_a_driver_that_does_not_answer_is_ended(make_driver: MakeDriver) -> None:
    driver = make_driver(nodes=[])
    assert driver.call("nodes") == []
    with pytest.raises(LaunchError, match=r"did not answer 'reserve' within 0 s, and was ended"):
        driver.call("reserve", limit=0.2)
    assert not driver.running
    assert driver.call("nodes") == [], "the next call starts another"


def test_the_end_of_the_driver_is_an_error_with_its_last_words(make_driver: MakeDriver) -> None:
    driver = make_driver()
    with pytest.raises(LaunchError, match="the Ray driver process has ended: out of memory"):
        driver.call("die")
    assert not driver.running


@pytest.mark.exhaustive
def test_a_problem_with_a_node_names_it_and_does_not_end_the_launcher(
    make_driver: MakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    ray = launched(make_driver(connect=[], reserve=["10.0.0.7"], start=None))
    stream = start(ray)
    monkeypatch.setattr("launcher.backends.ray.backend.ANSWER", 0.2)
    assert "node 10.0.0.7: the Ray driver process did not answer 'outcome' within" in stream.outcome()
    assert "the Ray driver process has ended" in str(stream.kill()), "asks nobody"
    stream.close()


def test_a_host_is_started_again_through_a_new_driver(make_driver: MakeDriver) -> None:
    ray = launched(make_driver(connect=[], reserve=["10.0.0.9"], start=None))
    start(ray).close()
    with suppress(LaunchError):
        ray._driver.call("die")
    start(ray).close()
    assert ray._driver.running
    assert ray.nodes == ["10.0.0.9"]
