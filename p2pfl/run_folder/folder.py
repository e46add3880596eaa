"""The run folder: all files of one launch. Its processes share nothing else but sockets.

    runs/mesh20-20261121-093000/
        run.yaml            the resolved run file; can be launched again
        plugins/            copies of the plug-ins that run.yaml lists, which peers import
        files/              copies of other files that it names
        run.json            run id, versions, command line, host           (RunFolder.info)
        dataset.sha256      hash of the dataset that the peers learn from  (p2pfl.session.build)
        addresses/03        the address of peer 3, e.g. tcp://127.0.0.1:40123
        addresses/03.dead   the launcher no longer restarts peer 3; empty
        slots/alpha-0.fifo  locks that limit how many peers compute at once on host alpha
        summary.json        the table printed at the end
        report.html         the page of `p2pfl report`
        hosts.json          which peers run on other hosts      (launcher.facts.host_state)
        keys/               with other hosts: keys that the launcher has made, or handed out to this host; mode 0700
        peers/03/
            peer.log        one entry per event                            (p2pfl.run_folder.peer_log)
            peer.log.1      the log before, if peer.log became too large
            metrics.jsonl   one RoundRecord per line, for programs         (p2pfl.session.metrics)
            order.jsonl     which messages each round took, if rounds do not wait  (p2pfl.session.order)
            status.json     current activity                               (Status)
            result.json     final outcome                                  (Result)
            checkpoint.pt   the state after the last checkpointed round    (p2pfl.session.checkpoint)
            checkpoint-previous.pt  the checkpoint before, used if the newest is damaged
            checkpoint-damaged.pt   a checkpoint that could not be used, moved here
            journal/        sent messages that neighbors may still ask for (p2pfl.session.body_files)
            output.log      stdout and stderr
            health          socket that answers health checks              (peers.health)
            chaos.jsonl     injected faults, if the run file asks for some
            origin.json     in a collection only: where the files come from   (Origin)

A *collection* is a run folder that `p2pfl collect` assembled from the run folders of other hosts: nothing else
writes into it, and none of its peers runs on this host.

Files that are read while they change (addresses, result, summary) are replaced atomically, and so are the first and
the last status; updates in between overwrite it, since they are frequent. What cannot be written raises WriteError. A
peer continues without its status file and log; any other write error ends it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from itertools import chain
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, get_type_hints

from p2pfl import PeerId
from p2pfl.errors import RunFolderError
from p2pfl.run_folder.files import is_file, overwrite, read_json, read_lines, write_errors, write_json
from p2pfl.run_folder.json_types import mismatch

Phase = Literal["starting", "queued", "training", "waiting", "evaluating", "finished", "stopped", "failed"]
"""``queued`` waits for a compute slot, ``waiting`` for neighbors; the last three are final."""

RecordT = TypeVar("RecordT", "Status", "Result", "Origin")

PLUGINS = "plugins"
"""The subfolder with copies of plug-ins."""

FINAL: tuple[Phase, ...] = ("finished", "stopped", "failed")

Counts = Annotated[list[int], 3]
"""Messages, payload bytes, header bytes."""
LossValue = Annotated[float, math.inf]
"""May be infinite, unlike other numbers, with which summaries compute."""


@dataclass
class Status:
    """A peer's current activity.

    Attributes:
        t: its round; ``rounds_done`` counts completed rounds.
        accuracy, masked_accuracy, unmasked_accuracy: last evaluation on the local test split; the first equals the
            second or the third, as ``masked_test`` asks.
        bytes_out, bytes_in, messages_out: of the completed rounds.
        since: seconds of this host's monotonic clock when ``phase`` began; 0 if unknown.
        unread: messages that have arrived and were not yet used.
        undelivered: messages that wait to be passed to the transport, one for each connected neighbor.
        starts: how often the peer has started, this time included.
        resumes: how many of these starts followed a regular end, e.g. by `p2pfl stop`; the others followed a failure.
        tested_on: p2pfl.learning.peer_data.TestedOn of the local test split.
        skipped: what was not used in the completed rounds since it had diverged, by kind (p2pfl/outcomes.py).
        ages: median, lowest and highest age of the messages that the last completed round took, in rounds; None if it
            took none, or if rounds wait for one another.
    """

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
    since: float = 0.0
    unread: int = 0
    undelivered: int = 0
    starts: int = 0
    masked_accuracy: float | None = None
    unmasked_accuracy: float | None = None
    messages_out: int = 0
    resumes: int = 0
    tested_on: dict[str, str] = field(default_factory=dict)
    skipped: dict[str, int] = field(default_factory=dict)
    ages: Annotated[list[float], 3] | None = None

    def resumes_at_start(self) -> int:
        """Return ``resumes`` for the next process of the peer, which starts now."""
        known = self.resumes if type(self.resumes) is int else 0  # a damaged status must not stop the next process
        return known + (self.phase in ("stopped", "finished"))


@dataclass
class Result:
    """A peer's final outcome.

    Attributes:
        digest: SHA-256 of the algorithm's final state.
        group: the peer's group in the partition.
        accuracy, loss, correct, samples: last evaluation on the local test split, as ``masked_test`` asks.
        global_accuracy: last evaluation on the whole test set, if enabled.
        metrics: further metrics of the local test split, by name; None where the model has diverged.
        extra_metrics: accuracies of the algorithm's additional evaluations by name.
        masked_accuracies: accuracies by name where only scores of the peer's local classes count: ``personal``, on
            the local test split, and those of ``extra_metrics``.
        unmasked_accuracies: the same where the scores of all classes count.
        best, best_round: highest accuracy of the run, and its round.
        sent, received: ``{neighbor: {kind: [messages, payload bytes, header bytes]}}`` over the whole run.
        weights: last row of mixing weights, if the algorithm has them.
        missing: number of messages that missed their deadline.
        skipped_rounds: number of rounds that the neighbors completed without this peer.
        skipped: what was not used in the whole run since it had diverged, by kind (p2pfl/outcomes.py).
        dropped: ``{neighbor: invalid messages from it}``, since the last start.
        expired: messages that arrived too late, or were not taken in their round, since the last start.
        seconds: time spent by phase.
        cost: sums over the rounds of seconds of CPU and GPU and joules; p2pfl/session/cost.py lists them.
        tested_on: as in Status.
        statistics: what becomes of batch-normalization statistics, e.g. ``local``; empty if the model has none.
        ages: ``{kind: {age: messages}}`` of the messages that the rounds took; empty if they wait for one another.
    """

    peer: PeerId
    phase: Phase
    rounds_done: int
    digest: str
    model: str
    group: int
    accuracy: float | None = None
    loss: LossValue | None = None
    correct: int = 0
    samples: int = 0
    global_accuracy: float | None = None
    metrics: dict[str, LossValue | None] = field(default_factory=dict)
    extra_metrics: dict[str, float] = field(default_factory=dict)
    masked_accuracies: dict[str, float] = field(default_factory=dict)
    unmasked_accuracies: dict[str, float] = field(default_factory=dict)
    best: float | None = None
    best_round: int | None = None
    sent: dict[str, dict[str, Counts]] = field(default_factory=dict)
    received: dict[str, dict[str, Counts]] = field(default_factory=dict)
    weights: dict[str, float] | None = None
    missing: int = 0
    skipped_rounds: int = 0
    skipped: dict[str, int] = field(default_factory=dict)
    dropped: dict[str, int] = field(default_factory=dict)
    expired: int = 0
    seconds: dict[str, float] = field(default_factory=dict)
    cost: dict[str, float] = field(default_factory=dict)
    error: str = ""
    tested_on: dict[str, str] = field(default_factory=dict)
    statistics: str = ""
    ages: dict[str, dict[str, int]] = field(default_factory=dict)


@dataclass(frozen=True)
class Origin:
    """Where the files of a peer in a collection come from.

    Attributes:
        source: the argument of `p2pfl collect` that provided them; None if none did yet.
        at: time of collection (ISO 8601).
        info: the run.json beside the original peer folder, with its host and versions.
    """

    source: str | None
    at: str
    info: dict[str, Any] = field(default_factory=dict)


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
    def journal(self) -> Path:
        """What the peer has sent and neighbors may still ask for."""
        return self.root / "journal"

    @property
    def output(self) -> Path:
        return self.root / "output.log"

    @property
    def chaos(self) -> Path:
        """The faults injected into this peer, one JSON object per line."""
        return self.root / "chaos.jsonl"

    def injected(self) -> list[dict[str, Any]]:
        return read_lines(self.chaos)

    def write_status(self, status: Status, *, in_place: bool = False) -> None:
        """Replace the status file, or overwrite it ``in_place``, which is much cheaper. Raises WriteError."""
        path = self.root / "status.json"
        if in_place:
            overwrite(path, (json.dumps(vars(status)) + "\n").encode())
        else:
            write_json(path, asdict(status))

    def status(self) -> Status | None:
        """Return the peer's status; None if it has written none yet, or if it is damaged, e.g. by a power failure."""
        return _read_record(Status, self.root / "status.json", stable=True)

    def write_result(self, result: Result) -> None:
        write_json(self.root / "result.json", asdict(result))

    def result(self) -> Result | None:
        """Return the peer's result; None before the peer ended, or if it is damaged."""
        return _read_record(Result, self.root / "result.json")

    def write_origin(self, origin: Origin) -> None:
        write_json(self.root / "origin.json", asdict(origin))

    def origin(self) -> Origin | None:
        """Return the origin of the files; None outside a collection."""
        return _read_record(Origin, self.root / "origin.json")

    def check_records(self) -> None:
        """Check the types of the status and the result: another host may have written them.

        Raises RunFolderError, naming file and key. Unlike other damage, a wrong type would fail later.
        """
        records: dict[str, type] = {"status.json": Status, "result.json": Result}
        for name, record in records.items():
            path = self.root / name
            types = get_type_hints(record, include_extras=True)
            for key, value in (_read_or_none(path) or {}).items():
                if key in types and (wrong := mismatch(key, value, types[key])) is not None:
                    raise RunFolderError(f"{path}: {wrong}; correct or remove it there")

    def clear_result(self) -> None:
        """Delete the result of an earlier process of this peer; called when a new one starts."""
        path = self.root / "result.json"
        with write_errors(path):
            path.unlink(missing_ok=True)

    def sweep(self) -> None:
        """Delete temporary files that an earlier process of this peer left when it was killed."""
        addresses = self.root.parents[1] / "addresses"
        own = (folder.glob(".*.tmp") for folder in (self.root, self.journal))
        for temporary in (*chain.from_iterable(own), *addresses.glob(f".{self.root.name}.*.tmp")):
            with write_errors(temporary):
                temporary.unlink(missing_ok=True)


