"""FedTGP: trainable global prototypes.

Jianqing Zhang, Yang Liu, Yang Hua, Jian Cao: «FedTGP: Trainable Global Prototypes with Adaptive-Margin-Enhanced
Contrastive Learning for Data and Model Heterogeneity in Federated Learning», AAAI 2024.
https://arxiv.org/abs/2401.03230

As FedProto (fedproto.py): peers with different models exchange class prototypes, train guided by global ones, and
classify by the nearest. But means of prototypes lie closer together than the prototypes of the best peer; so the
global ones are trained instead, to be near what the peers call that class and far from what they call another, by
a margin that follows the peers':

    P̂ = F(P´)     P´: K x d trainable vectors     F: linear d x d, ReLU, linear d x d

Algorithm 1 in round t on peer i; the server's lines 10 and 11 are computed by every peer over {i} ∪ N_i, from the
same initial values and in the same order (``net.shared``), so that on a complete graph all copies of P̂ are the
paper's, equal bit for bit:

     4  I^t: a share ρ of the peers takes part
     7  train on  cross-entropy + λ · distance of f_i(x) to P̂^y                      (Eq. 11)
     8  P_i^c = mean of f_i(x) over the training samples of class c                  (Eq. 2)
     9  send P_i
    10  δ(t) from the unweighted class means of what came                            (Eq. 9)
    11  S epochs of SGD on P´ and F over what came, the contrastive loss with δ(t)   (Eq. 10)

Differs from the paper:

- δ(t) = min(max_c min_{c'≠c} ‖Q^c − Q^c'‖, τ), as in the released code: the widest class's distance to its nearest
  neighbour. Eq. 9 prints the largest distance between any two (``margin: pairwise-max``). With one class heard of
  there is no such distance, and δ(t) = 0 (the code takes τ).
- λ and its distance are those of the released code, as in fedproto.py; Eq. 11 as printed is ``distance: euclidean``.
- in the first round peers train on the cross-entropy alone, as in the released code; Algorithm 1 hands out the random
  initial P̂ already then.
- the loss is the mean over a batch, where Eqs. 5 and 10 print sums: a matter of the learning rate, which the paper
  does not give. Batch and rate are the released code's.
- a class has a global prototype only once a prototype of it was heard. The code compares with all K; on a complete
  graph with all peers the two differ in nothing but classes that no peer has.
- the fixed margin of Table 6 (FM) is τ itself; the paper does not say what it was.
- peers that do not take part in a round hear the others and train P̂ too, so that all copies stay equal.
- on a sparse graph each peer's global prototypes are those of its own neighbourhood.
- a neighbour that misses a deadline is left out of that round's lines 10 and 11, and so are prototypes with NaN or
  infinity or absurdly large numbers, the own ones too. After a missed message the copies of P̂ stay different, for
  they are trained on and not computed anew. Equal bits also need one kind of device and one number of threads.
- a last training batch of one sample is left out when there are others.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import torch
from pydantic import PositiveFloat, PositiveInt
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, one_hot, relu

from p2pfl import rng
from p2pfl.algorithms.fedproto import Guidance, Guided, Heard, class_means, distances, gaps
from p2pfl.net import Net


@dataclass(frozen=True)
class Hyper(Guidance):
    margin: Literal["adaptive", "pairwise-max", "fixed", "none"] = "adaptive"
    """δ(t): adaptive as in the released code; pairwise-max: Eq. 9 as printed; fixed: τ in every round (FM in
    Table 6); none: 0, the standard contrastive loss of Eq. 6 (SCL)."""
    threshold: PositiveFloat = 100.0
    """τ, which δ(t) never exceeds (Table 7)."""
    transform: bool = True
    """F on top of the vectors P´ (Table 6: w/o F)."""
    prototype_epochs: PositiveInt = 100
    """S, epochs over the prototypes that came, in each round (Table 7)."""
    prototype_batch: PositiveInt = 10
    """Prototypes in one step of SGD."""
    prototype_lr: PositiveFloat = 0.01
    """Its learning rate."""


# ---- ACL: adaptive-margin-enhanced contrastive learning ------------------------------------------------------


def adaptive_margin(centres: Tensor, h: Hyper) -> float:
    """δ(t), Eq. 9, of the class centres Q [n, d]; see Hyper.margin."""
    if h.margin == "none":
        return 0.0
    if h.margin == "fixed":
        return h.threshold
    if len(centres) < 2:
        return 0.0
    apart = gaps(centres) if h.margin == "adaptive" else distances(centres, centres)
    return min(float(apart.max()), h.threshold)


def acl_loss(values: Tensor, labels: Tensor, prototypes: Tensor, margin: float) -> Tensor:
    """Eq. 10, as the mean over the given prototypes of peers.

    The cross-entropy of the scores −(φ(P_j, P̂^c') + δ·1[c' = c]) over all K classes c'.

    Args:
        values: P_j^c, float [B, d].
        labels: their classes c, int64 [B].
        prototypes: P̂, float [K, d].
        margin: δ(t).
    """
    apart = distances(values, prototypes) + margin * one_hot(labels, len(prototypes)).to(values.dtype)
    return cross_entropy(-apart, labels)


def acl_gradient(values: Tensor, targets: Tensor, prototypes: Tensor, margin: float) -> Tensor:
    """The gradient of ``acl_loss`` with respect to P̂, [K, d]; ``targets`` are the labels one-hot, float [B, K].

    With p_bk the softmax of the scores, ∂L/∂P̂^k = 1/B Σ_b (1[k = c_b] − p_bk) · (P̂^k − P_b) / ‖P̂^k − P_b‖.
    """
    apart = distances(values, prototypes)
    probabilities = torch.softmax(-(apart + margin * targets), dim=1)
    pulls = torch.where(apart > 0, (targets - probabilities) / apart, 0.0) / len(values)  # at a prototype: none
    return pulls.sum(0)[:, None] * prototypes - pulls.T @ values


class TrainablePrototypes(nn.Module):
    """P̂ = F(P´) [K, d] (Fig. 3). Initial values come from torch's global RNG.

    A thousand small steps a round are what the method costs, so ``descend`` goes back through F by hand and adds
    each rank-K gradient to the weights in place: with 10 classes half of the time that autograd and an optimiser
    take for the same arithmetic.
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
        """One step of SGD on Eq. 10 over a batch; arguments as those of ``acl_gradient``."""
        if self.inner is None or self.outer is None:
            self.vectors.sub_(acl_gradient(values, targets, self.vectors, margin), alpha=lr)
            return
        hidden = relu(self.inner(self.vectors))
        at_output = acl_gradient(values, targets, self.outer(hidden), margin)
        at_hidden = (at_output @ self.outer.weight) * (hidden > 0)
        at_vectors = at_hidden @ self.inner.weight
        for layer, entering, gradient in (
            (self.outer, hidden, at_output),
            (self.inner, self.vectors, at_hidden),
        ):
            layer.weight.addmm_(gradient.T, entering, alpha=-lr)
            layer.bias.sub_(gradient.sum(0), alpha=lr)
        self.vectors.sub_(at_vectors, alpha=lr)

    def fit(
        self, values: Tensor, labels: Tensor, margin: float, orders: Iterable[Tensor], batch: int, lr: float
    ) -> None:
        """Line 11: one epoch for each order, a permutation of the rows of ``values``."""
        targets = one_hot(labels, len(self.vectors)).to(values.dtype)
        for order in orders:
            shuffled = order.to(values.device)
            batches = zip(torch.split(values[shuffled], batch), torch.split(targets[shuffled], batch), strict=True)
            for some, their_targets in batches:
                self.descend(some, their_targets, margin, lr)


