"""Copies of checkpoints in a folder or an object storage, from which a peer continues on another host."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import secrets
import threading
from pathlib import Path
from typing import Any

import fsspec
import fsspec.implementations.local
import pytest

from p2pfl.errors import CheckpointError, RunFileError
from p2pfl.run_file.load import from_dict
from p2pfl.run_folder.folder import PeerFolder, RunFolder
from p2pfl.session import metrics
from p2pfl.session.checkpoint_copies import CheckpointCopies
from p2pfl.session.session import Session, Stopped
from p2pfl.simulation.simulate import simulate
from tests.conftest import tree

RUN_ID = "0123456789abcdef"
LOG = logging.getLogger("p2pfl.null")


@pytest.fixture(params=["path", "memory"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A folder, or an object storage without folders and renaming."""
    return str(tmp_path / "copies") if request.param == "path" else f"memory://bucket/{secrets.token_hex(4)}"


def sealed(state: bytes) -> bytes:
    """Return a checkpoint file with that content."""
    return hashlib.sha256(state).digest() + state


def files_of(root: Path, checkpoint: bytes = b"", **segments: bytes) -> PeerFolder:
    """Return the folder of peer 3 on a host, with a checkpoint and segments of its journal."""
    files = RunFolder.create(root, [3], again=True).peer(3)
    if checkpoint:
        files.checkpoint.write_bytes(sealed(checkpoint))
        files.metrics.write_text("{}\n")
    files.journal.mkdir(exist_ok=True)
    for name, content in segments.items():
        (files.journal / name.removeprefix("s")).write_bytes(content)
    return files


def copies(url: str, files: PeerFolder) -> CheckpointCopies:
    return CheckpointCopies(url, RUN_ID, files, LOG)


def stored(url: str) -> set[str]:
    fs, root = fsspec.core.url_to_fs(url)
    return {path.rpartition("/")[2] for path in fs.ls(f"{root}/{RUN_ID}/03", detail=False)}


def content(files: PeerFolder) -> dict[str, bytes]:
    found = [files.checkpoint, files.metrics, *files.journal.iterdir()]
    return {path.name: path.read_bytes() for path in found if path.exists()}


def test_another_host_restores_the_newest_copy(tmp_path: Path, url: str) -> None:
    here = files_of(tmp_path / "here", b"first", s1=b"abc")
    process = copies(url, here)
    assert process.save(1, {1: 3})
    files_of(tmp_path / "here", b"second", s1=b"abcdef", s2=b"ghi")
    assert process.save(2, {1: 6, 2: 3})
    there = files_of(tmp_path / "there")
    restored = copies(url, there)
    restored.restore()
    assert content(there) == content(here)
    assert restored.rounds_done == 2


