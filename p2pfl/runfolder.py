"""The run folder: where one launch keeps everything, and the only thing its processes share besides sockets.

    runs/mesh20-20261121-093000/
        run.yaml            the resolved run file; can be launched again as it is
        run.json            run id, versions, command line, host           (RunFolder.about)
        addresses/03        where peer 3 listens, e.g. tcp://127.0.0.1:40123
        slots/alpha-0       locks that bound how many peers compute at once on host alpha
        summary.json        the table printed at the end
        peers/03/
            peer.log        one line per event, for people
            metrics.jsonl   one RoundRecord per line, for programs         (p2pfl.metrics)
            status.json     what the peer is doing now                     (Status)
            result.json     how it ended                                   (Result)
            checkpoint.pt   everything needed to go on after the last checkpointed round
            checkpoint-previous.pt  the one before, should that one be damaged   (p2pfl.checkpoint)
            output.log      anything that wrote to stdout or stderr
            health          a socket at which the peer can be asked how it does     (peers.health)
            origin.json     in a collection only: whence and when              (Origin)

A *collection* is a run folder that `p2pfl collect` has put together from those of peers that run elsewhere: nobody
else writes into it, and no process on this host is a peer of it.

Files that others read while they change (addresses, status, result, summary) are replaced atomically. What cannot be
written raises Unwritable. A peer goes on without its status file and its log; without anything else it ends.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar

from p2pfl.errors import RunFolderError, Unwritable

PeerId = int
Buffer = bytes | memoryview
Phase = Literal["starting", "queued", "training", "waiting", "evaluating", "finished", "stopped", "failed"]
"""``queued`` waits for a compute slot, ``waiting`` for neighbours; the last three are final."""

Written = TypeVar("Written", "Status", "Result", "Origin")

FINAL: tuple[Phase, ...] = ("finished", "stopped", "failed")


@dataclass
class Status:
    """What a peer is doing now. ``t`` is the round it is in; ``rounds_done`` counts completed rounds."""

    peer: PeerId
    pid: int
    phase: Phase = "starting"
    t: int = 0
    rounds_done: int = 0
    waiting_for: list[PeerId] = field(default_factory=list)
    accuracy: float | None = None
    bytes_out: int = 0
    bytes_in: int = 0
    error: str = ""


@dataclass
class Result:
    """How a peer ended.

    ``accuracy``, ``correct`` and ``samples`` are the last evaluation on the peer's own test split, ``best`` the
    highest accuracy of the run and ``best_round`` its round. ``out`` and ``inn`` count
    ``{neighbour: {kind: [messages, payload bytes, header bytes]}}`` over the whole run. ``weights`` is the
    last row of mixing weights, if the method has one; ``group`` the peer's group in the partition. ``measures`` are
    accuracies of what else the method evaluates, by name. ``missing`` counts messages that did not come, ``left_out``
    rounds that the others went through while this peer was gone.
    """

    peer: PeerId
    phase: Phase
    rounds_done: int
    digest: str
    model: str
    group: int
    accuracy: float | None = None
    loss: float | None = None
    correct: int = 0
    samples: int = 0
    global_accuracy: float | None = None
    measures: dict[str, float] = field(default_factory=dict)
    best: float | None = None
    best_round: int | None = None
    out: dict[str, dict[str, list[int]]] = field(default_factory=dict)
    inn: dict[str, dict[str, list[int]]] = field(default_factory=dict)
    weights: dict[str, float] | None = None
    missing: int = 0
    left_out: int = 0
    seconds: dict[str, float] = field(default_factory=dict)
    error: str = ""


@dataclass(frozen=True)
class Origin:
    """Where a peer's folder in a collection comes from.

    ``source`` is what was given to `p2pfl collect`, None as long as nothing was found of this peer; ``at`` the time
    of collecting (ISO 8601); ``about`` the run.json beside the peer's own folder, which names its host and versions.
    """

    source: str | None
    at: str
    about: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class PeerFolder:
    """One peer's files."""

    root: Path
    peer: PeerId

    @property
    def log(self) -> Path:
        return self.root / "peer.log"

    @property
    def metrics(self) -> Path:
        return self.root / "metrics.jsonl"

    @property
    def checkpoint(self) -> Path:
        return self.root / "checkpoint.pt"

    @property
    def output(self) -> Path:
        return self.root / "output.log"

    @property
    def chaos(self) -> Path:
        """What was injected into this peer, a JSON object a line."""
        return self.root / "chaos.jsonl"

    def injected(self) -> list[dict[str, Any]]:
        return read_lines(self.chaos)

    def write_status(self, status: Status) -> None:
        write_json(self.root / "status.json", asdict(status))

    def status(self) -> Status | None:
        """The peer's status; None before it wrote one, or if that is damaged, e.g. empty after a power cut."""
        return _whole(Status, self.root / "status.json")

    def write_result(self, result: Result) -> None:
        write_json(self.root / "result.json", asdict(result))

    def result(self) -> Result | None:
        """How the peer ended; None while it has not, or if that is damaged."""
        return _whole(Result, self.root / "result.json")

    def write_origin(self, origin: Origin) -> None:
        write_json(self.root / "origin.json", asdict(origin))

    def origin(self) -> Origin | None:
        """None where the peer itself writes: everywhere but in a collection."""
        return _whole(Origin, self.root / "origin.json")

    def clear_result(self) -> None:
        """Forget how an earlier process of this peer ended; called when a new one takes over."""
        with writing(self.root / "result.json") as path:
            path.unlink(missing_ok=True)

    def sweep(self) -> None:
        """Remove what an earlier process of this peer had begun to write when it was killed."""
        for left in (*self.root.glob(".*.tmp"), *self.root.parents[1].glob(f"addresses/.{self.root.name}.*.tmp")):
            with writing(left):
                left.unlink(missing_ok=True)


