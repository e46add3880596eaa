"""Health checks."""

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

from p2pfl.messaging.schema import Layout
from p2pfl.messaging.topology import Topology
from p2pfl.run_folder.folder import PeerFolder, Status
from peers.health import NAME, Health, check_health
from tests.bodies import Word

ENDLESS = 1_000_000
LOG = logging.getLogger("health")
GENEROUS_DEADLINE = 100.0
"""Seconds that an answer may take; nothing takes that long unless it hangs."""


def told(**changes: Any) -> dict[str, Any]:
    return {**vars(Status(3, 1, "training", t=7)), "links_up": 2, "links": 3, **changes}


@contextmanager
def answering(folder: Path, answer: Any) -> Iterator[Health]:
    """Run a thread that answers as the I/O thread does."""
    health = Health(folder, answer, LOG)
    poller, ending = zmq.Poller(), threading.Event()
    health.open(poller)

    def turn() -> None:
        while not ending.is_set():
            health.answer(dict(poller.poll(20)), poller)
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
    """Let this process open no more files."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest = os.dup(0)
    os.close(lowest)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


@pytest.fixture
def files(tmp_path: Path) -> PeerFolder:
    return PeerFolder(tmp_path, 3)


@pytest.mark.parametrize(
    ("status", "words"),
    [
        ({}, "peer 3 is training in round 7 | 2 of 3 neighbors connected"),
        ({"phase": "starting"}, "peer 3 is starting | 2 of 3 neighbors connected"),
        ({"phase": "finished", "links_up": 0}, "peer 3 is finished | 0 of 3 neighbors connected"),
    ],
)
def test_answers_with_the_status(files: PeerFolder, status: dict[str, Any], words: str) -> None:
    with answering(files.root, lambda: told(**status)):
        assert check_health(files, GENEROUS_DEADLINE) == (True, words)
        assert check_health(files, GENEROUS_DEADLINE) == (True, words)
    assert list(files.root.iterdir()) == []


def test_survives_clients_that_hang_up(files: PeerFolder) -> None:
    with answering(files.root, told):
        for _ in range(100):
            with socket.socket(socket.AF_UNIX) as rude:
                rude.connect(str(files.root / NAME))
        assert check_health(files, GENEROUS_DEADLINE)[0]


def test_answers_in_a_folder_with_a_long_path(tmp_path: Path) -> None:
    folder = tmp_path / ("d" * 200)
    folder.mkdir()
    with answering(folder, told):
        assert check_health(PeerFolder(folder, 3), GENEROUS_DEADLINE)[0]


def test_warns_about_a_folder_without_room_for_a_socket(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with answering(tmp_path / "gone", told):
        pass
    assert f"health checks disabled: {tmp_path}/gone/health: No such file or directory" in caplog.text


def test_disables_checks_when_files_run_out(files: PeerFolder, caplog: pytest.LogCaptureFixture) -> None:
    """Otherwise the thread would spin."""
    poller = zmq.Poller()
    health = Health(files.root, told, LOG)
    health.open(poller)
    with socket.socket(socket.AF_UNIX) as asking:
        asking.connect(str(files.root / NAME))
        stirred = dict(poller.poll(100_000))
        with no_more_files():
            health.answer(stirred, poller)
    assert "health checks disabled: Too many open files" in caplog.text
    assert dict(poller.poll(0)) == {}
    assert not (files.root / NAME).exists()


def test_reports_that_no_process_answers(files: PeerFolder) -> None:
    assert check_health(files, GENEROUS_DEADLINE) == (False, "peer 3 does not answer: it has not started yet")
    files.write_status(Status(3, 1, "failed", error="no disk"))
    assert check_health(files, GENEROUS_DEADLINE) == (False, "peer 3 does not answer: last seen failed: no disk")


@pytest.mark.parametrize("answer", [[], {}, {"peer": 3}, "well", 7])
def test_reports_an_invalid_answer(files: PeerFolder, answer: Any) -> None:
    with answering(files.root, lambda: answer):
        assert check_health(files, GENEROUS_DEADLINE) == (
            False,
            "peer 3 sent an invalid answer; it may run another version",
        )


# ---- a whole peer


def ask(folder: Any, peer: int, file: str = "") -> tuple[int, str]:
    """Run the command of a container's health check, for a run folder or its ``run.yaml``."""
    command = [sys.executable, "-m", "peers", "--health", "--run", str(folder.root / file), "--me", str(peer)]
    asked = subprocess.run(command, capture_output=True, text=True, check=False)
    assert asked.stderr == ""
    return asked.returncode, asked.stdout


def test_health_check_of_a_peer_from_start_to_end(
    make_run: Any, prepare: Any, warm: Any, until: Any, tmp_path: Path
) -> None:
    run = make_run(peers=2, rounds=ENDLESS, transport={"give_up": 60})
    folder = prepare(tmp_path / "run", run)
    assert ask(folder, 0) == (1, "peer 0 does not answer: it has not started yet\n")
    pids = warm.start(folder)
    until(lambda: "| 1 of 1 neighbors connected" in check_health(folder.peer(0))[1])
    # On a busy host even this peer may not answer in time.
    _, words = until(lambda: (asked := ask(folder, 0))[0] == 0 and asked)
    assert words.startswith("peer 0 is ")
    _, words = until(lambda: (asked := ask(folder, 0, "run.yaml"))[0] == 0 and asked)
    assert words.startswith("peer 0 is ")

    os.kill(pids[0], signal.SIGSTOP)  # the kernel accepts the connection, but the process does not answer
    until(lambda: not check_health(folder.peer(0), timeout=0.2)[0])
    words = check_health(folder.peer(0), timeout=0.2)[1]
    assert words.startswith("peer 0 did not answer within 0.2 s: last seen ")
    os.kill(pids[0], signal.SIGCONT)

    os.kill(pids[0], signal.SIGKILL)
    assert warm.wait({0: pids[0]}) == {0: -signal.SIGKILL}
    assert (folder.peer(0).root / NAME).is_socket()
    code, words = ask(folder, 0)
    assert code == 1
    assert words.startswith("peer 0 does not answer: last seen ")

    pids |= warm.start(folder, [0])
    until(lambda: "| 1 of 1 neighbors connected" in check_health(folder.peer(0))[1])
    for pid in pids.values():
        os.kill(pid, signal.SIGTERM)
    assert warm.wait(pids) == {0: 0, 1: 0}
    assert ask(folder, 0) == (1, "peer 0 does not answer: last seen stopped\n")


async def test_answers_while_the_event_loop_is_blocked(sockets: Any, eventually: Any, tmp_path: Path) -> None:
    files = PeerFolder(tmp_path, 0)
    health = Health(files.root, lambda: {**vars(Status(0, 1)), "links_up": link.connected(), "links": 1}, LOG)
    endpoint = sockets.endpoint(0, Topology.from_edges(2, [(0, 1)]), [Layout.of(Word(""))])
    link = sockets.link(endpoint, health=health)
    await link.start()
    await eventually((tmp_path / NAME).exists)
    assert check_health(files, GENEROUS_DEADLINE) == (
        True,
        "peer 0 is starting | 0 of 1 neighbors connected",
    )  # blocks the event loop
    await sockets.shut(link)
    assert not (tmp_path / NAME).exists()


def test_health_check_does_not_import_torch(tmp_path: Path) -> None:
    """It runs every few seconds, for every peer."""
    code = "import sys, peers.__main__, peers.health; assert not {'torch', 'pydantic', 'zmq'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
