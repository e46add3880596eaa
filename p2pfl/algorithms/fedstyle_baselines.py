"""FedStyle's other baselines, which learn without labels: FedPer, FedRep, FedProx, APFL and Ditto.

As FedStyle's paper adapts them to self-supervised learning (arXiv 2211.06470, appendix C). They were published, with
labels, in

- FedPer: Manoj Ghuhan Arivazhagan, Vinay Aggarwal, Aaditya Kumar Singh, Sunav Choudhary: "Federated Learning with
  Personalization Layers", 2019. https://arxiv.org/abs/1912.00818
- FedRep: Liam Collins, Hamed Hassani, Aryan Mokhtari, Sanjay Shakkottai: "Exploiting Shared Representations for
  Personalized Federated Learning", ICML 2021. https://arxiv.org/abs/2102.07078
- FedProx: Tian Li, Anit Kumar Sahu, Manzil Zaheer, Maziar Sanjabi, Ameet Talwalkar, Virginia Smith: "Federated
  Optimization in Heterogeneous Networks", MLSys 2020. https://arxiv.org/abs/1812.06127
- APFL: Yuyang Deng, Mohammad Mahdi Kamani, Mehrdad Mahdavi: "Adaptive Personalized Federated Learning", 2020.
  https://arxiv.org/abs/2003.13461
- Ditto: Tian Li, Shengyuan Hu, Ahmad Beirami, Virginia Smith: "Ditto: Fair and Robust Federated Learning Through
  Personalization", ICML 2021. https://arxiv.org/abs/2012.04221

All run FedAvg's rounds (fedavg_ssl.py); a method is what it shares, and how it trains. With w_i = (f_i, g_i) the
nets of peer i, w the average, z = g(f(x)), and E_l epochs for each line:

    FedPer    f_i ← f                       f_i, g_i ← minimize L_unsup(z¹, z²)
    FedRep    f_i ← f                       g_i ← minimize L_unsup(z¹, z²), f_i frozen
                                            f_i ← minimize L_unsup(z¹, z²), g_i frozen
    FedProx   w_i ← w                       w_i ← minimize L_unsup(z¹, z²) + μ/2 |w_i − w|²
    APFL      w_i,g ← w; z_g of w_i,g       w_i,g ← minimize L_unsup(z_g¹, z_g²)
                                            w_i   ← minimize L_unsup(ẑ¹, ẑ²), ẑ = α z_g.detach() + (1 − α) z
    Ditto     w_i,g ← w                     w_i,g ← minimize L_unsup(z_g¹, z_g²)
                                            w_i   ← minimize L_unsup(z¹, z²) + μ/2 |w_i − w_i,g|²

APFL trains both nets on each batch. Sent and averaged is f_i in FedPer and FedRep, w_i in FedProx, w_i,g in APFL and
Ditto. Personalization is measured with f_i, generalization with the average.

Differs from the paper, besides what fedavg_ssl.py lists:

- Algorithm 1 averages w_k for all methods, which would be the personal nets of APFL and Ditto. As in their own papers
  the w_k,g are averaged here, each trained on from w.
- FedProx starts from w, as in its own paper; in the appendix w_k continues from its own last state.
- APFL's α is a constant, as in the appendix, and both views are mixed alike; it has z_k² for both, a slip.
- "initialize optimizer" is once per E_l epochs, not in each of them, which differs with a momentum or Adam only.
- a frozen net is in training mode: its batch-normalization statistics follow the batches.
- w_i of APFL and Ditto starts from the common initial net, and is restored if its training diverges.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from pydantic import Field, NonNegativeFloat
from torch import Tensor

from p2pfl.algorithms import fedavg_ssl
from p2pfl.algorithms.fedavg_ssl import FedAvgSSL
from p2pfl.algorithms.registration import algorithm
from p2pfl.learning.losses import proximal
from p2pfl.tensors import clone, parameters_of


@algorithm("fedper-ssl")
class FedPerSSL(FedAvgSSL):
    """FedPer: projectors stay personal."""

    summary = "as fedavg-ssl, but projectors stay local"
    title = "Federated Learning with Personalization Layers"
    authors = "Arivazhagan, Aggarwal, Singh, Choudhary"
    venue = "arXiv 2019"
    url = "https://arxiv.org/abs/1912.00818"
    share_projector = False


@algorithm("fedrep-ssl")
class FedRepSSL(FedAvgSSL):
    """FedRep: FedPer, but the personal projector and the shared content net are trained one after the other."""

    summary = "as fedper-ssl, but first the projector is trained, then the content net"
    title = "Exploiting Shared Representations for Personalized Federated Learning"
    authors = "Collins, Hassani, Mokhtari, Shakkottai"
    venue = "ICML 2021"
    url = "https://arxiv.org/abs/2102.07078"
    share_projector = False

    def local_training(self) -> None:
        content = self.content
        projection = [part for part in (content.projector, content.predictor) if part is not None]
        for trained, frozen in ((projection, [content.backbone]), ([content.backbone], projection)):
            # A network of one's own may have frozen layers, which stay frozen.
            parameters = [p for part in frozen for p in part.parameters() if p.requires_grad]
            for parameter in parameters:
                parameter.requires_grad_(False)
            self.train_modules(trained)
            for parameter in parameters:
                parameter.requires_grad_(True)


@dataclass(frozen=True)
class ProxHyper(fedavg_ssl.Hyper):
    mu: NonNegativeFloat = 0.2
    """μ, weight of the proximal term."""


@algorithm("fedprox-ssl")
class FedProxSSL(FedAvgSSL):
    """FedProx: a proximal term keeps local training near the average."""

    summary = "as fedavg-ssl, with a proximal term that keeps local training near the average"
    title = "Federated Optimization in Heterogeneous Networks"
    authors = "Li, Sahu, Zaheer, Sanjabi, Talwalkar, Smith"
    venue = "MLSys 2020"
    url = "https://arxiv.org/abs/1812.06127"
    Hyper = ProxHyper
    hyper: ProxHyper

    def setup(self) -> None:
        super().setup()
        self.start = parameters_of(self.content)  # during local training, a copy

    def local_training(self) -> None:
        self.start = clone(parameters_of(self.content))  # w
        super().local_training()
        self.start = parameters_of(self.content)

    def loss(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        return {**super().loss(x, labels), "prox": proximal(self.content, self.start, self.hyper.mu)}


@dataclass(frozen=True)
class MixtureHyper(fedavg_ssl.Hyper):
    alpha: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.5
    """α, the weight of the averaged net's projections in the mixture that trains the personal net."""


