"""A matrix as blocks of shade in a terminal."""

from __future__ import annotations

from collections.abc import Sequence

MOST_PEERS = 60
"""Larger matrices do not fit a terminal."""
SHADES = "·░▒▓█"
WIDTH = 80


def draw(peers: Sequence[int], groups: Sequence[int], weights: Sequence[Sequence[float]]) -> str:
    """One row of blocks per peer; a dot is no weight, the full block the largest weight given to another.

    What a peer gives to itself is often many times as much, and would leave the rest in one shade.
    """
    strongest = max((w for i, row in enumerate(weights) for j, w in enumerate(row) if i != j), default=0.0)
    labels = [f"group {group}, peer {peer}" for peer, group in zip(peers, groups, strict=True)]
    margin = max(map(len, labels))
    cell = max(1, min(3, (WIDTH - margin - 1) // len(peers)))
    return "\n".join(
        f"{label:>{margin}} " + "".join(_shade(w, strongest) * cell for w in row)
        for label, row in zip(labels, weights, strict=True)
    )


def _shade(weight: float, strongest: float) -> str:
    if weight <= 0:
        return SHADES[0]
    steps = len(SHADES) - 1
    return SHADES[min(steps, 1 + int(steps * weight / strongest)) if strongest > 0 else steps]
