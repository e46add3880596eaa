"""meta-L2C, from: Learning to Collaborate in Decentralized Learning of Personalized Models.

Shuangtong Li, Tianyi Zhou, Xinmei Tian, Dacheng Tao, CVPR 2022. https://doi.org/10.1109/CVPR52688.2022.00954

L2C (l2c.py) learns one weight per pair of peers. meta-L2C learns to *compute* weights from how far two models have
moved from their common start: an encoder, equal on all peers, turns that change into a code, and attention compares
codes. What the encoder has learned also holds for peers and tasks that it has not seen.

Algorithm 1, in round t on peer i, over the peers {i} ∪ N_i:

    7–10   θ_i^{t+½} ← S steps of SGD from θ_i^t
    11     Δ_i ← θ_i^t − θ_i^{t+½},  Δ̂_i ← θ_i^{t+½} − θ_i^0, and exchange both with the neighbors
    14     w_i ← softmax over j of f(Δ̂_i, Δ̂_j) = <E(Δ̂_i), E(Δ̂_j)>        (Eqs. 4, 5, 7, 8)
    16     θ_i^{t+1} ← θ_i^t − Σ_j w_ij Δ_j                              (Eq. 2)
    18     E ← E − β ∇_E L_val(θ_i^{t+1}), by Adam                       (Eq. 6)
    20–22  if t = T_0: remove the K_0 neighbors with the smallest w_ij
    24     E ← AllReduce(E), the mean over all peers

Differs from the paper:

- line 16 as printed omits the peer's own update; the second line of Eq. 2, used here, includes it.
- Δ̂ of the whole model is scaled to norm 1 before it is encoded: it grows over the rounds and differs in size between
  peers, and the encoder would otherwise see its length more than its direction.
- ``score: mean`` divides the inner products of Eq. 5 by the numbers of channels and layers, as later code of the
  authors does. Weights then differ far less.
- every parameter tensor is a layer, biases and normalization too; both of the encoder's layers end in tanh.
- the weight decay of Adam is decoupled (AdamW) unless ``mixing_optimizer: adam``, with which the encoder forgets.
- a peer never prunes itself, and ``prune_to`` is the number of neighbors kept; rounds 0 to T_0 are dense: w_ij is
  known only after the exchange of round T_0. Later, a neighbor that joins competes with those kept. A peer that joins
  does not prune in its first round, before it has the others' encoder.
- with ``precision: bfloat16`` only what neighbors send is rounded; a peer's own stays float32.
- line 24 averages the encoder's parameters; each peer's Adam keeps its own moments.
- a frozen encoder (``train_encoder: false``) is not averaged; ``send_codes`` sends its codes in place of changes.
- batch-normalization statistics stay local, as local training leaves them.
- local training that diverges is rolled back, an aggregate that diverged is discarded, and an encoder gradient that
  is not finite is skipped.
- a neighbor that misses the deadline gets no weight in the round; one that is missing in round T_0 is pruned,
  unless fewer than ``prune_to`` messages arrived.
- validation samples are required with a frozen encoder too, which does not use them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from pydantic import PositiveInt, model_validator
from torch import Tensor

from p2pfl import PeerId, rng
from p2pfl.algorithms import l2c, presets
from p2pfl.algorithms.base import Algorithm
from p2pfl.algorithms.l2c import (
    aggregate,
    directional_derivative,
    make_mixing_optimizer,
    strongest,
    to_precision,
    validation_gradient,
)
from p2pfl.algorithms.meta_l2c_encoder import Encoder, attention, backward
from p2pfl.algorithms.presets import Presets
from p2pfl.algorithms.registration import algorithm
from p2pfl.learning.optimizers import step_if_finite
from p2pfl.messaging.net import Net
from p2pfl.messaging.schema import Body, Layout
from p2pfl.paths import LocalPath
from p2pfl.tensors import Tensors, assign, clone, parameters_of, subtract


@dataclass(frozen=True)
class Hyper(l2c.Hyper):
    preset: Literal["default", "paper", "official"] = "default"  # type: ignore[assignment]
    """default: what works best here; paper: the formulas as printed; official: the score of later code. Other keys
    override it."""
    encoder_hidden: PositiveInt = 10
    """Outputs of the encoder's first layer."""
    encoder_width: PositiveInt = 5
    """d, outputs of the encoder's second layer: length of the code of one channel."""
    score: Literal["sum", "mean"] = "sum"
    """f_ij: the inner product of codes summed over channels and layers (Eqs. 5, 7, 8), or its mean over both."""
    encoder: LocalPath | None = None
    """Encoder to start from: the folder of a meta-l2c run, or a peer's checkpoint of one; null: random."""
    train_encoder: bool = True
    """Train the encoder; false keeps it as loaded (Table 4)."""
    send_codes: bool = False
    """Send the code of the local change instead of the change, for nearly half the bytes; frozen encoders only."""

    PRESETS: ClassVar[Presets] = presets.META_L2C

    @model_validator(mode="after")
    def _check_frozen(self) -> Hyper:
        if not self.train_encoder and self.encoder is None:
            raise ValueError("train_encoder: false needs a trained encoder; set encoder to the folder of a run")
        if self.send_codes and self.train_encoder:
            raise ValueError("send_codes needs train_encoder: false, as training an encoder needs the changes")
        return self


# ---- messages ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Progress(Body):
    """Δ_j and Δ̂_j: all parameters by name, in the run's precision."""

    update: Tensors
    change: Tensors


