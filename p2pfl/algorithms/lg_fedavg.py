"""LG-FedAvg: local representations, global heads.

Paul Pu Liang, Terrance Liu, Liu Ziyin, Nicholas B. Allen, Randy P. Auerbach, David Brent, Ruslan Salakhutdinov,
Louis-Philippe Morency: "Think Locally, Act Globally: Federated Learning with Local and Global Representations", 2020.
https://arxiv.org/abs/2001.01523

A round is FedAvg's, but only the head is sent and averaged. Backbones stay local and may have any architecture with
the same number of features. Head and backbone are trained together.

Differs from the paper:

- There is no server; see fedavg.py for what follows from that.
- The head is one linear layer, everything after the features.
- The local representation is trained with the cross-entropy alone, as in comparisons by later papers: no auxiliary
  self-supervised or adversarial term.
- Heads start equal on all peers, as if sent by a server.
- A peer whose backbone diverged stays diverged: only its head is replaced by the average of the others'.
"""

from __future__ import annotations

import copy
from abc import abstractmethod
from collections.abc import Iterable

from torch import Tensor

from p2pfl import rng
from p2pfl.algorithms.fedavg import FedAvg, Participation
from p2pfl.algorithms.registration import algorithm
from p2pfl.learning.evaluation import ExtraMetric
from p2pfl.tensors import parameters_of


@algorithm("lg-fedavg")
class LGFedAvg(FedAvg):
    """LG-FedAvg: FedAvg of the heads."""

    summary = "heads are sent and averaged; backbones stay local and may differ"
    title = "Think Locally, Act Globally: Federated Learning with Local and Global Representations"
    authors = "Liang, Liu, Ziyin, Allen, Auerbach, Brent, Salakhutdinov, Morency"
    venue = "arXiv 2020"
    url = "https://arxiv.org/abs/2001.01523"
    Hyper = Participation
    homogeneous = False
    linear_heads = True
    equal_features = True

    def setup(self) -> None:
        with rng.torch_seeded(self.seed, "lg-fedavg.init"):
            self.model.reset_linear_head()
        super().setup()

    def shared_part(self) -> dict[str, Tensor]:
        """Return the tensors to average: weight and bias of the head."""
        return parameters_of(self.model.linear_head)


class WithOwnHead(LGFedAvg):
    """LG-FedAvg that also evaluates each peer with its own head, as it was before the last average.

    That is how the released codes of FedSim and FedClassAvg evaluate.
    """

    state = (*LGFedAvg.state, "own_head")

    def setup(self) -> None:
        super().setup()
        self.own_head = copy.deepcopy(self.model.linear_head)

    @abstractmethod
    def train_locally(self) -> None:
        """Train backbone and head for a round."""

    def local_training(self) -> None:
        self.train_locally()
        self.assign_unless_diverged(parameters_of(self.own_head), self.shared_part())

    def predict_with_own_head(self, x: Tensor) -> Tensor:
        logits: Tensor = self.own_head(self.model.backbone(x))
        return logits

    def extra_metrics(self, whole: bool) -> Iterable[ExtraMetric]:
        """The backbone with the peer's own head on the test samples."""
        yield ExtraMetric("own_head", self.predict_with_own_head, self.data.test)
        if whole:
            yield ExtraMetric("own_head_global", self.predict_with_own_head, self.data.global_test)
