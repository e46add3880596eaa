"""What the live view shows: the state and the history of all peers, read from the run folder as it grows."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from launcher.facts.logs import LogEntry, LogFile
from launcher.facts.snapshot import Snapshot
from p2pfl import PeerId
from p2pfl.run_folder.folder import RunFolder, Status
from p2pfl.run_folder.records import Record, RecordFile

NOTICES = 200
"""Most warnings that are kept."""
LEVELS = ("WARNING", "ERROR", "CRITICAL")


@dataclass
class Peer:
    """One peer: its status and the numbers of its rounds."""

    peer: PeerId
    status: Status | None = None
    accuracies: dict[int, float] = field(default_factory=dict)
    """By round."""
    losses: dict[int, float] = field(default_factory=dict)
    """Cross-entropy on the training samples by round, or the sum of the loss terms if there is none."""
    weights: dict[int, float] | None = None
    """The last row of mixing weights."""
    absent: dict[int, int] = field(default_factory=dict)
    """Messages that missed their deadline, by round."""
    attack: str = ""
    """The name of its attack, if it attacks."""
    warnings: int = 0
    """Warnings and errors in its log."""

    @property
    def phase(self) -> str:
        return "starting" if self.status is None else self.status.phase

    @property
    def rounds_done(self) -> int:
        return 0 if self.status is None else self.status.rounds_done

    @property
    def accuracy(self) -> float | None:
        return next(reversed(self.accuracies.values()), None)

    @property
    def loss(self) -> float | None:
        return next(reversed(self.losses.values()), None)

    @property
    def missing(self) -> int:
        return sum(self.absent.values())

    @property
    def sent(self) -> int:
        return 0 if self.status is None else self.status.bytes_out

    @property
    def received(self) -> int:
        return 0 if self.status is None else self.status.bytes_in

    def add(self, record: Record) -> None:
        """Add the record of a round; a resumed peer writes some again."""
        if record.accuracy is not None:
            self.accuracies[record.t] = record.accuracy
        if terms := record.loss:
            loss = terms["ce"] if "ce" in terms else sum(term for term in terms.values() if term is not None)
            if loss is not None:
                self.losses[record.t] = loss
        if record.weights is not None:
            self.weights = record.weights
        self.absent[record.t] = len(record.missing)


def level_of(line: str) -> str:
    """Return the level of a log entry, which follows its time."""
    return line.partition(" ")[2].lstrip().partition(" ")[0]


class RunState:
    """All peers of a run, and the latest warnings."""

    def __init__(self, folder: RunFolder, rounds: int, attacks: Mapping[PeerId, str] = {}) -> None:
        self.folder, self.rounds, self._attackers = folder, rounds, attacks.keys()
        self.peers = [Peer(files.peer, attack=attacks.get(files.peer, "")) for files in folder.peers()]
        self.notices: deque[str] = deque(maxlen=NOTICES)
        """Lines of the launcher, and warnings of peers, oldest first."""
        self.snapshot = Snapshot(len(self.peers), rounds, [])
        self.weights_read = 0
        """How many rows of weights were read."""
        self._files = [RecordFile(folder.peer(peer.peer).metrics) for peer in self.peers]
        self._logs = [LogFile(peer.peer, folder.peer(peer.peer).log) for peer in self.peers]

    def read(self) -> None:
        """Read what is new."""
        for peer, file in zip(self.peers, self._files, strict=True):
            for record in file.read():
                peer.add(record)
                self.weights_read += record.weights is not None
            peer.status = self.folder.peer(peer.peer).status() or peer.status
        statuses = [peer.status for peer in self.peers if peer.status is not None]
        self.snapshot = Snapshot(len(self.peers), self.rounds, statuses, self._attackers)
        self._read_logs()

    def _read_logs(self) -> None:
        found: list[LogEntry] = []
        for peer, log in zip(self.peers, self._logs, strict=True):
            entries = [entry for entry in log.read() if level_of(entry.text) in LEVELS]
            peer.warnings += len(entries)
            found += entries
        for entry in sorted(found):
            time, _, text = entry.text.partition("\n")[0].partition(" ")
            level, _, event = text.strip().partition(" ")
            sign = "" if level == "WARNING" else f"{level.lower()}: "
            self.notices.append(f"{time[11:19]} peer {entry.peer}: {sign}{event.strip()}")

    def add(self, lines: Iterable[str]) -> None:
        """Add lines of the launcher."""
        self.notices.extend(lines)

    def weights(self) -> list[list[float]] | None:
        """Return the mixing weights, [M, M] in the order of ``peers``; None if no peer has any."""
        if all(peer.weights is None for peer in self.peers):
            return None
        return [[(row.weights or {}).get(column.peer, 0.0) for column in self.peers] for row in self.peers]
