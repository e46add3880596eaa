"""Draw a matrix as blocks of shade in a terminal."""

from __future__ import annotations

from collections.abc import Sequence

MAX_PEERS = 60
"""Larger matrices do not fit a terminal."""
SHADES = "·░▒▓█"
WIDTH = 80


def draw(peers: Sequence[int], groups: Sequence[int], weights: Sequence[Sequence[float]]) -> str:
    """Return one row of blocks per peer: a dot for weight 0, a full block for the largest off-diagonal weight.

    The weights on the diagonal do not set the scale: they are often so large that all others would look alike.
    """
    largest = max((w for i, row in enumerate(weights) for j, w in enumerate(row) if i != j), default=0.0)
    labels = [f"group {group}, peer {peer}" for peer, group in zip(peers, groups, strict=True)]
    margin = max(map(len, labels))
    cell = max(1, min(3, (WIDTH - margin - 1) // len(peers)))
    return "\n".join(
        f"{label:>{margin}} " + "".join(_shade(w, largest) * cell for w in row)
        for label, row in zip(labels, weights, strict=True)
    )


def _shade(weight: float, largest: float) -> str:
    if weight <= 0:
        return SHADES[0]
    steps = len(SHADES) - 1
    return SHADES[min(steps, 1 + int(steps * weight / largest)) if largest > 0 else steps]
