"""What each peer of a run does now, and who holds up whom."""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from typing import Any

import psutil

from launcher import formatting
from launcher.facts.host_state import HostState
from launcher.facts.processes import find_process, is_alive, outcome
from launcher.facts.registration import find_launcher
from p2pfl import PeerId
from p2pfl.attackers import attacks
from p2pfl.run_folder.ages import AgeRange
from p2pfl.run_folder.folder import FINAL, PeerFolder, RunFolder, Status

WATCH_INTERVAL = 1.0
"""Minimum seconds between two updates of ``--watch``."""
MAX_LOAD = 0.05
"""Maximum fraction of a core that ``--watch`` takes: with many peers there are fewer updates."""
SUSPENDED = "suspended"


@dataclass(frozen=True)
class PeerLine:
    """One peer.

    Attributes:
        alive: whether its process lives; None in a collection, where that is unknown.
        state: its phase if it is alive, else how it ended.
        t: its round; ``rounds_done`` counts completed ones.
        waiting_for: neighbors whose messages it waits for.
        seconds: for how long it has been in this phase; None if unknown.
        bytes_out, bytes_in: of the completed rounds.
        memory: bytes, shared pages divided among the processes that share them; None unless it is alive.
        unread: messages that arrived and were not yet used.
        undelivered: messages that neighbors have not yet received.
        skipped: what it did not use in the completed rounds because it had diverged, by kind.
        ages: of the messages that its last completed round took; None if it took none, or if rounds wait for one
            another.
    """

    peer: PeerId
    alive: bool | None
    state: str
    t: int
    rounds_done: int
    accuracy: float | None
    waiting_for: list[PeerId]
    seconds: float | None
    bytes_out: int
    bytes_in: int
    memory: int | None
    unread: int
    undelivered: int
    skipped: dict[str, int] = field(default_factory=dict)
    ages: AgeRange | None = None

    def to_dict(self) -> dict[str, Any]:
        plain = asdict(self)
        if self.ages is None:
            del plain["ages"]
        else:
            plain["ages"] = self.ages._asdict()
        return plain


@dataclass(frozen=True)
class Hold:
    """A peer that others wait for, directly or through others.

    Attributes:
        edges: [source, receiver] pairs: the messages of ``source`` that are missing first.
        peers: all that wait because of it.
        why: what it does instead of sending.
    """

    source: PeerId
    edges: list[tuple[PeerId, PeerId]]
    peers: list[PeerId]
    why: str


@dataclass(frozen=True)
class RunStatus:
    """The peers of a run now, and who holds up others, the one with the most victims first."""

    run: str
    name: str
    rounds: int
    alive: int
    peers: list[PeerLine]
    holds: list[Hold]
    attacks: dict[PeerId, str] = field(default_factory=dict)
    """The attack of each attacker, by peer: means are of honest peers."""

    def to_dict(self) -> dict[str, Any]:
        plain = {**asdict(self), "peers": [line.to_dict() for line in self.peers]}
        if not self.attacks:
            del plain["attacks"]
        return plain

    @classmethod
    def take(cls, folder: RunFolder) -> RunStatus:
        """Look at all peers. Raises RunFolderError if run.yaml or run.json is unusable."""
        run, starting = folder.settings, find_launcher(folder) is not None
        resuming = starting and not any(find_process(folder, files.peer) for files in folder.peers())
        peers = [_peer_line(folder, files, starting, resuming) for files in folder.peers()]
        # Without a launcher, the peers on other hosts are as they were at the last look.
        alive = sum(bool(peer.alive) or peer.state.startswith("running on host") for peer in peers)
        return cls(str(folder.root), run["name"], run["rounds"], alive, peers, holds(peers), attacks(run))


