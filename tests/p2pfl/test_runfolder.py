"""Files of a run: what becomes of them when the disk is full, the power fails, or somebody removes them."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from p2pfl import metrics
from p2pfl.errors import RunFolderError, Unwritable
from p2pfl.peerlog import close_logger, peer_logger
from p2pfl.runfolder import Result, RunFolder, Status, append_line, read_lines, write_atomically


@contextlib.contextmanager
def no_file_beyond(size: int) -> Iterator[None]:
    """The kernel lets no file of this process grow beyond so many bytes, as if the disk were full."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    folder = RunFolder.create(tmp_path / "run", range(2))
    folder.run_file.write_text("name: toy\n")
    return folder


# ---- what cannot be written


def test_a_file_that_finds_no_room_is_left_as_it_was(folder: RunFolder) -> None:
    path = folder.peer(0).root / "status.json"
    write_atomically(path, b"before")
    with no_file_beyond(100), pytest.raises(Unwritable) as caught:
        write_atomically(path, bytes(101))
    assert path.read_bytes() == b"before"
    assert list(path.parent.iterdir()) == [path]
    said = str(caught.value)
    assert said.startswith(f"{path}: cannot be written: File too large; ")
    assert said.endswith(f" bytes are free there; make room, then `p2pfl resume {folder.root}`")


@pytest.mark.parametrize("room", range(0, 20, 3))
def test_a_line_that_finds_no_room_is_not_there_in_part(folder: RunFolder, room: int) -> None:
    path = folder.peer(0).metrics
    append_line(path, '{"t": 0}')
    with no_file_beyond(path.stat().st_size + room), pytest.raises(Unwritable):
        append_line(path, '{"t": 1, "what": "a long one"}')
    append_line(path, '{"t": 2}')
    assert read_lines(path) == [{"t": 0}, {"t": 2}]


@pytest.mark.parametrize(
    ("number", "advice"),
    [
        (errno.ENOSPC, " bytes are free there; make room, then `p2pfl resume {run}`"),
        (errno.EDQUOT, " bytes are free there; make room, then `p2pfl resume {run}`"),
        (errno.EACCES, "; make it writable, then `p2pfl resume {run}`"),
        (errno.EROFS, "; make it writable, then `p2pfl resume {run}`"),
        (errno.EIO, "; make it writable, then `p2pfl resume {run}`"),
    ],
)
def test_the_error_says_what_to_do(folder: RunFolder, number: int, advice: str) -> None:
    path = folder.peer(1).metrics
    said = str(Unwritable(path, OSError(number, os.strerror(number))))
    assert said.startswith(f"{path}: cannot be written: {os.strerror(number)}; ")
    assert said.endswith(advice.format(run=folder.root))
    assert "\n" not in said


def test_the_error_says_what_is_gone(folder: RunFolder) -> None:
    shutil.rmtree(folder.root)
    with pytest.raises(Unwritable, match=f"No such file or directory; {folder.root} is gone$"):
        append_line(folder.peer(1).metrics, "{}")


def test_a_log_that_finds_no_room_loses_lines_and_nothing_else(folder: RunFolder, capfd: Any) -> None:
    path = folder.peer(0).log
    log = peer_logger(0, path)
    log.info("before")
    with no_file_beyond(path.stat().st_size + 5):
        log.info("too much")
        log.info("too much again")
        close_logger(log)
    again = peer_logger(0, path)
    again.info("after")
    close_logger(again)
    assert path.read_text().splitlines()[0].endswith("INFO    before")
    assert path.read_text().endswith("INFO    after\n")
    assert capfd.readouterr() == ("", "")


def test_a_log_that_cannot_be_opened_is_an_error(folder: RunFolder) -> None:
    folder.peer(0).log.mkdir()
    with pytest.raises(Unwritable, match=r"peer\.log: cannot be written: Is a directory"):
        peer_logger(0, folder.peer(0).log)


# ---- what a power cut, or a kill, leaves behind


@pytest.mark.parametrize("content", [b"", b"\0" * 50, b'{"peer": 0, "ph', b"[]", b'{"peer": 0, "what": 1}', b"\xff"])
def test_a_damaged_status_or_result_counts_as_none(folder: RunFolder, content: bytes) -> None:
    place = folder.peer(0)
    place.write_status(Status(0, 1))
    place.write_result(Result(0, "stopped", 1, "", "", 0))
    for name in ("status.json", "result.json"):
        (place.root / name).write_bytes(content)
    assert place.status() is None
    assert place.result() is None


def test_a_damaged_run_json_is_an_error(folder: RunFolder) -> None:
    (folder.root / "run.json").write_bytes(b"")
    with pytest.raises(RunFolderError, match="damaged: not a JSON object"):
        _ = folder.about


def test_what_was_half_written_is_swept_away(folder: RunFolder) -> None:
    place = folder.peer(1)
    mine = [place.root / ".checkpoint.pt.77.tmp", folder.addresses / ".01.77.tmp"]
    others = [folder.peer(0).root / ".status.json.7.tmp", folder.addresses / ".00.7.tmp", place.root / "status.json"]
    for path in (*mine, *others):
        path.touch()
    place.sweep()
    assert not any(path.exists() for path in mine)
    assert all(path.exists() for path in others)


@pytest.mark.parametrize("rest", ["", '{"t": 2, "lo', "\0\0\0\0\n", '{"t": 2}', '\0\0\n{"t": 1}\n'])
def test_records_after_a_damaged_one_are_dropped(folder: RunFolder, rest: str) -> None:
    path = folder.peer(0).metrics
    whole = '{"t": 0, "loss": 0.1}\n{"t": 1}\n'
    path.write_text(whole + rest)
    assert metrics.read(path) == [{"t": 0, "loss": 0.1}, {"t": 1}]
    metrics.keep_before(path, 5)
    assert path.read_text() == whole
    metrics.keep_before(path, 1)
    assert metrics.read(path) == [{"t": 0, "loss": 0.1}]


def test_records_that_cannot_be_read_are_not_dropped(folder: RunFolder) -> None:
    path = folder.peer(0).metrics
    path.mkdir()
    with pytest.raises(RunFolderError, match="cannot be read: Is a directory"):
        metrics.keep_before(path, 1)