class FedTGP(Guided[Hyper]):
    """FedTGP, Algorithm 1. It observes δ(t) too, as ``delta``."""

    name = "fedtgp"
    gist = "as fedproto, but the global prototypes are trained to lie apart, not averaged"
    title = (
        "FedTGP: Trainable Global Prototypes with Adaptive-Margin-Enhanced Contrastive Learning "
        "for Data and Model Heterogeneity in Federated Learning"
    )
    authors = "Zhang, Liu, Hua, Cao"
    venue = "AAAI 2024"
    url = "https://arxiv.org/abs/2401.03230"
    Hyper = Hyper
    state = (*Guided.state, "trainable")

    def setup(self) -> None:
        super().setup()
        with rng.torch_seeded(self.seed, "fedtgp.init"):  # equal on all peers
            trainable = TrainablePrototypes(self.model.classes, self.model.features, self.hyper.transform)
        self.trainable = trainable.to(self.device)

    def globalize(self, heard: Heard, net: Net) -> None:
        h = self.hyper
        equal = torch.ones_like(heard.samples)
        centres, present = class_means(heard.values, heard.labels, equal, self.model.classes)
        margin = adaptive_margin(centres[present], h)  # line 10

        def orders() -> Iterable[Tensor]:
            for _ in range(h.prototype_epochs):
                self.after_batch()  # S epochs may take a while: time to look up
                yield torch.from_numpy(net.shared.permutation(len(heard.labels)))

        self.trainable.fit(heard.values, heard.labels, margin, orders(), h.prototype_batch, h.prototype_lr)  # line 11
        self.prototypes = self.trainable().detach().clone()
        self.known = self.known | present
        self.observed["delta"] = margin
