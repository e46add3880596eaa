"""FedTGP: Trainable global prototypes.

Jianqing Zhang, Yang Liu, Yang Hua, Jian Cao: "FedTGP: Trainable Global Prototypes with Adaptive-Margin-Enhanced
Contrastive Learning for Data and Model Heterogeneity in Federated Learning", AAAI 2024.
https://arxiv.org/abs/2401.03230

Peers with different models exchange class prototypes, train guided by global ones, and classify by the nearest. Means
of prototypes, as in FedProto, lie closer together than the prototypes of the best peer. So the global ones are
trained: near the peers' prototypes of the same class, far from all others, by an adaptive margin:

    P̂ = F(P´)     P´: K x d trainable vectors     F: linear d x d, ReLU, linear d x d

Algorithm 1 in round t on peer i. Every peer computes the server's lines 10 and 11 over {i} ∪ N_i, from the same
initial values and in the same order (``net.shared``): on a complete graph all copies of P̂ equal the paper's.

     4  I^t: a fraction ρ of the peers takes part
     7  train on  cross-entropy + λ · distance of f_i(x) to P̂^y                      (Eq. 11)
     8  P_i^c = mean of f_i(x) over the training samples of class c                  (Eq. 2)
     9  send P_i
    10  δ(t) from the unweighted class means of the received prototypes              (Eq. 9)
    11  S epochs of SGD on P´ and F over them, the contrastive loss with δ(t)        (Eq. 10)

Lines 7 and 8 are in prototypes.py.

Differs from the paper:

- δ(t) = min(max_c min_{c'≠c} ‖Q^c − Q^c'‖, τ), as in the released code: the largest of the distances between a class
  and the nearest other one. Eq. 9 prints the largest distance between any two (``margin: pairwise-max``). With one
  class δ(t) = 0 (the code takes τ).
- λ and its distance are as in the released code: λ = 10 with the mean squared error; Eq. 11 as printed is
  ``distance: euclidean``, with λ = 0.1.
- In the first round peers train on the cross-entropy alone, as in the released code; Algorithm 1 sends the random
  initial P̂ before it.
- The loss is the mean over a batch, where Eqs. 5 and 10 print sums: a matter of the learning rate, which the paper
  does not give. Batch and learning rate are the released code's.
- A class has a global prototype only after a peer has sent a local one. The code compares with all K; on a complete
  graph the two differ only in classes that no peer has.
- The fixed margin of Table 6 (FM) is τ; the paper does not give its value.
- Peers that do not take part in a round receive and train P̂ too, so that all copies stay equal.
- On a sparse graph each peer trains the global prototypes of its neighborhood.
- Lines 10 and 11 skip neighbors that miss the deadline or whose prototypes have diverged, and the peer's own if they
  have. After a missed message the copies of P̂ stay different, as training continues from them.
  Equal bits also need the same kind of device and number of threads.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from pydantic import PositiveFloat, PositiveInt
from torch import Tensor, nn
from torch.nn.functional import one_hot, relu

from p2pfl import rng
from p2pfl.algorithms import presets
from p2pfl.algorithms.class_means import ClassMeans, Prototypes, PrototypeTable, class_means
from p2pfl.algorithms.presets import Presets
from p2pfl.algorithms.prototypes import (
    GuidedTraining,
    compare_margins,
    distances,
    guided_loss,
    margins,
    mean_features,
    nearest_prototype,
)
from p2pfl.algorithms.registration import algorithm
from p2pfl.messaging.net import Net
from p2pfl.tensors import Tensors


@dataclass(frozen=True)
class Hyper(GuidedTraining):
    preset: Literal["default", "paper", "official"] = "default"
    """default: what works best here; paper: the formulas as printed; official: the released code. Other keys
    override it."""
    margin: Literal["adaptive", "pairwise-max", "fixed", "none"] = "adaptive"
    """δ(t): adaptive as in the released code; pairwise-max: Eq. 9 as printed; fixed: τ in every round (FM in
    Table 6); none: 0, the standard contrastive loss of Eq. 6 (SCL)."""
    threshold: PositiveFloat = 100.0
    """τ, the maximum of δ(t) (Table 7)."""
    transform: bool = True
    """Apply F to the vectors P´ (Table 6: w/o F)."""
    prototype_epochs: PositiveInt = 100
    """S, epochs over the received prototypes in each round (Table 7)."""
    prototype_batch: PositiveInt = 10
    """Prototypes per step of SGD on P̂."""
    prototype_lr: PositiveFloat = 0.01
    """Learning rate of P̂."""

    PRESETS: ClassVar[Presets] = presets.FEDTGP


def adaptive_margin(centers: Tensor, h: Hyper) -> float:
    """Return δ(t), Eq. 9, of the class centers Q [n, d]; see Hyper.margin."""
    if h.margin == "none":
        return 0.0
    if h.margin == "fixed":
        return h.threshold
    if len(centers) < 2:
        return 0.0
    apart = margins(centers) if h.margin == "adaptive" else distances(centers, centers)
    return min(float(apart.max()), h.threshold)


def acl_gradient(values: Tensor, targets: Tensor, prototypes: Tensor, margin: float) -> Tensor:
    """Return the gradient [K, d] of the contrastive loss L, Eq. 10, with respect to P̂.

    L is the cross-entropy of the scores −(‖P_b − P̂^k‖ + δ·1[k = c_b]) over all K classes, averaged over the batch.
    With p_bk the softmax of the scores, ∂L/∂P̂^k = 1/B Σ_b (1[k = c_b] − p_bk) · (P̂^k − P_b) / ‖P̂^k − P_b‖.

    Args:
        values: P_b, local prototypes, float [B, d].
        targets: their classes c_b, one-hot, float [B, K].
        prototypes: P̂, float [K, d].
        margin: δ(t).
    """
    apart = distances(values, prototypes)
    probabilities = torch.softmax(-(apart + margin * targets), dim=1)
    pulls = torch.where(apart > 0, (targets - probabilities) / apart, 0.0) / len(values)  # distance 0: no direction
    return pulls.sum(0)[:, None] * prototypes - pulls.T @ values


class TrainablePrototypes(nn.Module):
    """P̂ = F(P´) [K, d] (Fig. 3), initialized from torch's global RNG.

    The algorithm's cost is a thousand small steps per round. So ``descend`` differentiates F by hand and adds each
    rank-K gradient to the weights in place, which takes half the time of autograd and an optimizer with 10 classes.
    """

    def __init__(self, classes: int, features: int, transform: bool) -> None:
        super().__init__()
        self.vectors = nn.Parameter(torch.randn(classes, features))
        self.inner = nn.Linear(features, features) if transform else None
        self.outer = nn.Linear(features, features) if transform else None

    def forward(self) -> Tensor:
        if self.inner is None or self.outer is None:
            return self.vectors
        prototypes: Tensor = self.outer(relu(self.inner(self.vectors)))
        return prototypes

    @torch.no_grad()
    def descend(self, values: Tensor, targets: Tensor, margin: float, lr: float) -> None:
        """Take one step of SGD on Eq. 10 over a batch; see ``acl_gradient`` for the arguments."""
        if self.inner is None or self.outer is None:
            self.vectors.sub_(acl_gradient(values, targets, self.vectors, margin), alpha=lr)
            return
        hidden = relu(self.inner(self.vectors))
        at_output = acl_gradient(values, targets, self.outer(hidden), margin)
        at_hidden = (at_output @ self.outer.weight) * (hidden > 0)
        at_vectors = at_hidden @ self.inner.weight
        for layer, inputs, gradient in ((self.outer, hidden, at_output), (self.inner, self.vectors, at_hidden)):
            layer.weight.addmm_(gradient.T, inputs, alpha=-lr)
            layer.bias.sub_(gradient.sum(0), alpha=lr)
        self.vectors.sub_(at_vectors, alpha=lr)

    def fit(
        self, values: Tensor, labels: Tensor, margin: float, orders: Iterable[Tensor], batch: int, lr: float
    ) -> None:
        """Line 11: one epoch per entry of ``orders``, a permutation of the rows of ``values``."""
        targets = one_hot(labels, len(self.vectors)).to(values.dtype)
        for order in orders:
            shuffled = order.to(values.device)
            batches = zip(torch.split(values[shuffled], batch), torch.split(targets[shuffled], batch), strict=True)
            for batch_values, batch_targets in batches:
                self.descend(batch_values, batch_targets, margin, lr)


@algorithm("fedtgp")
class FedTGP(ClassMeans[Hyper]):
    """FedTGP, Algorithm 1. Its diagnostics include δ(t), as ``delta``."""

    summary = "as fedproto, but the global prototypes are trained to lie apart, not averaged"
    title = (
        "FedTGP: Trainable Global Prototypes with Adaptive-Margin-Enhanced Contrastive Learning "
        "for Data and Model Heterogeneity in Federated Learning"
    )
    authors = "Zhang, Liu, Hua, Cao"
    venue = "AAAI 2024"
    url = "https://arxiv.org/abs/2401.03230"
    Hyper = Hyper
    equal_features = True
    state = (*ClassMeans.state, "trainable")

    def setup(self) -> None:
        super().setup()
        with rng.torch_seeded(self.seed, "fedtgp.init"):  # equal on all peers
            trainable = TrainablePrototypes(self.model.classes, self.model.features, self.hyper.transform)
        self.trainable = trainable.to(self.device)

    async def round(self, t: int, net: Net) -> None:
        table = await self.train_and_exchange(net)  # lines 4 and 7 to 9
        self.measured = {}
        if len(table):
            centers, present = class_means(table, self.model.classes, weighted=False, aggregation=self.aggregation)
            margin = adaptive_margin(centers[present], self.hyper)  # line 10
            self.train_prototypes(table, margin, net)  # line 11
            self.known = self.known | present
            self.measured = compare_margins(table, self.prototypes, self.known) | {"delta": margin}

    def loss(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """Line 7."""
        return guided_loss(self, x, labels)

    def local_prototypes(self) -> Prototypes:
        """Line 8."""
        return mean_features(self)

    def predict(self, x: Tensor) -> Tensor:
        return nearest_prototype(self, x)

    def train_prototypes(self, table: PrototypeTable, margin: float, net: Net) -> None:
        """Line 11, with shuffles that are the same on every peer."""
        h = self.hyper

        def orders() -> Iterator[Tensor]:
            for _ in range(h.prototype_epochs):
                self.after_batch()  # S epochs may take a while: allow a stop in between
                yield torch.from_numpy(net.shared.permutation(len(table)))

        def trained() -> Tensors:
            self.trainable.fit(table.values, table.labels, margin, orders(), h.prototype_batch, h.prototype_lr)
            return self.trainable.state_dict()

        before = {**self.trainable.state_dict()}
        inputs = {"before": before, "values": table.values, "labels": table.labels, "margin": margin}
        self.trainable.load_state_dict(net.memoized("prototypes", inputs, trained))
        self.prototypes = self.trainable().detach().clone()
