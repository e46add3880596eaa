"""The small files of a peer that the host process sends to the launcher as they change."""

from __future__ import annotations

import base64
import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path, PurePosixPath
from time import monotonic
from typing import Any

from p2pfl.errors import RunFolderError
from p2pfl.run_folder.folder import PeerFolder

WHOLE = ("status.json", "result.json")
"""Files that are replaced or overwritten."""
GROWING = ("metrics.jsonl", "chaos.jsonl", "output.log")
"""Files that are appended to."""
REPLACED = "metrics.jsonl"
"""The one of them that a peer replaces when it resumes (``metrics.truncate``)."""
LOG, ROTATED = "peer.log", "peer.log.1"
CHUNK = 1 << 19
"""Most bytes in one event."""
MAX_WHOLE = 64 << 20
"""Most bytes of a file that is sent whole; results of thousands of neighbors have a few MB."""


def inside(root: Path, path: str) -> Path:
    """Return ``root / path``. Raises RunFolderError if the path leaves the folder."""
    parts = PurePosixPath(path).parts
    if not parts or path.startswith("/") or ".." in parts or "\0" in path:
        raise RunFolderError(f"{path!r} is not a path inside the run folder")
    return root.joinpath(*parts)


class SentFiles:
    """What the launcher has of one peer's files.

    Args:
        have: sizes of the files that the launcher has already, by path relative to the run folder. REPLACED is
            sent from its start all the same: what the launcher has may be of an earlier file.
    """

    def __init__(self, files: PeerFolder, have: Mapping[str, int]) -> None:
        self._files = files
        self._prefix = f"peers/{files.root.name}"
        self._versions: dict[str, tuple[int, int, int] | None] = dict.fromkeys(WHOLE)
        """Inode, time and size of the files as sent whole."""
        self._sizes = {name: have.get(f"{self._prefix}/{name}", 0) for name in (*GROWING, LOG)}
        self._sizes[REPLACED] = 0
        self._inodes: dict[str, int] = {}
        """Inodes of the files as sent."""

    def changes(self) -> Iterator[dict[str, Any]]:
        """Yield the events that bring the launcher up to date. The result comes before the status."""
        yield from self._log()
        for name in GROWING:
            yield from self._growth(name, name)
        for name in reversed(WHOLE):
            path = self._files.root / name
            try:
                found = path.stat()
            except OSError:
                if self._versions[name] is not None:
                    self._versions[name] = None
                    yield self._event(name, 0, None)
                continue
            version = found.st_ino, found.st_mtime_ns, found.st_size
            if version != self._versions[name] and found.st_size <= MAX_WHOLE:
                with suppress(OSError):
                    yield self._event(name, 0, path.read_bytes())
                    self._versions[name] = version

    def _log(self) -> Iterator[dict[str, Any]]:
        with suppress(OSError):
            inode = (self._files.root / LOG).stat().st_ino
            if self._inodes.get(LOG, inode) != inode:  # it was rotated
                yield from self._growth(LOG, ROTATED)
                yield {**self._event(LOG, 0, b""), "rotate": True}
                self._sizes[LOG], self._inodes[LOG] = 0, inode
        yield from self._growth(LOG, LOG)

    def _growth(self, name: str, source: str) -> Iterator[dict[str, Any]]:
        """Yield what was appended to ``name``, reading it from ``source``."""
        with suppress(OSError), (self._files.root / source).open("rb") as file:
            found = os.fstat(file.fileno())
            size, inode = found.st_size, found.st_ino
            if size < self._sizes[name] or self._inodes.get(name, inode) != inode:  # another file
                self._sizes[name] = 0
            self._inodes[name] = inode
            file.seek(self._sizes[name])
            while self._sizes[name] < size and (chunk := file.read(min(CHUNK, size - self._sizes[name]))):
                yield self._event(name, self._sizes[name], chunk)
                self._sizes[name] += len(chunk)

    def _event(self, name: str, at: int, data: bytes | None) -> dict[str, Any]:
        encoded = None if data is None else base64.b64encode(data).decode()
        return {"event": "file", "path": f"{self._prefix}/{name}", "at": at, "data": encoded, "clock": monotonic()}
