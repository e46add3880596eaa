"""``p2pfl collect``: combine copies of the run folders of peers on other hosts into one run folder, a *collection*.

All files are copied into a subfolder and checked first; then the folder of each peer is replaced. Interrupted at any
point, the collection stays intact: for each peer it holds the old files or the new ones.
"""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from launcher import formatting
from launcher.collect.folders import copy_files, reject_remote, run_folders
from launcher.errors import CollectError
from launcher.facts.summary import Summary, summarize
from p2pfl import PeerId
from p2pfl.errors import RunFolderError
from p2pfl.run_folder.files import write_atomically
from p2pfl.run_folder.folder import Origin, PeerFolder, RunFolder

COPIED, BACKUP = ".copied", ".before"
"""Temporary folders in a collection: copied files, and the replaced folder of a peer."""
TEMPORARY = ".*.*.tmp"
MAX_PEERS = 10_000
"""Most peers of a run: a collection has a folder for each."""
HOST_KEYS = ("host", "hosts", "cores", "launcher_pid", "collected")
"""Keys of run.json that do not describe the run as a whole."""


@dataclass(frozen=True)
class Collected:
    """The result of a collection. ``unread`` maps each location that could not be read to the reason."""

    folder: RunFolder
    summary: Summary
    unread: dict[str, str]


@dataclass(frozen=True)
class Copied:
    """A run folder found at a location, with some or all of the peers."""

    folder: RunFolder
    location: str
    info: dict[str, Any]

    @property
    def identity(self) -> tuple[str, str | None]:
        """Run id and hash of the run file, equal in all folders of a run."""
        return self.info["id"], self.info.get("config_hash")


@dataclass(frozen=True)
class Candidate:
    """A folder of a peer that may become part of the collection."""

    files: PeerFolder
    origin: Origin

    @property
    def rounds_done(self) -> int:
        last = self.files.result() or self.files.status()
        return last.rounds_done if last else 0

    def __str__(self) -> str:
        return f"{self.origin.source} (rounds done: {self.rounds_done})"


def collect(
    into: Path, locations: Sequence[str], report: Callable[[str], None], checkpoints: bool = False
) -> Collected:
    """Collect the peers' folders from ``locations`` into the collection ``into``, which is new or gets updated.

    Args:
        locations: run folders, or folders that contain run folders, e.g. of mounted volumes; if empty, the
            previous ones.
        checkpoints: also collect checkpoints, now and in later updates.
        report: called with a line of text for each folder found, and for each choice between two.

    Raises:
        CollectError: nothing was found, or folders of different runs; ``into`` is unchanged.
    """
    with _opened(into) as (root, info):
        known = (info or {}).get("collected", {})
        for location in locations:
            reject_remote(location)
        sources = [str(Path(location).absolute()) for location in locations] or known.get("sources", [])
        checkpoints = checkpoints or known.get("checkpoints", False)  # else an update would delete them
        if not sources:
            raise CollectError(f"{into}: not a collection yet; give the folders to collect from")
        unread: dict[str, str] = {}
        found = list(_copied(root, sources, checkpoints, unread, report))
        if not found:
            reasons = "".join(f"\n{name}: {reason}" for name, reason in unread.items())
            raise CollectError(f"no run folder found, nothing collected{reasons}")
        before = [Copied(RunFolder(root), str(into), info)] if info is not None else []
        _check_same_run([*before, *found])
        folder = _update_folder(root, [*before, *found], sources, checkpoints)
        for candidate in _best(folder, found, report):
            _replace(folder.peer(candidate.files.peer), candidate)
    return Collected(folder, summarize(folder), unread)


# ---- copying -------------------------------------------------------------------------------------------------


def _copied(
    root: Path, locations: Sequence[str], checkpoints: bool, unread: dict[str, str], report: Callable[[str], None]
) -> Iterator[Copied]:
    """Copy every run folder into a separate folder and yield the copies; add failures to ``unread``."""
    folders: dict[Path, None] = {}
    for location in locations:
        try:
            folders |= dict.fromkeys(run_folders(location))
        except CollectError as error:
            unread[location] = str(error)
    for number, source in enumerate(folders):
        if source.resolve() == root:
            continue  # the collection itself, among the folders that it is made of
        into = root / COPIED / str(number)
        into.mkdir()
        try:
            copy_files(source, into, checkpoints=checkpoints)
            copied = _checked(into, str(source))
        except (CollectError, RunFolderError) as error:
            unread[str(source)] = str(error).replace(f"{into}/", "")
            shutil.rmtree(into)  # make room for the other folders
            continue
        peers = [files.peer for files in copied.folder.peers()]
        report(f"{source}: {formatting.peers(peers, most=len(peers)) if peers else 'peers none yet'}")
        yield copied


def _checked(run: Path, source: str) -> Copied:
    """Check a copied run folder. Raises RunFolderError if it is not one, or its records are invalid."""
    folder = RunFolder.open(run)
    info = folder.info
    if not _is_complete(info, folder.settings):
        raise RunFolderError(
            "run.json lacks the run's id or start time, or run.yaml the name, algorithm, seed, rounds or peers "
            f"(1 to {MAX_PEERS}) of the run"
        )
    (run / "peers").mkdir(exist_ok=True)
    for files in folder.peers():
        files.check_records()
    return Copied(folder, source, info)


def _is_complete(info: dict[str, Any], run: dict[str, Any]) -> bool:
    """Return whether run.json and run.yaml have what a collection and its summary need."""
    try:
        datetime.fromisoformat(info["started"])
        texts = info["id"], run["name"], run["algorithm"]["name"]
        numbers = run["seed"], run["rounds"], run["peers"]
    except (KeyError, TypeError, ValueError):
        return False
    valid = all(isinstance(text, str) for text in texts) and all(isinstance(number, int) for number in numbers)
    return valid and 0 < run["peers"] <= MAX_PEERS


