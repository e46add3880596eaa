"""pFedSim: FedAvg first, then backbones averaged among peers with similar heads.

Jiahao Tan, Yipeng Zhou, Gang Liu, Jessie Hui Wang, Shui Yu: "pFedSim: Similarity-Aware Model Aggregation Towards
Personalized Federated Learning", 2023. https://arxiv.org/abs/2305.15706

A model W_i has a backbone θ_i and a head ω_i, one linear layer. Of T rounds, the first T_g = ρT are FedAvg's (the
generalization phase). In round t ≥ T_g (the personalization phase) on peer i (line numbers are ours):

    1  S_t ← a random fraction of the peers                                      (the same draw on every peer)
    2  if t > T_g, i ∈ S_t: send θ_i and ω_i to the neighbors
    3      s_ij ← max(0, mean over the classes of the cosine of ω_i's and ω_j's rows)
    4      φ_ij ← −log(1 − s_ij)                                                 with s_ii = 0.9999
    5      θ_i ← Σ_j φ_ij θ_j / Σ_j φ_ij  over the j ∈ S_t that are i or its neighbors
    6  i ∈ S_t: W_i ← E epochs of SGD from W_i

The head is never averaged in this phase. A round ends with local training, so what is evaluated is the trained model,
as in the paper. In round T_g peers train from FedAvg's models, and nothing is sent. On a complete graph each peer
computes what the paper's server sends it.

Differs from the paper:

- There is no server; see fedavg.py for what follows from that.
- The average is over the peers that take part in the round. The paper's server keeps every client's last model and
  every pair's last similarity, and averages over all of them. If all peers take part, both are the same.
- s_ij is at most 0.9999, so that equal heads have a finite weight.
- The bias of the head is neither sent nor compared in the personalization phase.
- A neighbor that misses the deadline, or whose model has diverged, is excluded from the average.
- Local training that diverges is rolled back.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar

from pydantic import Field
from torch import Tensor

from p2pfl import PeerId
from p2pfl.algorithms.averaging import Averaging, WholeModel
from p2pfl.algorithms.mapl_graph import head_similarity
from p2pfl.algorithms.registration import algorithm
from p2pfl.algorithms.shared_model import shared_tensors
from p2pfl.messaging.net import Net
from p2pfl.messaging.schema import Body, Layout
from p2pfl.tensors import fractions


@dataclass(frozen=True)
class SimilarityHyper(WholeModel):
    generalization: Annotated[float, Field(ge=0.0, le=1.0)] = 0.5
    """ρ, fraction of the run's rounds in which whole models are averaged, as by fedavg; rounded down."""


@dataclass(frozen=True)
class Trained(Body):
    """θ_j by name and the weight of ω_j [K, d], float32."""

    backbone: dict[str, Tensor]
    head: Tensor


SELF_SIMILARITY = 0.9999
"""s_ii, and the largest s_ij."""


def similarity_weights(heads: Mapping[PeerId, Tensor], me: PeerId) -> dict[PeerId, float]:
    """Lines 3 and 4: φ_ij / Σ_j φ_ij over the peers with ``heads`` [K, d], which include ``me``, ascending."""
    phi = {}
    for j in sorted(heads):
        s = SELF_SIMILARITY if j == me else head_similarity(heads[me], heads[j].to(heads[me].device), "rows")
        phi[j] = -math.log1p(-min(max(s, 0.0), SELF_SIMILARITY))
    total = sum(phi.values())
    return {j: weight / total for j, weight in phi.items()}


@algorithm("pfedsim")
class PFedSim(Averaging):
    """pFedSim: FedAvg, then a personalized average of backbones."""

    summary = "fedavg; from half of the rounds on, backbones are averaged with weights from the similarity of heads"
    title = "pFedSim: Similarity-Aware Model Aggregation Towards Personalized Federated Learning"
    authors = "Tan, Zhou, Liu, Wang, Yu"
    venue = "arXiv 2023"
    url = "https://arxiv.org/abs/2305.15706"
    Hyper = SimilarityHyper
    hyper: SimilarityHyper
    homogeneous = linear_heads = True
    learns_weights = True
    state: ClassVar[tuple[str, ...]] = ("model", "optimizer", "phi")

    def setup(self) -> None:
        super().setup()
        self.phi: dict[PeerId, float] = {}
        self.personalizes_from = math.floor(self.hyper.generalization * self.rounds + 1e-9)  # 0.29 * 100 is 28.999…

    async def round(self, t: int, net: Net) -> None:
        if t < self.personalizes_from:
            await super().round(t, net)
            return
        participants = net.participants(self.hyper.participation)  # line 1
        if t > self.personalizes_from:
            models = await self.exchange_including_own(net, self.local_model(), participants)  # line 2
            if self.me in models:
                self.average_similar(models)
        if self.me in participants:
            self.local_training()  # line 6

    def local_training(self) -> None:
        self.train_or_roll_back(epochs=self.hyper.local_epochs, batch=self.hyper.batch)

    def local_model(self) -> Trained:
        return Trained(self.shared_backbone(), self.model.linear_head.weight.detach())

    def shared_backbone(self) -> dict[str, Tensor]:
        return shared_tensors(self.model, self.hyper, "backbone")

    def average_similar(self, models: Mapping[PeerId, Trained]) -> None:
        """Lines 3 to 5."""
        self.phi = similarity_weights({j: body.head for j, body in models.items()}, self.me)
        self.aggregation.combine(models, fractions(self.phi), self.shared_backbone(), part="backbone")

    def layouts(self) -> Sequence[Layout]:
        return [*super().layouts(), Layout.of(self.local_model())]

    def weights(self) -> Mapping[PeerId, float] | None:
        """Return φ of the last average; None before the first."""
        return self.phi or None
