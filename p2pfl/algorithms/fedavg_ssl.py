"""FedAvg without labels: nets that contrastive learning trains are averaged. FedStyle's first baseline, and its base.

Brendan McMahan, Eider Moore, Daniel Ramage, Seth Hampson, Blaise Agüera y Arcas: "Communication-Efficient Learning of
Deep Networks from Decentralized Data", AISTATS 2017. https://arxiv.org/abs/1602.05629

As FedStyle's paper adapts it to self-supervised learning (arXiv 2211.06470, Algorithm 1 and appendix C):

    content net f: x → h      projector g: h → z      w = (f, g)

    in round t, on peer i, if it is among the participants (line numbers are ours):
    1     w_i ← w, the average                                   (LocalUpdate)
    2     for E_l epochs, for batches x of D_i:                  (LocalTraining)
    3       x¹, x² ← Augmentations(x)
    4       z¹, z² ← g(f(x¹)), g(f(x²))
    5       w_i ← w_i − η ∇ L_unsup(z¹, z²)
    on all peers:
    6     w ← mean of the participants' w_j over {i} ∪ N_i, weighted by samples

L_unsup is SimCLR's loss or SimSiam's. Only the evaluation reads labels: a linear probe on frozen features.

Differs from the paper:

- no server: every peer averages what it receives. On a complete graph this is the paper's global model. Weights are
  n_j / Σ n_j; the 1 / |D_k| of Algorithm 1 do not sum to one. All its peers have equally many samples.
- personalization uses w_i as peer i trained it last (or its initial net), the paper's "local content model";
  generalization uses w.
- batch-normalization statistics are averaged with the weights, so that there is one global model to evaluate
  (``share_statistics: false`` keeps them local). SimSiam's predictor belongs to the projector.
- both views of a batch pass the content net together.
- projector and predictor have half as many hidden units as there are features, and a quarter as outputs, like
  FedStyle's 256 and 128 for ResNet18's 512.
- the paper gives no numbers for the linear probe; the defaults are from Zhuang et al. (2021), whom it cites.
- peers that do not take part in a round neither train nor send, but receive and average.
- an average excludes neighbors that miss the deadline, and diverged nets, also the peer's own; of none, w stays. What
  is not averaged is restored if its training diverges.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from pydantic import PositiveFloat, PositiveInt
from torch import Tensor, nn

from p2pfl import PeerId, rng
from p2pfl.algorithms.base import Algorithm, Fraction
from p2pfl.algorithms.fedstyle_evaluation import ProbeOptions, generalization, personal_classifier
from p2pfl.algorithms.registration import algorithm
from p2pfl.learning.evaluation import ExtraMetric
from p2pfl.learning.losses import unsupervised
from p2pfl.learning.optimizers import LocalTraining, OptimizerName
from p2pfl.messaging.net import Net
from p2pfl.messaging.schema import Body, Layout
from p2pfl.models.fedstyle import ContentNet
from p2pfl.outcomes import TRAININGS
from p2pfl.tensors import assign, buffers_of, clone, constants_of, fractions, parameters_of


@dataclass(frozen=True)
class Hyper(ProbeOptions, LocalTraining):
    local_epochs: PositiveInt = 5
    optimizer: OptimizerName = "sgd"
    """sgd or adam, for FedStyle's style net too; its state starts anew each round."""
    lr: PositiveFloat = 0.1
    loss: Literal["simclr", "simsiam"] = "simclr"
    """L_unsup."""
    temperature: PositiveFloat = 0.07
    """τ of SimCLR, and of FedStyle's L_style."""
    participation: Fraction = 1.0
    """α, fraction of peers that take part in a round (0.5 in Tables 2 and 3). The others receive and average."""
    hidden: PositiveInt | None = None
    """Hidden units of projectors, predictor and FedStyle's generator; default: half the features (256 of 512)."""
    output: PositiveInt | None = None
    """Outputs of projectors; default: a quarter of the features (128 of 512)."""
    share_statistics: bool = True
    """Exchange batch-normalization statistics with the weights."""


@dataclass(frozen=True)
class Content(Body):
    """w_j: f and g by name, float32; and n_j = |D_j|."""

    values: dict[str, Tensor]
    samples: int


def all_tensors(net: nn.Module) -> dict[str, Tensor]:
    """Return parameters and batch-normalization statistics by name, sharing memory with ``net``."""
    statistics = {name: buffer for name, buffer in buffers_of(net).items() if buffer.is_floating_point()}
    return parameters_of(net) | statistics


