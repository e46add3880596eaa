"""FedProto: Federated Prototype Learning across Heterogeneous Clients.

Yue Tan, Guodong Long, Lu Liu, Tianyi Zhou, Qinghua Lu, Jing Jiang, Chengqi Zhang: "FedProto: Federated Prototype
Learning across Heterogeneous Clients", AAAI 2022. https://arxiv.org/abs/2105.00243
As FedTGP's paper restates and runs it (Eqs. 2 to 4; https://arxiv.org/abs/2401.03230).

Peers with different models exchange nothing but class prototypes: the mean feature of each of their classes. In round
t, peer i

    1  trains on  cross-entropy + λ · distance of f_i(x) to the global prototype P̄^y                (Eq. 4)
    2  computes its local prototypes  P_i^c = mean of f_i(x) over its training samples of class c     (Eq. 2)
    3  sends them, and averages all of {i} ∪ N_i class by class, weighted by |D_{j,c}|, to P̄        (Eq. 3)

and classifies x by the nearest P̄^c. On a complete graph all peers have the paper's global prototypes, bit for bit.
Lines 1 and 2 and the equations are in prototypes.py and class_means.py.

Differs from the paper:

- The distance in line 1 is the mean squared error over batch and dimensions, as in the released code of both papers,
  with λ = 10, which FedTGP's authors ran (FedProto's own README has 1, and 0.1 for CIFAR-10). Eq. 4 has the Euclidean
  distance between class means, to which FedTGP's λ = 0.1 belongs (``distance: euclidean``, with the class means of
  the batch).
- Eq. 3 prints the weights |D_{j,c}| / N_c and also divides by the number of peers; here weights sum to 1.
- Prototypes are computed after the training epochs, in evaluation mode, as in FedTGP's code;
  FedProto's averages the features that training saw.
- x is classified by the nearest of all known prototypes, as by FedTGP's authors; FedProto's code looks at the peer's
  classes only. The accuracy of the head, which MAPL's code also logs, is recorded besides, as ``head``.
- ``preset: official`` is the unweighted mean and the ``drop_last`` of the code of both papers, and no more.
- A class without a received prototype in a round keeps its global prototype (the released code drops it).
- A class that has had no prototype yet contributes no loss and is never predicted.
- Peers that do not take part in a round (``participation``) receive, and update their global prototypes.
- On a sparse graph each peer's global prototypes are the means over its neighborhood.
- Until there is a global prototype, the head classifies.
- The mean skips neighbors that miss the deadline or whose prototypes have diverged, and the peer's own if they have.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar, Literal

from torch import Tensor

from p2pfl.algorithms import presets
from p2pfl.algorithms.class_means import ClassMeans, Prototypes
from p2pfl.algorithms.presets import Presets
from p2pfl.algorithms.prototypes import GuidedTraining, compare_margins, guided_loss, mean_features, nearest_prototype
from p2pfl.algorithms.registration import algorithm
from p2pfl.learning.evaluation import ExtraMetric
from p2pfl.messaging.net import Net


@dataclass(frozen=True)
class Hyper(GuidedTraining):
    preset: Literal["default", "paper", "official"] = "default"
    """default: what works best here; paper: the formulas as printed; official: the released code. Other keys
    override it."""
    weighted: bool = True
    """Weight each peer's prototype by its number of samples of that class; otherwise equally, as the released code
    does, and then no count is sent."""

    PRESETS: ClassVar[Presets] = presets.FEDPROTO


@algorithm("fedproto")
class FedProto(ClassMeans[Hyper]):
    """FedProto: global prototypes are means."""

    summary = "class prototypes are sent and averaged; features are pulled to them, the nearest one classifies"
    title = "FedProto: Federated Prototype Learning across Heterogeneous Clients"
    authors = "Tan, Long, Liu, Zhou, Lu, Jiang, Zhang"
    venue = "AAAI 2022"
    url = "https://arxiv.org/abs/2105.00243"
    Hyper = Hyper
    equal_features = True

    def setup(self) -> None:
        super().setup()
        self.sends_counts = self.hyper.weighted

    async def round(self, t: int, net: Net) -> None:
        table = await self.train_and_exchange(net)  # lines 1 and 2
        self.measured = {}
        if len(table):
            self.average_prototypes(table)  # line 3
            self.measured = compare_margins(table, self.prototypes, self.known)

    def loss(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """Line 1."""
        return guided_loss(self, x, labels)

    def local_prototypes(self) -> Prototypes:
        """Line 2."""
        return mean_features(self)

    def predict(self, x: Tensor) -> Tensor:
        return nearest_prototype(self, x)

    def extra_metrics(self, whole: bool) -> Iterable[ExtraMetric]:
        """The backbone with the head, which ``predict`` uses only until a prototype is known."""
        yield ExtraMetric("head", self.model, self.data.test)
        if whole:
            yield ExtraMetric("head_global", self.model, self.data.global_test)