def test_a_fork_opens_the_storage_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file system that has started a thread refuses to work in a fork."""
    made: list[str] = []
    original = fsspec.core.url_to_fs

    def url_to_fs(url: str) -> Any:
        made.append(url)
        return original(url)

    monkeypatch.setattr(fsspec.core, "url_to_fs", url_to_fs)
    url = str(tmp_path / "copies")
    found = copies(url, files_of(tmp_path / "run"))
    assert found._open() == found._open()
    assert made == [url]
    monkeypatch.setattr(os, "getpid", lambda: -1)
    assert found._open()[1] == found._open()[1]
    assert made == [url, url]


def test_an_empty_storage_leaves_the_folder_alone(tmp_path: Path, url: str) -> None:
    here = files_of(tmp_path / "here", b"mine")
    process = copies(url, here)
    process.restore()
    assert here.checkpoint.read_bytes() == sealed(b"mine")
    assert process.rounds_done == -1


def test_a_checkpoint_as_new_as_its_last_copy_stays(tmp_path: Path, url: str) -> None:
    here = files_of(tmp_path / "here", b"first")
    copies(url, here).save(1, {})
    here.checkpoint.write_bytes(sealed(b"newer, not copied before the crash"))
    again = copies(url, here)
    again.restore()
    assert here.checkpoint.read_bytes() == sealed(b"newer, not copied before the crash")
    assert again.rounds_done == 1


def test_a_checkpoint_older_than_that_of_another_host_is_replaced(tmp_path: Path, url: str) -> None:
    here = files_of(tmp_path / "here", b"first")
    copies(url, here).save(1, {})
    there = files_of(tmp_path / "there")
    moved = copies(url, there)
    moved.restore()
    there.checkpoint.write_bytes(sealed(b"second"))
    moved.save(2, {})
    copies(url, here).restore()
    assert here.checkpoint.read_bytes() == sealed(b"second")


@pytest.mark.parametrize("damage", ["shorter", "torn", "missing", "list"])
def test_the_copy_before_replaces_an_incomplete_or_damaged_one(tmp_path: Path, damage: str) -> None:
    here = files_of(tmp_path / "here", b"first")
    process = copies(str(tmp_path / "copies"), here)
    process.save(1, {})
    here.checkpoint.write_bytes(sealed(b"second"))
    process.save(2, {})
    folder = tmp_path / "copies" / RUN_ID / "03"
    (checkpoint,) = folder.glob("00000002-*-checkpoint.pt")
    if damage == "shorter":
        checkpoint.write_bytes(sealed(b"second")[:-1])
    elif damage == "torn":
        checkpoint.write_bytes(sealed(b"second")[:-1] + b"?")
    elif damage == "missing":
        checkpoint.unlink()
    else:
        (listed,) = folder.glob("00000002-*.json")
        listed.write_text('{"files": {"chec')
    there = files_of(tmp_path / "there")
    copies(str(tmp_path / "copies"), there).restore()
    assert there.checkpoint.read_bytes() == sealed(b"first")


def test_a_damaged_copy_does_not_replace_an_older_checkpoint(tmp_path: Path) -> None:
    process = copies(str(tmp_path / "copies"), files_of(tmp_path / "here", b"second"))
    process.save(1, {})
    (checkpoint,) = (tmp_path / "copies" / RUN_ID / "03").glob("*-checkpoint.pt")
    checkpoint.write_bytes(sealed(b"second")[:-1] + b"?")
    there = files_of(tmp_path / "there", b"first")
    with pytest.raises(CheckpointError, match="checksum mismatch"):
        copies(str(tmp_path / "copies"), there).restore()
    assert there.checkpoint.read_bytes() == sealed(b"first")


def test_without_a_complete_copy_the_peer_does_not_start_anew(tmp_path: Path) -> None:
    process = copies(str(tmp_path / "copies"), files_of(tmp_path / "here", b"first"))
    process.save(1, {})
    (checkpoint,) = (tmp_path / "copies" / RUN_ID / "03").glob("*-checkpoint.pt")
    checkpoint.unlink()
    with pytest.raises(CheckpointError, match=r"no copy of peer 3 is complete: 00000001-.*No such file"):
        copies(str(tmp_path / "copies"), files_of(tmp_path / "there")).restore()


def test_keeps_two_copies_and_what_they_refer_to(tmp_path: Path, url: str) -> None:
    here = files_of(tmp_path / "here", b"state", s1=b"abc", s2=b"de", s3=b"f")
    process = copies(url, here)
    for rounds_done, segments in ((1, {1: 3, 2: 2}), (2, {2: 2, 3: 1}), (3, {3: 1})):
        assert process.save(rounds_done, segments)
    kinds = sorted(name.replace(process._token, "T") for name in stored(url))
    assert kinds == [
        *("00000002-T-checkpoint.pt", "00000002-T-metrics.jsonl", "00000002-T.json"),
        *("00000003-T-checkpoint.pt", "00000003-T-metrics.jsonl", "00000003-T.json"),
        *("T-journal-2-2", "T-journal-3-1"),
    ]


def test_a_copy_is_complete_although_old_ones_cannot_be_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*arguments: object) -> None:
        raise PermissionError("delete is not allowed")

    process = copies(str(tmp_path / "copies"), files_of(tmp_path / "here", b"first"))
    monkeypatch.setattr(fsspec.implementations.local.LocalFileSystem, "rm_file", refuse)
    assert [process.save(t, {}) for t in range(1, 6)] == [True] * 5
    assert process.rounds_done == 5
    (warning,) = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert warning.getMessage() == "old copies of checkpoints not deleted: delete is not allowed"


def test_a_full_segment_is_copied_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here = files_of(tmp_path / "here", b"state", s1=b"abc")
    process = copies(str(tmp_path / "copies"), here)
    put: list[str] = []
    original = process._put

    def record(source: Path, size: int, to: str) -> None:
        put.append(source.name)
        original(source, size, to)

    monkeypatch.setattr(process, "_put", record)
    process.save(1, {1: 3})
    process.save(2, {1: 3})
    assert put.count("1") == 1
    assert put.count("checkpoint.pt") == 2


def test_a_copy_has_no_body_that_is_still_being_written(tmp_path: Path) -> None:
    """The next entry's bytes are reserved in the file before they are written."""
    here = files_of(tmp_path / "here", b"first", s1=b"abc\0\0\0")
    process = copies(str(tmp_path / "copies"), here)
    assert process.save(1, {1: 3})
    files_of(tmp_path / "here", b"second", s1=b"abcdef")
    assert process.save(2, {1: 6})
    there = files_of(tmp_path / "there")
    copies(str(tmp_path / "copies"), there).restore()
    assert content(there) == content(here)


