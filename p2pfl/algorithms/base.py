"""Base class of all algorithms: a model, local samples, random streams, hyper-parameters, and one round at a time.

An algorithm is the paper's pseudo-code as a coroutine, ``round``, with the paper's equations as pure functions
beside it. It trains, predicts, exchanges messages and averages. The session that drives it evaluates, measures
time, counts bytes, logs and writes files.

All algorithms skip a last training batch of a single sample unless it is the only batch; no paper mentions this.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import fields, replace
from typing import Annotated, Any, ClassVar, Generic, TypeVar

import torch
from pydantic import Field
from torch import Tensor
from torch.func import functional_call

from p2pfl import PeerId, rng
from p2pfl.aggregation.aggregator import Aggregator
from p2pfl.algorithms.context import Context
from p2pfl.algorithms.shared_model import statistics_stay_local
from p2pfl.learning.evaluation import ExtraMetric
from p2pfl.learning.gradients import Clipped
from p2pfl.learning.named_losses import LOSSES
from p2pfl.learning.trainer import Trainer
from p2pfl.messaging.net import Net
from p2pfl.messaging.schema import B, Body, Layout, what_diverged
from p2pfl.messaging.tensor_file import Spool
from p2pfl.options import Options
from p2pfl.outcomes import CONTRIBUTIONS
from p2pfl.tensors import Tensors, widened

H = TypeVar("H", bound=Options)
Fraction = Annotated[float, Field(gt=0.0, le=1.0)]
"""A fraction of the peers, greater than 0."""


class Algorithm(Trainer, ABC, Generic[H]):
    """Base of all algorithms. A subclass sets class attributes and implements ``setup``, ``round``, ``layouts``.

    ``Trainer`` trains the model; a subclass overrides its ``loss`` if that is not the loss on the labels alone.
    """

    name: ClassVar[str]
    summary: ClassVar[str]
    """One line: what is sent and how it is used. `p2pfl algorithms` lists it."""
    title: ClassVar[str]
    authors: ClassVar[str]
    venue: ClassVar[str]
    url: ClassVar[str]
    Hyper: ClassVar[type[Options]]
    homogeneous: ClassVar[bool] = False
    """Whole models are averaged or replaced: all peers need one architecture, and start from one initial model."""
    linear_heads: ClassVar[bool] = False
    """Head weights are compared or averaged: each head must be one linear layer, ``model.linear_head``."""
    equal_features: ClassVar[bool] = False
    """Heads, features or prototypes are exchanged: all peers need the same number of features."""
    needs_validation: ClassVar[bool] = False
    """The algorithm learns from validation samples: each peer must have some."""
    needs_images: ClassVar[bool] = False
    """The algorithm processes images itself: other inputs are refused."""
    learns_weights: ClassVar[bool] = False
    """It computes the weights of what it combines: aggregation rules that ignore weights are refused."""
    prunes: ClassVar[bool] = False
    """It drops sources (``net.receive_only_from``), and each Begin states the rest: the graph must stay the same."""
    replies: ClassVar[bool] = False
    """Peers answer what they receive within the round: edges need both directions, in every round's graph."""
    bipartite: ClassVar[bool] = False
    """Neighbors have different roles, by the sides of the graph: it must be bipartite over all rounds."""
    asynchronous: ClassVar[bool] = False
    """It can use bodies of other rounds than its own: the run file may choose a ``synchrony``."""
    own_gradients: ClassVar[bool] = False
    """It trains by gradients that it makes without ``descend``: the run file's rule for gradients is refused."""
    sends_training: ClassVar[bool] = False
    """Its messages hold what training steps compute, e.g. gradients: the run file may not leave training out."""
    named_loss: ClassVar[bool] = False
    """Its own ``loss`` contains ``label_loss``: the run file may choose that (``loss`` of ``LocalTraining``)."""
    sends_parts: ClassVar[bool] = False
    """Bodies hold parts of tensors: rules that measure the loss of received models are refused."""
    screened: ClassVar[type[Body] | None] = None
    """Kind of the models that peers exchange once a round, to average them and no more: rules may screen these."""
    state: ClassVar[tuple[str, ...]] = ("model", "optimizer")
    """Attributes that make up the algorithm's state, in checkpoints and digests."""
    pretrained: ClassVar[tuple[str, ...]] = ()
    """Modules of ``state`` that start from an earlier run if the hyper-parameter of the same name holds its path."""

    finished: bool = False
    """Set by an algorithm that ends before the run's last round."""

    def __init__(self, hyper: H, context: Context) -> None:
        super().__init__(context.model, context.data, context.streams)
        self.hyper = hyper
        if (loss := str(getattr(hyper, "loss", ""))) in LOSSES:
            self.loss_name = loss
        self.drop_last = bool(getattr(hyper, "drop_last", False))
        clip_norm = getattr(hyper, "clip_norm", None)
        self.gradient = context.gradient if clip_norm is None else Clipped(context.gradient, clip_norm)
        self.me = context.me
        self.peers, self.rounds = context.peers, context.rounds
        self.seed = context.seed
        self.device = context.device
        self.architectures = context.architectures
        self.build = context.build
        self.build_named = context.build_named
        self.sample_counts = range(1 + max(context.samples, default=0))
        """Sample counts that a peer may send, for ``Layout.of(ranges=...)``: none has more than the largest."""
        rule = context.aggregation
        measure = self.loss_with if rule.needs_loss else None
        self.aggregation = Aggregator(rule, self.me, self.rounds, measure, measures=context.measures_distances)
        """Combines what has arrived with the peer's own: ``self.aggregation.combine(bodies, weights, out=…)``."""
        self.accepted: Sequence[Layout] = ()
        """What ``layouts`` has returned."""
        self._spool = Spool()
        self.setup()
        for module in self.modules():
            module.eval()
        self.note_start()

    # ---- what a subclass implements

    @abstractmethod
    def setup(self) -> None:
        """Create what the algorithm needs besides the model: optimizer, prototypes, weights.

        Raises:
            OptionErrors: a hyper-parameter does not fit the model or the data.
        """

    @abstractmethod
    async def round(self, t: int, net: Net) -> None:
        """Run one round of the paper's algorithm."""

    @abstractmethod
    def layouts(self) -> Sequence[Layout]:
        """Return what messages this peer accepts: kinds, dtypes, shapes, ranges. Others are refused on arrival."""

    def predict(self, x: Tensor) -> Tensor:
        """Return class scores [B, K] of network input, e.g. normalized images [B, C, H, W]."""
        scores: Tensor = self.model(x)
        return scores

    def weights(self) -> Mapping[PeerId, float] | None:
        """Return the last mixing weights, including the peer's own, all finite; None without weights."""
        return None

    def extra_metrics(self, whole: bool) -> Iterable[ExtraMetric]:
        """Return what to evaluate besides ``predict``, by name, for the records and the summary.

        Args:
            whole: the run file asks for the whole test set too (``global_test``).
        """
        return ()

    def diagnostics(self) -> Mapping[str, float]:
        """Return the algorithm's own measurements of the last round, for the records."""
        return {}

    # ---- receiving and averaging

    @torch.no_grad()
    def loss_with(self, tensors: Tensors) -> float:
        """Return the mean loss of the model with some of its tensors replaced, on one batch of the training samples.

        Each round draws one batch. Only for methods that send whole models, or the part that ``share`` names.
        """
        share = getattr(self.hyper, "share", None)
        prefix = f"{share}." if share in ("head", "backbone") else ""
        named = {f"{prefix}{name}": tensor.to(self.device) for name, tensor in tensors.items()}
        order = rng.shared(self.seed, "aggregation.loss", self.aggregation.t)
        images, labels = next(self.data.batches(int(getattr(self.hyper, "batch", 64)), order))
        with self.streams.evaluation():
            scores = functional_call(self.model, named, (self.data.input(images, augmented=False),))
            terms = self.label_loss(widened(scores), labels)
        return sum(float(term) for term in terms.values())

    def on_receive(self, body: Body) -> Body:
        """Return what to keep of a received body until the round uses it.

        With the hyper-parameter ``spool``, dicts of tensors move to a file (p2pfl/messaging/tensor_file.py). Over
        sockets this runs on the I/O thread while the peer trains, so it accesses nothing but the body.
        """
        if not getattr(self.hyper, "spool", False):
            return body
        models = {each.name: x for each in fields(body) if isinstance(x := getattr(body, each.name), Mapping)}
        return replace(body, **{name: self._spool.put(model) for name, model in models.items()})

    async def exchange_including_own(
        self, net: Net, body: B, among: Collection[PeerId] | None = None
    ) -> dict[PeerId, B]:
        """Exchange ``body`` with the neighbors and add the peer's own if it is ``among`` the senders."""
        received = await net.exchange(body, among=among)
        return self.including_local(received, body) if among is None or self.me in among else received

    def including_local(self, received: Mapping[PeerId, B], local: B) -> dict[PeerId, B]:
        """Return the received bodies and this peer's ``local`` one, as a server would see them.

        A local one that has diverged is dropped, as ``Net`` drops received ones: the peer continues with the others'.
        """
        return {**received, self.me: local} if self.note_contribution(local) else dict(received)

    def note_contribution(self, local: Body) -> bool:
        """Count a body that this peer sends; return whether it is usable: receivers drop one that has diverged."""
        return self.outcomes.note(CONTRIBUTIONS, what_diverged(local, self.accepted))

    def reset_after_divergence(self) -> None:
        """Clear the optimizer's state, and the statistics unless an average has replaced them."""
        if statistics_stay_local(self.hyper):
            super().reset_after_divergence()
        else:
            self.optimizer.state.clear()

    # ---- state

    def state_dict(self) -> dict[str, Any]:
        """Return the whole state as nested dicts of tensors and plain values; tensors are not copied."""
        rules = {"aggregation": self.aggregation.state_dict(), "gradient": self.gradient_state}
        kept = {name: state for name, state in rules.items() if state}
        return {name: _state_of(getattr(self, name)) for name in self.state} | kept

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.aggregation.load_state_dict(state.get("aggregation", {}))
        self.gradient_state = dict(state.get("gradient", {}))
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