def _check_same_run(found: Sequence[Copied]) -> None:
    first = found[0]
    for other in found[1:]:
        if first.identity != other.identity:
            (run, config), (other_run, other_config) = first.identity, other.identity
            what, mine, theirs = ("runs", run, other_run) if run != other_run else ("run files", config, other_config)
            raise CollectError(
                f"{first.location} ({mine}) and {other.location} ({theirs}) have different {what}; nothing collected"
            )


# ---- the collection ------------------------------------------------------------------------------------------


@contextmanager
def _opened(into: Path) -> Iterator[tuple[Path, dict[str, Any] | None]]:
    """Lock the folder ``into`` and create an empty COPIED in it. Yield the folder, and its run.json if it has one.

    Raises CollectError if it is neither empty nor a collection.
    """
    try:
        new = not into.exists()
        into.mkdir(parents=True, exist_ok=True)
        root = into.resolve()
        lock = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise CollectError(f"{into}: cannot be created: {error.strerror}") from None
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise CollectError(f"{into}: in use by another `p2pfl collect`") from None
        except OSError as error:  # NFS locks no folders
            raise CollectError(f"{into}: cannot be locked: {error.strerror}; collect to a local disk") from None
        info = RunFolder(root).info if (root / "run.json").exists() else None
        if info is not None and "collected" not in info:
            raise CollectError(f"{into}: a run folder that its peers write to; give a new folder")
        if info is None and set(root.iterdir()) - {root / COPIED, *root.glob(TEMPORARY)}:
            raise CollectError(f"{into}: neither empty nor a collection; give a new folder")
        _clean_up(root)
        try:
            (root / COPIED).mkdir()
            yield root, info
        except OSError as error:
            raise CollectError(f"{error.filename or root}: cannot be written: {error.strerror}") from None
        finally:
            shutil.rmtree(root / COPIED, ignore_errors=True)
            if new:
                with suppress(OSError):  # fails if the folder is not empty
                    root.rmdir()
    finally:
        os.close(lock)


def _clean_up(root: Path) -> None:
    """Remove the temporary files of an earlier process that was killed, and undo its unfinished replacement."""
    shutil.rmtree(root / COPIED, ignore_errors=True)
    for path in (*root.glob(TEMPORARY), *root.glob(f"peers/*/{TEMPORARY}")):
        path.unlink()
    for backup in root.glob(f"peers/{BACKUP}-*"):
        target = backup.with_name(backup.name.removeprefix(f"{BACKUP}-"))
        if target.exists():
            shutil.rmtree(backup)
        else:
            backup.rename(target)


def _update_folder(root: Path, found: Sequence[Copied], sources: list[str], checkpoints: bool) -> RunFolder:
    """Write run.json and run.yaml, which agree in all of ``found``, and create a folder for every peer."""
    folder = RunFolder(root)
    info = {key: value for key, value in found[0].info.items() if key not in HOST_KEYS}
    started = (copied.info["started"] for copied in found)
    info["started"] = min(started, key=lambda time: datetime.fromisoformat(time).timestamp())
    now = _now()
    folder.write_info({**info, "collected": {"at": now, "sources": sources, "checkpoints": checkpoints}})
    for peer in range(found[-1].folder.settings["peers"]):
        files = folder.peer(peer)
        if files.origin() is None:
            files.root.mkdir(parents=True, exist_ok=True)
            files.write_origin(Origin(None, now))
    # Write run.yaml last: a folder that has one counts as a run.
    if not folder.run_file.exists():
        write_atomically(folder.run_file, found[-1].folder.run_file.read_bytes(), durable=True)
    return folder


def _best(folder: RunFolder, found: Sequence[Copied], report: Callable[[str], None]) -> Iterator[Candidate]:
    """Yield for each peer the copied folder with the most rounds done, unless the collection has a better one.

    What was collected before is a candidate too, unless it came from one of the locations copied now.
    """
    now = _now()
    count = folder.settings["peers"]
    by_peer: dict[PeerId, list[Candidate]] = {}
    for copied in found:
        origin = Origin(copied.location, now, copied.info)
        for files in copied.folder.peers():
            if files.peer < count:
                by_peer.setdefault(files.peer, []).append(Candidate(files, origin))
    for peer, candidates in sorted(by_peer.items()):
        current = folder.peer(peer)
        origin_before = current.origin()
        copied_from = [candidate.origin.source for candidate in candidates]
        if origin_before is not None and origin_before.source not in (None, *copied_from):
            candidates = [*candidates, Candidate(current, origin_before)]
        best = max(candidates, key=lambda candidate: candidate.rounds_done)  # ties go to the first one given
        if others := [str(candidate) for candidate in candidates if candidate is not best]:
            report(f"peer {peer}: from {best}, not from {', '.join(others)}")
        if best.files is not current:
            yield best


def _replace(files: PeerFolder, candidate: Candidate) -> None:
    """Replace the folder of a peer in the collection by a copied one."""
    new, backup = candidate.files.root, files.root.with_name(f"{BACKUP}-{files.root.name}")
    candidate.files.write_origin(candidate.origin)
    files.root.rename(backup)
    try:
        new.rename(files.root)
    except OSError:
        backup.rename(files.root)
        raise
    shutil.rmtree(backup)


def _now() -> str:
    return datetime.now().astimezone().isoformat(timespec="seconds")  # noqa: TID251  # for people