def test_a_process_that_was_cut_off_does_not_delete_what_its_successor_writes(tmp_path: Path, url: str) -> None:
    cut_off = copies(url, files_of(tmp_path / "here", b"first", s1=b"abc"))
    cut_off.save(1, {1: 3})
    there = files_of(tmp_path / "there")
    successor = copies(url, there)
    successor.restore()
    successor.save(2, {1: 3})
    successor.save(3, {1: 3})
    for rounds_done in (2, 3, 4):
        cut_off.save(rounds_done, {})
    assert {name for name in stored(url) if successor._token in name} >= successor._kept[-1].objects


@pytest.mark.parametrize(
    "path", ["../04/checkpoint.pt", "/etc/passwd", "journal/../../x", "journal/1/2", "status.json", "journal/"]
)
def test_a_list_cannot_name_other_files(tmp_path: Path, path: str) -> None:
    here = files_of(tmp_path / "here", b"first")
    process = copies(str(tmp_path / "copies"), here)
    process.save(1, {})
    (listed,) = (tmp_path / "copies" / RUN_ID / "03").glob("*.json")
    files = json.loads(listed.read_text())["files"]
    listed.write_text(json.dumps({"files": {**files, path: files["metrics.jsonl"]}}))
    there = files_of(tmp_path / "there")
    copies(str(tmp_path / "copies"), there).restore()
    assert not there.checkpoint.exists()  # as if there were no copy


def test_a_failed_copy_is_logged_and_tried_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    blocked = tmp_path / "copies"
    blocked.write_text("a file in place of the folder")
    log = logging.getLogger("copies")
    process = CheckpointCopies(str(blocked), RUN_ID, files_of(tmp_path / "here", b"first"), log)
    assert not process.save(1, {})
    assert "checkpoint not copied t=0" in caplog.text
    blocked.unlink()
    assert process.save(2, {}, last=True), "the last copy does not wait"
    assert process.rounds_done == 2


def test_a_storage_that_fails_slowly_is_left_alone_for_a_while(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    now = 0.0
    attempts = []

    def fail(*given: Any, **named: Any) -> None:
        nonlocal now
        attempts.append(now)
        now += 20.0
        raise ConnectionError("no route to the bucket")

    monkeypatch.setattr("p2pfl.session.checkpoint_copies.monotonic", lambda: now)
    monkeypatch.setattr(CheckpointCopies, "_save", fail)
    process = CheckpointCopies(
        str(tmp_path), RUN_ID, files_of(tmp_path / "here", b"x"), logging.getLogger("p2pfl.copies")
    )
    for rounds_done in range(1, 30):
        assert not process.save(rounds_done, {})
        now += 10.0
    assert attempts == [0.0, 120.0, 240.0]
    assert "no route to the bucket; trying again with the next one in 100 s or later" in caplog.text


def test_an_unreadable_storage_stops_the_peer_before_it_starts_anew(tmp_path: Path) -> None:
    blocked = tmp_path / "copies"
    blocked.write_text("a file in place of the folder")
    with pytest.raises(CheckpointError, match=r"checkpoint_copies .*/copies: cannot be read: .*make it reachable"):
        copies(str(blocked), files_of(tmp_path / "here")).restore()


def test_a_stop_while_a_copy_is_restored_is_no_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    copies(str(tmp_path / "copies"), files_of(tmp_path / "here", b"first")).save(1, {})

    def stopped(*given: Any) -> None:
        raise Stopped

    there = copies(str(tmp_path / "copies"), files_of(tmp_path / "there"))
    monkeypatch.setattr(fsspec.implementations.local.LocalFileSystem, "cat_file", stopped)
    with pytest.raises(Stopped):
        there.restore()


def test_a_storage_that_does_not_answer_does_not_stop_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, until: Any
) -> None:
    answers = threading.Event()

    def hang(self: Any, path: str, *given: Any, **named: Any) -> None:
        answers.wait(10)

    here = files_of(tmp_path / "here", b"first")
    process = CheckpointCopies(str(tmp_path / "copies"), RUN_ID, here, logging.getLogger("copies"))
    monkeypatch.setattr("p2pfl.session.checkpoint_copies.STUCK", 0.1)
    with monkeypatch.context() as hanging:
        hanging.setattr(fsspec.implementations.local.LocalFileSystem, "makedirs", hang)
        assert not process.save(1, {})
        assert "checkpoint not copied t=0" in caplog.text
        assert "no progress within" in caplog.text
        assert not process.save(2, {}, last=True), "one attempt at a time"
    monkeypatch.setattr("p2pfl.session.checkpoint_copies.STUCK", 10.0)
    answers.set()
    until(lambda: process.save(3, {}, last=True), "the next attempt, once the first is back")
    assert [name for name in stored(str(tmp_path / "copies")) if name.endswith(".json")] == [process._kept[-1].name]
    assert process.rounds_done == 3


