"""L2C: Learning to Collaborate in Decentralized Learning of Personalized Models.

Shuangtong Li, Tianyi Zhou, Xinmei Tian, Dacheng Tao, CVPR 2022. https://doi.org/10.1109/CVPR52688.2022.00954

Peers with one architecture and one initial model exchange model *updates*. Each peer learns the weights with which
it mixes them: those that make its own loss on validation samples small. After a while it hears only the few peers
with the largest weights.

    update Δ_j = θ_j^t − θ_j^{t+½}      logits α_i      weights w_i = softmax(α_i)      over {i} ∪ N_i

Differs from the paper:

- line 16 of Algorithm 1 leaves the own update out of the sum; the second line of Eq. 2, which is used here, has it.
- α_i stays with peer i: the AllReduce of line 24 is meta-L2C's.
- the own update is never pruned, and counts neither among the K_0 that are removed nor among those that are kept.
- the paper says Adam with a weight decay of 0.01; here it is decoupled (AdamW) unless ``mixing_optimizer: adam``.
- the paper removes K_0 = 90 of a peer's 99 neighbours, which leaves 9; ``prune_to`` says how many are kept, K − K_0 =
  10, whatever the degree. As in line 20 that is at the end of round T_0, so that T_0 + 1 rounds are dense.
- with ``precision: bfloat16`` only neighbours' updates are rounded; a peer's own stay float32.
- the gradient of line 18 is a closed form, so that no graph goes through the models: the same numbers for less.
- batch-normalisation statistics stay local, and are those of the local training.
- local training that diverges is dropped: the peer goes on as if it had not trained in that round. So is a mix that
  overflows; a gradient of the logits that is not finite is no step.
- a neighbour that misses a deadline is left out of that round's mix: its weight goes to the others in proportion, and
  its logit stays as it is (Adam's moments of it decay).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from pydantic import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from p2pfl.algorithms.base import Algorithm
from p2pfl.net import Net
from p2pfl.options import Options
from p2pfl.runfolder import PeerId
from p2pfl.spool import Spool
from p2pfl.tensors import Tensors, assign, clone, is_finite, parameters_of, subtract
from p2pfl.training import PeerData, make_optimizer
from p2pfl.wire import Body, Layout


@dataclass(frozen=True)
class Hyper(Options):
    local_epochs: PositiveInt = 5
    """Epochs over the own training samples in one round (S steps)."""
    batch: PositiveInt = 10
    """Samples in one step."""
    lr: PositiveFloat = 0.01
    """Learning rate of the local SGD."""
    momentum: NonNegativeFloat = 0.0
    """Of the local SGD."""
    weight_decay: NonNegativeFloat = 5e-4
    """ℓ2 penalty added to the gradient of the local SGD."""
    mixing_lr: NonNegativeFloat = 0.1
    """β, Adam's learning rate for what makes the mixing weights; 0 leaves them as they are at first."""
    mixing_weight_decay: NonNegativeFloat = 0.01
    """Weight decay there."""
    mixing_optimizer: Literal["adamw", "adam"] = "adamw"
    """adamw takes the decay off what is learned, adam adds it to the gradient, which may be far smaller."""
    prune_round: NonNegativeInt | None = 10
    """T_0, the last round in which all neighbours are heard; null: all of them always."""
    prune_to: NonNegativeInt = 10
    """K − K_0, neighbours that are still heard after that: those with the largest weights."""
    precision: Literal["float32", "bfloat16"] = "float32"
    """What numbers travel in, and are kept in until they are mixed; bfloat16 takes half the bytes of both."""
    spool: bool = False
    """Keep what neighbours send on disk ($TMPDIR), not in memory, until it is mixed. Does not change a bit."""


@dataclass(frozen=True)
class Update(Body):
    """Δ_j: all parameters by name, in the run's precision."""

    values: Tensors


# ---- equations -----------------------------------------------------------------------------------------------


def softmax(logits: Tensor, among: Collection[PeerId]) -> dict[PeerId, float]:
    """Line 13 and Eq. 3: w_ij over the peers in ``among``, ascending, of the logits α_i, float64 [M] by peer id."""
    ids = sorted(among)
    return dict(zip(ids, logits.detach()[ids].softmax(0).tolist(), strict=True))


def aggregate(before: Tensors, updates: Mapping[PeerId, Tensors], w: Mapping[PeerId, float]) -> dict[str, Tensor]:
    """Line 16, as in Eq. 2: θ_i^t − Σ_j w_ij Δ_j, the sum in ascending order of j, in the dtype of θ_i^t.

    Tensor by tensor, so that of updates on disk one tensor is in memory at a time.
    """
    mixed = {}
    for name, start in before.items():
        total = torch.zeros_like(start)
        for j in sorted(updates):
            total.add_(updates[j][name].to(total), alpha=w[j])
        mixed[name] = start - total
    return mixed


def validation_gradient(model: nn.Module, data: PeerData) -> tuple[float, dict[str, Tensor]]:
    """L_val(θ), the mean cross-entropy over the validation samples, and g = ∇_θ L_val by parameter name."""
    parameters = dict(model.named_parameters())
    loss, gradient = 0.0, {name: torch.zeros_like(parameter) for name, parameter in parameters.items()}
    for x, labels in data.sweep(data.validation):
        part = cross_entropy(model(x), labels, reduction="sum") / len(data.validation)
        loss += float(part.detach())
        parts = torch.autograd.grad(part, list(parameters.values()), allow_unused=True)
        for name, one in zip(parameters, parts, strict=True):
            if one is not None:
                gradient[name] += one
    return loss, gradient


