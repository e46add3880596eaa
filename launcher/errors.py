"""Errors of the launcher. The tree of all errors is in p2pfl.errors."""

from __future__ import annotations

from p2pfl.errors import P2pflError


class LaunchError(P2pflError):
    """Peers could not be started on this host."""


class HostsGone(LaunchError):
    """The hosts of a run were given back, e.g. when its batch job ended: nothing of it runs there."""


class CollectError(P2pflError):
    """Copied run folders could not be combined."""


class CompareError(P2pflError):
    """The results of several runs do not mean the same, so that they cannot be compared."""


class NewProjectError(P2pflError):
    """A project cannot be written where it is asked for."""


class SweepError(P2pflError):
    """A sweep cannot be started or continued."""


class ManifestError(P2pflError):
    """A run cannot be described by manifests for Kubernetes."""
