"""When checkpoints are written, and that one is written at a time."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from p2pfl.errors import CheckpointError
from p2pfl.messaging import wire
from p2pfl.messaging.conversation import Conversation
from p2pfl.messaging.endpoint import Endpoint
from p2pfl.messaging.journal import Journal
from p2pfl.messaging.neighborhood import Neighborhood
from p2pfl.run_folder.folder import PeerFolder, RunFolder
from p2pfl.session import checkpoint, saving
from p2pfl.session.body_files import FileStore
from p2pfl.session.checkpoint_copies import CheckpointCopies
from tests.bodies import Named, complete
from tests.checkpoints import RUN, state
from tests.launcher_fixtures import MakeFolder


def test_a_checkpoint_is_due_when_much_was_taken_since_the_last_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """R9 of the delivery protocol: the neighbors keep it on their disks until then."""
    monkeypatch.setattr(saving, "MAX_INTERVAL", 1000.0)
    endpoint = Mock(taken_bytes=saving.MAX_TAKEN)
    saver = saving.Saver(Mock(), endpoint, "auto", 1, logging.getLogger("saver"))
    assert not saver.is_due(1)
    endpoint.taken_bytes += 1
    assert saver.is_due(1)


def test_states_are_kept_after_each_round_unless_checkpoints_are_automatic(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 100.0
    monkeypatch.setattr(saving, "perf_counter", lambda: now)
    each, auto = (
        saving.Saver(Mock(root=tmp_path), Mock(taken_bytes=0), every, 1, logging.getLogger("saver"))
        for every in (1000, "auto")
    )
    with closing(each), closing(auto):
        for saver in (each, auto):
            assert saver.is_stale(), "nothing was kept yet"
            saver.keep({"rounds_done": 1})
        now += saving.MAX_AGE - 0.1
        assert (each.is_stale(), auto.is_stale()) == (True, False)
        now += 0.1
        assert auto.is_stale()


def test_without_a_checkpoint_nothing_stays_of_the_journal_of_an_earlier_process(make_folder: MakeFolder) -> None:
    """Or each kill before the first checkpoint would leave what was sent since the start on the disk."""
    files = make_folder(peers=2, results={0: None, 1: None}).peer(0)
    FileStore(files.journal).write(wire.encode(Named({"a": torch.ones(9)})))
    store = FileStore(files.journal)
    endpoint = Endpoint(Neighborhood(0, complete(2)), "run", Conversation(), store=store)
    assert saving.load(files, endpoint, "run", logging.getLogger("load")) is None
    assert [path.name for path in files.journal.iterdir()] == [store.token]


@dataclass(frozen=True)
class Host:
    """What peer 3 has on one of several hosts that share a folder of copies."""

    files: PeerFolder
    copies: CheckpointCopies

    def load(self) -> Any:
        store = FileStore(self.files.journal)
        endpoint = Endpoint(Neighborhood(3, complete(4)), RUN, Conversation(), store=store)
        return saving.load(self.files, endpoint, RUN, logging.getLogger("load"), self.copies)

    def save(self, rounds_done: int) -> None:
        """Write and copy a checkpoint; a message is in the journal."""
        journal = Journal([0], FileStore(self.files.journal))
        journal.append(wire.encode(Named({"a": torch.ones(9)})), [0])
        index = journal.state_dict(before=rounds_done)
        endpoint = Endpoint(Neighborhood(3, complete(4)), RUN, Conversation()).state_dict()
        checkpoint.save(self.files.checkpoint, state(rounds_done=rounds_done, journal=index, endpoint=endpoint))
        assert self.copies.save(rounds_done, saving._segments(index))


@pytest.fixture
def host(tmp_path: Path) -> Callable[[str], Host]:
    def make(name: str) -> Host:
        files = RunFolder.create(tmp_path / name, [3], again=True).peer(3)
        return Host(files, CheckpointCopies(str(tmp_path / "copies"), RUN, files, logging.getLogger("copies")))

    return make


def spoil(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1] + b"!")


def the_segment(files: PeerFolder) -> Path:
    (segment,) = (path for path in files.journal.iterdir() if path.name.isdecimal())
    return segment


@pytest.mark.parametrize("damaged", [lambda files: files.checkpoint, the_segment], ids=["state", "journal"])
def test_a_checkpoint_damaged_since_it_was_restored_is_restored_again(
    host: Callable[[str], Host], caplog: pytest.LogCaptureFixture, damaged: Callable[[PeerFolder], Path]
) -> None:
    host("here").save(20)
    there = host("there")
    assert there.load()["rounds_done"] == 20
    spoil(damaged(there.files))
    again = host("there")
    assert again.load()["rounds_done"] == 20
    assert "resuming from the newest copy" in caplog.text
    assert checkpoint.damaged(again.files.checkpoint).exists()
    again.save(21)
    assert host("elsewhere").load()["rounds_done"] == 21, "copies go on"


def test_a_damaged_copy_is_an_error_that_names_it(
    host: Callable[[str], Host], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    host("here").save(20)
    (segment,) = tmp_path.glob("copies/*/03/*-journal-*")
    spoil(segment)
    with pytest.raises(CheckpointError, match=r"the copy 00000020-.*\.json of peer 3 is damaged; delete this list"):
        host("there").load()
    assert "resuming from" not in caplog.text
    assert caplog.text.count("checkpoint restored") == 1, "not fetched twice"


def test_two_damaged_checkpoints_can_be_replaced_by_the_newest_copy(host: Callable[[str], Host]) -> None:
    here = host("here")
    here.save(20)
    here.save(21)
    both = (here.files.checkpoint, checkpoint.previous(here.files.checkpoint))
    for path in both:
        spoil(path)
    with pytest.raises(CheckpointError, match=r"or remove both to start from the newest copy$"):
        here.load()
    for path in both:
        path.unlink()
    assert host("here").load()["rounds_done"] == 21


async def test_a_stop_during_a_wait_for_a_checkpoint_does_not_write_two_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or the older state would replace the newer one, under the hands of what copies it."""
    begun, go_on = threading.Event(), threading.Event()
    calls: list[tuple[str, int]] = []

    def save(path: Path, state: Any) -> None:
        calls.append(("begin", state["rounds_done"]))
        begun.set()
        assert go_on.wait(60)
        calls.append(("end", state["rounds_done"]))

    monkeypatch.setattr(checkpoint, "save", save)
    monkeypatch.setattr(saving, "sync", lambda path: None)
    endpoint = Mock(taken_bytes=0)
    saver = saving.Saver(Mock(root=tmp_path), endpoint, 1, 1, logging.getLogger("saver"))
    try:
        saver.keep({"rounds_done": 1})
        await saver.begin()
        assert await asyncio.to_thread(begun.wait, 60)
        saver.keep({"rounds_done": 2})
        waiting = asyncio.create_task(saver.begin())
        await asyncio.sleep(0)  # it waits for the first
        waiting.cancel()
        await asyncio.wait((waiting,))
        assert waiting.cancelled()
        finishing = asyncio.create_task(saver.finish(final=False))
        await asyncio.sleep(0)
        go_on.set()
        await finishing
    finally:
        go_on.set()
        saver.close()
    assert calls == [("begin", 1), ("end", 1), ("begin", 2), ("end", 2)]
    assert (saver.saved, endpoint.durable) == (2, 1)
