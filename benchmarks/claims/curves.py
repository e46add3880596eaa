"""Learning curves with bands, as small SVG files without a drawing library."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from xml.sax.saxutils import escape

from benchmarks.claims.statistics import interval
from benchmarks.claims.summary import Curve

WIDTH, HEIGHT = 420, 240
LEFT, RIGHT, TOP, BOTTOM = 44, 8, 10, 34
COLORS = ("#1f6fb4", "#d1602a", "#2a8f4f", "#8a4fb0", "#a88a1a", "#555555")

Band = list[tuple[int, float, float, float]]
"""Rounds, mean, and the ends of the 95 % interval."""


def band(curves: Sequence[Curve]) -> Band:
    """Average the curves of several seeds in the rounds that all of them have."""
    by_round = [dict(curve) for curve in curves]
    common = set.intersection(*map(set, by_round)) if by_round else set()
    points: Band = []
    for t in sorted(common):
        found = interval([curve[t] for curve in by_round])
        assert found is not None
        half = 0.0 if math.isinf(found.half) else found.half
        points.append((t, found.mean, found.mean - half, found.mean + half))
    return points


def ticks(low: float, high: float, most: int = 5) -> list[float]:
    """Round numbers between two values, at most ``most`` + 1 of them."""
    step = 10.0 ** math.floor(math.log10((high - low) / most))
    step = next(step * factor for factor in (1, 2, 5, 10) if (high - low) / (step * factor) <= most)
    first = math.ceil(low / step - 1e-9)
    return [round(n * step, 10) for n in range(first, math.floor(high / step + 1e-9) + 1)]


def draw(bands: Mapping[str, Band], ylabel: str) -> str:
    """Return an SVG with one line and band per label. Raises ValueError without points."""
    points = [point for found in bands.values() for point in found]
    if not points:
        raise ValueError("no points to draw")
    right = max(point[0] for point in points)
    low, high = min(point[2] for point in points), max(point[3] for point in points)
    low, high = (low - 1.0, high + 1.0) if high - low < 1e-9 else (low, high)

    def x(t: float) -> str:
        return f"{LEFT + (WIDTH - LEFT - RIGHT) * t / right:.1f}"

    def y(value: float) -> str:
        return f"{TOP + (HEIGHT - TOP - BOTTOM) * (high - value) / (high - low):.1f}"

    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}"',
        ' font-family="sans-serif" font-size="10">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#fff"/>',
    ]
    for value in ticks(low, high):
        lines.append(f'<path d="M{LEFT} {y(value)}H{WIDTH - RIGHT}" stroke="#ddd"/>')
        lines.append(f'<text x="{LEFT - 4}" y="{y(value)}" dy="3" text-anchor="end">{value:g}</text>')
    for t in ticks(0, right):
        lines.append(f'<text x="{x(t)}" y="{HEIGHT - BOTTOM + 12}" text-anchor="middle">{t:g}</text>')
    lines.append(f'<text x="{WIDTH - RIGHT}" y="{HEIGHT - 2}" text-anchor="end">rounds; {escape(ylabel)}</text>')
    legend = LEFT
    for color, (label, found) in zip(COLORS * (1 + len(bands) // len(COLORS)), bands.items(), strict=False):
        upper = " ".join(f"{x(t)},{y(top)}" for t, _, _, top in found)
        lower = " ".join(f"{x(t)},{y(bottom)}" for t, _, bottom, _ in reversed(found))
        middle = " ".join(f"{x(t)},{y(mean)}" for t, mean, _, _ in found)
        lines.append(f'<polygon points="{upper} {lower}" fill="{color}" fill-opacity=".18"/>')
        lines.append(f'<polyline points="{middle}" fill="none" stroke="{color}" stroke-width="1.5"/>')
        lines.append(f'<text x="{legend}" y="{HEIGHT - 2}" fill="{color}" font-weight="bold">{escape(label)}</text>')
        legend += 12 + 6 * len(label)
    return "\n".join([*lines, "</svg>\n"])
