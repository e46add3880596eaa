"""Learning curves with bands, many on one sheet, as SVG without a drawing library."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from xml.sax.saxutils import escape

from benchmarks.claims.statistics import interval
from benchmarks.claims.summary import Curve

COLUMNS, ROWS = 3, 11
"""Panels on a sheet."""
WIDTH, HEIGHT = 330, 224
LEFT, RIGHT, TOP, BOTTOM, LINE = 36, 14, 14, 28, 12
COLORS = ("#1f6fb4", "#d1602a", "#2a8f4f", "#8a4fb0", "#a88a1a", "#555555")

Band = list[tuple[int, float, float, float]]
"""Rounds, mean, and the ends of the 95 % interval."""


@dataclass(frozen=True)
class Panel:
    """A picture. ``bands``: by label, with two points or more each; ``ylabel``: what they show."""

    title: str
    bands: Mapping[str, Band]
    ylabel: str


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


def divided(panels: Sequence[Panel]) -> list[Sequence[Panel]]:
    """Divide panels among as few sheets as they need, with equally many rows."""
    rows = math.ceil(len(panels) / COLUMNS)
    many = COLUMNS * math.ceil(rows / max(1, math.ceil(rows / ROWS)))
    return [panels[k : k + many] for k in range(0, len(panels), max(1, many))]


def sheet(panels: Sequence[Panel]) -> str:
    """Return an SVG with all panels, row by row."""
    columns, rows = min(COLUMNS, len(panels)), math.ceil(len(panels) / COLUMNS)
    drawn = [
        f'<g transform="translate({WIDTH * (k % COLUMNS)} {HEIGHT * (k // COLUMNS)})">{draw(panel)}</g>'
        for k, panel in enumerate(panels)
    ]
    frame = f'viewBox="0 0 {WIDTH * columns} {HEIGHT * rows}" font-family="sans-serif" font-size="9.5"'
    background = '<rect width="100%" height="100%" fill="#fff"/>'
    style = "<style>.b{fill-opacity:.18}.l{fill:none;stroke-width:15}.g{stroke:#ddd}.e{text-anchor:end}</style>"
    return "\n".join([f'<svg xmlns="http://www.w3.org/2000/svg" {frame}>', style, background, *drawn, "</svg>\n"])


def draw(panel: Panel) -> str:
    """Draw one panel: title, labels in the colors of their lines, axes, bands and lines."""
    points = [point for found in panel.bands.values() for point in found]
    right = max(point[0] for point in points)
    low, high = min(point[2] for point in points), max(point[3] for point in points)
    low, high = (low - 1.0, high + 1.0) if high - low < 1e-9 else (low, high)
    title = textwrap.wrap(panel.title, 62)
    colors = dict(zip(panel.bands, COLORS * (1 + len(panel.bands) // len(COLORS)), strict=False))
    legend = _legend(colors)
    top = TOP + LINE * (len(title) + len(legend)) - 4

    def x(t: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * t / right

    def y(value: float) -> float:
        return top + (HEIGHT - top - BOTTOM) * (high - value) / (high - low)

    def path(where: Sequence[tuple[float, float]]) -> str:
        """Steps in tenths of a pixel."""
        tenths = [(round(10 * x(t)), round(10 * y(value))) for t, value in where]
        steps = [f"{b[0] - a[0]},{b[1] - a[1]}" for a, b in pairwise(tenths)]
        return f"M{tenths[0][0]},{tenths[0][1]}l{' '.join(steps)}"

    lines = [
        f'<text x="6" y="{TOP + LINE * k}" font-weight="bold">{escape(text)}</text>' for k, text in enumerate(title)
    ]
    for k, labels in enumerate(legend, start=len(title)):
        spans = "".join(f'<tspan fill="{colors[label]}">— {escape(label)}   </tspan>' for label in labels)
        lines.append(f'<text x="6" y="{TOP + LINE * k}" xml:space="preserve">{spans}</text>')
    for value in ticks(low, high):
        lines.append(f'<path d="M{LEFT} {y(value):.1f}H{WIDTH - RIGHT}" class="g"/>')
        lines.append(f'<text x="{LEFT - 4}" y="{y(value):.1f}" dy="3" class="e">{value:g}</text>')
    for t in ticks(0, right):
        lines.append(f'<text x="{x(t):.1f}" y="{HEIGHT - BOTTOM + 11}" text-anchor="middle">{t:g}</text>')
    lines.append(f'<text x="{WIDTH - RIGHT}" y="{HEIGHT - 7}" class="e">{escape(panel.ylabel)} by rounds</text>')
    for label, found in panel.bands.items():
        around = path([(t, up) for t, _, _, up in found] + [(t, down) for t, _, down, _ in reversed(found)])
        middle = path([(t, mean) for t, mean, _, _ in found])
        lines.append(f'<g transform="scale(.1)"><path class="b" fill="{colors[label]}" d="{around}"/>')
        lines.append(f'<path class="l" stroke="{colors[label]}" d="{middle}"/></g>')
    return "".join(lines)


def _legend(labels: Mapping[str, str]) -> list[list[str]]:
    """Divide the labels into lines that fit."""
    lines: list[list[str]] = [[]]
    for label in labels:
        if lines[-1] and sum(len(each) + 5 for each in [*lines[-1], label]) > 64:
            lines.append([])
        lines[-1].append(label)
    return lines
