"""FedFomo without a server: average the models of a few neighbors that lower the local validation loss.

Michael Zhang, Karan Sapra, Sanja Fidler, Serena Yeung, Jose M. Alvarez: "Personalized Federated Learning with First
Order Model Optimization", ICLR 2021. https://arxiv.org/abs/2012.08565

Each peer weights another's model by how much it lowers the peer's validation loss L_i, per unit of distance from the
peer's model: a first-order approximation of the best combination. In round t on peer i:

    1  A_i ← M neighbors: each the one with the largest affinity P_ij that is left, or with probability
       ε_t = max(0, ε − t · decay) a random one; ask them for their models
    2  θ_i^{t+½} ← E epochs of SGD from θ_i^t; send it to the neighbors that asked for it
    3  w_ij ← (L_i(θ_i^t) − L_i(θ_j^{t+½})) / ‖θ_j^{t+½} − θ_i^t‖  over the j ∈ A_i ∪ {i}
    4  P_ij ← P_ij + w_ij
    5  w⁺_ij ← max(w_ij, 0) / Σ_l max(w_il, 0)
    6  θ_i^{t+1} ← θ_i^t + Σ_j w⁺_ij (θ_j^{t+½} − θ_i^t)

If no model lowers the loss, peer i returns to θ_i^t.

Differs from the paper:

- There is no server that keeps P, draws A_i and forwards models: each peer keeps its row of P, sends A_i to all
  neighbors, and its model to the neighbors that asked. On a sparse graph only neighbors can be asked. A_i is sent
  before training, so that no peer waits for it.
- Exploration follows the released code: ε falls by a constant per round, and each of the M is drawn independently.
  The local model is always a candidate beside them (the code's "5 models" are 4 and the local one).
- The first round mixes too; affinities are then equal. Equal ones are in random order.
- The distance is Euclidean, over the parameters; the released code also offers the L1 norm, its default.
- Line 6 is computed as Σ_j w⁺_ij θ_j^{t+½}: the weights sum to 1.
- The optimizer's state persists across rounds; with plain SGD there is none.
- Batch-normalization statistics stay local: other models are evaluated with the peer's own, and so is θ_i^t where the
  peer returns to it: the statistics then stay as in its last local training.
- Losses above 10⁶, NaN and infinity count as 10⁶.
- Local training that diverges is rolled back. A neighbor that misses the deadline, or whose model has diverged, is
  left out of the round; its affinity stays. A model is not waited for if the request of its owner has not arrived.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated

import numpy as np
import torch
from pydantic import Field, NonNegativeFloat, PositiveInt
from torch.func import functional_call
from torch.nn.functional import cross_entropy

from p2pfl import PeerId, rng
from p2pfl.algorithms.base import Algorithm
from p2pfl.algorithms.dpsgd import Parameters
from p2pfl.algorithms.registration import algorithm
from p2pfl.learning.optimizers import LocalTraining
from p2pfl.messaging.net import Net
from p2pfl.messaging.schema import Body, Layout
from p2pfl.tensors import LIMIT, Tensors, assign, distance, fractions, parameters_of, widened

MODELS_DEADLINES = 2.0
"""Deadlines to wait for models: their owners may have to wait for the requests of others first."""


@dataclass(frozen=True)
class Hyper(LocalTraining):
    models: PositiveInt = 5
    """M, neighbors that a peer asks for their models in a round; all if it has fewer."""
    exploration: Annotated[float, Field(ge=0.0, le=1.0)] = 0.3
    """ε, probability in round 0 that one of the M is random instead of the one with the largest affinity."""
    exploration_decay: NonNegativeFloat = 0.05
    """How much ε falls in each round, down to 0."""


@dataclass(frozen=True)
class Request(Body):
    """A_j: the neighbors whose models the sender asks for, ascending."""

    peers: tuple[int, ...]


# ---- equations -----------------------------------------------------------------------------------------------


def exploration_at(h: Hyper, t: int) -> float:
    """Line 1: ε_t."""
    return max(0.0, h.exploration - t * h.exploration_decay)


def chosen(
    affinity: Mapping[PeerId, float],
    sources: Collection[PeerId],
    count: int,
    exploration: float,
    draw: np.random.Generator,
) -> tuple[PeerId, ...]:
    """Line 1: A_i, ``count`` of the sources or all of them, ascending; ties are in random order."""
    best_first, explored = (
        [int(j) for j in draw.permutation(np.array(sorted(sources), dtype=np.int64))] for _ in range(2)
    )
    best_first.sort(key=lambda j: -affinity.get(j, 0.0))
    found: list[PeerId] = []
    for _ in range(min(count, len(sources))):
        order = explored if draw.random() < exploration else best_first
        found.append(next(j for j in order if j not in found))
    return tuple(sorted(found))


def first_order_weight(before: float, after: float, length: float) -> float:
    """Line 3: w_ij, from L_i(θ_i^t), L_i(θ_j^{t+½}) and the distance of the models; 0 if they are equal."""
    return (before - after) / length if length > 0.0 else 0.0


def positive_part(w: Mapping[PeerId, float]) -> dict[PeerId, float]:
    """Line 5: w⁺_ij of the peers with w_ij > 0, ascending; empty if there are none."""
    positive = {j: w[j] for j in sorted(w) if w[j] > 0.0}
    total = sum(positive.values())
    return {j: value / total for j, value in positive.items()}


@algorithm("fedfomo")
class FedFomo(Algorithm[Hyper]):
    """FedFomo."""

    summary = "whole models are sent to peers that ask; each weights them by how they lower its validation loss"
    title = "Personalized Federated Learning with First Order Model Optimization"
    authors = "Zhang, Sapra, Fidler, Yeung, Alvarez"
    venue = "ICLR 2021"
    url = "https://arxiv.org/abs/2012.08565"
    Hyper = Hyper
    homogeneous = True
    needs_validation = True
    learns_weights = True
    replies = True
    state = ("model", "optimizer", "affinity", "w")

    def setup(self) -> None:
        self.optimizer = self.hyper.make_optimizer(self.model.parameters())
        self.affinity: dict[PeerId, float] = {}
        """P_ij of the neighbors that have been asked; all others have 0."""
        self.w: dict[PeerId, float] = {self.me: 1.0}
        self.loss_before = 0.0

    async def round(self, t: int, net: Net) -> None:
        h, theta = self.hyper, parameters_of(self.model)
        asked = await self.ask(t, net)  # line 1
        self.loss_before = self.validation_loss(theta)
        before = self.train_or_roll_back(epochs=h.local_epochs, batch=h.batch)  # line 2
        local = Parameters(theta)
        models = self.including_local(await self.exchange_models(net, asked, local), local)
        w = {j: self.weight(before, models[j].values) for j in sorted(models)}  # line 3
        self.affinity |= {j: self.affinity.get(j, 0.0) + w[j] for j in w if j != self.me}  # line 4
        self.w = positive_part(w)  # line 5
        if self.w:
            self.aggregation.combine({j: models[j] for j in self.w}, fractions(self.w), out=theta)  # line 6
        else:
            assign(theta, before)
            self.w = {self.me: 1.0}

    async def ask(self, t: int, net: Net) -> tuple[PeerId, ...]:
        """Choose neighbors, ask them for their models, and tell the others that this peer does not need theirs."""
        draw = rng.shared(self.seed, f"fedfomo.{self.me}", t)
        asked = chosen(self.affinity, net.sources, self.hyper.models, exploration_at(self.hyper, t), draw)
        await net.broadcast(Request(asked))
        return asked

    async def exchange_models(self, net: Net, asked: Sequence[PeerId], local: Parameters) -> dict[PeerId, Parameters]:
        """Send the local model to the peers that asked for it; receive the models of the ``asked``."""
        requests = await net.gather(Request)
        await net.broadcast(local, to=[j for j, request in requests.items() if self.me in request.peers])
        return await net.gather(Parameters, of=[j for j in asked if j in requests], deadline_factor=MODELS_DEADLINES)

    def weight(self, before: Tensors, model: Tensors) -> float:
        on_device = {name: tensor.to(self.device) for name, tensor in model.items()}
        return first_order_weight(self.loss_before, self.validation_loss(on_device), distance(on_device, before))

    @torch.no_grad()
    def validation_loss(self, parameters: Tensors) -> float:
        """L_i(θ): the mean cross-entropy of a model over the local validation samples, at most LIMIT."""
        total = 0.0
        with self.streams.evaluation():
            for x, labels in self.data.sweep(self.data.validation):
                scores = functional_call(self.model, dict(parameters), (x,))
                total += float(cross_entropy(widened(scores), labels, reduction="sum"))
        loss = total / len(self.data.validation)
        return loss if loss < LIMIT else LIMIT  # not min: the loss may be NaN

    def layouts(self) -> Sequence[Layout]:
        peers = range(self.peers)
        request = Layout.of(Request(()), free={"peers": {0: self.peers}}, ranges={"peers": peers})
        return [request, Layout.of(Parameters(parameters_of(self.model)))]

    def weights(self) -> Mapping[PeerId, float]:
        return self.w

    def diagnostics(self) -> Mapping[str, float]:
        return {"validation_loss": self.loss_before}