@algorithm("fedavg-ssl")
class FedAvgSSL(Algorithm[Hyper]):
    """FedAvg as FedStyle's Algorithm 1 and appendix C have it."""

    summary = "as fedavg, but without labels: contrastive learning trains the nets that are averaged"
    title = "Communication-Efficient Learning of Deep Networks from Decentralized Data"
    authors = "McMahan, Moore, Ramage, Hampson, Agüera y Arcas"
    venue = "AISTATS 2017"
    url = "https://arxiv.org/abs/1602.05629"
    Hyper = Hyper
    homogeneous = needs_images = True
    state: ClassVar[tuple[str, ...]] = ("content", "averaged", "mixing_weights")
    views = 2
    share_projector: bool = True
    """Whether peers exchange g, or f alone."""
    personal_net: ClassVar[bool] = False
    """Whether peers train a net that stays local besides ``content``, which is sent and averaged."""

    def setup(self) -> None:
        h, features = self.hyper, self.model.features
        self.widths = features, h.hidden or max(1, features // 2), h.output or max(1, features // 4)
        with rng.torch_seeded(self.seed, "fedstyle.content"):  # equal for all methods that are compared
            self.content = ContentNet(self.model.backbone, *self.widths, predictor=h.loss == "simsiam")
        self.content.to(self.device)
        self.averaged = copy.deepcopy(self.content)
        if self.personal_net:
            self.personal = copy.deepcopy(self.content)
        self.mixing_weights: dict[PeerId, float] = {}
        self.classifier: nn.Module | None = None

    async def round(self, t: int, net: Net) -> None:
        await self.train_and_average(net)

    async def train_and_average(self, net: Net, deadline_factor: float = 1.0) -> None:
        """Run a round, and wait for ``deadline_factor`` times as long as usual for what the neighbors send."""
        participants = net.participants(self.hyper.participation)
        if self.me in participants:
            assign(self.shared_part(self.content), self.shared_part(self.averaged))  # line 1
            before = clone(self.personal_part())
            self.local_training()  # lines 2–5
            # The average does not replace this part.
            if before and not self.outcomes.note(TRAININGS, self.what_diverged(self.personal_part())):
                assign(self.personal_part(), before)
        local = self.local_content()
        contents = await net.exchange(local, among=participants, deadline_factor=deadline_factor)
        self.average(self.including_local(contents, local) if self.me in participants else contents)  # line 6
        self.classifier = None

    def local_training(self) -> None:
        """LocalTraining: train for E_l epochs."""
        self.train_modules([self.content])

    def train_modules(
        self, modules: Sequence[nn.Module], step: Callable[[Tensor, Tensor], None] | None = None
    ) -> None:
        """Train these modules together for E_l epochs, with a new optimizer. ``step`` as in ``train``."""
        self.optimizer = self.hyper.make_optimizer([p for module in modules for p in module.parameters()])
        self.train(epochs=self.hyper.local_epochs, batch=self.hyper.batch, step=step)

    def loss(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """L_unsup of both views, x [2 B, C, H, W], first views first. Ignores the labels."""
        return {"content": self.contrast(self.content, self.content.project(x))}

    def contrast(self, net: ContentNet, z: Tensor) -> Tensor:
        """L_unsup(z¹, z²) of projections z [2 B, p] and, for SimSiam, the predictor of ``net``."""
        return unsupervised(z, net.predictor, self.hyper.temperature)

    def average(self, contents: Mapping[PeerId, Content]) -> None:
        """Line 6: w ← Σ_j n_j w_j / Σ_j n_j; w stays if no peer nearby took part or has samples."""
        samples = {j: body.samples for j, body in contents.items()}
        if any(samples.values()):
            self.mixing_weights = fractions(samples)
            self.aggregation.combine(contents, self.mixing_weights, self.shared_part(self.averaged))
        if not self.hyper.share_statistics:
            assign(buffers_of(self.averaged), buffers_of(self.content))

    def shared_part(self, net: ContentNet) -> dict[str, Tensor]:
        """Return the part of w that peers exchange, sharing memory with ``net``."""
        values = all_tensors(net) if self.hyper.share_statistics else parameters_of(net)
        return {name: value for name, value in values.items() if self.share_projector or name.startswith("backbone.")}

    def personal_part(self) -> dict[str, Tensor]:
        """Return what is trained but not averaged, sharing memory with the nets."""
        shared = self.shared_part(self.content)
        found = {name: value for name, value in all_tensors(self.content).items() if name not in shared}
        if self.personal_net:
            found |= {f"personal.{name}": value for name, value in all_tensors(self.personal).items()}
        return found

    def local_content(self) -> Content:
        return Content(self.shared_part(self.content), len(self.data.train))

    def layouts(self) -> Sequence[Layout]:
        constants = {"values": constants_of(self.content)}
        return [Layout.of(self.local_content(), ranges={"samples": self.sample_counts}, constants=constants)]

    def weights(self) -> Mapping[PeerId, float]:
        return self.mixing_weights

    # -- evaluation

    def predict(self, x: Tensor) -> Tensor:
        """Personalization: classify by a linear layer on the peer's features, trained on its local samples."""
        if self.classifier is None:
            self.classifier = self.personal_classifier()
        scores: Tensor = self.classifier(self.personal_features(x))
        return scores

    def personal_classifier(self, generator: nn.Module | None = None) -> nn.Module:
        stream = self.streams.fresh("fedstyle.probe")
        with self.streams.evaluation():  # whichever evaluation is the first to need it
            return personal_classifier(
                self.personal_features, self.model.features, generator, self.data, stream, self.hyper
            )

    def personal_features(self, x: Tensor) -> Tensor:
        """Return the features that personalization uses, h of w_i, float [B, d]."""
        net = self.personal if self.personal_net else self.content
        features: Tensor = net.backbone(x)
        return features

    def extra_metrics(self, whole: bool) -> Iterable[ExtraMetric]:
        """Generalization: the average under one linear probe per style, trained on all samples of that style."""
        if self.hyper.probe_peers is not None and self.me >= self.hyper.probe_peers:
            return ()
        return generalization(self.averaged.backbone, self.data, self.seed, self.hyper)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self.classifier = None
