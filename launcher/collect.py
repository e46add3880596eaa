"""``p2pfl collect``: the folders of peers that run elsewhere, put together into one run folder, a *collection*.

Everything is fetched first, beside what is there, and looked at; then peer by peer takes its place. Whenever that is
broken off, the collection is whole, and holds of each peer the old or the new.
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

from launcher import text
from launcher.errors import CollectError
from launcher.sources import Folder, Place, Source, parse
from launcher.summary import Summary, settings, summarize
from p2pfl.errors import RunFolderError
from p2pfl.runfolder import Origin, PeerFolder, PeerId, RunFolder, write_atomically

FETCHED, BEFORE = ".fetched", ".before"
"""In a collection while it is worked on: what has been fetched, and the folder of the peer that is being replaced."""
HALF_WRITTEN = ".*.*.tmp"
OF_A_HOST = ("host", "cores", "launcher_pid", "collected")
"""Keys of run.json that say nothing of the run as a whole."""


@dataclass(frozen=True)
class Collected:
    """What came of it. ``unread`` are the sources that could not be read, each with the reason."""

    folder: RunFolder
    summary: Summary
    unread: dict[str, str]


@dataclass(frozen=True)
class Fetched:
    """A run folder as it was found in one place, with some of the peers or all."""

    folder: RunFolder
    place: str
    about: dict[str, Any]

    @property
    def identity(self) -> tuple[str, str | None]:
        """What the folders of one run have in common: its id, and the digest of its run file."""
        return self.about["id"], self.about.get("digest")


@dataclass(frozen=True)
class Candidate:
    """A peer's folder that may become part of the collection."""

    peer: PeerFolder
    origin: Origin

    @property
    def rounds_done(self) -> int:
        last = self.peer.result() or self.peer.status()
        return last.rounds_done if last else 0

    def __str__(self) -> str:
        return f"{self.origin.source} (rounds done: {self.rounds_done})"


def collect(into: Path, sources: Sequence[str], say: Callable[[str], None], checkpoints: bool = False) -> Collected:
    """Gather the peers' folders from ``sources`` into the collection ``into``, new or one to bring up to date.

    Args:
        sources: see launcher.sources; none: those of the last time.
        say: is told what was found where, and what could not be read.

    Raises:
        CollectError: nothing was found, or folders of different runs; ``into`` is as it was then.
    """
    with _opened(into) as (root, about):
        texts = list(sources) or (about or {}).get("collected", {}).get("sources", [])
        if not texts:
            raise CollectError(f"{into}: no collection to bring up to date: say where the peers' folders are")
        given = [parse(one) for one in texts]
        unread: dict[str, str] = {}
        found = list(_fetch(root, given, checkpoints, unread, say))
        if not found:
            reasons = "".join(f"\n{what}: {why}" for what, why in unread.items())
            raise CollectError(f"no run folder was found; nothing is collected{reasons}")
        before = [Fetched(RunFolder(root), str(into), about)] if about is not None else []
        _check_same_run([*before, *found])
        folder = _folder(root, [*before, *found], sources=[str(one) for one in given])
        for candidate in _best(folder, found, say):
            _replace(folder.peer(candidate.peer.peer), candidate)
    return Collected(folder, summarize(folder), unread)


# ---- fetching ------------------------------------------------------------------------------------------------


def _fetch(
    root: Path, sources: Sequence[Source], checkpoints: bool, unread: dict[str, str], say: Callable[[str], None]
) -> Iterator[Fetched]:
    """Everything that can be had, each place's in a folder of its own; what cannot goes to ``unread``."""
    places: dict[str, Place] = {}
    for source in sources:
        try:
            places |= {str(place): place for place in source.places()}
        except CollectError as error:
            unread[str(source)] = str(error)
    for number, (name, place) in enumerate(places.items()):
        if isinstance(place, Folder) and place.root.resolve() == root:
            continue  # the collection lies among what it is made of
        into = root / FETCHED / str(number)
        into.mkdir()
        try:
            place.fetch(into, checkpoints)
            found = list(_run_folders(into, name))
            if not found:
                raise CollectError("no run folder there")
        except (CollectError, RunFolderError) as error:
            unread[name] = str(error).replace(f"{into}/", "")
            continue
        for one in found:
            peers = [place.peer for place in one.folder.peers()]
            noun = "peer" if len(peers) == 1 else "peers"
            say(f"{one.place}: {noun} {text.ids(peers, most=len(peers)) or 'none yet'}")
            yield one


def _run_folders(root: Path, name: str) -> Iterator[Fetched]:
    """What has come from one place. Raises RunFolderError if it is no run."""
    roots: list[Path] = []
    for path in sorted(root.rglob("run.json")):
        if not any(outer in path.parents for outer in roots):
            roots.append(path.parent)
    for one in roots:
        folder = RunFolder.open(one)
        about = folder.about
        try:
            datetime.fromisoformat(about["started"])
            whole = isinstance(about["id"], str) and isinstance(settings(folder)["peers"], int)
        except (KeyError, TypeError, ValueError):
            whole = False
        if not whole:
            raise RunFolderError("run.json lacks the run's id or its start, or run.yaml the number of peers")
        (one / "peers").mkdir(exist_ok=True)
        yield Fetched(folder, name if len(roots) == 1 else f"{name}/{one.relative_to(root)}", about)


