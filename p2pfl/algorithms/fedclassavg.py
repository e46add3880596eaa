"""FedClassAvg: heads are averaged, and a contrastive loss shapes the features that they classify.

Jaehee Jang, Heonseok Ha, Dahuin Jung, Sungroh Yoon: "FedClassAvg: Local Representation Learning for Personalized
Federated Learning on Heterogeneous Neural Networks", ICPP 2022. https://arxiv.org/abs/2210.14226

Peers with different backbones f_i and equal heads C_i exchange the heads alone. In round t on peer i (line numbers
are ours):

    1  S_t ← a random fraction of the peers        (the same draw on every peer)
    2  i ∈ S_t: C^t ← C_i
    3      for each batch of E epochs, with two augmented views x' and x'' of each sample:
               f_i, C_i ← Adam on  L_CL(f_i(x'), f_i(x'')) + L_CE(C_i(f_i(x))) + (μ/2) ‖C_i − C^t‖²
    4      send C_i to the neighbors
    5  C_i ← Σ_j n_j C_j / Σ_j n_j  over the j ∈ S_t that are i or its neighbors

L_CL is the supervised contrastive loss, L_CE the cross-entropy. On a complete graph the heads of all peers are equal
after each round, and they are the paper's global classifier. Lines 1, 4 and 5 are LG-FedAvg's.

Differs from the paper (``preset: official``: the released code, except for the first four points):

- There is no server; see fedavg.py for what follows from that.
- A peer is evaluated with the averaged head, and with its own, from before the average (``own_head`` in the records),
  which the released code evaluates.
- Heads start equal on all peers, as if sent by a server. In the released code peers train for an epoch before the
  first round, with a random head that the server's then replaces.
- A batch of fewer samples than ``batch`` is used, except a last one of a single sample.
- L_CL has the temperature 0.2, as in MAPL, and compares directions of features. The released code has inner products
  at the temperature 100, and a weight of 100 / 0.07.
- L_CE is the mean over both views, as in MAPL; the released code takes the first views only.
- The proximal term is the squared distance; the released code has the sum of the mean squares of weight and bias.
- The optimizer's state persists across rounds. The released code starts anew in each, with β1 = 0.5.
- Local training that diverges is rolled back.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar, Literal

from pydantic import NonNegativeFloat, PositiveFloat
from torch import Tensor

from p2pfl.algorithms import presets
from p2pfl.algorithms.averaging import Averaging, Participation, Shared
from p2pfl.algorithms.presets import Presets
from p2pfl.algorithms.registration import algorithm
from p2pfl.learning.evaluation import ExtraMetric, on_test_samples
from p2pfl.learning.losses import proximal, supervised_contrastive
from p2pfl.learning.optimizers import OptimizerName
from p2pfl.tensors import clone, parameters_of


@dataclass(frozen=True)
class ContrastiveHyper(Participation):
    preset: Literal["default", "official"] = "default"
    """default: what works best here; official: the released code. Other keys override it."""
    optimizer: OptimizerName = "adam"
    lr: PositiveFloat = 1e-4
    fresh_optimizer: bool = False
    """Reset the optimizer's state at the start of each round."""
    contrastive: NonNegativeFloat = 1.0
    """Weight of L_CL."""
    temperature: PositiveFloat = 0.2
    """Temperature of L_CL."""
    similarity: Literal["cosine", "inner"] = "cosine"
    """How L_CL compares two features: by the cosine or by the inner product."""
    supervised_views: Literal["both", "first"] = "both"
    """Views on which L_CE is computed."""
    mu: NonNegativeFloat = 0.1
    """μ, weight of the proximal term, which keeps the head near the average (ρ in the paper)."""
    proximal: Literal["sum", "mean"] = "sum"
    """Of the squared differences: their sum, or their mean in the weight plus their mean in the bias."""

    PRESETS: ClassVar[Presets] = presets.FEDCLASSAVG


@algorithm("fedclassavg")
class FedClassAvg(Averaging):
    """FedClassAvg: LG-FedAvg with a contrastive loss and a proximal term."""

    summary = "heads are sent and averaged; a contrastive loss shapes the features, backbones may differ"
    title = (
        "FedClassAvg: Local Representation Learning for Personalized Federated Learning on Heterogeneous Neural "
        "Networks"
    )
    authors = "Jang, Ha, Jung, Yoon"
    venue = "ICPP 2022"
    url = "https://arxiv.org/abs/2210.14226"
    Hyper = ContrastiveHyper
    hyper: ContrastiveHyper
    share = "head"
    screened = Shared
    linear_heads = True
    equal_features = True
    views = 2
    named_loss = True
    state = (*Averaging.state, "own_head")

    def setup(self) -> None:
        super().setup()
        self.own_head = copy.deepcopy(self.model.linear_head)
        """C_i, before the last average: the released code evaluates with it."""
        self.start = self.shared_part()  # during local training, a copy

    def local_training(self) -> None:
        """Line 3, from the head C^t of line 2."""
        h = self.hyper
        self.start = clone(self.shared_part())
        if h.fresh_optimizer:
            self.optimizer = h.make_optimizer(self.model.parameters())
        self.train_or_roll_back(epochs=h.local_epochs, batch=h.batch)
        self.start = self.shared_part()
        self.assign_unless_diverged(parameters_of(self.own_head), self.start)

    def loss(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """L_CL + L_CE + the proximal term."""
        h = self.hyper
        z = self.model.backbone(x)
        supervised = len(z) if h.supervised_views == "both" else len(z) // 2
        terms = self.label_loss(self.model.head(z[:supervised]), labels[:supervised])
        if h.contrastive:
            contrast = supervised_contrastive(z, labels, h.temperature, cosine=h.similarity == "cosine")
            terms["cont"] = h.contrastive * contrast
        if h.mu:
            terms["prox"] = proximal(self.model.linear_head, self.start, h.mu, mean=h.proximal == "mean")
        return terms

    def extra_metrics(self, whole: bool) -> Iterable[ExtraMetric]:
        """The backbone with the peer's own head on the test samples."""
        return on_test_samples("own_head", lambda x: self.own_head(self.model.backbone(x)), self.data, whole)
