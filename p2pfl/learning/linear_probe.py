"""Linear probe: one linear layer trained on frozen features.

The defaults are FedStyle's (arXiv 2211.06470, "following Zhuang et al. 2021"): Adam with a learning rate of 3e-3, 200
epochs, batches of 2048 features. A few hundred samples are one batch: set ``steps`` too, as 200 are too few.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from p2pfl.learning.optimizers import Adam


def new_probe(features: int, classes: int, stream: np.random.Generator, device: torch.device) -> nn.Linear:
    """Create a linear layer with weights drawn from ``stream``, never from torch's generators."""
    probe = nn.Linear(features, classes, device="meta").to_empty(device=device)  # "meta" draws no initial weights
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
    steps: int = 1,
    batch: int = 2048,
) -> None:
    """Train a classifier of frozen features with Adam on the cross-entropy.

    Args:
        classifier: maps features [B, d] to logits; must not draw random numbers.
        features: float [N, d], N > 0; they receive no gradient.
        labels: int64 [N].
        stream: shuffles the samples.
        epochs: at least; more if ``steps`` optimizer steps take more.
    """
    features = features.detach()
    epochs = max(epochs, -(-steps // -(-len(features) // batch)))
    optimizer = Adam(classifier.parameters(), lr=lr)
    with torch.enable_grad():
        for _ in range(epochs):
            order = torch.from_numpy(stream.permutation(len(features))).to(features.device)
            for indices in torch.split(order, batch):
                optimizer.zero_grad(set_to_none=True)
                loss = cross_entropy(classifier(features[indices]), labels[indices])
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
    steps: int = 1,
    batch: int = 2048,
) -> nn.Linear:
    """Train a new linear probe; arguments as for ``fit``, but ``stream`` also draws the initial weights."""
    probe = new_probe(features.shape[1], classes, stream, features.device)
    fit(probe, features, labels, stream, lr=lr, epochs=epochs, steps=steps, batch=batch)
    return probe
