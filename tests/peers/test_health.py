"""A peer that is asked how it does."""

from __future__ import annotations

import logging
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import zmq

from p2pfl.runfolder import PeerFolder, Status
from p2pfl.topology import Topology
from p2pfl.wire import Layout
from peers.health import NAME, Health, examine
from tests.bodies import Word

ENDLESS = 1_000_000
LOG = logging.getLogger("health")
ROOM = 100.0
"""Seconds that an answer may take; it matters only when something hangs."""


def told(**changes: Any) -> dict[str, Any]:
    return {**vars(Status(3, 1, "training", t=7)), "links_up": 2, "links": 3, **changes}


@contextmanager
def answering(folder: Path, answer: Any) -> Iterator[Health]:
    """A thread that does what the I/O thread does."""
    health = Health(folder, answer, LOG)
    poller, ending = zmq.Poller(), threading.Event()
    health.open(poller)

    def turn() -> None:
        while not ending.is_set():
            health.look(dict(poller.poll(20)), poller)
        health.close(poller)

    thread = threading.Thread(target=turn)
    thread.start()
    try:
        yield health
    finally:
        ending.set()
        thread.join()


@contextmanager
def no_more_files() -> Iterator[None]:
    """This process can open none."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest = os.dup(0)
    os.close(lowest)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


@pytest.fixture
def place(tmp_path: Path) -> PeerFolder:
    return PeerFolder(tmp_path, 3)


@pytest.mark.parametrize(
    ("status", "words"),
    [
        ({}, "peer 3 is training in round 7 | 2 of 3 neighbours connected"),
        ({"phase": "starting"}, "peer 3 is starting | 2 of 3 neighbours connected"),
        ({"phase": "finished", "links_up": 0}, "peer 3 is finished | 0 of 3 neighbours connected"),
    ],
)
def test_what_a_peer_says_of_itself(place: PeerFolder, status: dict[str, Any], words: str) -> None:
    with answering(place.root, lambda: told(**status)):
        assert examine(place, ROOM) == (True, words)
        assert examine(place, ROOM) == (True, words)
    assert list(place.root.iterdir()) == []


def test_who_asks_and_goes_away_keeps_nobody_from_an_answer(place: PeerFolder) -> None:
    with answering(place.root, told):
        for _ in range(100):
            with socket.socket(socket.AF_UNIX) as rude:
                rude.connect(str(place.root / NAME))
        assert examine(place, ROOM)[0]


def test_a_path_that_is_too_long_for_a_socket(tmp_path: Path) -> None:
    folder = tmp_path / ("d" * 200)
    folder.mkdir()
    with answering(folder, told):
        assert examine(PeerFolder(folder, 3), ROOM)[0]


def test_a_folder_that_takes_no_socket_is_warned_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with answering(tmp_path / "gone", told):
        pass
    assert f"cannot be asked how it does: {tmp_path}/gone/health: No such file or directory" in caplog.text


def test_no_more_open_files_end_it_with_a_warning(place: PeerFolder, caplog: pytest.LogCaptureFixture) -> None:
    """And do not make the thread turn for ever."""
    poller = zmq.Poller()
    health = Health(place.root, told, LOG)
    health.open(poller)
    with socket.socket(socket.AF_UNIX) as asking:
        asking.connect(str(place.root / NAME))
        stirred = dict(poller.poll(100_000))
        with no_more_files():
            health.look(stirred, poller)
    assert "can no longer be asked how it does: Too many open files" in caplog.text
    assert dict(poller.poll(0)) == {}
    assert not (place.root / NAME).exists()


def test_nobody_there(place: PeerFolder) -> None:
    assert examine(place, ROOM) == (False, "peer 3 does not answer: it has not started yet")
    place.write_status(Status(3, 1, "failed", error="no disk"))
    assert examine(place, ROOM) == (False, "peer 3 does not answer: last seen failed: no disk")


@pytest.mark.parametrize("answer", [[], {}, {"peer": 3}, "well", 7])
def test_an_answer_of_another_sort(place: PeerFolder, answer: Any) -> None:
    with answering(place.root, lambda: answer):
        assert examine(place, ROOM) == (False, "peer 3 answers something else; is it of another version?")


# ---- a whole peer


def ask(folder: Any, peer: int) -> tuple[int, str]:
    """As a container's health check does it."""
    command = [sys.executable, "-m", "peers", "--health", "--run", str(folder.root), "--me", str(peer)]
    asked = subprocess.run(command, capture_output=True, text=True, check=False)
    assert asked.stderr == ""
    return asked.returncode, asked.stdout


def test_a_peer_is_asked_from_its_start_to_its_end(
    make_run: Any, prepare: Any, warm: Any, until: Any, tmp_path: Path
) -> None:
    run = make_run(peers=2, rounds=ENDLESS, transport={"give_up": 60})
    folder = prepare(tmp_path / "run", run)
    assert ask(folder, 0) == (1, "peer 0 does not answer: it has not started yet\n")
    pids = warm.start(folder)
    until(lambda: "| 1 of 1 neighbours connected" in examine(folder.peer(0))[1])
    # On a host that is busy enough even this peer may not answer within PATIENCE.
    _, words = until(lambda: (asked := ask(folder, 0))[0] == 0 and asked)
    assert words.startswith("peer 0 is ")

    os.kill(pids[0], signal.SIGSTOP)  # then the kernel takes the question, and nobody answers it
    until(lambda: not examine(folder.peer(0), patience=0.2)[0])
    words = examine(folder.peer(0), patience=0.2)[1]
    assert words.startswith("peer 0 has not answered within 0.2 s: last seen ")
    os.kill(pids[0], signal.SIGCONT)

    os.kill(pids[0], signal.SIGKILL)
    assert warm.wait({0: pids[0]}) == {0: -signal.SIGKILL}
    assert (folder.peer(0).root / NAME).is_socket()
    code, words = ask(folder, 0)
    assert code == 1
    assert words.startswith("peer 0 does not answer: last seen ")

    pids |= warm.start(folder, [0])
    until(lambda: "| 1 of 1 neighbours connected" in examine(folder.peer(0))[1])
    for pid in pids.values():
        os.kill(pid, signal.SIGTERM)
    assert warm.wait(pids) == {0: 0, 1: 0}
    assert ask(folder, 0) == (1, "peer 0 does not answer: last seen stopped\n")


async def test_it_answers_while_the_event_loop_does_not_turn(sockets: Any, eventually: Any, tmp_path: Path) -> None:
    place = PeerFolder(tmp_path, 0)
    health = Health(place.root, lambda: {**vars(Status(0, 1)), "links_up": link.connected(), "links": 1}, LOG)
    endpoint = sockets.endpoint(0, Topology.from_edges(2, [(0, 1)]), [Layout.of(Word(""))])
    link = sockets.link(endpoint, health=health)
    await link.start()
    await eventually((tmp_path / NAME).exists)
    assert examine(place, ROOM) == (True, "peer 0 is starting | 0 of 1 neighbours connected")  # blocks the event loop
    await sockets.shut(link)
    assert not (tmp_path / NAME).exists()


def test_asking_does_not_load_torch(tmp_path: Path) -> None:
    """It is done every few seconds, for every peer."""
    code = "import sys, peers.__main__, peers.health; assert not {'torch', 'pydantic'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
