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

Differs from the paper, besides what it shares with its baselines (fedavg_ssl.py):

- L_style is a mean over samples and positives, of cosines, where Eq. 2 sums inner products, so that one learning
  rate suits both nets; also with ``preset: paper``.
- Algorithm 3 leaves G untrained (``train_generator: false``); but only a trained one can collapse (Table 4), and
  untrained ones, which differ from peer to peer, feed one projector.
- the frozen style net is in evaluation mode; edges are rescaled to the value range of their image.
- images with their edges pass the style net together.
- the generator returns all features, as Eq. 4 requires.
- style extraction is part of round 0; a peer that restarts before its first checkpoint repeats it.
- Office-Home is split 70:30 once, in the paper four times.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from pydantic import NonNegativeFloat, NonNegativeInt
from torch import Tensor, nn

from p2pfl.algorithms import fedavg_ssl, presets
from p2pfl.algorithms.fedavg_ssl import FedAvgSSL
from p2pfl.algorithms.fedstyle_extraction import train_style_net, with_edges
from p2pfl.algorithms.presets import Presets
from p2pfl.algorithms.registration import algorithm
from p2pfl.messaging.net import Net
from p2pfl.models.fedstyle import StyleInfusion, mlp
from p2pfl.tensors import parameters_of


@dataclass(frozen=True)
class StyleHyper(fedavg_ssl.Hyper):
    preset: Literal["default", "paper"] = "default"
    """default: what works best here; paper: the formulas as printed. Other keys override it."""
    style_epochs: NonNegativeInt = 10
    """E_s, epochs of style extraction before round 0 (the figure with 0, 10 and 100)."""
    style_weight: NonNegativeFloat = 0.5
    """λ of the style-infused loss (0.1 to 1 in Tables 1 to 3; Table 4)."""
    train_generator: bool = True
    """Train G with the content net; otherwise it keeps its initial values, different on each peer. Evaluation trains
    a copy either way."""
    share_projector: bool = True
    """Exchange g_c with f_c."""
    stylized: bool = True
    """Evaluate personalization with h_c + G([h_c, h_s]) (Eq. 4); otherwise with h_c, as for the baselines."""

    PRESETS: ClassVar[Presets] = presets.FEDSTYLE


@algorithm("fedstyle")
class FedStyle(FedAvgSSL):
    """FedStyle, Algorithm 4."""

    summary = "averages content nets that are trained without labels, infused with each peer's style"
    title = "More Generalized and Personalized Unsupervised Representation Learning In A Distributed System"
    authors = "Yang, Sun, Li, Li, Chen"
    venue = "arXiv 2022"
    url = "https://arxiv.org/abs/2211.06470"
    Hyper = StyleHyper
    hyper: StyleHyper
    state = ("content", "averaged", "infusion", "style_extracted", "mixing_weights")
    views = 4

    def setup(self) -> None:
        super().setup()
        self.share_projector = self.hyper.share_projector
        self.style_extracted = False
        with self.streams.torch("fedstyle.style"):
            self.infusion = StyleInfusion(self.build(self.me).backbone, *self.widths[:2]).to(self.device)
        self.infusion.generator.requires_grad_(self.hyper.train_generator)

    async def round(self, t: int, net: Net) -> None:
        deadline_factor = self.deadline_factor(net)
        if not self.style_extracted:
            self.extract_style()  # line 2
        await self.train_and_average(net, deadline_factor)  # lines 4–11

    def deadline_factor(self, net: Net) -> float:
        """Return how much longer than usual to wait: peers extract their style in their first round."""
        extracting = not self.style_extracted or any(net.rounds_since_join(j) == 0 for j in net.sources)
        return 1.0 + self.hyper.style_epochs / self.hyper.local_epochs if extracting else 1.0

    def extract_style(self) -> None:
        self.style_extracted = True
        with self.streams.torch("fedstyle.style"):
            projector = mlp(*self.widths).to(self.device)  # g_s, not needed afterwards
        train_style_net(self, self.infusion.style_net, projector)

    def local_training(self) -> None:
        """Algorithm 3: train the content net and its projector, and G, for E_l epochs."""
        self.train_modules([self.content, self.infusion.generator] if self.hyper.train_generator else [self.content])

    def personal_part(self) -> dict[str, Tensor]:
        generator = parameters_of(self.infusion.generator) if self.hyper.train_generator else {}
        return super().personal_part() | {f"generator.{name}": value for name, value in generator.items()}

    def inputs(self, images: Tensor) -> Tensor:
        """Line 5 of Algorithm 3: x¹ and x², augmented; then x and Sobel(x)."""
        augmented = [self.data.input(images, augmented=True) for _ in range(2)]
        return torch.cat([*augmented, with_edges(images, self.data)])

    def loss(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """Eq. 3 of what ``inputs`` returns. Ignores the labels."""
        both_views = 2 * (len(x) // self.views)
        content = self.content.backbone(x[:both_views])  # line 6
        style = self.infusion.style_net(x[both_views:])  # line 4
        infused = self.infusion(content, style)  # lines 7 and 8: style into first views, edges into second ones
        return {
            "content": self.contrast(self.content, self.content.projector(content)),
            "infused": self.hyper.style_weight * self.contrast(self.content, self.content.projector(infused)),
        }

    # -- evaluation

    def personal_classifier(self, generator: nn.Module | None = None) -> nn.Module:
        return super().personal_classifier(self.infusion.generator if self.hyper.stylized else None)

    def personal_features(self, x: Tensor) -> Tensor:
        """Return [h_c, h_s], float [B, 2 d], or h_c alone if ``stylized`` is off."""
        content = super().personal_features(x)
        return torch.cat([content, self.infusion.style_net(x)], dim=1) if self.hyper.stylized else content
