"""FedStyle's networks (arXiv 2211.06470) around a backbone: projectors, predictor, style net and generator."""

from __future__ import annotations

import torch
from torch import Tensor, nn


def mlp(inputs: int, hidden: int, outputs: int) -> nn.Sequential:
    """Return two linear layers with a ReLU between them."""
    return nn.Sequential(nn.Linear(inputs, hidden), nn.ReLU(), nn.Linear(hidden, outputs))


class ContentNet(nn.Module):
    """w_c: content net f_c, projector g_c, and a predictor for SimSiam."""

    def __init__(self, backbone: nn.Module, features: int, hidden: int, output: int, predictor: bool) -> None:
        super().__init__()
        self.backbone = backbone
        self.projector = mlp(features, hidden, output)
        self.predictor = mlp(output, hidden, output) if predictor else None

    def project(self, x: Tensor) -> Tensor:
        """Return z = g_c(f_c(x)), float [B, output]."""
        z: Tensor = self.projector(self.backbone(x))
        return z


class StyleInfusion(nn.Module):
    """What never leaves a peer: style net f_s, frozen, and generator G."""

    def __init__(self, style_net: nn.Module, features: int, hidden: int) -> None:
        super().__init__()
        self.style_net = style_net.requires_grad_(False).eval()
        self.generator = mlp(2 * features, hidden, features)

    def forward(self, content: Tensor, style: Tensor) -> Tensor:
        """Return h_c' = G([h_c, h_s]), float [B, d]."""
        infused: Tensor = self.generator(torch.cat([content, style], dim=1))
        return infused

    def train(self, mode: bool = True) -> StyleInfusion:
        """Switch the generator only: the style net's features must depend on the image, not on its batch."""
        self.generator.train(mode)
        return self


class StylizedClassifier(nn.Module):
    """Eq. 4 and a linear layer: class scores of [h_c, h_s], float [B, 2 d]."""

    def __init__(self, generator: nn.Module, probe: nn.Linear) -> None:
        super().__init__()
        self.generator = generator
        self.probe = probe

    def forward(self, features: Tensor) -> Tensor:
        content, _ = features.chunk(2, dim=1)
        scores: Tensor = self.probe(content + self.generator(features))
        return scores
