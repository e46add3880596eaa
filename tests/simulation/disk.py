"""Files in memory that outlive the simulated process that wrote them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from errno import ENOENT
from os import strerror
from typing import TypeVar

import torch
from torch import Tensor

from p2pfl.messaging.journal import BodyStore, Place
from p2pfl.messaging.wire import Buffer, Encoded

T = TypeVar("T")

Step = Callable[[str], None]
"""Called before every step that a process takes in the outside world; raises if the process is killed there."""


@dataclass
class Disk:
    """The files of one peer in the run folder."""

    files: dict[str, bytes] = field(default_factory=dict)
    segments: dict[int, bytes] = field(default_factory=dict)
    """The bodies of the journal."""
    last_segment: int = 0
    """The highest number that was ever used."""


@dataclass(frozen=True)
class SimulatedPath:
    """The part of the pathlib.Path interface that the project uses on its run folder."""

    disk: Disk
    step: Step = field(compare=False)
    text: str = ""

    def __truediv__(self, name: str) -> SimulatedPath:
        return SimulatedPath(self.disk, self.step, f"{self.text}/{name}")

    def __str__(self) -> str:
        return self.text

    @property
    def name(self) -> str:
        return self.text.rpartition("/")[2]

    @property
    def stem(self) -> str:
        return self.name.rpartition(".")[0]

    def with_stem(self, stem: str) -> SimulatedPath:
        folder, _, name = self.text.rpartition("/")
        return SimulatedPath(self.disk, self.step, f"{folder}/{stem}.{name.rpartition('.')[2]}")

    def exists(self) -> bool:
        return self.text in self.disk.files

    def read_bytes(self) -> bytes:
        try:
            return self.disk.files[self.text]
        except KeyError:
            raise FileNotFoundError(ENOENT, strerror(ENOENT), self.text) from None

    def read_text(self, encoding: str = "utf-8") -> str:
        return self.read_bytes().decode(encoding)

    def write_bytes(self, data: bytes) -> None:
        self.step(f"write {self.name}")
        self.disk.files[self.text] = bytes(data)

    def write_text(self, data: str, encoding: str = "utf-8") -> None:
        self.write_bytes(data.encode(encoding))

    def replace(self, target: SimulatedPath) -> SimulatedPath:
        content = self.read_bytes()
        self.step(f"rename {self.name} to {target.name}")
        del self.disk.files[self.text]
        self.disk.files[target.text] = content
        return target

    def unlink(self, missing_ok: bool = False) -> None:
        if not missing_ok:
            self.read_bytes()
        if self.exists():
            self.step(f"remove {self.name}")
            del self.disk.files[self.text]


class SimulatedStore(BodyStore):
    """Its segments survive the process; two bodies a segment."""

    def __init__(self, disk: Disk, step: Step) -> None:
        self.disk = disk
        self.segments = disk.segments
        self.step = step
        self.current = disk.last_segment + 1

    def write(self, encoded: Encoded) -> Place:
        body = b"".join(encoded.parts())
        self.step(f"write a body to segment {self.current}")
        self.disk.last_segment = self.current
        before = self.segments.get(self.current, b"")
        self.segments[self.current] = before + body
        place = Place(self.current, len(before))
        self.current += bool(before)
        return place

    def read(self, place: Place, offset: int, length: int) -> Buffer:
        if place.segment not in self.segments:
            raise FileNotFoundError(ENOENT, strerror(ENOENT))
        return self.segments[place.segment][place.at + offset :][:length]

    def map(self, place: Place, size: int) -> Tensor:
        return torch.frombuffer(bytearray(self.read(place, 0, size)), dtype=torch.uint8)

    def release(self, segment: int) -> None:
        self.segments.pop(segment, None)

    def restore(self, segments: Iterable[int]) -> set[int]:
        kept = set(segments)
        for segment in self.segments.keys() - kept:
            del self.segments[segment]
        return kept & self.segments.keys()


def append_line(path: SimulatedPath, line: str, *, durable: bool = False) -> None:
    """Replace run_folder.append_line."""
    content = path.read_bytes() if path.exists() else b""
    path.write_bytes(content + f"{line}\n".encode())


def sync(path: SimulatedPath) -> None:
    """Replace run_folder.sync: simulated writes are durable at once."""


async def on_thread(function: Callable[[], T]) -> T:
    """Replace saving.on_thread: the event loop runs meanwhile, but virtual time must not pass on a real thread."""
    await asyncio.sleep(0.01)
    return function()


class NewFile:
    """Replaces files.NewFile; the process may be killed between any two steps."""

    def __init__(self, path: SimulatedPath, mode: int = 0o666) -> None:
        self.path = path
        self.content = bytearray()

    def write(self, data: Buffer, at: int) -> None:
        self.content.extend(bytes(max(0, at - len(self.content))))
        self.content[at : at + memoryview(data).nbytes] = data

    def replace(self, keep: SimulatedPath | None = None, *, durable: bool = True) -> None:
        if keep is not None and self.path.exists():
            self.path.replace(keep)
        self.path.write_bytes(bytes(self.content))

    def close(self) -> None:
        pass
