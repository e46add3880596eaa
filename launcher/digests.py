"""``p2pfl digest``: the final state of every peer as a hash, and whether two runs ended with the same bits."""

from __future__ import annotations

from dataclasses import dataclass

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


def differing(one: RunFolder, other: RunFolder) -> list[PeerId]:
    """Peers that do not have the same digest after the same rounds in both; a missing one differs."""
    first, second = digests(one), digests(other)
    peers = {place.peer for folder in (one, other) for place in folder.peers()}
    return sorted(peer for peer in peers if peer not in first or first[peer] != second.get(peer))
