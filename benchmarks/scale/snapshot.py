"""What running peers hold, as Linux's /proc counts it: connections, descriptors, threads, memory, files."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.bench import procfs

ESTABLISHED = "01"
"""State of a TCP socket in /proc/net/tcp."""
BLOCK = 512
"""Bytes of a unit of st_blocks."""

Figures = dict[str, float]


@dataclass
class Processes:
    """The processes of one run: the peers', and those that forked them, by folder of the host."""

    peers: dict[Path, dict[int, int]] = field(default_factory=dict)
    """{run folder on the host: {peer: process id}}"""
    warm: dict[Path, int] = field(default_factory=dict)
    """{run folder on the host: process id of the warm process or the host process}"""


def find(folders: Iterable[Path], proc: Path = Path("/proc")) -> Processes:
    """Find the processes of a run by their titles, also in other network namespaces."""
    found = Processes({folder: {} for folder in folders})
    for entry in proc.iterdir():
        if not entry.name.isdigit():
            continue
        title = ""
        with suppress(OSError):
            title = (entry / "cmdline").read_bytes().rstrip(b"\0 ").decode(errors="replace")
        for folder, peers in found.peers.items():
            if not title.endswith(f" {folder}"):
                continue
            words = title.split()
            if title.startswith("p2pfl peer "):
                peers[int(words[2])] = int(entry.name)
            elif title.startswith(("p2pfl warm ", "p2pfl host ")):
                found.warm[folder] = int(entry.name)
    return found


def tcp_states(pid: int, proc: Path = Path("/proc")) -> dict[int, str]:
    """Return the state of each TCP socket in the process's network namespace, by inode."""
    states = {}
    for name in ("tcp", "tcp6"):
        with suppress(OSError):
            for line in (proc / str(pid) / "net" / name).read_text().splitlines()[1:]:
                words = line.split()
                states[int(words[9])] = words[3]
    return states


def unix_sockets(pid: int, proc: Path = Path("/proc")) -> set[int]:
    """Return the inodes of the Unix sockets in the process's network namespace."""
    with suppress(OSError):
        lines = (proc / str(pid) / "net" / "unix").read_text().splitlines()[1:]
        return {int(line.split()[6]) for line in lines}
    return set()


def process(pid: int, tcp: Mapping[int, str], unix: set[int], proc: Path = Path("/proc")) -> Figures:
    """Return what one process holds: counts, and bytes of memory.

    Args:
        tcp, unix: sockets of its network namespace.

    Raises:
        OSError: the process has ended.
    """
    root, kinds = proc / str(pid), Counter[str]()
    for entry in (root / "fd").iterdir():
        with suppress(OSError):
            target = os.readlink(entry)
            if target.startswith("socket:["):
                inode = int(target[8:-1])
                kinds["connections"] += tcp.get(inode) == ESTABLISHED
                kinds["unix"] += inode in unix
        kinds["descriptors"] += 1
    memory = Counter[str]()
    for line in (root / "smaps_rollup").read_text().splitlines()[1:]:
        name, size = line.split()[:2]
        memory[name.rstrip(":")] += 1024 * int(size)
    threads = next(
        int(line.split()[1]) for line in (root / "status").read_text().splitlines() if line.startswith("Threads:")
    )
    return {
        **{name: kinds[name] for name in ("connections", "unix", "descriptors")},
        "threads": threads,
        "pss": memory["Pss"],
        "rss": memory["Rss"],
        "private": memory["Private_Clean"] + memory["Private_Dirty"],
        "cpu": procfs.cpu_seconds(pid),
    }


def host(folder: Path, peers: Mapping[int, int], warm: int | None) -> tuple[list[Figures], Figures]:
    """Return the figures of each peer on a host, and the figures of all processes of the run there."""
    some = next(iter(peers.values()))
    tcp, unix = tcp_states(some), unix_sockets(some)
    each = [{**process(pid, tcp, unix), **files(folder / "peers" / f"{peer:02d}")} for peer, pid in peers.items()]
    first = process(warm, tcp, unix) if warm is not None else {}
    total = {name: sum(figures[name] for figures in each) + first.get(name, 0.0) for name in each[0]}
    return each, {**total, "peers": len(each), **{f"warm_{name}": value for name, value in first.items()}}


def files(folder: Path) -> Figures:
    """Return the number of files in a folder and below, and the bytes that they take on disk, by kind."""
    found: Counter[str] = Counter(files=0, disk=0, journal=0, checkpoints=0)
    for path in folder.rglob("*"):
        with suppress(OSError):
            status = path.lstat()
            if path.is_dir():
                continue
            size = status.st_blocks * BLOCK
            found.update(files=1, disk=size)
            if path.parent.name == "journal":
                found["journal"] += size
            elif path.name.startswith("checkpoint"):
                found["checkpoints"] += size
    return dict(found)