@dataclass(frozen=True)
class RunFolder:
    """One launch on disk. ``create`` makes a new one, ``open`` finds an existing one."""

    root: Path

    @classmethod
    def create(cls, root: Path, peers: Iterable[PeerId], *, again: bool = False) -> RunFolder:
        """Make the folder, with a place for each of ``peers``. It must be new or empty, unless it is made ``again``.

        Raises RunFolderError if it cannot be made or is in use.
        """
        try:
            root.mkdir(parents=True, exist_ok=True)
            if any(root.iterdir()) and not again:
                raise RunFolderError(f"{root}: not empty; give a new or an empty folder")
            folder = cls(root.resolve())
            for place in (folder.addresses, folder.slots, *(folder.peer(peer).root for peer in peers)):
                place.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise RunFolderError(f"{root}: cannot be made: {error.strerror}") from error
        return folder

    @classmethod
    def open(cls, root: Path) -> RunFolder:
        """An existing run. Raises RunFolderError if there is none."""
        if not (root / "run.yaml").is_file():
            raise RunFolderError(f"{root}: no run folder (no run.yaml in it); `p2pfl list` shows the runs")
        return cls(root.resolve())

    def own(self) -> RunFolder:
        """This folder, if peers on this host may write into it. Raises RunFolderError for a collection."""
        if "collected" in self.about:
            raise RunFolderError(
                f"{self.root}: a collection: its peers live, or lived, elsewhere, and are started and stopped there"
            )
        return self

    @property
    def run_file(self) -> Path:
        return self.root / "run.yaml"

    @property
    def addresses(self) -> Path:
        return self.root / "addresses"

    @property
    def slots(self) -> Path:
        return self.root / "slots"

    @property
    def about(self) -> dict[str, Any]:
        """Contents of run.json: ``id`` (16 hex digits), ``started`` (ISO 8601), ``command``, versions, host; and in a
        collection ``collected``: its ``sources``, and the time of the last one (``at``)."""
        found = read_json(self.root / "run.json")
        if found is None:
            raise RunFolderError(f"{self.root}: run.json is missing")
        return found

    def write_about(self, about: dict[str, Any]) -> None:
        write_json(self.root / "run.json", about, durable=True)

    @property
    def summary(self) -> Path:
        return self.root / "summary.json"

    def peer(self, peer: PeerId) -> PeerFolder:
        return PeerFolder(self.root / "peers" / f"{peer:02d}", peer)

    def peers(self) -> Iterator[PeerFolder]:
        """All peers' folders, ascending."""
        try:
            ids = sorted(int(entry.name) for entry in (self.root / "peers").iterdir() if entry.name.isdigit())
        except OSError as error:
            raise RunFolderError(f"{self.root}: no peers folder: {error.strerror}") from error
        return (self.peer(peer) for peer in ids)


