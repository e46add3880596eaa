"""The copies that the launcher has of the files of peers on other hosts."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest

from launcher.backends.mirror import Mirror
from p2pfl.run_folder.files import append_line
from p2pfl.run_folder.folder import RunFolder
from p2pfl.session import metrics
from peers.sent_files import SentFiles

LOG = logging.getLogger("test")


class Copied:
    """A peer's folder on its host, and the launcher's copy of it."""

    def __init__(self, root: Path) -> None:
        self.here = RunFolder.create(root / "host", [0]).peer(0)
        launcher = RunFolder.create(root / "launcher", [0])
        self.there = launcher.peer(0)
        self._mirror = Mirror(launcher, [0])
        self.connect()

    def connect(self) -> None:
        self._sent = SentFiles(self.here, self._mirror.sizes())

    def look(self) -> None:
        """Let the host process send what has changed."""
        for event in self._sent.changes():
            self._mirror.write(event)

    def record(self, *rounds: int, width: int) -> None:
        for t in rounds:
            append_line(self.here.metrics, json.dumps({"t": t, "elapsed": 1.0, "filler": width * "x"}))

    def resume(self, t: int) -> None:
        """Resume the peer from round ``t``: it repeats the rounds since, and records more about them."""
        metrics.truncate(self.here.metrics, t, LOG)


@pytest.fixture
def copied(tmp_path: Path) -> Copied:
    return Copied(tmp_path)


@pytest.mark.parametrize("launcher", ["stays", "was away"])
def test_records_that_a_resumed_peer_has_replaced_are_copied_whole(copied: Copied, launcher: str) -> None:
    copied.record(*range(8), width=20)
    copied.look()
    copied.resume(5)
    copied.record(*range(5, 13), width=33)
    if launcher == "was away":
        copied.connect()
    copied.look()
    assert [record["t"] for record in metrics.read(copied.there.metrics)] == list(range(13))
    assert copied.there.metrics.read_bytes() == copied.here.metrics.read_bytes()


def test_only_new_records_of_the_same_file_are_sent(copied: Copied) -> None:
    copied.record(0, 1, width=20)
    copied.look()
    size = copied.here.metrics.stat().st_size
    copied.record(2, width=20)
    (event,) = copied._sent.changes()
    assert event["at"] == size


def test_a_rotated_log_is_rotated_in_the_copy(copied: Copied) -> None:
    copied.here.log.write_text("a" * 50)
    copied.look()
    with copied.here.log.open("a") as log:
        log.write("b" * 10)
    copied.here.log.replace(copied.here.log.with_name("peer.log.1"))
    copied.here.log.write_text("c" * 100)
    copied.look()
    assert copied.there.log.read_text() == "c" * 100
    assert copied.there.log.with_name("peer.log.1").read_text() == "a" * 50 + "b" * 10
