"""Copies of a peer's checkpoints in a shared folder or an object storage, for hosts that do not come back.

A peer that starts without its files, on another host, restores the newest complete copy. Below ``checkpoint_copies``
of the run file:

    <run id>/03/00000012-<token>.json               list of the copy of the checkpoint after 12 rounds; written last
    <run id>/03/00000012-<token>-checkpoint.pt
    <run id>/03/00000012-<token>-metrics.jsonl
    <run id>/03/<token>-journal-81-4096             the first 4096 bytes of segment 81 of the journal

Each process has a token. It never changes what is written, so a copy is complete once its list exists, on any file
system. The last two copies are kept, like the last two checkpoints. A process deletes only what it has written, or
found at its start: one that was cut off and still runs cannot delete what its successor writes.
"""

from __future__ import annotations

import json
import logging
import os
import re
import secrets
from collections.abc import Iterable, Mapping
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Event, Thread
from time import monotonic
from typing import Any, Self

from p2pfl.errors import CheckpointError, RunFolderError, first_line
from p2pfl.run_folder.files import NewFile, read_json, write_errors, write_json
from p2pfl.run_folder.folder import PeerFolder
from p2pfl.session import checkpoint

MARKER = "copied.json"
"""In the peer's folder: the last copy that was made of it, or that it was restored from."""
CHUNK = 1 << 22
"""Bytes copied at once."""
STUCK = 120.0
"""Seconds without progress after which an attempt is given up: clients of storages may try for longer."""
PAUSE, MAX_PAUSE = 5.0, 300.0
"""A failed attempt is followed by a pause of this many times the seconds that it took, at most of the second number:
a storage that cannot be reached must not slow down training."""
CHECKPOINT, METRICS, JOURNAL = "checkpoint.pt", "metrics.jsonl", "journal/"
_LIST = re.compile(r"\d{8,}-[0-9a-f]{16}\.json")
_OBJECT = re.compile(r"[0-9a-f][0-9a-z.-]*")


class _Incomplete(Exception):
    """An object of a copy is missing or too short."""


@dataclass(frozen=True)
class _Copy:
    """A complete copy.

    Attributes:
        name: of its list.
        files: {path in the peer's folder: (object, bytes)}.
    """

    name: str
    files: dict[str, tuple[str, int]]

    @classmethod
    def parse(cls, name: str, text: bytes) -> Self | None:
        """Return the copy of a list; None if the list is damaged, or names a file that is not of a copy."""
        try:
            files = {path: (str(entry[0]), int(entry[1])) for path, entry in json.loads(text)["files"].items()}
        except (ValueError, TypeError, LookupError, AttributeError):
            return None
        objects = all(_OBJECT.fullmatch(stored) for stored, _ in files.values())
        return cls(name, files) if CHECKPOINT in files and objects and all(map(_is_copied, files)) else None

    @property
    def objects(self) -> set[str]:
        return {self.name, *(stored for stored, _ in self.files.values())}


def _is_copied(path: str) -> bool:
    return path in (CHECKPOINT, METRICS) or (path.startswith(JOURNAL) and path.removeprefix(JOURNAL).isdecimal())


