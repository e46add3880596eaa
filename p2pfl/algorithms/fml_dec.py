"""Decentralized FML, a baseline of "DFML: Decentralized Federated Mutual Learning".

Yasser H. Khalil, Amir H. Estiri, Mahdi Beitollahi, Nader Asadi, Sobhan Hemati, Xu Li, Guojun Zhang, Xi Chen,
TMLR 2024, appendices A.3.4 and A.4.11. https://arxiv.org/abs/2402.01863

Each peer has a private model W_n of any architecture, which it never sends, and a *meme* M_n of an architecture that
all share (fml.py). In round t, with the aggregator a, the senders S and participants P = S ∪ {a} of fedavg_dec.py
(line numbers are ours):

    1  n ∈ P: local epochs of steps of W_n on  α L_WSM + (1 − α) KL(p_M ‖ p_W)
                               and of M_n on  β L_WSM + (1 − β) KL(p_W ‖ p_M),  from the same outputs
    2  s ∈ S: send M_s to a
    3  a: M ← Σ_{n∈P} d_n M_n / Σ_{n∈P} d_n
    4  a: send M to each s ∈ S; the receivers, and a itself, continue from it

Memes start equal, and private models with different weights.

Differs from the paper:

- The paper does not name the loss on the labels, nor α and β: L_WSM, as for its other baselines, and FML's 1/2. Nor
  does it say that memes are weighted; they are, as in Eq. 5.
- if one of a peer's models diverges in training, the peer restores both from before the round and sends that meme.
- schedule, statistics, optimizer and failures are as in fedavg_dec.py.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated, ClassVar

from pydantic import AfterValidator
from torch import Tensor

from p2pfl.algorithms import fedavg_dec
from p2pfl.algorithms.fedavg_dec import FedAvgDec
from p2pfl.algorithms.fml import Weight, distillation, initial_meme, one_architecture
from p2pfl.algorithms.registration import algorithm
from p2pfl.learning.evaluation import ExtraMetric
from p2pfl.models import Model


@dataclass(frozen=True)
class MutualHyper(fedavg_dec.Hyper):
    meme: Annotated[str, AfterValidator(one_architecture)] = "tiny-cnn"
    """Architecture of the meme, the model that is sent: any single one, e.g. dfml-cnn-32-64 (`p2pfl models`)."""
    alpha: Weight = 0.5
    """α, weight of the labels for the private model; 1 − α is the weight of the meme."""
    beta: Weight = 0.5
    """β, weight of the labels for the meme; 1 − β is the weight of the private model."""


@algorithm("fml-dec")
class FMLDec(FedAvgDec):
    """Decentralized FML."""

    summary = "as fml, but one aggregator per round averages the memes, as in dfml"
    venue = "TMLR 2024, appendix A.3.4"
    Hyper = MutualHyper
    hyper: MutualHyper
    trained_models = 2
    state: ClassVar[tuple[str, ...]] = ("model", "meme")
    shared_norm_statistics = "averaged in the model that is sent, local in the personal one"

    def setup(self) -> None:
        self.meme = self.initial(self.hyper.meme)
        super().setup()

    def initial(self, architecture: str) -> Model:
        """Return the meme from which all peers start."""
        return initial_meme(self, architecture)

    @property
    def sent(self) -> Model:
        return self.meme

    @property
    def sent_architectures(self) -> Iterable[str]:
        return (self.meme.name,)

    def local_training(self) -> None:
        """Line 1."""
        h = self.hyper
        self.optimizer = h.make_optimizer([*self.model.parameters(), *self.meme.parameters()])
        self.train_or_roll_back(epochs=h.local_epochs, batch=h.batch, beside=[self.meme])

    def loss(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """Line 1: neither model's loss depends on the parameters of the other."""
        h, z, z_meme = self.hyper, self.model(x), self.meme(x)
        return {
            h.supervision: h.alpha * self.supervision(z, labels),
            "kl": (1 - h.alpha) * distillation(z, z_meme),
            f"meme_{h.supervision}": h.beta * self.supervision(z_meme, labels),
            "meme_kl": (1 - h.beta) * distillation(z_meme, z),
        }

    def extra_metrics(self, whole: bool) -> Iterable[ExtraMetric]:
        """The private model's local accuracy, and the meme on the test samples."""
        yield from super().extra_metrics(whole)
        yield ExtraMetric("meme", self.meme, self.data.test)
