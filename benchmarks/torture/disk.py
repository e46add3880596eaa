"""Files in memory, which outlive the process that wrote them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from errno import ENOENT
from os import strerror

Act = Callable[[str], None]
"""Called before everything that a process does to the world; does not return if it dies there."""


@dataclass
class Disk:
    """One peer's part of the run folder."""

    files: dict[str, bytes] = field(default_factory=dict)


@dataclass(frozen=True)
class SimulatedPath:
    """As much of pathlib.Path as the project uses of its run folder."""

    disk: Disk
    act: Act = field(compare=False)
    text: str = ""

    def __truediv__(self, name: str) -> SimulatedPath:
        return SimulatedPath(self.disk, self.act, f"{self.text}/{name}")

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
        return SimulatedPath(self.disk, self.act, f"{folder}/{stem}.{name.rpartition('.')[2]}")

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
        self.act(f"write {self.name}")
        self.disk.files[self.text] = bytes(data)

    def write_text(self, data: str, encoding: str = "utf-8") -> None:
        self.write_bytes(data.encode(encoding))

    def replace(self, target: SimulatedPath) -> SimulatedPath:
        content = self.read_bytes()
        self.act(f"rename {self.name} to {target.name}")
        del self.disk.files[self.text]
        self.disk.files[target.text] = content
        return target

    def unlink(self, missing_ok: bool = False) -> None:
        if not missing_ok:
            self.read_bytes()
        if self.exists():
            self.act(f"remove {self.name}")
            del self.disk.files[self.text]


def append_line(path: SimulatedPath, line: str, *, durable: bool = False) -> None:
    """In the place of p2pfl.runfolder's."""
    before = path.read_bytes() if path.exists() else b""
    path.write_bytes(before + f"{line}\n".encode())


def sync(path: SimulatedPath) -> None:
    """In the place of p2pfl.runfolder's: what was written is there."""


def write_atomically(
    path: SimulatedPath, data: bytes, *, durable: bool = False, keep: SimulatedPath | None = None
) -> None:
    """In the place of p2pfl.runfolder's: it may end between any two steps."""
    if keep is not None and path.exists():
        path.replace(keep)
    path.write_bytes(data)
