"""``p2pfl digest``: the hash of every peer's final state, and whether two runs have equal ones."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from launcher.formatting import peers
from p2pfl import PeerId
from p2pfl.run_folder.folder import RunFolder


@dataclass(frozen=True)
class PeerDigest:
    """SHA-256 of a peer's final state, and the rounds that it had done."""

    peer: PeerId
    rounds_done: int
    digest: str


def digests(folder: RunFolder) -> dict[PeerId, PeerDigest]:
    """Return the digests of all peers that have a result."""
    results = (files.result() for files in folder.peers())
    return {r.peer: PeerDigest(r.peer, r.rounds_done, r.digest) for r in results if r is not None}


@dataclass(frozen=True)
class Unfinished:
    """Peers that have not finished, and how many of ``rounds`` the slowest and the fastest of them have done."""

    peers: list[PeerId]
    slowest: int
    fastest: int
    rounds: int

    def __str__(self) -> str:
        done = f"{self.slowest}" if self.slowest == self.fastest else f"{self.slowest} to {self.fastest}"
        verb = "has" if len(self.peers) == 1 else "have"
        return f"{peers(self.peers)} {verb} not finished ({done} of {self.rounds} rounds done)"


def unfinished(folder: RunFolder, among: Iterable[PeerId] | None = None) -> Unfinished | None:
    """Return the peers (of ``among``, if given) that have not finished; None if all have."""
    done = {}
    for files in folder.peers():
        result, status = files.result(), files.status()
        if (among is None or files.peer in among) and (result is None or result.phase != "finished"):
            last = result or status
            done[files.peer] = last.rounds_done if last else 0
    if not done:
        return None
    return Unfinished(sorted(done), min(done.values()), max(done.values()), folder.settings["rounds"])


@dataclass(frozen=True)
class DigestComparison:
    """The digests of two runs compared peer by peer.

    Attributes:
        peers: number of peers of each run; if these differ, nothing else is compared.
        agree: peers with the same digest after the same number of rounds.
        differ: peers with another digest, or that finished after another number of rounds.
        unfinished: by run, the remaining peers that have done fewer rounds than in the other run.
        absent: by run, the peers that its folder lacks.
    """

    peers: tuple[int, int]
    agree: list[PeerId]
    differ: list[PeerId]
    unfinished: tuple[Unfinished | None, Unfinished | None]
    absent: tuple[list[PeerId], list[PeerId]]

    @property
    def same(self) -> bool:
        return self.peers[0] == self.peers[1] and not (self.differ or any(self.unfinished) or any(self.absent))


def compare(one: RunFolder, other: RunFolder) -> DigestComparison:
    """Compare the final states of two runs."""
    counts = one.settings["peers"], other.settings["peers"]
    if counts[0] != counts[1]:
        return DigestComparison(counts, [], [], (None, None), ([], []))
    first, second = ({files.peer for files in folder.peers()} for folder in (one, other))
    mine, theirs = digests(one), digests(other)
    incomplete = {peer for found in map(unfinished, (one, other)) if found for peer in found.peers}
    agree, differ, unknown = [], [], []
    for peer in sorted(first & second):
        # Stopped peers can be compared if they have done equally many rounds.
        if peer in mine and mine[peer] == theirs.get(peer):
            agree.append(peer)
        elif peer not in incomplete or _same_rounds(mine.get(peer), theirs.get(peer)):
            differ.append(peer)
        else:
            unknown.append(peer)
    remaining = unfinished(one, unknown), unfinished(other, unknown)
    return DigestComparison(counts, agree, differ, remaining, (sorted(second - first), sorted(first - second)))


def _same_rounds(one: PeerDigest | None, other: PeerDigest | None) -> bool:
    return one is not None and other is not None and one.rounds_done == other.rounds_done
