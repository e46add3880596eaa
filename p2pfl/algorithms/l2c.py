"""L2C: Learning to Collaborate in Decentralized Learning of Personalized Models.

Shuangtong Li, Tianyi Zhou, Xinmei Tian, Dacheng Tao, CVPR 2022. https://doi.org/10.1109/CVPR52688.2022.00954

Peers with one architecture and one initial model exchange model *updates*. Each peer learns the weights with which it
mixes them, so that its validation loss falls. After round T_0 it receives only from the neighbors with the largest
weights.

Algorithm 1, in round t on peer i, over the peers {i} ∪ N_i:

    7–10   θ_i^{t+½} ← S steps of SGD from θ_i^t
    11     Δ_i ← θ_i^t − θ_i^{t+½}, and exchange it with the neighbors
    13     w_i ← softmax(α_i)                                            (Eq. 3)
    16     θ_i^{t+1} ← θ_i^t − Σ_j w_ij Δ_j                              (Eq. 2)
    18     α_i ← α_i − β ∇_{α_i} L_val(θ_i^{t+1}), by Adam
    20–22  if t = T_0: remove the K_0 neighbors with the smallest w_ij

Differs from the paper:

- line 16 as printed omits the peer's own update; the second line of Eq. 2, used here, includes it.
- α_i stays with peer i: the AllReduce of line 24 belongs to meta-L2C.
- a peer never prunes itself, and ``prune_to`` counts neighbors only: it keeps K − K_0 = 10 of them, where the paper
  removes 90 of 99. Lines 20–22 come before the exchange, as w_ij is known by then, and take effect in the next round,
  so that rounds 0 to T_0 are dense. For a peer that joins late, and for its neighbors, they count from then.
- the weight decay of Adam is decoupled (AdamW) unless ``mixing_optimizer: adam``.
- with ``precision: bfloat16`` only the neighbors' updates are rounded; a peer's own stays float32.
- the gradient of line 18 is computed in closed form, without a graph through the models: the same values for less.
- batch-normalization statistics stay local, as local training leaves them.
- local training that diverges is rolled back, an aggregate that diverged is discarded, and a logit gradient that
  is not finite is skipped.
- a neighbor that misses the deadline is excluded from the round's aggregate: its weight goes to the others in
  proportion, and its logit stays (Adam's moments of it decay).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from pydantic import NonNegativeFloat, NonNegativeInt, PositiveInt
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from p2pfl import PeerId
from p2pfl.aggregation.aggregator import Aggregator
from p2pfl.algorithms import presets
from p2pfl.algorithms.base import Algorithm
from p2pfl.algorithms.presets import Presets
from p2pfl.algorithms.registration import algorithm
from p2pfl.learning.optimizers import Adam, AdamW, LocalTraining, step_if_finite
from p2pfl.learning.peer_data import PeerData
from p2pfl.messaging.net import Net
from p2pfl.messaging.schema import Body, Layout
from p2pfl.tensors import Tensors, parameters_of, subtract, widened


@dataclass(frozen=True)
class Hyper(LocalTraining):
    preset: Literal["default", "paper"] = "default"
    """default: what works best here; paper: the formulas as printed. Other keys override it."""
    local_epochs: PositiveInt = 5
    batch: PositiveInt = 10
    weight_decay: NonNegativeFloat = 5e-4
    mixing_lr: NonNegativeFloat = 0.1
    """β, Adam's learning rate for the parameters that determine the mixing weights; 0 keeps them as they start."""
    mixing_weight_decay: NonNegativeFloat = 0.01
    """Adam's weight decay for the parameters that determine the mixing weights."""
    mixing_optimizer: Literal["adamw", "adam"] = "adamw"
    """adamw decays the parameters directly; adam adds the decay to the gradient, which may be far smaller."""
    prune_round: NonNegativeInt | None = 10
    """T_0, the last round in which a peer receives from all neighbors; null: never prune."""
    prune_to: NonNegativeInt = 10
    """K − K_0, neighbors with the largest weights that a peer still receives from after round T_0."""
    precision: Literal["float32", "bfloat16"] = "float32"
    """Data type in which models travel and are kept until they are averaged; bfloat16 halves both."""
    spool: bool = False
    """Keep received models on disk ($TMPDIR) instead of in memory until they are averaged; bit-identical."""

    PRESETS: ClassVar[Presets] = presets.L2C


@dataclass(frozen=True)
class Update(Body):
    """Δ_j: all parameters by name, in the run's precision."""

    values: Tensors


# ---- equations -----------------------------------------------------------------------------------------------


def mixing_weights(logits: Tensor, peers: Collection[PeerId]) -> dict[PeerId, float]:
    """Line 13, Eq. 3: w_ij over ``peers``, ascending, from the logits α_i, float64 [M] by peer id."""
    ids = sorted(peers)
    return dict(zip(ids, logits.detach()[ids].softmax(0).tolist(), strict=True))


def aggregate(
    aggregation: Aggregator, before: Tensors, bodies: Mapping[PeerId, Body], w: Mapping[PeerId, float], part: str
) -> dict[str, Tensor]:
    """Line 16, Eq. 2: θ_i^t − Σ_j w_ij Δ_j, summed in ascending order of j, in the dtype of θ_i^t.

    Args:
        part: the field of the bodies with Δ_j.
    """
    totals = {name: torch.empty_like(widened(start)) for name, start in before.items()}
    aggregation.combine(bodies, w, totals, part=part)
    return {name: torch.sub(start, totals[name], out=totals[name]).to(start.dtype) for name, start in before.items()}


