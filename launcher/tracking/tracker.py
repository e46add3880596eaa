"""What a tracker is: a class that a package provides by name, as an entry point of the group ``p2pfl.trackers``.

A *stream* is what its library calls a run: ``peer-03`` for a peer, ``mean`` for the means over all peers, or ``all``
for both together, if they are pooled. What belongs to one run of p2pfl is a group (W&B), a folder (TensorBoard) or
a parent run (MLflow). Only the process of the tracker makes one, so only that process imports the library.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from p2pfl.errors import MissingExtra

Values = Mapping[str, float]
EXTRAS = {
    "tensorboard": ("tensorboard", "tensorboard"),
    "wandb": ("wandb", "wandb"),
    "mlflow": ("mlflow", "mlflow-skinny"),
}
"""The module and the package that an extra of p2pfl-mesh installs, by tracker."""
MAIN = ("mean", "all")
"""Streams of the run as a whole."""


@dataclass
class Tracked:
    """The run that is tracked.

    Attributes:
        root: the run folder.
        id: 16 hex digits.
        project: W&B project, MLflow experiment.
        settings: the run file as flat keys and plain values.
        state: what the tracker remembers for a resumed run, as JSON.
    """

    root: Path
    id: str
    project: str
    settings: dict[str, Any]
    state: dict[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return self.root.name


class Tracker(Protocol):
    """A library that keeps numbers by stream, round and name."""

    def __init__(self, run: Tracked) -> None: ...

    def write(self, stream: str, t: int, values: Values) -> None:
        """Keep the numbers of round ``t``."""

    def flush(self) -> None:
        """Called when nothing else is to be written for a while."""

    def close(self, finished: bool) -> None:
        """Called at the end of the run, or when it has stopped before it was ``finished``."""


def require(name: str) -> None:
    """Raise MissingExtra if an extra that is not installed has the library of a tracker."""
    module, package = EXTRAS.get(name, (None, ""))
    if module is not None and find_spec(module) is None:
        raise MissingExtra(package, name, f"the tracker {name}")


def now() -> float:
    return time.time()  # noqa: TID251  # for people: the time axis of the tracker
