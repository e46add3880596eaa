"""FedStyle: style infusion for contrastive learning without labels.

Yuewei Yang, Jingwei Sun, Ang Li, Hai Li, Yiran Chen: "More Generalized and Personalized Unsupervised Representation
Learning In A Distributed System", 2022. https://arxiv.org/abs/2211.06470

Peers have unlabeled images of the same classes in different styles. Each first learns what marks its style, by
contrasting its images with their edges. Rounds then train a content net by contrastive learning under augmentation
*and* under style, which a generator infuses into the features. Content nets are averaged; style nets and generators
never leave their peer. Only the evaluation reads labels.

    content net f_c: x → h_c      style net f_s: x → h_s      generator G: [h_c, h_s] → h_c'
    projectors g_c, g_s: h → z    Sobel(x): the edges of x

Algorithm 4, on peer i:

    2       before round 0: train f_s by Algorithm 2 for E_s epochs, on L_style (Eq. 2), and freeze it
    4–5     in round t: if i is among the participants
    6         f_c ← w, the average
    7–9       train f_c by Algorithm 3 for E_l epochs, on Eq. 3
    11      w ← mean of the participants' f_c over {i} ∪ N_i, weighted by samples

Differs from the paper:

- no server: every peer averages what it receives. On a complete graph this is the paper's global model. Weights are
  n_j / Σ n_j; the paper's 1 / |D_k| do not sum to one. All its peers have equally many samples.
- L_style is a mean over samples and positives, of cosines, where Eq. 2 sums inner products, so that one learning
  rate suits both nets; also with ``preset: paper``.
- Algorithm 3 leaves G untrained (``train_generator: false``); but only a trained one can collapse (Table 4), and
  untrained ones, which differ from peer to peer, feed one projector.
- the frozen style net is in evaluation mode; edges are rescaled to the value range of their image.
- personalization uses w_c,i as peer i trained it last (or its initial net), the paper's "local content model";
  generalization uses w.
- batch-normalization statistics are averaged with the weights, so that there is one global model to evaluate
  (``share_statistics: false`` keeps them local). SimSiam's predictor travels with the projector.
- both views of a batch pass the content net together, and images with their edges the style net.
- projector, predictor and generator have half as many hidden units as there are features, and a quarter as outputs,
  like the paper's 256 and 128 for ResNet18's 512. The generator returns all features, as Eq. 4 requires.
- style extraction is part of round 0; a peer that restarts before its first checkpoint repeats it.
- peers that do not take part in a round neither train nor send, but receive and average.
- an average excludes neighbors that miss the deadline, and diverged nets, also the peer's own; of none, w stays.
- the paper gives no numbers for the linear probe; those of Zhuang et al. (2021), which it cites, are the defaults.
- Office-Home is split 70:30 once, in the paper four times; of its baselines only FedAvg is here (``style: false``).
- a last batch of a single image is skipped if there are others.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

import torch
from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt
from torch import Tensor, nn

from p2pfl import PeerId, rng
from p2pfl.algorithms import dry_rounds, presets
from p2pfl.algorithms.base import Algorithm
from p2pfl.algorithms.fedstyle_evaluation import ProbeOptions, generalization, personal_classifier
from p2pfl.algorithms.fedstyle_extraction import train_style_net, with_edges
from p2pfl.algorithms.presets import Presets
from p2pfl.learning.evaluation import ExtraMetric
from p2pfl.learning.losses import unsupervised
from p2pfl.learning.optimizers import LocalTraining, OptimizerName
from p2pfl.messaging.net import Net
from p2pfl.messaging.schema import Body, Layout
from p2pfl.models.fedstyle import ContentNet, StyleInfusion, mlp
from p2pfl.tensors import assign, average, buffers_of, clone, has_diverged, parameters_of


@dataclass(frozen=True)
class Hyper(ProbeOptions, LocalTraining):
    preset: Literal["default", "paper"] = "default"
    """default: what works best here; paper: the formulas as printed. Other keys override it."""
    local_epochs: PositiveInt = 5
    optimizer: OptimizerName = "sgd"
    """sgd or adam, for the style net and for the content net; its state starts anew each round."""
    lr: PositiveFloat = 0.1
    style: bool = True
    """Extract and infuse style; false is unsupervised FedAvg, the paper's baseline."""
    style_epochs: NonNegativeInt = 10
    """E_s, epochs of style extraction before round 0 (the figure with 0, 10 and 100)."""
    style_weight: NonNegativeFloat = 0.5
    """λ of the style-infused loss (0.1 to 1 in Tables 1 to 3; Table 4)."""
    train_generator: bool = True
    """Train G with the content net; otherwise it keeps its initial values, different on each peer. Evaluation trains
    a copy either way."""
    loss: Literal["simclr", "simsiam"] = "simclr"
    """L_unsup."""
    temperature: PositiveFloat = 0.07
    """τ of L_style and of SimCLR."""
    participation: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0
    """α, fraction of peers that take part in a round (0.5 in Tables 2 and 3). The others receive and average."""
    hidden: PositiveInt | None = None
    """Hidden units of projectors, predictor and generator; default: half the features (256 of 512)."""
    output: PositiveInt | None = None
    """Outputs of projectors; default: a quarter of the features (128 of 512)."""
    share_projector: bool = True
    """Exchange g_c with f_c."""
    share_statistics: bool = True
    """Exchange batch-normalization statistics with the weights."""

    PRESETS: ClassVar[Presets] = presets.FEDSTYLE


