"""Limits of `p2pfl collect`: endless, sparse and oversized files and archives, with a fake ssh."""

from __future__ import annotations

import shutil
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from launcher.collect import limits
from p2pfl.run_folder.folder import RunFolder
from tests.launcher_fixtures import Host, Invoke, hosts_by_peer


def collected_from(body: str, into: Path, programs: Any, invoke: Invoke, *options: str) -> str:
    """Collect from a host whose `ssh` runs ``body``. Return the reason for which the host could not be read."""
    programs("ssh", body)
    outcome = invoke("collect", into, "alpha:x", *options)
    assert outcome.exit_code == 1
    assert not into.exists()
    *_, line = outcome.stderr.splitlines()
    assert line.startswith("alpha:x: ")
    return str(line.removeprefix("alpha:x: "))


def header(name: str, size: int, kind: bytes = tarfile.REGTYPE) -> bytes:
    """The header of a member that claims ``size`` bytes."""
    member = tarfile.TarInfo(name)
    member.size, member.type = size, kind
    return member.tobuf(tarfile.GNU_FORMAT)


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """Return the bytes that this process has written to files that it extracted."""
    written = 0
    copy = shutil.copyfileobj

    def copyfileobj(source: Any, target: Any, length: int = 0) -> None:
        nonlocal written
        before = target.tell()
        try:
            copy(source, target, length)
        finally:
            written += target.tell() - before

    monkeypatch.setattr(shutil, "copyfileobj", copyfileobj)
    return lambda: written


def test_ends_an_endless_file(tmp_path: Path, into: Path, programs: Any, invoke: Invoke, disk: Any) -> None:
    (tmp_path / "header").write_bytes(header("peers/00/peer.log", 1 << 50))
    body = 'cat "$(dirname "$0")/../header"; exec cat /dev/zero'
    reason = collected_from(body, into, programs, invoke, "--max-gb", "0.01")
    assert reason == "peers/00/peer.log has 1125.9 TB; at most 10.0 MB may be read: see `p2pfl collect --max-gb`"
    assert disk() == 0


def test_ends_endless_files_that_are_not_wanted(tmp_path: Path, into: Path, programs: Any, invoke: Invoke) -> None:
    (tmp_path / "header").write_bytes(header("something", 1 << 50))
    body = 'cat "$(dirname "$0")/../header"; exec cat /dev/zero'
    reason = collected_from(body, into, programs, invoke, "--max-gb", "0.01")
    assert reason == "more than 10.0 MB, which is the most that may be read: see `p2pfl collect --max-gb`"


def test_ends_many_files_at_the_total_size(
    tmp_path: Path, into: Path, programs: Any, invoke: Invoke, disk: Any
) -> None:
    (tmp_path / "member").write_bytes(header("peers/00/peer.log", 1 << 20) + bytes(1 << 20))
    body = 'while cat "$(dirname "$0")/../member"; do :; done 2>/dev/null'
    reason = collected_from(body, into, programs, invoke, "--max-gb", "0.01")
    assert reason == "more than 10.0 MB, which is the most that may be read: see `p2pfl collect --max-gb`"
    assert 0 < disk() <= 10_000_000


@pytest.mark.parametrize("name", ["peers/00/peer.log", "something"])
def test_limits_the_number_of_files(
    name: str, tmp_path: Path, into: Path, programs: Any, invoke: Invoke, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "MAX_FILES", 100)
    (tmp_path / "member").write_bytes(header(name, 0) * 100)
    body = 'while cat "$(dirname "$0")/../member"; do :; done 2>/dev/null'
    reason = collected_from(body, into, programs, invoke)
    assert reason.startswith("more than 100 files; ")


@pytest.mark.parametrize("name", ["run.yaml", "run.json", "peers/00/status.json", "peers/00/result.json"])
def test_limits_the_size_of_files_that_are_read_into_memory(
    name: str, tmp_path: Path, into: Path, programs: Any, invoke: Invoke, disk: Any
) -> None:
    (tmp_path / "header").write_bytes(header(name, limits.MAX_RECORD + 1))
    reason = collected_from('cat "$(dirname "$0")/../header" /dev/zero', into, programs, invoke)
    assert reason == f"{name} has 67.1 MB, more than such a file can have (67.1 MB); remove it there"
    assert disk() == 0


@pytest.mark.parametrize(
    ("names", "reason"),
    [
        (["run.json", "run.json/run.yaml"], "run.json/run.yaml cannot be created here: "),
        (["n" * 300 + "/run.json"], "n" * 100 + " cannot be created here: File name too long"),
    ],
)
def test_names_that_cannot_be_files_here_concern_one_location(
    names: list[str], reason: str, tmp_path: Path, into: Path, programs: Any, invoke: Invoke
) -> None:
    (tmp_path / "archive").write_bytes(b"".join(header(name, 0) for name in names) + bytes(2 * tarfile.BLOCKSIZE))
    found = collected_from('cat "$(dirname "$0")/../archive"', into, programs, invoke)
    assert found.startswith(reason)