def is_run(root: Path) -> bool:
    """Return whether a folder is a run folder. Raises RunFolderError if it cannot be read."""
    # Not by run.yaml alone: a user's run file may have that name. A run folder may be damaged, but not that much.
    return is_file(root / "run.yaml") and (is_file(root / "run.json") or (root / "peers").is_dir())


def require_empty(root: Path) -> None:
    """Raise RunFolderError if ``root`` exists and is not empty. Raises OSError if it is not a folder."""
    if root.exists() and any(root.iterdir()):
        resume = f"resume the run in it with `p2pfl resume {root}`, or " if is_run(root) else ""
        raise RunFolderError(f"{root}: not empty; {resume}choose a new or empty folder")


@dataclass(frozen=True)
class RunFolder:
    """One launch on disk."""

    root: Path

    @classmethod
    def create(cls, root: Path, peers: Iterable[PeerId], *, again: bool = False) -> RunFolder:
        """Create the folder, with a subfolder for each of ``peers``.

        Args:
            again: allow a folder that is not empty.

        Raises:
            RunFolderError: the folder cannot be created, or is not empty.
        """
        try:
            root.mkdir(parents=True, exist_ok=True)
            if not again:
                require_empty(root)
            folder = cls(root.resolve())
            for subfolder in (folder.addresses, folder.slots, *(folder.peer(peer).root for peer in peers)):
                subfolder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise RunFolderError(f"{root}: cannot be created: {error.strerror}") from error
        return folder

    @classmethod
    def open(cls, root: Path) -> RunFolder:
        """Open an existing run. Raises RunFolderError if there is none."""
        if is_run(root):
            return cls(root.resolve())
        if is_file(root / "run.yaml"):
            file = root / "run.yaml"
            raise RunFolderError(f"{root}: not a run folder, but it has a run file; start it: `p2pfl launch {file}`")
        if is_file(root / "sweep.yaml"):
            raise RunFolderError(f"{root}: a sweep, not a run; name one of its runs: `p2pfl list {root}` shows them")
        raise RunFolderError(f"{root}: not a run folder (no run.yaml in it); `p2pfl list` shows the runs")

    def require_local(self) -> RunFolder:
        """Return this folder, if peers on this host may write into it. Raises RunFolderError for a collection."""
        if "collected" in self.info:
            raise RunFolderError(
                f"{self.root}: a collection; its peers run on other hosts: start and stop them there"
            )
        return self

    @property
    def run_file(self) -> Path:
        return self.root / "run.yaml"

    @property
    def settings(self) -> dict[str, Any]:
        """The run file as plain, unchecked values. Raises RunFolderError."""
        import yaml  # takes a while, and most readers of run folders do not need it

        try:
            plain = yaml.safe_load(self.run_file.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError, yaml.YAMLError, RecursionError) as error:
            raise RunFolderError(f"{self.run_file}: cannot be read: {error}") from None
        if not isinstance(plain, dict):
            raise RunFolderError(f"{self.run_file}: not a YAML mapping")
        return plain

    @property
    def addresses(self) -> Path:
        return self.root / "addresses"

    def death_notice(self, peer: PeerId) -> Path:
        """Return the file by which the launcher declares dead a peer that it no longer restarts."""
        return self.addresses / f"{peer:02d}.dead"

    @property
    def slots(self) -> Path:
        return self.root / "slots"

    @property
    def info(self) -> dict[str, Any]:
        """Contents of run.json: ``id`` (16 hex digits), ``started`` (ISO 8601), ``command``, versions, host,
        ``settings`` and their hash, ``simulated``, ``clock`` if that is simulated too, the number of ``jobs``, and
        how peers ``log``; in a collection also ``collected``: its ``sources``, the time of the last collection
        (``at``), and whether it has ``checkpoints``."""
        found = read_json(self.root / "run.json")
        if found is None:
            raise RunFolderError(f"{self.root}: run.json is missing")
        return found

    def write_info(self, info: dict[str, Any]) -> None:
        write_json(self.root / "run.json", info, durable=True)

    @property
    def summary(self) -> Path:
        return self.root / "summary.json"

    def peer(self, peer: PeerId) -> PeerFolder:
        return PeerFolder(self.root / "peers" / f"{peer:02d}", peer)

    def peers(self) -> Iterator[PeerFolder]:
        """All peer folders, ascending by id."""
        try:
            ids = sorted(int(entry.name) for entry in (self.root / "peers").iterdir() if entry.name.isdigit())
        except OSError as error:
            raise RunFolderError(f"{self.root}: cannot list its folder peers: {error.strerror}") from error
        return (self.peer(peer) for peer in ids)


def _read_record(record: type[RecordT], path: Path, *, stable: bool = False) -> RecordT | None:
    """Read a record; None if the file is missing or damaged: nothing depends on records."""
    try:
        return record(**(_read_or_none(path, stable=stable) or {}))
    except TypeError:
        return None


def _read_or_none(path: Path, *, stable: bool = False) -> dict[str, Any] | None:
    try:
        return read_json(path, stable=stable)
    except RunFolderError:
        return None
