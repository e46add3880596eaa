"""Format numbers for people."""

from __future__ import annotations

from collections.abc import Collection, Iterable


def duration(seconds: float) -> str:
    """``0:07``, ``12:30``, ``1:02:03``"""
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02d}:{second:02d}" if hours else f"{minute}:{second:02d}"


def size(count: float) -> str:
    """``999 B``, ``1.5 kB``, ``12.3 MB``"""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 999.5:
            return f"{count:.0f} B" if unit == "B" else f"{count:.{1 if count < 99.95 else 0}f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"


def count(number: float) -> str:
    """``999``, ``36.6 k``, ``11.2 M``"""
    return size(number).removesuffix("B").strip()


def percent(fraction: float | None) -> str:
    """``97.3``, without the sign; a dash for None."""
    return "–" if fraction is None else f"{100 * fraction:.1f}"


def ids(peers: Iterable[int], most: int = 8) -> str:
    """``0-3 7 9``: fold ranges, and cut the list after ``most`` entries."""
    ranges: list[list[int]] = []
    for peer in sorted(peers):
        if ranges and ranges[-1][1] == peer - 1:
            ranges[-1][1] = peer
        else:
            ranges.append([peer, peer])
    entries = [str(low) if low == high else f"{low}-{high}" for low, high in ranges]
    return " ".join(entries[:most] + (["…"] if len(entries) > most else []))


def peers(found: Collection[int], most: int = 8) -> str:
    """``peer 3``, ``peers 0-3 7 9``: as ``ids``."""
    return f"{'peer' if len(found) == 1 else 'peers'} {ids(found, most)}"