def old_sparse() -> bytes:
    """A member of one byte, of which the archive has more than all disks hold."""
    sparse = bytearray(header("peers/00/peer.log", (1 << 33) - 1, tarfile.GNUTYPE_SPARSE))
    sparse[386:410] = b"%011o\0%011o\0" % (0, (1 << 33) - 1)  # one segment
    sparse[483:495] = b"%011o\0" % 1  # the size of the file
    sparse[148:156] = b" " * 8
    sparse[148:156] = b"%06o\0 " % sum(sparse)
    return bytes(sparse)


def new_sparse() -> bytes:
    """A member without data that claims an exbibyte of zeros."""
    member = tarfile.TarInfo("peers/00/peer.log")
    member.pax_headers = {"GNU.sparse.major": "0", "GNU.sparse.minor": "1", "GNU.sparse.map": "0,0"}
    member.pax_headers["GNU.sparse.size"] = str(1 << 60)
    return member.tobuf(tarfile.PAX_FORMAT)


@pytest.mark.parametrize("sparse", [old_sparse, new_sparse])
def test_rejects_sparse_files(
    sparse: Callable[[], bytes], tmp_path: Path, into: Path, programs: Any, invoke: Invoke, disk: Any
) -> None:
    (tmp_path / "header").write_bytes(sparse())
    reason = collected_from('cat "$(dirname "$0")/../header" /dev/zero', into, programs, invoke)
    assert reason == "peers/00/peer.log is sparse in the tar archive, which `p2pfl collect` does not accept"
    assert disk() == 0


@pytest.mark.parametrize("kind", [tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.GNUTYPE_LONGNAME])
def test_reads_no_long_header_into_memory(
    kind: bytes, tmp_path: Path, into: Path, programs: Any, invoke: Invoke
) -> None:
    (tmp_path / "header").write_bytes(header("x", 1 << 33, kind))
    reason = collected_from('cat "$(dirname "$0")/../header" /dev/zero', into, programs, invoke)
    assert reason == "incomplete or invalid tar archive: a header of more than 65536 bytes"


def test_ends_headers_without_end(tmp_path: Path, into: Path, programs: Any, invoke: Invoke) -> None:
    (tmp_path / "member").write_bytes((header("x", 12, tarfile.XHDTYPE) + b"12 comment=\n".ljust(512, b"\0")) * 100)
    body = 'while cat "$(dirname "$0")/../member"; do :; done 2>/dev/null'
    reason = collected_from(body, into, programs, invoke)
    assert reason == "incomplete or invalid tar archive: a header of more than 65536 bytes"


def test_ends_data_without_end_after_the_archive(host: Host, into: Path, programs: Any, invoke: Invoke) -> None:
    host("one", 0)
    body = 'tar -C "$(dirname "$0")/../hosts/one" -cf - .; exec cat /dev/zero'
    assert "invalid tar archive" in collected_from(body, into, programs, invoke)


def test_ends_error_messages_without_end(into: Path, programs: Any, invoke: Invoke) -> None:
    reason = collected_from("exec yes 'Permission denied' >&2", into, programs, invoke)
    assert "Permission denied" in reason
    assert len(reason) < 1000


def test_limits_what_is_copied_on_this_host(host: Host, into: Path, invoke: Invoke) -> None:
    one, two = host("one", 0), host("two", 1)
    with one.peer(0).log.open("r+b") as file:
        file.truncate(1 << 40)  # occupies nothing
    with two.peer(1).root.joinpath("result.json").open("r+b") as file:
        file.truncate(1 << 40)
    outcome = invoke("collect", into, one.root, two.root, host("three", 2).root)
    assert outcome.stderr.splitlines()[-2:] == [
        f"{one.root}: cannot be read: peers/00/peer.log has 1.1 TB; at most 10.0 GB may be read: "
        "see `p2pfl collect --max-gb`",
        f"{two.root}: cannot be read: peers/01/result.json has 1.1 TB, more than such a file can have (67.1 MB); "
        "remove it there",
    ]
    assert hosts_by_peer(RunFolder.open(into)) == {2: "three"}


def test_max_gb_allows_more(host: Host, into: Path, invoke: Invoke) -> None:
    one = host("one", 0)
    one.peer(0).log.write_bytes(bytes(3_000_000))
    assert invoke("collect", into, one.root, "--max-gb", "0.002").exit_code == 1
    assert invoke("collect", into, one.root, "--max-gb", "0.004").exit_code == 0