class CheckpointCopies:
    """The copies of one peer's checkpoints.

    Args:
        url: folder of the copies: a path, or a URL of a file system that fsspec supports.
        run_id: id of the run.
        folder: the peer's files.
        log: the peer's log.
    """

    def __init__(self, url: str, run_id: str, folder: PeerFolder, log: logging.Logger) -> None:
        self.url = url
        self._below = f"{run_id}/{folder.root.name}"
        self._folder = folder
        self._log = log
        self._token = secrets.token_hex(8)
        self._kept: list[_Copy] = []
        """The last two, oldest first."""
        self._removable: set[str] = set()
        """Objects that this process has written, or found at its start."""
        self._opened: tuple[int, Any, str] | None = None
        """By which process, and what it has opened."""
        self._next_attempt = 0.0
        self._attempt: Thread | None = None
        self._progress = 0.0
        """When the attempt last got on."""
        self._left_others = False
        """Whether old copies could not be deleted."""

    def _open(self) -> tuple[Any, str]:
        """Return the file system, and the folder of this peer in it."""
        if self._opened is None or self._opened[0] != os.getpid():  # one with a thread is of no use in a fork
            from fsspec.core import url_to_fs

            fs, root = url_to_fs(self.url)
            self._opened = os.getpid(), fs, f"{root.rstrip('/')}/{self._below}"
        return self._opened[1:]

    @property
    def newest(self) -> str:
        """The list of the last copy; empty if there is none."""
        return self._kept[-1].name if self._kept else ""

    @property
    def rounds_done(self) -> int:
        """Rounds in the last copy; -1 if there is none."""
        return int(self.newest.partition("-")[0]) if self.newest else -1

    # ---- making

    def save(self, rounds_done: int, segments: Mapping[int, int], *, last: bool = False) -> bool:
        """Copy the last checkpoint, unless an attempt has just failed. On any thread.

        Args:
            rounds_done: its rounds.
            segments: {segment of the journal: bytes that it refers to}. The files may be longer, as they grow.
            last: it is the last one of this process: copy it in any case.

        Returns:
            Whether the copy is complete. If not, the log says why, and neighbors must keep what this peer would need.
        """
        began = monotonic()
        if began < self._next_attempt and not last:
            return False
        if self._attempt is not None and self._attempt.is_alive():  # given up, and still not back
            return False
        errors: list[str] = []
        given_up, self._progress = Event(), began
        self._attempt = Thread(target=self._try, args=(rounds_done, segments, given_up, errors), daemon=True)
        self._attempt.start()
        while self._attempt.is_alive():
            self._attempt.join(max(0.01, self._progress + STUCK - monotonic()))
            if self._attempt.is_alive() and monotonic() - self._progress >= STUCK:
                given_up.set()
                errors.append(f"no progress within {STUCK:.0f} s")
                break
        if not errors:
            return True
        pause = min(MAX_PAUSE, PAUSE * (monotonic() - began))
        self._next_attempt = monotonic() + pause
        text = "checkpoint not copied t=%d to=%s: %s; trying again with the next one in %.0f s or later"
        self._log.warning(text, rounds_done - 1, self.url, errors[-1], pause)
        return False

    def _try(self, rounds_done: int, segments: Mapping[int, int], given_up: Event, errors: list[str]) -> None:
        try:
            self._save(rounds_done, segments, given_up)
        except Exception as error:  # of any type, by file system
            errors.append(first_line(error))

    def _save(self, rounds_done: int, segments: Mapping[int, int], given_up: Event) -> None:
        fs, root = self._open()
        prefix = f"{rounds_done:08d}-{self._token}"
        if self._kept and self._kept[-1].name == f"{prefix}.json":
            return  # the last checkpoint of a run is written twice
        fs.makedirs(root, exist_ok=True)
        present = set().union(*(copy.objects for copy in self._kept))
        sources = {CHECKPOINT: self._folder.checkpoint, METRICS: self._folder.metrics}
        sources |= {f"{JOURNAL}{segment}": self._folder.journal / str(segment) for segment in sorted(segments)}
        sizes = {f"{JOURNAL}{segment}": size for segment, size in segments.items()}
        files = {}
        for path, source in sources.items():
            with suppress(FileNotFoundError):  # there are no records yet, or the segment was released meanwhile
                size = sizes.get(path, source.stat().st_size)
                stored = f"{self._token}-journal-{source.name}-{size}" if path in sizes else f"{prefix}-{path}"
                if path not in sizes or stored not in present:
                    self._removable.add(stored)
                    self._put(source, size, f"{root}/{stored}")
                files[path] = stored, size
        if given_up.is_set():  # segments may have been released meanwhile
            return
        newest = _Copy(f"{prefix}.json", files)
        self._removable.add(newest.name)
        fs.pipe_file(f"{root}/{newest.name}", json.dumps({"files": files}).encode())
        write_json(self._folder.root / MARKER, {"copy": newest.name})
        self._kept = [*self._kept[-1:], newest]
        try:
            self._remove_others()
        except Exception as error:  # the copy is complete
            log = self._log.debug if self._left_others else self._log.warning
            self._left_others = True
            log("old copies of checkpoints not deleted: %s", error)

    def _put(self, source: Path, size: int, to: str) -> None:
        """Copy the first ``size`` bytes of a file, which may be growing."""
        self._progress = monotonic()
        with source.open("rb") as reader, self._open()[0].open(to, "wb") as writer:
            while size and (chunk := reader.read(min(size, CHUNK))):
                writer.write(chunk)
                size -= len(chunk)
                self._progress = monotonic()

    def _remove_others(self) -> None:
        fs, root = self._open()
        superfluous = self._removable.difference(*(copy.objects for copy in self._kept))
        for name in sorted(superfluous, key=lambda name: not _LIST.fullmatch(name)):  # lists first
            with suppress(FileNotFoundError):
                fs.rm_file(f"{root}/{name}")
            self._removable.discard(name)

    # ---- restoring

    def restore(self) -> bool:
        """Restore the newest complete copy, unless the folder's checkpoint is as new. Return whether it was restored.

        Raises:
            CheckpointError: the copies cannot be read, or none is complete.
            WriteError: the folder cannot be written.
        """
        try:
            found = self._find()
        except Exception as error:  # of any type, by file system
            problem = f"checkpoint_copies {self.url}: cannot be read: {first_line(error)}"
            raise CheckpointError(f"{problem}; make it reachable from this host, then resume the run") from error
        if not found or self._has(found[-1]):
            self._kept = found[-2:]
            return False
        problems = []
        for position in reversed(range(len(found))):
            try:
                self._fetch(found[position])
            except _Incomplete as error:
                problems.append(f"{found[position].name}: {error}")
                continue
            self._kept = found[max(0, position - 1) : position + 1]
            self._log.info("checkpoint restored copy=%s from=%s", found[position].name, self.url)
            return True
        problem = f"checkpoint_copies {self.url}: no copy of peer {self._folder.peer} is complete"
        raise CheckpointError(f"{problem}: {'; '.join(problems)}")

    def _find(self) -> list[_Copy]:
        """Return the copies that have a readable list, oldest first."""
        fs, root = self._open()
        fs.invalidate_cache()
        try:
            names = {path.rstrip("/").rpartition("/")[2] for path in fs.ls(root, detail=False)}
        except FileNotFoundError:
            return []
        self._removable |= {name for name in names if _OBJECT.fullmatch(name)}
        lists = sorted(filter(_LIST.fullmatch, names))
        return [copy for name in lists if (copy := _Copy.parse(name, fs.cat_file(f"{root}/{name}"))) is not None]

    def _has(self, copy: _Copy) -> bool:
        """Return whether the folder has a checkpoint, and this is the last copy of it."""
        path = self._folder.checkpoint
        if not (path.exists() or checkpoint.previous(path).exists()):
            return False
        try:
            marker = read_json(self._folder.root / MARKER)
        except RunFolderError:
            return False
        return marker is not None and marker.get("copy") == copy.name

    def _fetch(self, copy: _Copy) -> None:
        """Replace the folder's checkpoint and journal. Raises _Incomplete, or WriteError."""
        folder = self._folder
        with write_errors(folder.root):
            folder.journal.mkdir(mode=0o700, exist_ok=True)
        # The checkpoint last: until then, what is there counts. Its store deletes the segments that it does not name.
        for path in sorted(copy.files, key=lambda path: path == CHECKPOINT):
            self._get(*copy.files[path], folder.root / path)
        with write_errors(folder.root):
            checkpoint.previous(folder.checkpoint).unlink(missing_ok=True)
        write_json(folder.root / MARKER, {"copy": copy.name})

    def _get(self, stored: str, size: int, target: Path) -> None:
        fs, root = self._open()
        with write_errors(target), closing(NewFile(target)) as file:
            at = 0
            for chunk in _chunks(fs, f"{root}/{stored}"):
                file.write(chunk, at)
                at += len(chunk)
            if at != size:
                raise _Incomplete(f"{stored} has {at} bytes instead of {size}")
            if target == self._folder.checkpoint and not checkpoint.is_intact(Path(file.temporary)):
                raise _Incomplete(f"{stored} is damaged: checksum mismatch")
            file.replace()


def _chunks(fs: Any, path: str) -> Iterable[bytes]:
    """Yield the content of an object. Raises _Incomplete for any error of the file system."""
    try:
        with fs.open(path, "rb") as reader:
            while chunk := reader.read(CHUNK):
                yield chunk
    except Exception as error:
        raise _Incomplete(first_line(error)) from error
