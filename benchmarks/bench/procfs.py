"""Memory, CPU time and written bytes of processes, as Linux's /proc counts them."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, fields
from pathlib import Path

_MAPPING = re.compile(r"[0-9a-f]+-[0-9a-f]+ \S+ [0-9a-f]+ [0-9a-f]+:[0-9a-f]+ [0-9]+ *(.*)")
_TICK = os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 100


@dataclass(frozen=True)
class Mapping:
    """One mapping of a process. ``path`` is empty for anonymous memory.

    Attributes:
        pss: bytes of its resident pages, each divided by the number of processes that map it.
        private: bytes of pages that no other process maps.
    """

    path: str
    pss: int
    private: int


@dataclass(frozen=True)
class Memory:
    """Proportional set size (PSS) by kind of mapping, in bytes.

    Attributes:
        code: programs and libraries, and what the process inherited when it was forked: imported modules.
        data: decoded datasets.
        messages: files of the run folder and shared memory. Other messages are in ``private``.
        private: all that the process allocated: model, optimizer, activations, buffers, the interpreter's objects.
    """

    code: float = 0.0
    data: float = 0.0
    messages: float = 0.0
    private: float = 0.0

    @property
    def total(self) -> float:
        return self.code + self.data + self.messages + self.private

    def __add__(self, other: Memory) -> Memory:
        return Memory(*(getattr(self, field.name) + getattr(other, field.name) for field in fields(self)))

    def __truediv__(self, count: float) -> Memory:
        return Memory(*(getattr(self, field.name) / count for field in fields(self)))


def parse_smaps(text: str) -> Iterator[Mapping]:
    """The mappings in the text of /proc/PID/smaps."""
    path, sizes = "", dict[str, int]()
    for line in (*text.splitlines(), "0-0 ---p 0 0:0 0"):
        if found := _MAPPING.fullmatch(line):
            if sizes:
                private = sizes.get("Private_Clean", 0) + sizes.get("Private_Dirty", 0)
                yield Mapping(path, sizes.get("Pss", 0), private)
            path, sizes = found[1], {}
        else:
            name, _, value = line.partition(":")
            if value.endswith(" kB"):
                sizes[name] = int(value.split()[0]) * 1024


def split_memory(mappings: Iterable[Mapping], run: Path) -> Memory:
    """Sum the mappings of one process by kind. Mapped files in the folder ``run`` are messages."""
    code = data = messages = private = 0
    for mapping in mappings:
        if mapping.path.startswith((f"{run}/", "/dev/shm/", "/memfd:")):
            messages += mapping.pss
        elif mapping.path.endswith(".npy"):
            data += mapping.pss
        elif mapping.path.startswith("/") and not mapping.path.startswith("/dev/zero"):
            code += mapping.pss
        else:  # anonymous; what other processes map too is from before the fork
            private += mapping.private
            code += mapping.pss - mapping.private
    return Memory(code, data, messages, private)


def memory(pid: int, run: Path) -> Memory:
    """The memory of a process; nothing if it has ended."""
    try:
        text = Path(f"/proc/{pid}/smaps").read_text(errors="replace")
    except OSError:
        return Memory()
    return split_memory(parse_smaps(text), run)


def pss(pid: int) -> int:
    """The proportional set size of a process in bytes; 0 if it has ended."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))


def tree(pid: int) -> list[int]:
    """The process and all its descendants, parents first."""
    found = [pid]
    for process in found:
        found += children(process)
    return found


def children(pid: int) -> list[int]:
    """The children of a process."""
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(OSError):
            found += map(int, task.read_text().split())
    return found


def cpu_seconds(pid: int) -> float:
    """CPU seconds of a process itself, without its children; 0 if it has ended."""
    try:
        values = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(values[11]) + int(values[12])) / _TICK


def bytes_written() -> int:
    """Bytes that this process and all descendants for which their parents waited have written to disks.

    Counts pages that became dirty, once until they are written; not pages of files in memory (tmpfs).
    """
    counters = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(counters["write_bytes"])


def available() -> int:
    """Bytes of memory that new allocations can use without swapping."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return 1 << 62
