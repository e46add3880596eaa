"""The status file: current, consistent, and cheap."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from p2pfl.errors import WriteError
from p2pfl.run_folder.folder import PeerFolder, Phase, RunFolder, Status
from p2pfl.session import reporting
from p2pfl.session.evaluation import Evaluations
from p2pfl.session.metrics import Totals
from p2pfl.session.reporting import StatusFile


@pytest.fixture
def files(tmp_path: Path) -> PeerFolder:
    return RunFolder.create(tmp_path / "run", range(1)).peer(0)


class Clock:
    """A clock that stands still until it is set."""

    now = 100.0


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(reporting, "perf_counter", lambda: clock.now)
    return clock


def enter(file: StatusFile, phase: Phase, t: int, totals: Totals | None = None) -> None:
    file.enter(phase, t, t, Evaluations(), totals or Totals())


def shown(files: PeerFolder) -> tuple[Phase, int] | None:
    status = files.status()
    return None if status is None else (status.phase, status.t)


@pytest.mark.parametrize(("peers", "every"), [(1, 0.25), (12, 0.25), (100, 2.0), (1000, 5.0)])
def test_the_more_peers_the_less_often_the_status_is_written(
    files: PeerFolder, clock: Clock, peers: int, every: float
) -> None:
    file = StatusFile(Status(0, 1), files, peers)
    enter(file, "training", 1)
    assert shown(files) == ("training", 1)
    clock.now += every - 0.001
    enter(file, "training", 2)
    assert shown(files) == ("training", 1)
    clock.now += 0.002
    file.write()
    assert shown(files) == ("training", 2)


@pytest.mark.parametrize("phase", ["finished", "stopped", "failed"])
def test_a_final_status_is_written_at_once(files: PeerFolder, clock: Clock, phase: Phase) -> None:
    file = StatusFile(Status(0, 1), files, 100)
    enter(file, "training", 1)
    enter(file, phase, 2)
    assert shown(files) == (phase, 2)


def test_updates_neither_create_nor_replace_files(files: PeerFolder, clock: Clock) -> None:
    file = StatusFile(Status(0, 1), files)
    path = files.root / "status.json"
    enter(file, "training", 1000)
    inode, changed = path.stat().st_ino, files.root.stat().st_mtime_ns
    for t in (2000, 3):  # the latter is shorter
        clock.now += 1
        enter(file, "training", t)
        assert shown(files) == ("training", t)
    assert (path.stat().st_ino, files.root.stat().st_mtime_ns) == (inode, changed)
    path.unlink()
    clock.now += 1
    enter(file, "training", 4)
    assert shown(files) == ("training", 4)


def test_the_status_has_the_bytes_of_the_completed_rounds(files: PeerFolder, clock: Clock) -> None:
    file, totals = StatusFile(Status(0, 1), files), Totals(sent={1: {"Head": [1, 100, 10]}})
    enter(file, "training", 0, totals)
    totals.sent[1]["Head"], totals.last_ages = [2, 200, 20], [0.5, 0, 3]
    clock.now += 1
    enter(file, "training", 1, totals)
    status = files.status()
    assert status is not None
    assert (status.bytes_out, status.bytes_in, status.messages_out) == (220, 0, 2)
    assert status.ages == [0.5, 0, 3]


def test_the_status_has_the_time_when_its_phase_began(
    files: PeerFolder, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = StatusFile(Status(0, 1), files)
    monkeypatch.setattr(reporting, "monotonic", lambda: 1234.567)
    enter(file, "training", 1)
    monkeypatch.setattr(reporting, "monotonic", lambda: 1240.0)
    clock.now += 1
    file.write()
    status = files.status()
    assert status is not None
    assert status.since == 1234.57


def test_queues_are_counted_only_when_the_status_is_written_anyway(files: PeerFolder, clock: Clock) -> None:
    asked = 0

    def queues() -> tuple[int, int]:
        nonlocal asked
        asked += 1
        return asked, 10 * asked

    file = StatusFile(Status(0, 1), files, queues=queues)
    enter(file, "waiting", 1)
    for _ in range(5):
        clock.now += 1
        file.write()
    assert asked == 1
    status = files.status()
    assert status is not None
    assert (status.unread, status.undelivered) == (1, 10)


def test_a_reader_waits_until_an_update_is_complete(files: PeerFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    mixture, new = b'{"peer": 0, "pid": 1, "t": 1 2}\n', b'{"peer": 0, "pid": 1, "t": 12}\n'
    contents = iter([mixture, new, new])
    monkeypatch.setattr(Path, "read_bytes", lambda path: next(contents))
    assert files.status() == Status(0, 1, t=12)


def test_a_failed_update_is_repeated(files: PeerFolder, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    def write_status(self: PeerFolder, status: Status, *, in_place: bool = False) -> None:
        raise WriteError(self.root / "status.json", OSError(28, os.strerror(28)))

    file = StatusFile(Status(0, 1), files)
    with monkeypatch.context() as patch:
        patch.setattr(PeerFolder, "write_status", write_status)
        enter(file, "training", 1)
    assert shown(files) is None
    clock.now += 1
    file.write()
    assert shown(files) == ("training", 1)


async def turns(count: int = 50) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every update is due at once."""
    monkeypatch.setattr(reporting, "STATUS_EVERY", 0.0)
    monkeypatch.setattr(reporting, "LONGEST", 0.0)


async def test_keeps_what_a_waiting_peer_waits_for_current(files: PeerFolder, at_once: None) -> None:
    file, missing = StatusFile(Status(0, 1), files), [1, 2]
    updates = asyncio.create_task(file.keep_current())
    file.enter("waiting", 1, 1, Evaluations(), Totals(), lambda: list(missing))
    missing.remove(1)
    await turns()
    status = files.status()
    assert status is not None
    assert status.waiting_for == [2]
    updates.cancel()


async def test_a_peer_that_does_not_wait_for_neighbors_does_not_wake_up(files: PeerFolder, at_once: None) -> None:
    asked = 0

    def waits_for() -> list[int]:
        nonlocal asked
        asked += 1
        return []

    file = StatusFile(Status(0, 1), files)
    updates = asyncio.create_task(file.keep_current())
    file.enter("queued", 1, 1, Evaluations(), Totals(), waits_for)
    await turns()
    before = asked
    await turns()
    assert asked == before
    file.enter("waiting", 1, 1, Evaluations(), Totals(), waits_for)
    await turns()
    assert asked > before + 10
    updates.cancel()


@pytest.mark.exhaustive
async def test_writes_an_update_that_was_not_due_when_it_happened(files: PeerFolder) -> None:
    file = StatusFile(Status(0, 1), files)
    updates = asyncio.create_task(file.keep_current())
    enter(file, "training", 1)
    enter(file, "queued", 2)
    async with asyncio.timeout(100):
        while shown(files) != ("queued", 2):
            await asyncio.sleep(0.01)
    updates.cancel()