def slope(gradient: Tensors, update: Tensors) -> float:
    """d_j = <g, Δ_j>, summed in float64; −d_j is ∂L_val/∂w_ij, as θ_i^{t+1} is linear in w_i."""
    parts = (g * update[name].to(g) for name, g in gradient.items())
    return float(sum(part.sum(dtype=torch.float64) for part in parts))


def logit_gradient(w: Tensor, slopes: Tensor) -> Tensor:
    """∂L_val/∂α_j = −w_j (d_j − Σ_l w_l d_l): Eq. 3 through Eq. 2 and the softmax. Both float64 [n]."""
    return -w * (slopes - w @ slopes)


def strongest(w: Mapping[PeerId, float], sources: Iterable[PeerId], count: int) -> tuple[PeerId, ...]:
    """Lines 21–22: the ``count`` sources with the largest weights, ascending; of equal ones those with lower ids."""
    return tuple(sorted(sorted(sources, key=lambda j: (-w.get(j, 0.0), j))[:count]))


def make_mixing_optimizer(h: Hyper, learned: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    kind = torch.optim.AdamW if h.mixing_optimizer == "adamw" else torch.optim.Adam
    return kind(learned, lr=h.mixing_lr, weight_decay=h.mixing_weight_decay)


class L2C(Algorithm[Hyper]):
    """L2C, Algorithm 1."""

    name = "l2c"
    gist = "model updates travel; each peer learns a weight for each neighbour on its validation samples"
    title = "Learning to Collaborate in Decentralized Learning of Personalized Models"
    authors = "Li, Zhou, Tian, Tao"
    venue = "CVPR 2022"
    url = "https://doi.org/10.1109/CVPR52688.2022.00954"
    Hyper = Hyper
    homogeneous = True
    masked_evaluation = True
    needs_validation = True
    state = ("model", "optimizer", "logits", "mixing_optimizer", "w")

    def setup(self) -> None:
        h = self.hyper
        self.optimizer = make_optimizer(
            "sgd", self.model.parameters(), lr=h.lr, momentum=h.momentum, weight_decay=h.weight_decay
        )
        self.logits = nn.Parameter(torch.zeros(self.peers, dtype=torch.float64))
        self.mixing_optimizer = make_mixing_optimizer(h, [self.logits])
        self.w: dict[PeerId, float] = {self.me: 1.0}
        self.spool = Spool()
        self.validation_loss = 0.0

    async def round(self, t: int, net: Net) -> None:
        h = self.hyper
        x = parameters_of(self.model)
        before = clone(x)
        self.train_soundly(epochs=h.local_epochs, batch=h.batch)  # lines 7–10
        update = subtract(before, x)  # line 11
        self.w = softmax(self.logits, {self.me, *net.sources})  # line 13
        if h.prune_round is not None and t >= h.prune_round:  # line 20
            net.listen_to(strongest(self.w, net.sources, h.prune_to))  # lines 21–22, from the next round on
        theirs = await net.exchange(Update(in_precision(update, h.precision)))
        updates = {**{j: body.values for j, body in theirs.items()}, self.me: update}
        self.w = softmax(self.logits, updates)
        mixed = aggregate(before, updates, self.w)
        if not all(map(is_finite, mixed.values())):  # a neighbour's numbers are near the end of what there is
            return
        assign(x, mixed)  # line 16
        self.validation_loss, gradient = validation_gradient(self.model, self.data)
        self.learn({j: slope(gradient, updates[j]) for j in self.w})  # line 18

    def loss(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        return {"ce": cross_entropy(self.model(x), labels)}

    @torch.no_grad()
    def learn(self, slopes: Mapping[PeerId, float]) -> None:
        """Line 18: a step of Adam on the logits of those that were mixed; the others keep theirs."""
        ids = list(self.w)
        row = [torch.tensor([numbers[j] for j in ids], dtype=torch.float64) for numbers in (self.w, slopes)]
        gradient = logit_gradient(*row)
        if not gradient.isfinite().all():  # a step on it would make all weights nan for good
            return
        before = self.logits.clone()
        self.logits.grad = torch.zeros_like(self.logits)
        self.logits.grad[ids] = gradient
        self.mixing_optimizer.step()
        before[ids] = self.logits[ids]
        self.logits.copy_(before)

    def layouts(self) -> Sequence[Layout]:
        return [Layout.of(Update(in_precision(parameters_of(self.model), self.hyper.precision)))]

    def stow(self, body: Body) -> Body:
        return Update(self.spool.put(body.values)) if self.hyper.spool and isinstance(body, Update) else body

    def weights(self) -> Mapping[PeerId, float]:
        return self.w

    def observations(self) -> Mapping[str, float]:
        return {"validation_loss": self.validation_loss}


def in_precision(tensors: Tensors, precision: str) -> Tensors:
    """As they travel."""
    return {name: tensor.to(getattr(torch, precision)) for name, tensor in tensors.items()}
