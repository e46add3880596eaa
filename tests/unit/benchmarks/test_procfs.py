"""Reading /proc: memory by kind of mapping, CPU time, written bytes."""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from benchmarks.bench import procfs
from benchmarks.bench.procfs import Mapping, Memory, parse_smaps, split_memory

SMAPS = """\
55d0c0a00000-55d0c0b00000 r-xp 00000000 fd:01 1234                       /usr/bin/python3.11
Size:               1024 kB
Rss:                 512 kB
Pss:                 100 kB
Shared_Clean:        500 kB
Private_Clean:         8 kB
Private_Dirty:         4 kB
VmFlags: rd ex mr mw me
7f0000000000-7f0000100000 rw-p 00000000 00:00 0 
Pss:                 300 kB
Private_Clean:         0 kB
Private_Dirty:       250 kB
7f0000200000-7f0000300000 rw-p 00000000 00:00 0                          [heap]
Pss:                  40 kB
Private_Dirty:        40 kB
7f0000400000-7f0000500000 rw-s 00000000 fd:01 77                         /runs/a/peers/00/journal-1 (deleted)
Pss:                  64 kB
Private_Dirty:        64 kB
7f0000600000-7f0000700000 r--p 00000000 fd:01 78                         /cache/decoded set/images.npy
Pss:                  20 kB
7ffc00000000-7ffc00021000 ---p 00000000 00:00 0                          [stack]
Pss:                   0 kB
"""  # noqa: W291
KIB = 1024


def test_smaps_are_parsed_with_paths_that_contain_spaces() -> None:
    assert list(parse_smaps(SMAPS)) == [
        Mapping("/usr/bin/python3.11", 100 * KIB, 12 * KIB),
        Mapping("", 300 * KIB, 250 * KIB),
        Mapping("[heap]", 40 * KIB, 40 * KIB),
        Mapping("/runs/a/peers/00/journal-1 (deleted)", 64 * KIB, 64 * KIB),
        Mapping("/cache/decoded set/images.npy", 20 * KIB, 0),
        Mapping("[stack]", 0, 0),
    ]
    assert list(parse_smaps("")) == []


def test_memory_is_split_by_kind_of_mapping() -> None:
    """Anonymous pages that other processes map too are from before the fork: code, not the peer's memory."""
    found = split_memory(parse_smaps(SMAPS), Path("/runs/a"))
    assert found == Memory(code=150 * KIB, data=20 * KIB, messages=64 * KIB, private=290 * KIB)
    assert found.total == 524 * KIB
    elsewhere = split_memory(parse_smaps(SMAPS), Path("/runs/b"))
    assert (elsewhere.messages, elsewhere.code) == (0, 214 * KIB)


@pytest.mark.parametrize("path", ["/dev/shm/p2pfl-1", "/memfd:body (deleted)"])
def test_shared_memory_holds_messages(path: str) -> None:
    assert split_memory([Mapping(path, 8, 0)], Path("/runs/a")) == Memory(messages=8)


def test_memory_adds_up_and_divides() -> None:
    assert (Memory(1, 2, 3, 4) + Memory(1, 0, 1, 0)) / 2 == Memory(1, 1, 2, 2)


@pytest.mark.exhaustive
def test_memory_of_this_process_agrees_with_the_kernels_sum() -> None:
    with mmap.mmap(-1, 1 << 24) as private:
        private.write(b"x" * (1 << 24))
        found, total = procfs.memory(os.getpid(), Path("/nowhere")), procfs.pss(os.getpid())
    assert found.private + found.code > 1 << 24
    assert found.total == pytest.approx(total, rel=0.05)


def test_ended_process_has_no_figures() -> None:
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    assert (procfs.pss(child.pid), procfs.cpu_seconds(child.pid)) == (0, 0.0)
    assert procfs.memory(child.pid, Path("/nowhere")) == Memory()
    assert procfs.children(child.pid) == []


def test_tree_lists_parents_before_children() -> None:
    command = [sys.executable, "-c", "import os; r, w = os.pipe(); os.fork(); print(flush=True); os.read(0, 1)"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        assert child.stdin is not None
        child.stdout.readline()
        child.stdout.readline()
        grandchildren = procfs.children(child.pid)
        assert len(grandchildren) == 1
        assert procfs.tree(child.pid) == [child.pid, *grandchildren]
        child.stdin.write(b"..")
        child.stdin.close()


def in_memory(path: Path) -> bool:
    mounted = {part.mountpoint: part.fstype for part in psutil.disk_partitions(all=True)}
    return bool(mounted[next(str(folder) for folder in (path, *path.parents) if str(folder) in mounted)] == "tmpfs")


def test_counts_bytes_written_by_ended_children(tmp_path: Path) -> None:
    before = procfs.bytes_written()
    code = f"import os; f = open({str(tmp_path / 'file')!r}, 'wb'); f.write(bytes(1 << 20)); f.flush(); os.fsync(f)"
    subprocess.run([sys.executable, "-c", code], check=True)
    on_disk = procfs.bytes_written() - before
    if on_disk == 0 and in_memory(tmp_path):
        pytest.skip("the temporary folder is in memory, whose bytes are not counted")
    assert 1 << 20 <= on_disk < 1 << 22


def test_cpu_seconds_and_available_memory_are_positive() -> None:
    assert procfs.cpu_seconds(os.getpid()) > 0
    assert procfs.available() > 0
