"""Files of a run when the disk is full, the power fails, or they are deleted."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import resource
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from p2pfl.errors import RunFolderError, WriteError
from p2pfl.run_folder.files import append_line, read_lines, write_atomically
from p2pfl.run_folder.folder import Result, RunFolder, Status
from p2pfl.run_folder.peer_log import close_logger, peer_logger
from p2pfl.session import metrics
from tests.system_calls import calls_of

LOG = logging.getLogger("p2pfl.null")


@contextlib.contextmanager
def file_size_limit(size: int) -> Iterator[None]:
    """No file of this process can grow beyond ``size`` bytes, as if the disk were full."""
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


# ---- full disk


def test_full_disk_leaves_the_old_file(folder: RunFolder) -> None:
    path = folder.peer(0).root / "status.json"
    write_atomically(path, b"before")
    with file_size_limit(100), pytest.raises(WriteError) as caught:
        write_atomically(path, bytes(101))
    assert path.read_bytes() == b"before"
    assert list(path.parent.iterdir()) == [path]
    message = str(caught.value)
    assert message.startswith(f"{path}: cannot be written: File too large; ")
    assert message.endswith(f" bytes are free there; make room, then `p2pfl resume {folder.root}`")


@pytest.mark.parametrize("room", range(0, 20, 3))
def test_full_disk_appends_no_partial_line(folder: RunFolder, room: int) -> None:
    path = folder.peer(0).metrics
    append_line(path, '{"t": 0}')
    with file_size_limit(path.stat().st_size + room), pytest.raises(WriteError):
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
        (errno.EMFILE, "; raise the limit of open files (`ulimit -n`), then `p2pfl resume {run}`"),
        (errno.EIO, "; make it writable, then `p2pfl resume {run}`"),
    ],
)
def test_write_error_suggests_a_remedy(folder: RunFolder, number: int, advice: str) -> None:
    path = folder.peer(1).metrics
    message = str(WriteError(path, OSError(number, os.strerror(number))))
    assert message.startswith(f"{path}: cannot be written: {os.strerror(number)}; ")
    assert message.endswith(advice.format(run=folder.root))
    assert "\n" not in message


@pytest.mark.parametrize("name", ["report.html", "exported/toy.csv"])
def test_only_what_runs_write_leads_to_advice_to_resume(folder: RunFolder, name: str) -> None:
    (folder.root / "exported").mkdir()
    message = str(WriteError(folder.root / name, OSError(errno.EACCES, "Permission denied")))
    assert message.endswith(": cannot be written: Permission denied; make it writable")


def test_write_error_names_what_is_no_folder(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(WriteError, match=f"Not a directory; {tmp_path}/file is not a folder$"):
        append_line(tmp_path / "file" / "a.csv", "")


def test_write_error_names_the_missing_folder(folder: RunFolder) -> None:
    shutil.rmtree(folder.root)
    with pytest.raises(WriteError, match=f"No such file or directory; {folder.root} does not exist$"):
        append_line(folder.peer(1).metrics, "{}")


def test_full_disk_only_drops_log_lines(folder: RunFolder, capfd: Any) -> None:
    path = folder.peer(0).log
    log = peer_logger(0, path)
    log.info("before")
    with file_size_limit(path.stat().st_size + 5):
        log.info("too much")
        log.info("too much again")
        close_logger(log)
    again = peer_logger(0, path)
    again.info("after")
    close_logger(again)
    assert path.read_text().splitlines()[0].endswith("INFO    before")
    assert path.read_text().endswith("INFO    after\n")
    assert capfd.readouterr() == ("", "")


def test_unopenable_log_is_an_error(folder: RunFolder) -> None:
    folder.peer(0).log.mkdir()
    with pytest.raises(WriteError, match=r"peer\.log: cannot be written: Is a directory"):
        peer_logger(0, folder.peer(0).log)


# ---- after a power failure or a kill


@pytest.mark.parametrize(
    "content", [b"", b"\0" * 50, b'{"peer": 0, "ph', b"[]", b'{"peer": 0, "what": 1}', b"\xff", b"[" * 10**6]
)
def test_damaged_status_or_result_is_none(folder: RunFolder, content: bytes) -> None:
    peer_folder = folder.peer(0)
    peer_folder.write_status(Status(0, 1))
    peer_folder.write_result(Result(0, "stopped", 1, "", "", 0))
    for name in ("status.json", "result.json"):
        (peer_folder.root / name).write_bytes(content)
    assert peer_folder.status() is None
    assert peer_folder.result() is None


def test_damaged_run_json_is_an_error(folder: RunFolder) -> None:
    (folder.root / "run.json").write_bytes(b"")
    with pytest.raises(RunFolderError, match="damaged: not a JSON object"):
        _ = folder.info


def test_sweep_deletes_temporary_files_of_the_peer(folder: RunFolder) -> None:
    peer_folder = folder.peer(1)
    names = (".checkpoint.pt.77.tmp", "journal/.7.77.3.tmp")
    stale = [*(peer_folder.root / name for name in names), folder.addresses / ".01.77.tmp"]
    other_peer = folder.peer(0).root / ".status.json.7.tmp"
    kept = [other_peer, folder.addresses / ".00.7.tmp", peer_folder.root / "status.json"]
    peer_folder.journal.mkdir(exist_ok=True)
    for path in (*stale, *kept):
        path.touch()
    peer_folder.sweep()
    assert not any(path.exists() for path in stale)
    assert all(path.exists() for path in kept)


@pytest.mark.parametrize("rest", ["", '{"t": 2, "lo', "\0\0\0\0\n", '{"t": 2}', '\0\0\n{"t": 1}\n'])
def test_drops_records_after_a_damaged_one(folder: RunFolder, rest: str) -> None:
    path = folder.peer(0).metrics
    whole = '{"t": 0, "loss": 0.1}\n{"t": 1}\n'
    path.write_text(whole + rest)
    assert metrics.read(path) == [{"t": 0, "loss": 0.1}, {"t": 1}]
    metrics.truncate(path, 5, LOG)
    assert path.read_text() == whole
    metrics.truncate(path, 1, LOG)
    assert metrics.read(path) == [{"t": 0, "loss": 0.1}]


def test_keeps_the_records_after_a_damaged_one_on_resume(folder: RunFolder, caplog: pytest.LogCaptureFixture) -> None:
    path = folder.peer(0).metrics
    damaged = '{"t": 0}\n{"t"\n{"t": null}\n{"t": 2}\n{"t": 2}\n{"t": 3}\n{"t": 4'
    path.write_text(damaged)
    metrics.truncate(path, 5, LOG, last=4)
    assert metrics.read(path) == [{"t": 0}, {"t": 2}, {"t": 3}]
    copy = path.with_name("metrics-damaged.jsonl")
    assert copy.read_text() == damaged
    assert [record.getMessage() for record in caplog.records] == [
        f"damaged records dropped count=3; the file as it was: {copy}",
        f"records are missing rounds=4..4: {path} was cut off or deleted",
    ]
    path.unlink()
    metrics.truncate(path, 5, LOG, last=3)
    assert "records are missing rounds=0..3: " in caplog.text
    assert not path.exists()


THREE = '{"t": 0}\n{"t": 1}\n{"t": 2}\n'


def test_truncated_records_are_on_disk_before_they_replace_the_old_ones(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise a power failure leaves an empty file: the name has changed, the content was never written."""
    path = folder.peer(0).metrics
    path.write_text(THREE)
    assert calls_of(lambda: metrics.truncate(path, 2, LOG), monkeypatch) == ["write", "fsync", "rename", "fsync"]
    assert metrics.read(path) == [{"t": 0}, {"t": 1}]