@dataclass(frozen=True)
class Content(Body):
    """w_c,j: f_c and g_c by name, float32; and |D_j|."""

    values: dict[str, Tensor]
    samples: int


class FedStyle(Algorithm[Hyper]):
    """FedStyle, Algorithm 4."""

    name = "fedstyle"
    summary = "averages content nets that are trained without labels, infused with each peer's style"
    title = "More Generalized and Personalized Unsupervised Representation Learning In A Distributed System"
    authors = "Yang, Sun, Li, Li, Chen"
    venue = "arXiv 2022"
    url = "https://arxiv.org/abs/2211.06470"
    Hyper = Hyper
    homogeneous = needs_images = True
    state = ("content", "averaged", "infusion", "style_extracted", "mixing_weights")
    views = 2
    dry_round = dry_rounds.fedstyle

    def setup(self) -> None:
        h, features = self.hyper, self.model.features
        self.widths = features, h.hidden or max(1, features // 2), h.output or max(1, features // 4)
        with rng.torch_seeded(self.seed, "fedstyle.content"):
            self.content = ContentNet(self.model.backbone, *self.widths, predictor=h.loss == "simsiam")
        self.content.to(self.device)
        self.averaged = copy.deepcopy(self.content)
        self.mixing_weights: dict[PeerId, float] = {}
        self.infusion: StyleInfusion | None = None
        self.style_extracted = False
        self.classifier: nn.Module | None = None
        if h.style:
            with self.streams.torch("fedstyle.style"):
                self.infusion = StyleInfusion(self.build(self.me).backbone, *self.widths[:2]).to(self.device)
            self.infusion.generator.requires_grad_(h.train_generator)
            self.views = 4

    async def round(self, t: int, net: Net) -> None:
        h, patience = self.hyper, 1.0
        if not self.style_extracted:
            self.extract_style()  # line 2
            if h.style:
                patience += h.style_epochs / h.local_epochs  # neighbors extract theirs
        participants = net.participants(h.participation)  # line 4
        if self.me in participants:  # line 5
            assign(self.shared_part(self.content), self.shared_part(self.averaged))  # line 6
            self.infuse_style()  # lines 7–9
        local = self.local_content()
        contents = await net.exchange(local, among=participants, patience=patience)
        self.average(self.including_local(contents, local) if self.me in participants else contents)  # line 11
        self.classifier = None

    def extract_style(self) -> None:
        self.style_extracted = True
        if self.infusion is not None:
            with self.streams.torch("fedstyle.style"):
                projector = mlp(*self.widths).to(self.device)  # g_s, not needed afterwards
            train_style_net(self, self.infusion.style_net, projector)

    def infuse_style(self) -> None:
        """Algorithm 3: train the content net and its projector, and G, for E_l epochs; restore G if it diverges."""
        trained = (
            dict(self.infusion.generator.named_parameters()) if self.infusion and self.hyper.train_generator else {}
        )
        before = clone(trained)
        self.optimizer = self.hyper.make_optimizer([*self.content.parameters(), *trained.values()])
        self.train(epochs=self.hyper.local_epochs, batch=self.hyper.batch)
        if any(map(has_diverged, trained.values())):  # the content net is replaced by the average, G is not
            assign(trained, before)

    def inputs(self, images: Tensor) -> Tensor:
        """Line 5 of Algorithm 3: x¹ and x², augmented; then x and Sobel(x) with style infusion."""
        augmented = [self.data.input(images, augmented=True) for _ in range(2)]
        return torch.cat(augmented if self.infusion is None else [*augmented, with_edges(images, self.data)])

    def loss(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """Eq. 3 of what ``inputs`` returns. Ignores the labels."""
        h = self.hyper
        both_views = 2 * (len(x) // self.views)
        content = self.content.backbone(x[:both_views])  # line 6
        terms = {"content": unsupervised(self.content, content, h.temperature)}
        if self.infusion is not None:
            style = self.infusion.style_net(x[both_views:])  # line 4
            infused = self.infusion(content, style)  # lines 7 and 8: style into first views, edges into second ones
            terms["infused"] = h.style_weight * unsupervised(self.content, infused, h.temperature)
        return terms

    def average(self, contents: Mapping[PeerId, Content]) -> None:
        """Line 11: w ← Σ_j n_j w_c,j / Σ_j n_j; w stays if no peer nearby took part or has samples."""
        samples = {j: contents[j].samples for j in sorted(contents)}
        if total := sum(samples.values()):
            average({j: body.values for j, body in contents.items()}, samples, out=self.shared_part(self.averaged))
            self.mixing_weights = {j: n / total for j, n in samples.items()}
        if not self.hyper.share_statistics:
            assign(buffers_of(self.averaged), buffers_of(self.content))

    def shared_part(self, net: ContentNet) -> dict[str, Tensor]:
        """Return the part of w_c that peers exchange, sharing memory with ``net``."""
        h, values = self.hyper, parameters_of(net)
        if h.share_statistics:
            values |= {name: buffer for name, buffer in buffers_of(net).items() if buffer.is_floating_point()}
        return {name: value for name, value in values.items() if h.share_projector or name.startswith("backbone.")}

    def local_content(self) -> Content:
        return Content(self.shared_part(self.content), len(self.data.train))

    def layouts(self) -> Sequence[Layout]:
        return [Layout.of(self.local_content(), ranges={"samples": self.sample_counts})]

    def weights(self) -> Mapping[PeerId, float]:
        return self.mixing_weights

    # -- evaluation

    def predict(self, x: Tensor) -> Tensor:
        """Personalization: classify by a linear layer on the peer's features, trained on its local samples."""
        if self.classifier is None:
            generator = self.infusion.generator if self.infusion is not None and self.hyper.stylized else None
            stream = self.streams.fresh("fedstyle.probe")
            self.classifier = personal_classifier(
                self.personal_features, self.model.features, generator, self.data, stream, self.hyper
            )
        scores: Tensor = self.classifier(self.personal_features(x))
        return scores

    def personal_features(self, x: Tensor) -> Tensor:
        """Return [h_c, h_s], float [B, 2 d], or h_c alone without style."""
        content: Tensor = self.content.backbone(x)
        if self.infusion is None or not self.hyper.stylized:
            return content
        return torch.cat([content, self.infusion.style_net(x)], dim=1)

    def extra_metrics(self, whole: bool) -> Iterable[ExtraMetric]:
        """Generalization: the average under one linear probe per style, trained on all samples of that style."""
        if self.hyper.probe_peers is not None and self.me >= self.hyper.probe_peers:
            return ()
        return generalization(self.averaged.backbone, self.data, self.seed, self.hyper)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self.classifier = None
