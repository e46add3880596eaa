"""The linear probe: how well one linear layer tells classes apart by features that are no longer trained.

FedStyle (arXiv 2211.06470) is trained without labels and evaluated so, "following Zhuang et al. 2021": Adam with
a learning rate of 3e-3, 200 epochs, batches of 2048 features. Only the probe sees labels.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from p2pfl.training import Evaluation


def train_probe(
    features: Tensor,
    labels: Tensor,
    classes: int,
    stream: np.random.Generator,
    *,
    lr: float = 3e-3,
    epochs: int = 200,
    batch: int = 2048,
) -> nn.Linear:
    """A linear layer that was trained on these features alone.

    Args:
        features: float [N, d], N > 0; they get no gradient.
        labels: int64 [N].
        classes: K.
        stream: decides the initial weights and the order of the samples; nothing else is random.
    """
    features, device = features.detach(), features.device
    probe = nn.Linear(features.shape[1], classes, device="meta").to_empty(device=device)  # draws nothing
    bound = features.shape[1] ** -0.5
    with torch.no_grad():
        for parameter in probe.parameters():
            parameter.copy_(torch.from_numpy(stream.uniform(-bound, bound, parameter.shape)))
    optimizer = torch.optim.Adam(probe.parameters(), lr=lr)
    with torch.enable_grad():
        for _ in range(epochs):
            order = torch.from_numpy(stream.permutation(len(features))).to(device)
            for chosen in torch.split(order, batch):
                optimizer.zero_grad(set_to_none=True)
                cross_entropy(probe(features[chosen]), labels[chosen]).backward()  # type: ignore[no-untyped-call]
                optimizer.step()
    return probe


@torch.no_grad()
def score_probe(probe: nn.Linear, features: Tensor, labels: Tensor) -> Evaluation:
    """Outcome on features [N, d], N > 0, with labels [N]."""
    logits = probe(features)
    correct = int((logits.argmax(1) == labels).sum())
    return Evaluation(correct / len(labels), float(cross_entropy(logits, labels)), correct, len(labels))
