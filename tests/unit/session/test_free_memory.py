"""Memory that is given back: what is read afterwards must be the same."""

from __future__ import annotations

import ctypes
import math
import mmap
import os
from pathlib import Path

import pytest

from p2pfl.session import free_memory
from p2pfl.session.body_files import map_body
from p2pfl.session.free_memory import _unmodified, forget, forget_files, free_heap

PAGE = mmap.PAGESIZE


def resident(address: int) -> int:
    """Return the KiB in memory of the mapping at an address."""
    found = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        name, _, value = line.partition(" ")
        if "-" in name and not name.endswith(":"):
            start, end = (int(part, 16) for part in name.split("-"))
            found = start <= address < end
        elif found and name == "Rss:":
            return int(value.split()[0])
    raise AssertionError("not mapped")


@pytest.mark.exhaustive
def test_a_forgotten_body_is_read_again(tmp_path: Path) -> None:
    content = os.urandom(40 * PAGE)
    (tmp_path / "body").write_bytes(content)
    body = map_body(str(tmp_path / "body"), 3 * 64, len(content) - 1000, populate=True)
    assert resident(body.data_ptr()) >= 36 * PAGE // 1024
    forget(body)
    assert resident(body.data_ptr()) == 0
    assert bytes(body.numpy()) == content[192 : 192 + len(body)]
    body[0] += 1
    assert (tmp_path / "body").read_bytes() == content


@pytest.mark.exhaustive
def test_modified_pages_of_files_are_kept(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(bytes(8 * PAGE))
    mapped = map_body(str(tmp_path / "file"), 0, 8 * PAGE, populate=True)
    mapped[0] = 7
    clean = map_body(str(tmp_path / "file"), 0, 8 * PAGE, populate=True)
    forget_files()
    assert mapped[0] == 7
    assert clean[0] == 0
    free_heap()


def test_only_more_unused_memory_than_is_kept_is_returned(monkeypatch: pytest.MonkeyPatch) -> None:
    trimmed: list[int] = []
    monkeypatch.setattr(free_memory, "_function", lambda name, *types: trimmed.append)
    for unused, keep in ((99.0, 100), (100.0, 100), (101.0, 100), (1.0, 0), (math.inf, 100)):
        monkeypatch.setattr(free_memory, "_unused_heap", lambda unused=unused: unused)
        before = len(trimmed)
        free_heap(keep)
        assert len(trimmed) - before == (unused > keep), (unused, keep)


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallinfo2"), reason="needs glibc 2.33")
def test_freed_memory_counts_as_unused() -> None:
    blocks = [bytes(100_000) for _ in range(40)]  # below the size from which blocks have mappings of their own
    fence = [bytes(1000) for _ in range(1000)]  # the end of the heap is returned at once
    before = free_memory._unused_heap()
    del blocks
    assert free_memory._unused_heap() > before + 2_000_000
    del fence


def test_neither_swapped_nor_anonymous_nor_shared_mappings_count_as_unmodified() -> None:
    def mapping(start: int, kind: str, file: str, anonymous: int = 0, swap: int = 0) -> str:
        return (
            f"{start:x}000-{start + 1:x}000 {kind} 00000000 fe:00 1234 {file}\n"
            f"Rss: 4 kB\nAnonymous: {anonymous} kB\nSwap: {swap} kB\nVmFlags: rd mr\n"
        )

    smaps = "".join(
        [
            mapping(1, "r-xp", "      /lib/a.so"),
            mapping(2, "rw-p", "      /lib/a.so", anonymous=4),
            mapping(3, "rw-p", "      /lib/a.so", swap=4),
            mapping(4, "rw-p", ""),
            mapping(5, "rw-s", "      /dev/shm/x"),
            mapping(6, "rw-p", "      [heap]"),
            mapping(7, "r--p", "      /lib/b.so"),
        ]
    )
    assert list(_unmodified(smaps)) == [(0x1000, 0x2000), (0x7000, 0x8000)]
