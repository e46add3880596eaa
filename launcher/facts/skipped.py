"""What peers have skipped because it had diverged, in words."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

from launcher.formatting import peers
from p2pfl import PeerId
from p2pfl.outcomes import SKIPPED


def skipped_lines(by_peer: Mapping[PeerId, Mapping[str, int]]) -> list[str]:
    """Return a line for each kind: how often it was skipped, and at which peers."""
    counts: dict[str, dict[PeerId, int]] = defaultdict(dict)
    for peer, skipped in by_peer.items():
        for what, count in skipped.items():
            counts[what][peer] = count
    return [
        f"{what} {SKIPPED.get(what, 'skipped')} because values had diverged: {sum(found.values())}, at {peers(found)}"
        for what, found in sorted(counts.items())
    ]
