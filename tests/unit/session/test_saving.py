"""When checkpoints are written, and that one is written at a time."""

from __future__ import annotations

import asyncio
import logging
import threading
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from p2pfl.messaging import wire
from p2pfl.messaging.endpoint import Endpoint
from p2pfl.session import checkpoint, saving
from p2pfl.session.body_files import FileStore
from tests.bodies import Named, complete
from tests.launcher_fixtures import MakeFolder


def test_a_checkpoint_is_due_when_much_was_taken_since_the_last_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """R9 of the delivery protocol: the neighbors keep it on their disks until then."""
    monkeypatch.setattr(saving, "MAX_INTERVAL", 1000.0)
    endpoint = Mock(taken_bytes=saving.MAX_TAKEN)
    saver = saving.Saver(Mock(), endpoint, "auto", 1, logging.getLogger("saver"))
    assert not saver.is_due(1)
    endpoint.taken_bytes += 1
    assert saver.is_due(1)


def test_without_a_checkpoint_nothing_stays_of_the_journal_of_an_earlier_process(make_folder: MakeFolder) -> None:
    """Or each kill before the first checkpoint would leave what was sent since the start on the disk."""
    files = make_folder(peers=2, results={0: None, 1: None}).peer(0)
    FileStore(files.journal).write(wire.encode(Named({"a": torch.ones(9)})))
    store = FileStore(files.journal)
    endpoint = Endpoint(0, complete(2), "run", 0, [], store=store)
    assert saving.load(files, endpoint, "run", logging.getLogger("load")) is None
    assert [path.name for path in files.journal.iterdir()] == [store.token]


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