class Interrupted(Exception):
    pass


@pytest.mark.exhaustive
@pytest.mark.parametrize("every", [2, "auto"])
def test_a_run_whose_host_is_lost_continues_bit_identically(
    tmp_path: Path, make_run: Any, prepare: Any, url: str, every: int | str
) -> None:
    run = make_run(rounds=6, checkpoint_every=every, checkpoint_copies=url)
    expected = [result.digest for result in simulate(make_run(rounds=6))]

    def interrupt(peer: int, t: int) -> None:
        if (peer, t) == (2, 3):
            raise Interrupted

    with pytest.raises(Interrupted):
        simulate(run, prepare(tmp_path / "lost", run), on_round=interrupt)
    folder = prepare(tmp_path / "other", run)  # on another host, where no file of the first is
    assert [result.digest for result in simulate(run, folder)] == expected
    restored = [files.peer for files in folder.peers() if "checkpoint restored" in files.log.read_text()]
    assert len(restored) >= 3  # all but the one that failed had saved their state
    for files in folder.peers():
        assert [record["t"] for record in metrics.read(files.metrics)] == list(range(6))


@pytest.mark.exhaustive
def test_neighbors_keep_what_a_peer_needs_whose_copies_fail(
    tmp_path: Path, make_run: Any, prepare: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a failed copy, the peer acknowledges nothing that it would need to go on from the last one."""
    run = make_run(rounds=4, checkpoint_every=1, checkpoint_copies=str(tmp_path / "copies"))
    original = CheckpointCopies.save

    def save(self: CheckpointCopies, rounds_done: int, segments: Any, *, last: bool = False) -> bool:
        failed = self._folder.peer == 1 and rounds_done in (2, 3)
        return False if failed else original(self, rounds_done, segments, last=last)

    durable: dict[int, int] = {}

    finish = Session._take_snapshot

    def snapshot(self: Session) -> None:
        finish(self)
        if self.me == 1:
            durable[self.rounds_done] = self.endpoint.durable

    monkeypatch.setattr(CheckpointCopies, "save", save)
    monkeypatch.setattr(Session, "_take_snapshot", snapshot)
    simulate(run, prepare(tmp_path / "run", run))
    assert max(durable.values()) == 0  # of four checkpoints only the first was copied before the end


def test_a_relative_path_starts_from_the_run_file(tmp_path: Path) -> None:
    run = from_dict(tree(checkpoint_copies="kept"))
    assert run.file.checkpoint_copies == str(Path.cwd() / "kept")
    assert from_dict(run.resolved()).file.checkpoint_copies == run.file.checkpoint_copies


def test_the_place_of_copies_does_not_change_what_peers_compare(make_run: Any) -> None:
    assert make_run(checkpoint_copies="kept").config_hash() == make_run().config_hash()


def test_unknown_file_systems_are_an_error_in_the_run_file(make_run: Any) -> None:
    with pytest.raises(RunFileError, match=r"checkpoint_copies: .*'nosuch://x': Protocol not known: nosuch"):
        make_run(checkpoint_copies="nosuch://x")