@dataclass(frozen=True)
class CodedProgress(Body):
    """Δ_j as in Progress, and E(Δ̂_j), float32 [n]."""

    update: Tensors
    code: Tensor


@dataclass(frozen=True)
class EncoderParameters(Body):
    """The encoder's parameters by name, float32; summed over all peers."""

    values: Tensors


def direction(now: Tensors, initial: Tensors) -> dict[str, Tensor]:
    """Line 11: Δ̂ = θ^{t+½} − θ^0, all parameters together scaled to norm 1; zeros if nothing has changed."""
    change = subtract(now, initial)
    squares = sum(float(tensor.double().square().sum()) for tensor in change.values())
    scale = 1.0 / math.sqrt(squares) if squares > 0.0 else 0.0
    return {name: tensor.mul_(scale) for name, tensor in change.items()}


@algorithm("meta-l2c")
class MetaL2C(Algorithm[Hyper]):
    """meta-L2C, Algorithm 1."""

    summary = "as l2c, but an encoder of model changes, which all peers train together, computes the weights"
    title = l2c.L2C.title
    authors = l2c.L2C.authors
    venue = l2c.L2C.venue
    url = l2c.L2C.url
    Hyper = Hyper
    homogeneous = True
    needs_validation = True
    learns_weights = True
    prunes = True
    state = ("model", "optimizer", "encoder", "encoder_optimizer", "w")
    pretrained = ("encoder",)

    def setup(self) -> None:
        h = self.hyper
        self.optimizer = h.make_optimizer(self.model.parameters())
        parameters = parameters_of(self.model)
        self.initial = clone(parameters)  # θ^0, equal on all peers
        with rng.torch_seeded(self.seed, "meta-l2c.encoder"):
            self.encoder = Encoder(parameters, h.encoder_hidden, h.encoder_width, h.score == "mean").to(self.device)
        self.encoder_optimizer = make_mixing_optimizer(h, self.encoder.parameters())
        self.w: dict[PeerId, float] = {self.me: 1.0}
        self.validation_loss = 0.0

    async def round(self, t: int, net: Net) -> None:
        h = self.hyper
        x = parameters_of(self.model)
        before = self.train_or_roll_back(epochs=h.local_epochs, batch=h.batch)  # lines 7–10
        update, change = subtract(before, x), direction(x, self.initial)  # line 11
        received = await net.exchange(self.progress(update, change))
        updates = {**{j: body.update for j, body in received.items()}, self.me: update}
        changes = {**{j: body.change for j, body in received.items() if isinstance(body, Progress)}, self.me: change}
        codes = self.encode(changes)
        codes.update(
            {j: body.code.to(self.device) for j, body in received.items() if isinstance(body, CodedProgress)}
        )
        self.w = dict(zip(sorted(codes), attention(codes, self.me).tolist(), strict=True))  # line 14
        local = CodedProgress(update, codes[self.me]) if h.send_codes else Progress(update, change)
        bodies = {**received, self.me: local}
        aggregated = aggregate(self.aggregation, before, bodies, self.w, "update")  # line 16
        adopted = self.assign_unless_diverged(x, aggregated)
        del before, aggregated  # as large as the model, like the gradient
        if adopted and h.train_encoder:
            with self.streams.evaluation():
                self.validation_loss, gradient = validation_gradient(self.model, self.data)
            derivatives = {j: directional_derivative(gradient, updates[j]) for j in sorted(updates)}
            self.learn(changes, codes, derivatives)  # line 18
        if self.prunes_in(t, net):  # line 20
            net.receive_only_from(strongest(self.w, net.sources, h.prune_to))  # lines 21–22
        if h.train_encoder:
            del received, local, bodies, updates, changes  # all received models, before another wait
            parameters = parameters_of(self.encoder)
            assign(parameters, (await net.allreduce(EncoderParameters(parameters))).values)  # line 24

    def prunes_in(self, t: int, net: Net) -> bool:
        """Line 20: from round T_0 on, but not in the first round of a peer that joins late."""
        first = self.hyper.prune_round
        return first is not None and t >= first and net.rounds_since_join(self.me) >= min(first, 1)

    def progress(self, update: Tensors, change: Tensors) -> Progress | CodedProgress:
        """Return the message with the result of this round's local training."""
        update = to_precision(update, self.hyper.precision)
        if self.hyper.send_codes:
            return CodedProgress(update, self.encode({self.me: change})[self.me])
        return Progress(update, to_precision(change, self.hyper.precision))

    @torch.no_grad()
    def encode(self, changes: Mapping[PeerId, Tensors]) -> dict[PeerId, Tensor]:
        return {j: self.encoder(changes[j]) for j in sorted(changes)}

    def learn(
        self, changes: Mapping[PeerId, Tensors], codes: Mapping[PeerId, Tensor], derivatives: Mapping[PeerId, float]
    ) -> None:
        """Line 18: take one Adam step on the encoder."""
        backward(self.encoder, changes, codes, self.me, derivatives)
        step_if_finite(self.encoder_optimizer)

    def layouts(self) -> Sequence[Layout]:
        parameters = parameters_of(self.model)
        layouts = [Layout.of(self.progress(parameters, parameters))]
        if self.hyper.train_encoder:
            layouts.append(Layout.of(EncoderParameters(parameters_of(self.encoder))))
        return layouts

    def weights(self) -> Mapping[PeerId, float] | None:
        """Return the last α; None if codes have diverged."""
        return self.w if all(map(math.isfinite, self.w.values())) else None

    def diagnostics(self) -> Mapping[str, float]:
        return {"validation_loss": self.validation_loss} if self.hyper.train_encoder else {}
