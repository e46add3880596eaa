"""``p2pfl digest``: the final state of every peer as a hash, and whether two runs ended with the same bits."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from launcher.summary import settings
from launcher.text import ids
from p2pfl.runfolder import PeerId, RunFolder


@dataclass(frozen=True)
class PeerDigest:
    """SHA-256 over a peer's final method state, and the rounds it took to get there."""

    peer: PeerId
    rounds_done: int
    digest: str


def digests(folder: RunFolder) -> dict[PeerId, PeerDigest]:
    """Of all peers that left a result."""
    results = (place.result() for place in folder.peers())
    return {r.peer: PeerDigest(r.peer, r.rounds_done, r.digest) for r in results if r is not None}


@dataclass(frozen=True)
class Unfinished:
    """Peers of a run that have not finished, and how many of its ``rounds`` the slowest and the fastest have done."""

    peers: list[PeerId]
    slowest: int
    fastest: int
    rounds: int

    def __str__(self) -> str:
        noun = "peer" if len(self.peers) == 1 else "peers"
        done = f"{self.slowest}" if self.slowest == self.fastest else f"{self.slowest} to {self.fastest}"
        verb = "has" if len(self.peers) == 1 else "have"
        return f"{noun} {ids(self.peers)} {verb} not finished ({done} of {self.rounds} rounds done)"


def unfinished(folder: RunFolder, among: Iterable[PeerId] | None = None) -> Unfinished | None:
    """The peers (``among`` these) that have not finished; None if all have."""
    done = {}
    for place in folder.peers():
        result, status = place.result(), place.status()
        if (among is None or place.peer in among) and (result is None or result.phase != "finished"):
            last = result or status
            done[place.peer] = last.rounds_done if last else 0
    if not done:
        return None
    return Unfinished(sorted(done), min(done.values()), max(done.values()), settings(folder)["rounds"])


@dataclass(frozen=True)
class Comparison:
    """Two runs, peer by peer.

    ``peers`` is how many each run has; if not equally many, nothing more is compared. ``agree`` have the same digest
    after the same rounds, ``differ`` another one or finished after other rounds. For the rest it is not known:
    ``unfinished`` are by run those that have not come as far, ``absent`` those of which its folder has nothing.
    """

    peers: tuple[int, int]
    agree: list[PeerId]
    differ: list[PeerId]
    unfinished: tuple[Unfinished | None, Unfinished | None]
    absent: tuple[list[PeerId], list[PeerId]]

    @property
    def same(self) -> bool:
        return self.peers[0] == self.peers[1] and not (self.differ or any(self.unfinished) or any(self.absent))


def compare(one: RunFolder, other: RunFolder) -> Comparison:
    """Whether the peers of two runs ended with the same bits."""
    counts = settings(one)["peers"], settings(other)["peers"]
    if counts[0] != counts[1]:
        return Comparison(counts, [], [], (None, None), ([], []))
    first, second = ({place.peer for place in folder.peers()} for folder in (one, other))
    ended, also_ended = digests(one), digests(other)
    going = {peer for found in map(unfinished, (one, other)) if found for peer in found.peers}
    agree, differ, unknown = [], [], []
    for peer in sorted(first & second):
        # Of peers that were stopped, those can be compared that came equally far.
        if peer in ended and ended[peer] == also_ended.get(peer):
            agree.append(peer)
        elif peer not in going or _as_far(ended.get(peer), also_ended.get(peer)):
            differ.append(peer)
        else:
            unknown.append(peer)
    left = unfinished(one, unknown), unfinished(other, unknown)
    return Comparison(counts, agree, differ, left, (sorted(second - first), sorted(first - second)))


def _as_far(one: PeerDigest | None, other: PeerDigest | None) -> bool:
    return one is not None and other is not None and one.rounds_done == other.rounds_done