@algorithm("apfl-ssl")
class APFLSSL(FedAvgSSL):
    """APFL: the personal net learns to complement the net that is averaged."""

    summary = "as fedavg-ssl, but each peer also trains a personal net, on a mixture of both nets' projections"
    title = "Adaptive Personalized Federated Learning"
    authors = "Deng, Kamani, Mahdavi"
    venue = "arXiv 2020"
    url = "https://arxiv.org/abs/2003.13461"
    Hyper = MixtureHyper
    hyper: MixtureHyper
    personal_net = True
    state = ("content", "personal", "averaged", "mixing_weights")

    def local_training(self) -> None:
        self.train_modules([self.content, self.personal])

    def loss(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        alpha, shared = self.hyper.alpha, self.content.project(x)  # z_g
        mixture = alpha * shared.detach() + (1.0 - alpha) * self.personal.project(x)  # ẑ
        return {"content": self.contrast(self.content, shared), "personal": self.contrast(self.personal, mixture)}


@dataclass(frozen=True)
class DittoHyper(fedavg_ssl.Hyper):
    mu: NonNegativeFloat = 2.0
    """μ, how strongly the personal net is kept near the averaged net."""


@algorithm("ditto-ssl")
class DittoSSL(FedAvgSSL):
    """Ditto: the personal net is kept near the net that is averaged."""

    summary = "as fedavg-ssl, but each peer also trains a personal net, kept near the one that is averaged"
    title = "Ditto: Fair and Robust Federated Learning Through Personalization"
    authors = "Li, Hu, Beirami, Smith"
    venue = "ICML 2021"
    url = "https://arxiv.org/abs/2012.04221"
    Hyper = DittoHyper
    hyper: DittoHyper
    personal_net = True
    state = ("content", "personal", "averaged", "mixing_weights")

    def local_training(self) -> None:
        self.train_modules([self.content])
        self.train_modules([self.personal], self.step_personal)

    def step_personal(self, images: Tensor, labels: Tensor) -> None:
        """Take one optimizer step of w_i on L_unsup and its distance to w_i,g."""
        with self.streams.torch("augmentation"):
            x = self.inputs(images)

        def loss(x: Tensor, labels: Tensor) -> dict[str, Tensor]:
            prox = proximal(self.personal, parameters_of(self.content), self.hyper.mu)
            return {"personal": self.contrast(self.personal, self.personal.project(x)), "prox": prox}

        self.descend(self.optimizer, loss, x, labels, self.views)
