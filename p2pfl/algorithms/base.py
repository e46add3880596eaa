"""What every algorithm has: a model, samples, random streams, hyper-parameters, and one round at a time.

An algorithm is the paper's pseudo-code as a coroutine, ``round``, with the paper's equations as pure functions
beside it. It trains, predicts, speaks and mixes. It does not evaluate, time, count, log or write: the session
that drives it does.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from time import perf_counter
from typing import Any, ClassVar, Generic, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from p2pfl.models import Model
from p2pfl.net import Net
from p2pfl.options import Options
from p2pfl.rng import Streams
from p2pfl.runfolder import PeerId
from p2pfl.tensors import clone, is_finite
from p2pfl.training import Measure, Meter, PeerData
from p2pfl.wire import Body, Layout

H = TypeVar("H", bound=Options)


@dataclass(frozen=True)
class Setting:
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
    """A fresh model on ``device`` like that of the given peer. Initial values come from torch's global RNG."""


class Algorithm(ABC, Generic[H]):
    """Base of all methods. A subclass sets the class attributes, ``setup``, ``round``, ``loss``, ``layouts``."""

    name: ClassVar[str]
    gist: ClassVar[str]
    """What travels and what becomes of it, in one line: `p2pfl algorithms` tells methods of one paper apart by it."""
    title: ClassVar[str]
    authors: ClassVar[str]
    venue: ClassVar[str]
    url: ClassVar[str]
    Hyper: ClassVar[type[Options]]
    homogeneous: ClassVar[bool] = False
    """Whole models are mixed, so all peers need one architecture; they also start from one initial model."""
    linear_heads: ClassVar[bool] = False
    """Weights of heads are compared or mixed, so each must be one linear layer: ``model.linear_head``."""
    equal_features: ClassVar[bool] = False
    """Heads, features or prototypes are exchanged, so all peers need one number of features."""
    masked_evaluation: ClassVar[bool] = False
    """The paper evaluates each peer among its own classes only; a run file's ``masked_test`` wins over it."""
    needs_validation: ClassVar[bool] = False
    """The method learns something from the peer's validation samples, so each peer must have some."""
    state: ClassVar[tuple[str, ...]] = ("model", "optimizer")
    """Attributes that make up the method's state: what a checkpoint holds and a digest covers."""

    model: Model
    optimizer: torch.optim.Optimizer
    views: int = 1
    """Augmented views of each sample in a training batch."""
    finished: bool = False
    """Set by a method that ends before the run's last round."""

    def __init__(self, hyper: H, setting: Setting) -> None:
        self.hyper = hyper
        self.me = setting.me
        self.peers = setting.peers
        self.seed = setting.seed
        self.model = setting.model
        self.data = setting.data
        self.streams = setting.streams
        self.device = setting.device
        self.architectures = setting.architectures
        self.build = setting.build
        self.meter = Meter()
        self.training_seconds = 0.0
        self.after_batch: Callable[[], None] = lambda: None
        self.setup()
        for module in self._modules():
            module.eval()

    @abstractmethod
    def setup(self) -> None:
        """Make what the method needs besides the model: optimiser, prototypes, weights.

        Raises OptionErrors: a hyper-parameter does not go with the model or the data.
        """

    @abstractmethod
    async def round(self, t: int, net: Net) -> None:
        """One round of the paper's algorithm."""

    @abstractmethod
    def loss(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """Terms of the training loss on one batch; their sum is minimised.

        Args:
            x: float [views * B, C, H, W], the first views of all samples, then the second ones.
            labels: int64 [views * B].
        """

    @abstractmethod
    def layouts(self) -> Sequence[Layout]:
        """What neighbours may say: kinds, dtypes, shapes. Anything else is refused on arrival."""

    def stow(self, body: Body) -> Body:
        """What a body that has just arrived is kept as until the round takes it; by default as it is.

        For methods that hear many whole models (p2pfl/spool.py). Over sockets this runs on the I/O thread, while
        the peer trains: it may touch nothing but the body.
        """
        return body

    def predict(self, x: Tensor) -> Tensor:
        """Class scores [B, K] of normalised images [B, C, H, W]."""
        scores: Tensor = self.model(x)
        return scores

    def weights(self) -> Mapping[PeerId, float] | None:
        """The last row of mixing weights, self included, for the records; None if the method has none."""
        return None

    def measures(self, whole: bool) -> Iterable[Measure]:
        """What else to evaluate whenever ``predict`` is: by name, in the records and the summary.

        Args:
            whole: the run file asks for the whole test set too (``global_test``).
        """
        return ()

    def observations(self) -> Mapping[str, float]:
        """The method's own numbers after a round, for the records."""
        return {}

    # -- what subclasses use

    def train(
        self,
        *,
        epochs: int | None = None,
        steps: int | None = None,
        batch: int,
        step: Callable[[Tensor, Tensor], None] | None = None,
        order: str = "batches",
    ) -> None:
        """Train for so many epochs over the own samples, or for so many steps.

        Args:
            step: takes a batch of images and labels; by default ``self.step``. For methods that train in phases.
            order: name of the stream that shuffles the samples.
        """
        began = perf_counter()
        with self.training():
            for images, labels in self._batches(epochs, steps, batch, self.streams.numpy(order)):
                (step or self.step)(images, labels)
                self.after_batch()
        self.training_seconds += perf_counter() - began

    def train_soundly(self, *, epochs: int, batch: int) -> None:
        """Train; if that leaves NaN or infinity in the model, all is as if it had not been, the optimiser too."""
        model, optimizer = clone(self.model.state_dict()), copy.deepcopy(self.optimizer.state_dict())
        self.train(epochs=epochs, batch=batch)
        if not all(map(is_finite, self.model.state_dict().values())):
            self.model.load_state_dict(model)
            self.optimizer.load_state_dict(optimizer)

    def _batches(
        self, epochs: int | None, steps: int | None, size: int, order: np.random.Generator
    ) -> Iterator[tuple[Tensor, Tensor]]:
        if steps is None:
            for _ in range(epochs or 0):
                yield from self.data.batches(size, order)
            return
        done = 0
        while done < steps and len(self.data.train):
            for batch in self.data.batches(size, order):
                yield batch
                done += 1
                if done == steps:
                    return

    def step(self, images: Tensor, labels: Tensor) -> None:
        """One optimiser step on a batch of uint8 images."""
        with self.streams.torch("augmentation"):
            x = self.inputs(images)
        labels = labels.repeat(self.views)
        self.descend(self.optimizer, lambda: self.loss(x, labels), len(images))

    def inputs(self, images: Tensor) -> Tensor:
        """What ``loss`` gets of a batch of uint8 images: augmented views, one below the other."""
        return torch.cat([self.data.input(images, augmented=True) for _ in range(self.views)])

    def descend(self, optimizer: torch.optim.Optimizer, loss: Callable[[], dict[str, Tensor]], samples: int) -> None:
        """One step of ``optimizer`` on the sum of the terms, which are metered as means over so many samples."""
        optimizer.zero_grad(set_to_none=True)
        with self.streams.torch("dropout"):
            terms = loss()
            torch.stack(list(terms.values())).sum().backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        self.meter.add(terms, samples)

    @contextmanager
    def training(self) -> Iterator[None]:
        """Modules in training mode inside, in evaluation mode outside."""
        for module in self._modules():
            module.train()
        try:
            yield
        finally:
            for module in self._modules():
                module.eval()

    def _modules(self) -> Iterator[nn.Module]:
        return (value for value in vars(self).values() if isinstance(value, nn.Module))

    # -- state

    def state_dict(self) -> dict[str, Any]:
        """The method's whole state, as nested dicts of tensors and plain values (not copied)."""
        return {name: _state_of(getattr(self, name)) for name in self.state}

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for name in self.state:
            current = getattr(self, name)
            if hasattr(current, "load_state_dict"):
                current.load_state_dict(state[name])
            elif isinstance(current, Tensor):
                current.copy_(state[name])
            else:
                setattr(self, name, state[name])


def _state_of(value: Any) -> Any:
    if hasattr(value, "state_dict"):
        return value.state_dict()
    return value.detach() if isinstance(value, Tensor) else value
