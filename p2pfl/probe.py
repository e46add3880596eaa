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


def new_probe(features: int, classes: int, stream: np.random.Generator, device: torch.device) -> nn.Linear:
    """An untrained linear layer; ``stream`` decides its weights, and torch's generators are left alone."""
    probe = nn.Linear(features, classes, device="meta").to_empty(device=device)  # draws nothing
    bound = features**-0.5
    with torch.no_grad():
        for parameter in probe.parameters():
            parameter.copy_(torch.from_numpy(stream.uniform(-bound, bound, parameter.shape)))
    return probe


def fit(
    classifier: nn.Module,
    features: Tensor,
    labels: Tensor,
    stream: np.random.Generator,
    *,
    lr: float = 3e-3,
    epochs: int = 200,
    batch: int = 2048,
) -> None:
    """Train a classifier of features by the probe's recipe: cross-entropy, Adam.

    Args:
        classifier: float [B, d] to logits; its parameters are learned, and nothing in it may be random.
        features: float [N, d], N > 0; they get no gradient.
        labels: int64 [N].
        stream: decides the order of the samples.
    """
    features = features.detach()
    optimizer = torch.optim.Adam(classifier.parameters(), lr=lr)
    with torch.enable_grad():
        for _ in range(epochs):
            order = torch.from_numpy(stream.permutation(len(features))).to(features.device)
            for chosen in torch.split(order, batch):
                optimizer.zero_grad(set_to_none=True)
                loss = cross_entropy(classifier(features[chosen]), labels[chosen])
                loss.backward()  # type: ignore[no-untyped-call]
                optimizer.step()


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
    """A linear layer that was trained on these features alone; arguments as of ``fit``.

    Args:
        classes: K.
        stream: decides the initial weights and the order of the samples; nothing else is random.
    """
    probe = new_probe(features.shape[1], classes, stream, features.device)
    fit(probe, features, labels, stream, lr=lr, epochs=epochs, batch=batch)
    return probe


@torch.no_grad()
def score_probe(probe: nn.Linear, features: Tensor, labels: Tensor) -> Evaluation:
    """Outcome on features [N, d], N > 0, with labels [N]."""
    logits = probe(features)
    correct = int((logits.argmax(1) == labels).sum())
    return Evaluation(correct / len(labels), float(cross_entropy(logits, labels)), correct, len(labels))
