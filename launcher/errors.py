"""What can go wrong while peers are started and their folders gathered; the tree of all errors is in p2pfl.errors."""

from __future__ import annotations

from p2pfl.errors import P2pflError


class LaunchError(P2pflError):
    """Peers could not be started on this host."""


class CollectError(P2pflError):
    """What peers have written elsewhere could not be gathered."""
