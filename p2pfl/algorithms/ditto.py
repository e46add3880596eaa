"""Ditto without a server: FedAvg, and beside it a personal model that is kept near the average.

Tian Li, Shengyuan Hu, Ahmad Beirami, Virginia Smith: "Ditto: Fair and Robust Federated Learning Through
Personalization", ICML 2021. https://arxiv.org/abs/2012.04221

Peer i has two models: w_i, which is sent and averaged, and v_i, its personal one, which stays local and minimizes

    h_i(v_i; w_i) = F_i(v_i) + λ/2 ‖v_i − w_i‖²,      F_i: the loss on the local samples.

λ = 0 is local training; a large λ is FedAvg. Algorithm 1, with FedAvg for the global objective, in round t on peer i:

    1  S_t ← a random fraction C of the peers                           (the same draw on every peer)
    2  i ∈ S_t: v_i ← s epochs of v_i ← v_i − η (∇F_i(v_i) + λ (v_i − w_i))
    3  i ∈ S_t: w_i ← E epochs of SGD on F_i from w_i; send w_i to the neighbors
    4  w_i ← Σ_j n_j w_j / Σ_j n_j  over the j ∈ S_t that are i or its neighbors

The personal model is what is evaluated; it starts from the same model as w_i.

Differs from the paper:

- There is no server; see fedavg.py for what follows from that.
- v_i is trained before w_i, so that w_i is still the model from the start of the round, without a copy. The paper's
  order gives the same models.
- The local iterations are counted in epochs. v_i and w_i visit the samples in different orders.
- The average is weighted by sample counts, as in FedAvg.
- λ is given, not chosen on validation samples; the robust aggregations of the paper's comparisons are left out.
- Optimizer state and batch-normalization statistics of the two models are separate. With ``share_statistics: true``
  the statistics of w_i are averaged.
- Training of v_i that diverges is rolled back; v_i is not trained while w_i is a diverged model.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from dataclasses import dataclass

from pydantic import NonNegativeFloat, PositiveInt
from torch import Tensor

from p2pfl.algorithms.averaging import AnyPart, Averaging, Shared
from p2pfl.algorithms.registration import algorithm
from p2pfl.algorithms.shared_model import statistics_stay_local
from p2pfl.learning import losses
from p2pfl.learning.evaluation import ExtraMetric, on_test_samples
from p2pfl.learning.trainer import reset_norms
from p2pfl.models import Model
from p2pfl.outcomes import TRAININGS
from p2pfl.tensors import parameters_of


@dataclass(frozen=True)
class DittoHyper(AnyPart):
    regularization: NonNegativeFloat = 1.0
    """λ, how strongly the personal model is kept near the averaged one; 0 is local training."""
    personal_epochs: PositiveInt | None = None
    """s, epochs over the local samples per round that train the personal model; null: local_epochs."""


@algorithm("ditto")
class Ditto(Averaging):
    """Ditto, Algorithm 1."""

    summary = "as fedavg, but each peer also trains a personal model, kept near the average; that model is evaluated"
    title = "Ditto: Fair and Robust Federated Learning Through Personalization"
    authors = "Li, Hu, Beirami, Smith"
    venue = "ICML 2021"
    url = "https://arxiv.org/abs/2012.04221"
    Hyper = DittoHyper
    hyper: DittoHyper
    homogeneous = True
    screened = Shared
    named_loss = True
    state = ("model", "optimizer", "averaged", "averaged_optimizer")
    shared_norm_statistics = "averaged in the model that is sent, local in the personal one"

    def setup(self) -> None:
        super().setup()  # of the model, v_i
        self.averaged = copy.deepcopy(self.model)  # w_i
        self.averaged_optimizer = self.hyper.make_optimizer(self.averaged.parameters())

    @property
    def personal_epochs(self) -> int:
        return self.hyper.personal_epochs or self.hyper.local_epochs

    def local_training(self) -> None:
        h = self.hyper
        if diverged := self.what_diverged(self.shared_part()):
            self.outcomes.note(TRAININGS, diverged)
        else:
            self.train_or_roll_back(epochs=self.personal_epochs, batch=h.batch)  # line 2
        self.train(epochs=h.local_epochs, batch=h.batch, step=self.step_averaged)  # line 3

    def loss(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """h_i(v_i; w_i): the loss on the labels, and the distance to the averaged model."""
        prox = losses.proximal(self.model, parameters_of(self.averaged), self.hyper.regularization)
        return {**super().loss(x, labels), "prox": prox}

    def step_averaged(self, images: Tensor, labels: Tensor) -> None:
        """Take one optimizer step of w_i on F_i."""
        with self.streams.torch("augmentation"):
            x = self.inputs(images)

        def loss(x: Tensor, labels: Tensor) -> dict[str, Tensor]:
            terms = self.label_loss(self.averaged(x), labels)
            return {f"averaged_{name}": value for name, value in terms.items()}

        self.descend(self.averaged_optimizer, loss, x, labels)

    @property
    def sent(self) -> Model:
        return self.averaged

    def reset_after_divergence(self) -> None:
        """Clear optimizer state and statistics of a diverged w_i, which the average of the others has replaced."""
        self.averaged_optimizer.state.clear()
        if statistics_stay_local(self.hyper):
            reset_norms(self.averaged)

    def extra_metrics(self, whole: bool) -> Iterable[ExtraMetric]:
        """The averaged model on the local test split, and on the whole test set."""
        return on_test_samples("averaged", self.averaged, self.data, whole)