@pytest.mark.parametrize("steps", range(4))
def test_interrupted_truncation_loses_no_earlier_record(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch, steps: int
) -> None:
    path = folder.peer(0).metrics
    path.write_text(THREE)
    assert len(calls_of(lambda: metrics.truncate(path, 2, LOG), monkeypatch, fail_at=steps)) == steps + 1
    assert metrics.read(path)[:2] == [{"t": 0}, {"t": 1}]
    assert list(path.parent.iterdir()) == [path]


def test_truncation_that_drops_nothing_writes_nothing(folder: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    path = folder.peer(0).metrics
    path.write_text(THREE)
    assert calls_of(lambda: metrics.truncate(path, 3, LOG), monkeypatch) == []
    assert path.read_text() == THREE


def test_truncation_returns_the_seconds_up_to_the_last_record_dropped_or_not(folder: RunFolder) -> None:
    path = folder.peer(0).metrics
    assert metrics.truncate(path, 0, LOG) == 0
    path.write_text(THREE)
    assert metrics.truncate(path, 3, LOG) == 0
    path.write_text('{"t": 0, "elapsed": 1.5}\n{"t": 1, "elapsed": 4.0}\n')
    assert metrics.truncate(path, 1, LOG) == 4.0


def test_truncate_raises_if_records_are_unreadable(folder: RunFolder) -> None:
    path = folder.peer(0).metrics
    path.mkdir()
    with pytest.raises(RunFolderError, match="cannot be read: Is a directory"):
        metrics.truncate(path, 1, LOG)