def _peer_line(folder: RunFolder, files: PeerFolder, starting: bool, resuming: bool) -> PeerLine:
    status, collected = files.status(), files.origin() is not None
    process, remote = find_process(folder, files.peer), HostState.read(folder.root) is not None
    alive = process is not None or (remote and is_alive(folder, files.peer))
    known = status or Status(files.peer, 0)
    if not alive or known.phase in FINAL:
        expected = starting if status is None else resuming and known.phase == "stopped"
        state = "starting" if expected and not collected else outcome(files)
    else:
        state = SUSPENDED if process is not None and not remote and _is_suspended(process) else known.phase
    living = alive and known.phase not in FINAL
    seconds = time.monotonic() - known.since if living and known.since else None
    return PeerLine(
        peer=files.peer,
        alive=None if collected else alive,
        state=state,
        t=known.t,
        rounds_done=known.rounds_done,
        accuracy=known.accuracy,
        waiting_for=known.waiting_for if living and state == "waiting" else [],  # not if it is suspended meanwhile
        seconds=seconds if seconds is not None and seconds >= 0 else None,  # negative: of another boot
        bytes_out=known.bytes_out,
        bytes_in=known.bytes_in,
        memory=None if process is None or remote else _memory(process),
        unread=known.unread if living else 0,
        undelivered=known.undelivered if living else 0,
        skipped=known.skipped,
        ages=_age_range(known.ages),
    )


def _age_range(ages: Sequence[float] | None) -> AgeRange | None:
    if ages is None or not all(map(math.isfinite, ages)):
        return None
    return AgeRange(ages[0], int(ages[1]), int(ages[2]))


def _is_suspended(process: psutil.Process) -> bool:
    with suppress(psutil.Error):
        return bool(process.status() == psutil.STATUS_STOPPED)
    return False


def _memory(process: psutil.Process) -> int | None:
    """Forked peers share most of their memory: what each has resident would count that many times."""
    with suppress(psutil.Error, OSError):
        return int(process.memory_full_info().pss)
    with suppress(psutil.Error):
        return int(process.memory_info().rss)
    return None


# ---- who holds up whom


def holds(peers: Sequence[PeerLine]) -> list[Hold]:
    """Return the peers that others wait for and that wait for none of them, the one with the most victims first.

    A peer that waits for one in an earlier round, or in the same, is followed to what that one waits for. A peer in a
    later round has sent its message: then the connection holds up. So it does if peers wait for each other.
    """
    lines = {line.peer: line for line in peers}
    edges: dict[PeerId, set[tuple[PeerId, PeerId]]] = defaultdict(set)
    victims: dict[PeerId, set[PeerId]] = defaultdict(set)
    for line in peers:
        for source, edge in _first_missing(line.peer, lines):
            edges[source].add(edge)
            victims[source].add(line.peer)
    found = [
        Hold(source, sorted(edges[source]), sorted(victims[source]), _why(source, edges[source], lines))
        for source in edges
    ]
    return sorted(found, key=lambda hold: (-len(hold.peers), hold.source))


def _first_missing(peer: PeerId, lines: Mapping[PeerId, PeerLine]) -> Iterator[tuple[PeerId, tuple[PeerId, PeerId]]]:
    """Yield who keeps ``peer`` waiting in the end, and the edge whose message is missing first."""
    seen, follow = {peer}, [peer]
    while follow:
        receiver = follow.pop()
        for source in lines[receiver].waiting_for:
            line = lines.get(source)
            if line is None or not line.waiting_for or line.t > lines[receiver].t or source == peer:
                yield source, (source, receiver)
            elif source not in seen:
                seen.add(source)
                follow.append(source)


def _why(source: PeerId, edges: set[tuple[PeerId, PeerId]], lines: Mapping[PeerId, PeerLine]) -> str:
    line = lines.get(source)
    if line is None:
        return "not in this run folder"
    if line.waiting_for and any(receiver in line.waiting_for for _, receiver in edges):
        return "they wait for each other: messages are on their way, or the connection is lost"
    if any(line.t > lines[receiver].t for _, receiver in edges):
        return f"already in round {line.t}: its message is on its way, or the connection is lost"
    return describe(line)


def describe(line: PeerLine) -> str:
    """``training in round 3 for 0:12``"""
    if not line.alive or line.state in FINAL:
        return line.state
    duration = "" if line.seconds is None else f" for {formatting.duration(line.seconds)}"
    place = "" if line.state == "starting" else f" in round {line.t}"
    return f"{line.state}{place}{duration}"


def watch(folder: RunFolder) -> Iterator[RunStatus]:
    """Yield the status again and again until no peer is alive or about to start."""
    while True:
        began = time.thread_time()
        status = RunStatus.take(folder)
        yield status
        if not any(line.alive or line.state == "starting" for line in status.peers):
            return
        time.sleep(max(WATCH_INTERVAL, (time.thread_time() - began) / MAX_LOAD))
