"""What the algorithm of a peer is given before round 0."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from p2pfl import PeerId
from p2pfl.aggregation import Mean, Rule
from p2pfl.errors import ModelError
from p2pfl.learning.gradients import GradientRule
from p2pfl.learning.peer_data import PeerData
from p2pfl.models import Model
from p2pfl.rng import Streams


def no_model(name: str) -> Model:
    """Stand for ``Context.build_named`` where there is no dataset."""
    raise ModelError(f"cannot build {name!r} without a dataset")


@dataclass(frozen=True)
class Context:
    """What a peer is given before round 0."""

    me: PeerId
    peers: int
    seed: int
    model: Model
    data: PeerData
    streams: Streams
    device: torch.device
    architectures: tuple[str, ...]
    """Name of each peer's architecture, by id."""
    build: Callable[[PeerId], Model]
    """Build a new model on ``device`` with the given peer's architecture, initialized from torch's global RNG."""
    samples: tuple[int, ...] = ()
    """Number of each peer's training samples, by id; the run file's partition determines it."""
    build_named: Callable[[str], Model] = no_model
    """As ``build``, but with the architecture of this name (MODELS). Raises ModelError if that does not suit the
    dataset's inputs."""
    rounds: int = 0
    """Number of rounds of the run."""
    aggregation: Rule = Mean()
    """The run's aggregation rule."""
    measures_distances: bool = False
    """Measure how far what neighbors send is from the peer's own."""
    gradient: GradientRule = GradientRule()
    """The run's rule for gradients."""
