"""FML: Federated Mutual Learning.

Tao Shen, Jie Zhang, Xinkang Jia, Fengda Zhang, Gang Huang, Pan Zhou, Kun Kuang, Fei Wu, Chao Wu: "Federated Mutual
Learning", 2020. https://arxiv.org/abs/2006.16765
As FedTGP's paper compares with it (Table 1; https://arxiv.org/abs/2401.03230).

Each peer has a private model of any architecture, which it evaluates and never sends, and a small *meme* model of an
architecture that all share. The two teach each other on the local samples, and the memes are averaged. In round t on
peer i, with the outputs p_i of the private model and p_m of the meme m (line numbers are ours):

    1  S_t ← a random fraction of the peers
    2  i ∈ S_t: E epochs of steps of both models, one on each loss, from the same outputs,
          L_i = α · cross-entropy of p_i + (1 − α) · KL(p_m ‖ p_i)
          L_m = β · cross-entropy of p_m + (1 − β) · KL(p_i ‖ p_m)
       and send m_i to the neighbors
    3  m_i ← Σ_j n_j m_j / Σ_j n_j  over the j ∈ S_t that are i or its neighbors

Lines 1 and 3 are FedAvg's (fedavg.py), with the meme for the model. On a complete graph the parameters of all memes
are equal after each round, and they are the server's.

Differs from the paper:

- There is no server; see fedavg.py for what follows from that.
- A model learns from the other's outputs as from constants, and KL is the mean over the batch. FedTGP's authors also
  divide it by the number of classes, differentiate each loss with respect to both models, clip gradients, and average
  memes without weights.
- α and β are FedTGP's 1/2.
- Both models have the same optimizer settings, and the optimizer's state persists across rounds.
- Memes start equal on all peers, and private models with different weights.
- If one of a peer's models diverges in training, the peer restores both from before the round and sends that meme.
- Other tasks than the meme's, and heads for them, are left out: both models have the dataset's classes.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import AfterValidator, Field
from torch import Tensor
from torch.nn.functional import kl_div

from p2pfl import rng
from p2pfl.algorithms.averaging import AnyPart, Averaging, Shared
from p2pfl.algorithms.base import Algorithm
from p2pfl.algorithms.registration import algorithm
from p2pfl.errors import ModelError
from p2pfl.learning.evaluation import ExtraMetric, on_test_samples
from p2pfl.models import MODELS, Model, unknown_model
from p2pfl.models.import_path import parse
from p2pfl.options import OptionErrors

Weight = Annotated[float, Field(ge=0.0, le=1.0)]


def one_architecture(name: str) -> str:
    """Return the name of an architecture. Raises ValueError with what is allowed."""
    if parse(name) is not None:
        raise ValueError(f"{name!r} is an import path; name a model of p2pfl or of a plug-in, e.g. tiny-cnn")
    if name not in MODELS:
        raise ValueError(unknown_model(name))
    if len(members := MODELS[name].members) > 1:
        raise ValueError(f"{name!r} has several architectures; name one of {', '.join(members)}")
    return name


@dataclass(frozen=True)
class WithMeme(AnyPart):
    meme: Annotated[str, AfterValidator(one_architecture)] = "tiny-cnn"
    """Architecture of the meme, the model that is sent: any single one, e.g. htfe-cnn (`p2pfl models`)."""


@dataclass(frozen=True)
class MemeHyper(WithMeme):
    alpha: Weight = 0.5
    """α, weight of the labels for the private model; 1 − α is the weight of the meme."""
    beta: Weight = 0.5
    """β, weight of the labels for the meme; 1 − β is the weight of the private model."""


def distillation(student: Tensor, teacher: Tensor) -> Tensor:
    """Return KL(p_teacher ‖ p_student), the mean over the batch, of logits [B, K]; the teacher is constant."""
    log_p, log_q = student.log_softmax(1), teacher.detach().log_softmax(1)
    return kl_div(log_p, log_q, reduction="batchmean", log_target=True)


def initial_meme(method: Algorithm[Any], architecture: str) -> Model:
    """Return the meme from which all peers start. Raises OptionErrors if it does not suit the dataset's inputs."""
    try:
        with rng.torch_seeded(method.seed, f"{method.name}.meme"):
            return method.build_named(architecture)
    except ModelError as error:
        raise OptionErrors([(("meme",), str(error))]) from None


@algorithm("fml")
class FML(Averaging):
    """FML: FedAvg of memes, which teach and learn from private models."""

    summary = "a private model and a small meme teach each other; memes are sent and averaged"
    title = "Federated Mutual Learning"
    authors = "Shen, Zhang, Jia, Zhang, Huang, Zhou, Kuang, Wu, Wu"
    venue = "arXiv 2020"
    url = "https://arxiv.org/abs/2006.16765"
    Hyper = MemeHyper
    hyper: MemeHyper
    named_loss = True
    screened = Shared
    trained_models = 2
    state = ("model", "meme", "optimizer")
    shared_norm_statistics = "averaged in the model that is sent, local in the personal one"

    def setup(self) -> None:
        self.meme = initial_meme(self, self.hyper.meme)
        self.optimizer = self.hyper.make_optimizer([*self.model.parameters(), *self.meme.parameters()])

    @property
    def sent(self) -> Model:
        return self.meme

    def local_training(self) -> None:
        """Line 2."""
        self.train_or_roll_back(epochs=self.hyper.local_epochs, batch=self.hyper.batch, beside=[self.meme])

    def loss(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """L_i + L_m: neither depends on the parameters of the other model."""
        h, z, z_meme = self.hyper, self.model(x), self.meme(x)
        terms = {name: h.alpha * term for name, term in self.label_loss(z, labels).items()}
        terms["kl"] = (1 - h.alpha) * distillation(z, z_meme)
        terms |= {f"meme_{name}": h.beta * term for name, term in self.label_loss(z_meme, labels).items()}
        terms["meme_kl"] = (1 - h.beta) * distillation(z_meme, z)
        return terms

    def extra_metrics(self, whole: bool) -> Iterable[ExtraMetric]:
        """The meme, the paper's global model, on the test samples."""
        return on_test_samples("meme", self.meme, self.data, whole)