@contextmanager
def writing(path: Path) -> Iterator[Path]:
    """Turns what goes wrong with ``path`` inside into Unwritable."""
    try:
        yield path
    except OSError as error:
        raise Unwritable(path, error) from error


def write_atomically(path: Path, data: Buffer, *, durable: bool = False, keep: Path | None = None) -> None:
    """Replace ``path`` as a whole: a reader sees the old bytes or the new ones, never a part.

    ``durable`` also waits until the disk has it, so that it survives a power cut. ``keep`` is where the old file
    goes; then a reader may also see none at ``path``, for a moment or after a crash, but the old one at ``keep``.
    Raises Unwritable.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with writing(path):
        try:
            with temporary.open("wb") as file:
                file.write(data)
                if durable:
                    file.flush()
                    os.fsync(file.fileno())
            if keep is not None:
                with suppress(FileNotFoundError):
                    path.replace(keep)
            temporary.replace(path)
            if durable:
                _sync(path.parent)
        except OSError:
            with suppress(OSError):
                temporary.unlink(missing_ok=True)
            raise


def append_line(path: Path, line: str, *, durable: bool = False) -> None:
    """Add a line to a file, or nothing. Raises Unwritable."""
    with writing(path), path.open("ab", buffering=0) as file:
        before = os.fstat(file.fileno()).st_size
        rest = memoryview(f"{line}\n".encode())
        try:
            while rest:
                rest = rest[file.write(rest) :]
            if durable:
                os.fsync(file.fileno())
        except OSError:
            with suppress(OSError):
                file.truncate(before)
            raise


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The JSON objects in a file, one a line, up to the first line that is damaged or cut off by a crash; none if
    there is no such file. Raises RunFolderError if it cannot be read."""
    found: list[dict[str, Any]] = []
    for line in (_read(path) or b"").splitlines(keepends=True):
        value = _object(line) if line.endswith(b"\n") else None
        if value is None:
            break
        found.append(value)
    return found


def sync(path: Path) -> None:
    """Wait until the disk has the content of ``path``, if there is such a file; not necessarily its name. Raises
    Unwritable."""
    with writing(path), suppress(FileNotFoundError):
        _sync(path)


def _sync(path: Path) -> None:
    """Of a folder: until the disk has the names in it as they are now."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_json(path: Path, value: Any, *, durable: bool = False) -> None:
    write_atomically(path, (json.dumps(value) + "\n").encode(), durable=durable)


def read_json(path: Path) -> dict[str, Any] | None:
    """The JSON object in ``path``, or None if there is no such file. Raises RunFolderError if it is damaged."""
    content = _read(path)
    if content is None:
        return None
    value = _object(content)
    if value is None:
        raise RunFolderError(f"{path}: damaged: not a JSON object")
    return value


def _read(path: Path) -> bytes | None:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise RunFolderError(f"{path}: cannot be read: {error.strerror}") from error


def _object(text: bytes) -> dict[str, Any] | None:
    """None if it is something else."""
    try:
        value = json.loads(text)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def _whole(sort: type[Written], path: Path) -> Written | None:
    """What was written as ``sort``; None if there is no such file, or something else is in it: a record of that kind
    is for whoever looks, and nobody fails for the lack of it."""
    try:
        return sort(**(read_json(path) or {}))
    except (RunFolderError, TypeError):
        return None
