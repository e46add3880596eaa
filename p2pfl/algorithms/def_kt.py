"""Def-KT: decentralized federated learning by mutual knowledge transfer.

Chengxi Li, Gang Li, Pramod K. Varshney: "Decentralized Federated Learning via Mutual Knowledge Transfer", IEEE
Internet of Things Journal, 2021. https://arxiv.org/abs/2012.13063

No model is averaged. In each round Q peers train and send their model, each to another receiver. There the
model that arrives and the local one teach each other on the receiver's samples, and the receiver continues with the
one that arrived: models wander from peer to peer and learn from all data. DFML's Table 3 (arXiv 2402.01863)
compares with it.

In round t (line numbers are ours):

    1  draw Q pairs of peers, a sender a and a receiver b; no peer is in two      (the same draw on every peer)
    2  a: w_a ← local epochs of SGD from w_a on the cross-entropy
    3  a: send w_a to b
    4  b: w ← w_a; K times, for each batch with labels Y: compute p = softmax(z(w)) and p_b = softmax(z(w_b)), then
          update w   on CE(p, Y)   + KL(p_b ‖ p)
          update w_b on CE(p_b, Y) + KL(p ‖ p_b)
    5  b: w_b ← w

All models start equal.

Differs from the paper:

- pairs are drawn from a stream that all peers share (pairs.py). On a sparse graph a receiver is a neighbor of its
  sender, and there are fewer than Q pairs if no more peers with free neighbors are left.
- Q is at most half of the peers, its default. Local training and line 4 take one epoch each, by default;
  ``supervision`` replaces the cross-entropy in both, as in DFML's experiments.
- each local training and each mutual learning starts with a new optimizer.
- batch-normalization statistics travel with the parameters; both models are in training mode in line 4.
- a receiver whose sender is late, dead or diverged keeps its model.
- a sender whose training diverges restores its model and sends the restored one; a receiver restores its model if the
  model that arrived diverges. A model with NaN or infinity in its logits stops teaching.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from pydantic import Field, PositiveFloat, PositiveInt
from torch import Tensor

from p2pfl import rng
from p2pfl.algorithms.base import Algorithm
from p2pfl.algorithms.mutual_learning import make_participants, train_mutually
from p2pfl.algorithms.pairs import PairSchedule
from p2pfl.algorithms.registration import algorithm
from p2pfl.learning import losses
from p2pfl.learning.losses import Supervision
from p2pfl.learning.optimizers import LocalTraining, OptimizerName
from p2pfl.messaging.net import Net
from p2pfl.messaging.schema import Body, Layout
from p2pfl.models import Model
from p2pfl.outcomes import TRAININGS
from p2pfl.tensors import assign, buffers_of, clone, constants_of, frozen_of, parameters_of


@dataclass(frozen=True)
class Hyper(LocalTraining):
    optimizer: OptimizerName = "sgd"
    """sgd or adam; its state starts anew in each local training and each mutual learning."""
    participation: Annotated[float, Field(gt=0.0, le=0.5)] = 0.5
    """Q, senders per round, as a fraction of the peers that have joined; as many others receive."""
    supervision: Supervision = "ce"
    """Loss on the labels: plain cross-entropy, re-weighted softmax (in DFML's experiments), asymmetric or masked
    cross-entropy."""
    mutual_epochs: PositiveInt = 1
    """K, epochs of mutual learning over the receiver's samples."""
    patience: PositiveFloat = 2.0
    """Deadlines (transport.deadline) that mutual learning may take."""


@dataclass(frozen=True)
class LocallyTrained(Body):
    """w_a on its way to b: parameters and batch-normalization statistics by name."""

    parameters: dict[str, Tensor]
    buffers: dict[str, Tensor]


@algorithm("def-kt")
class DefKT(Algorithm[Hyper]):
    """Def-KT: mutual knowledge transfer between a local model and one that arrives."""

    summary = "each model sent goes to one peer, where it and the local one teach each other, and it replaces that"
    title = "Decentralized Federated Learning via Mutual Knowledge Transfer"
    authors = "Li, Li, Varshney"
    venue = "IEEE Internet of Things Journal 2021"
    url = "https://arxiv.org/abs/2012.13063"
    Hyper = Hyper
    homogeneous = True
    state = ("model",)
    norm_statistics = "sent with the models"

    def setup(self) -> None:
        h = self.hyper
        self.schedule = PairSchedule(self.seed, h.participation, h.patience)
        labels, classes = self.data.train.labels, self.data.classes
        self.supervision = losses.supervision_loss(h.supervision, labels, classes, self.device)

    async def round(self, t: int, net: Net) -> None:
        receiver = self.schedule.pairs(t, net).get(self.me)  # line 1
        sender = self.schedule.sender_to(self.me, t, net)
        if receiver is not None:
            self.local_training()  # line 2
            await net.send(receiver, self.local_model())  # line 3
        elif sender is not None:
            deadline_factor = self.schedule.deadlines(sender, net)
            received = await net.gather(LocallyTrained, of=[sender], deadline_factor=deadline_factor)
            for trained in received.values():
                self.transfer_knowledge(trained)

    def local_model(self) -> LocallyTrained:
        """Return the local model as it is sent."""
        return LocallyTrained(parameters_of(self.model), buffers_of(self.model))

    def local_training(self) -> None:
        self.optimizer = self.hyper.make_optimizer(self.model.parameters())
        self.train_or_roll_back(epochs=self.hyper.local_epochs, batch=self.hyper.batch)

    def loss(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """The cross-entropy, or the other loss that ``supervision`` names."""
        return {self.hyper.supervision: self.supervision(self.model(x), labels)}

    def transfer_knowledge(self, trained: LocallyTrained) -> None:
        """Let a model that arrives and the local one teach each other, and continue with the former (lines 4, 5)."""
        before = clone(self.model.state_dict())
        with rng.torch_seeded(self.seed, "def-kt.overwritten"):
            arrived = self.build(self.me).train()
        assign(frozen_of(arrived), frozen_of(self.model))  # equal on all peers
        assign(parameters_of(arrived), trained.parameters)
        assign(buffers_of(arrived), trained.buffers)
        self.mutual_learning(arrived)
        learned = arrived.state_dict()
        kept = self.outcomes.note(TRAININGS, self.what_diverged(self.model.state_dict(), learned))
        self.model.load_state_dict(learned if kept else before)

    def mutual_learning(self, arrived: Model) -> None:
        """Line 4: update both models in place by K epochs over the local samples."""
        models = make_participants([arrived, self.model], self.hyper.make_optimizer, by_size=False)
        train_mutually(self, models, models, self.supervision, (1.0, 1.0), self.hyper.mutual_epochs)

    def layouts(self) -> Sequence[Layout]:
        return [Layout.of(self.local_model(), constants={"buffers": constants_of(self.model)})]