def _check_same_run(found: Sequence[Fetched]) -> None:
    first = found[0]
    for other in found[1:]:
        if first.identity != other.identity:
            (run, digest), (another, changed) = first.identity, other.identity
            what = "are different runs" if run != another else "are of different run files"
            one, two = (run, another) if run != another else (digest, changed)
            raise CollectError(f"{first.place} ({one}) and {other.place} ({two}) {what}; nothing is collected")


# ---- the collection ------------------------------------------------------------------------------------------


@contextmanager
def _opened(into: Path) -> Iterator[tuple[Path, dict[str, Any] | None]]:
    """The folder ``into``, for us alone, with an empty FETCHED in it; and what its run.json says, if it has one.

    Raises CollectError if it is something else than a collection or empty.
    """
    try:
        new = not into.exists()
        into.mkdir(parents=True, exist_ok=True)
        root = into.resolve()
        lock = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise CollectError(f"{into}: cannot be made: {error.strerror}") from None
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise CollectError(f"{into}: another `p2pfl collect` is at work here") from None
        about = RunFolder(root).about if (root / "run.json").exists() else None
        if about is not None and "collected" not in about:
            raise CollectError(f"{into}: the peers of this run write here themselves; give a new folder")
        if about is None and set(root.iterdir()) - {root / FETCHED, *root.glob(HALF_WRITTEN)}:
            raise CollectError(f"{into}: not empty and no collection; give a new folder")
        _clear_up(root)
        try:
            (root / FETCHED).mkdir()
            yield root, about
        except OSError as error:
            raise CollectError(f"{error.filename or root}: cannot be written: {error.strerror}") from None
        finally:
            shutil.rmtree(root / FETCHED, ignore_errors=True)
            if new:
                with suppress(OSError):  # unless it is empty
                    root.rmdir()
    finally:
        os.close(lock)


def _clear_up(root: Path) -> None:
    """Remove what an earlier process had begun when it was killed, and undo a replacement in the middle of it."""
    shutil.rmtree(root / FETCHED, ignore_errors=True)
    for left in (*root.glob(HALF_WRITTEN), *root.glob(f"peers/*/{HALF_WRITTEN}")):
        left.unlink()
    for before in root.glob(f"peers/{BEFORE}-*"):
        place = before.with_name(before.name.removeprefix(f"{BEFORE}-"))
        if place.exists():
            shutil.rmtree(before)
        else:
            before.rename(place)


def _folder(root: Path, found: Sequence[Fetched], sources: list[str]) -> RunFolder:
    """The collection with a place for every peer, and run.json and run.yaml as they are in all of ``found``."""
    folder = RunFolder(root)
    about = {key: value for key, value in found[0].about.items() if key not in OF_A_HOST}
    started = (one.about["started"] for one in found)
    about["started"] = min(started, key=lambda time: datetime.fromisoformat(time).timestamp())
    now = _now()
    folder.write_about({**about, "collected": {"at": now, "sources": sources}})
    for peer in range(settings(found[-1].folder)["peers"]):
        place = folder.peer(peer)
        if place.origin() is None:
            place.root.mkdir(parents=True, exist_ok=True)
            place.write_origin(Origin(None, now))
    # Last: a folder with a run.yaml in it is a run.
    if not folder.run_file.exists():
        write_atomically(folder.run_file, found[-1].folder.run_file.read_bytes(), durable=True)
    return folder


def _best(folder: RunFolder, found: Sequence[Fetched], say: Callable[[str], None]) -> Iterator[Candidate]:
    """Of each peer that is in several places the folder with more rounds done, if that is none that we have.

    What has been collected before counts as a place too, unless it comes from one of those looked at now.
    """
    now = _now()
    peers = settings(folder)["peers"]
    by_peer: dict[PeerId, list[Candidate]] = {}
    for one in found:
        origin = Origin(one.place, now, one.about)
        for place in one.folder.peers():
            if place.peer < peers:
                by_peer.setdefault(place.peer, []).append(Candidate(place, origin))
    for peer, candidates in sorted(by_peer.items()):
        have = folder.peer(peer)
        before = have.origin()
        if before is not None and before.source not in (None, *(one.origin.source for one in candidates)):
            candidates = [*candidates, Candidate(have, before)]
        best = max(candidates, key=lambda one: one.rounds_done)  # of equals the first given
        if others := [str(one) for one in candidates if one is not best]:
            say(f"peer {peer}: from {best}, not from {', '.join(others)}")
        if best.peer is not have:
            yield best


def _replace(place: PeerFolder, candidate: Candidate) -> None:
    """Put a fetched folder in the place of the one that is there."""
    new, before = candidate.peer.root, place.root.with_name(f"{BEFORE}-{place.root.name}")
    candidate.peer.write_origin(candidate.origin)
    place.root.rename(before)
    try:
        new.rename(place.root)
    except OSError:
        before.rename(place.root)
        raise
    shutil.rmtree(before)


def _now() -> str:
    return datetime.now().astimezone().isoformat(timespec="seconds")