def validation_gradient(model: nn.Module, data: PeerData) -> tuple[float, dict[str, Tensor]]:
    """Return L_val(θ), the mean cross-entropy over the validation samples, and g = ∇_θ L_val by parameter name.

    Of a parameter that was frozen after the model was built, g is zero.
    """
    gradient = {name: torch.zeros_like(widened(parameter)) for name, parameter in parameters_of(model).items()}
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    loss = 0.0
    for x, labels in data.sweep(data.validation):
        part = cross_entropy(widened(model(x)), labels, reduction="sum") / len(data.validation)
        loss += float(part.detach())
        parts = torch.autograd.grad(part, list(trained.values()), allow_unused=True)
        for name, term in zip(trained, parts, strict=True):
            if term is not None:
                gradient[name] += term
    return loss, gradient


def directional_derivative(gradient: Tensors, update: Tensors) -> float:
    """d_j = <g, Δ_j>, summed in float64. As θ_i^{t+1} is linear in w_i, ∂L_val/∂w_ij = −d_j."""
    parts = (g * update[name].to(g) for name, g in gradient.items())
    return float(sum(part.sum(dtype=torch.float64) for part in parts))


def logit_gradient(w: Tensor, derivatives: Tensor) -> Tensor:
    """Line 18: ∂L_val/∂α_j = −w_j (d_j − Σ_l w_l d_l), Eq. 2 and Eq. 3 combined; all float64 [n]."""
    return -w * (derivatives - w @ derivatives)


def strongest(scores: Mapping[PeerId, float], sources: Iterable[PeerId], count: int) -> tuple[PeerId, ...]:
    """Lines 21–22: the ``count`` sources with the largest scores, ascending by id; ties go to the lower id."""
    return tuple(sorted(sorted(sources, key=lambda j: (-scores.get(j, 0.0), j))[:count]))


def make_mixing_optimizer(h: Hyper, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    kind = AdamW if h.mixing_optimizer == "adamw" else Adam
    return kind(parameters, lr=h.mixing_lr, weight_decay=h.mixing_weight_decay)


def to_precision(tensors: Tensors, precision: str) -> Tensors:
    return {name: tensor.to(getattr(torch, precision)) for name, tensor in tensors.items()}


@algorithm("l2c")
class L2C(Algorithm[Hyper]):
    """L2C, Algorithm 1."""

    summary = "sends model updates; each peer learns one mixing weight per neighbor on its validation samples"
    title = "Learning to Collaborate in Decentralized Learning of Personalized Models"
    authors = "Li, Zhou, Tian, Tao"
    venue = "CVPR 2022"
    url = "https://doi.org/10.1109/CVPR52688.2022.00954"
    Hyper = Hyper
    homogeneous = True
    needs_validation = True
    learns_weights = True
    prunes = True
    state = ("model", "optimizer", "logits", "mixing_optimizer", "w")

    def setup(self) -> None:
        self.optimizer = self.hyper.make_optimizer(self.model.parameters())
        self.logits = nn.Parameter(torch.zeros(self.peers, dtype=torch.float64))
        self.mixing_optimizer = make_mixing_optimizer(self.hyper, [self.logits])
        self.w: dict[PeerId, float] = {self.me: 1.0}
        self.validation_loss = 0.0

    async def round(self, t: int, net: Net) -> None:
        h = self.hyper
        x = parameters_of(self.model)
        before = self.train_or_roll_back(epochs=h.local_epochs, batch=h.batch)  # lines 7–10
        update = subtract(before, x)  # line 11
        self.prune(dict(enumerate(self.logits.tolist())), net)  # lines 20–22; α is in the order of the weights
        received = await net.exchange(Update(to_precision(update, h.precision)))
        updates = {**received, self.me: Update(update)}
        self.w = mixing_weights(self.logits, updates)  # line 13
        aggregated = aggregate(self.aggregation, before, updates, self.w, "values")  # line 16
        adopted = self.assign_unless_diverged(x, aggregated)
        del before, aggregated  # as large as the model, like the gradient
        if adopted:
            with self.streams.evaluation():
                self.validation_loss, gradient = validation_gradient(self.model, self.data)
            self.learn({j: directional_derivative(gradient, updates[j].values) for j in self.w})  # line 18

    def prune(self, scores: Mapping[PeerId, float], net: Net) -> None:
        """Lines 20–22: keep the sources with the largest scores, and those that joined less than T_0 rounds ago."""
        h = self.hyper
        if h.prune_round is None or net.rounds_since_join(self.me) < h.prune_round:
            return
        recent = {j for j in net.sources if net.rounds_since_join(j) < h.prune_round}
        others = [j for j in net.sources if j not in recent]
        net.receive_only_from({*strongest(scores, others, h.prune_to), *recent})

    @torch.no_grad()
    def learn(self, derivatives: Mapping[PeerId, float]) -> None:
        """Line 18: take one Adam step on the logits of the peers in the aggregate; the other logits stay."""
        ids = list(self.w)
        w, d = (torch.tensor([values[j] for j in ids], dtype=torch.float64) for values in (self.w, derivatives))
        after = self.logits.clone()
        self.logits.grad = torch.zeros_like(self.logits)
        self.logits.grad[ids] = logit_gradient(w, d)
        step_if_finite(self.mixing_optimizer)
        after[ids] = self.logits[ids]
        self.logits.copy_(after)

    def layouts(self) -> Sequence[Layout]:
        return [Layout.of(Update(to_precision(parameters_of(self.model), self.hyper.precision)))]

    def weights(self) -> Mapping[PeerId, float]:
        return self.w

    def diagnostics(self) -> Mapping[str, float]:
        return {"validation_loss": self.validation_loss}
