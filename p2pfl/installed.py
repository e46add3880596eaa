"""Backends of the launcher and trackers, which packages, p2pfl-mesh among them, provide by entry points.

``p2pfl`` reads names only; the launcher loads what it uses.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from p2pfl.errors import P2pflError

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

BACKENDS, TRACKERS = "p2pfl.backends", "p2pfl.trackers"
"""Groups of entry points."""


def names(group: str) -> list[str]:
    """Return the names in a group, ascending."""
    return sorted({point.name for point in _points(group)})


def load(group: str, name: str) -> Any:
    """Import what ``name``, one of ``names``, stands for.

    Raises:
        P2pflError: its import fails, or several packages provide the name.
    """
    found = [point for point in _points(group) if point.name == name]
    packages = sorted({point.dist.name for point in found if point.dist is not None})
    if len(packages) > 1:
        raise P2pflError(f"{name} is provided by {' and '.join(packages)}: uninstall all but one")
    try:
        return found[0].load()
    except Exception as error:  # of any kind: the package may be of another author
        where = f"{found[0].value} of {packages[0]}" if packages else found[0].value
        raise P2pflError(f"{name} cannot be loaded from {where}: {type(error).__name__}: {error}") from error


def _points(group: str) -> list[EntryPoint]:
    from importlib import metadata  # takes tens of milliseconds

    return list(metadata.entry_points(group=group))
