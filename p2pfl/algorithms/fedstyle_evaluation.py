"""FedStyle's evaluation by linear probes (arXiv 2211.06470), the only part of the method that reads labels."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from pydantic import PositiveFloat, PositiveInt
from torch import Tensor, nn

from p2pfl import rng
from p2pfl.learning.evaluation import ExtraMetric
from p2pfl.learning.linear_probe import fit, new_probe, train_probe
from p2pfl.learning.peer_data import PeerData, Samples
from p2pfl.models.fedstyle import StylizedClassifier
from p2pfl.options import Options

Features = Callable[[Tensor], Tensor]
"""Network input [B, C, H, W] to features [B, d]."""


@dataclass(frozen=True)
class ProbeOptions(Options):
    """How linear probes are trained, and on what."""

    probe_samples: PositiveInt | None = None
    """Training samples per style for the probe of the global model; default: all."""
    probe_peers: PositiveInt | None = None
    """Evaluate the global model only on peers with ids below this; default: all, which agree on a complete graph."""
    probe_epochs: PositiveInt = 200
    """Epochs of a linear probe, if they make ``probe_steps`` steps; otherwise as many as do."""
    probe_steps: PositiveInt = 2000
    """Least optimizer steps of a linear probe: with few samples, an epoch is a single one."""
    probe_lr: PositiveFloat = 3e-3
    """Learning rate of a linear probe, for Adam."""
    probe_batch: PositiveInt = 2048
    """Features per optimizer step of a linear probe."""

    @property
    def recipe(self) -> dict[str, Any]:
        return {
            "lr": self.probe_lr,
            "epochs": self.probe_epochs,
            "steps": self.probe_steps,
            "batch": self.probe_batch,
        }


@torch.no_grad()
def features_of(samples: Samples, data: PeerData, features: Features) -> tuple[Tensor, Tensor]:
    """Return the features of all samples, not augmented, float [N, d], and their labels, int64 [N]; N > 0."""
    parts = [(features(x), labels) for x, labels in data.sweep(samples)]
    return torch.cat([part for part, _ in parts]), torch.cat([labels for _, labels in parts])


def personal_classifier(
    features: Features,
    width: int,
    generator: nn.Module | None,
    data: PeerData,
    stream: np.random.Generator,
    options: ProbeOptions,
) -> nn.Module:
    """Train a classifier of a peer's features on its training samples.

    Args:
        features: to [h_c, h_s]; to h_c without a generator.
        width: d.
        generator: G; a copy learns together with the probe on h_c + G([h_c, h_s]).
        stream: determines the probe's initial weights and the order of the samples.
    """
    probe = new_probe(width, data.classes, stream, data.device)
    classifier: nn.Module = probe
    if generator is not None:
        classifier = StylizedClassifier(copy.deepcopy(generator).requires_grad_(True), probe)
    if len(data.train):
        fit(classifier, *features_of(data.train, data, features), stream, **options.recipe)
    return classifier


def generalization(features: Features, data: PeerData, seed: int, options: ProbeOptions) -> Iterator[ExtraMetric]:
    """Yield one metric per style: a probe trained on the style's training samples, evaluated on its test samples."""
    for number, style in enumerate(data.styles):
        if len(style.train):
            predict = _style_probe(number, style.train, features, data, seed, options)
            yield ExtraMetric(f"generalization, style {number}", predict, style.test, part_of="generalization")


def _style_probe(
    number: int, samples: Samples, features: Features, data: PeerData, seed: int, options: ProbeOptions
) -> Features:
    stream = rng.shared(seed, "fedstyle.probe", number)  # equal nets get equal probes on all peers
    chosen = np.sort(stream.permutation(samples.indices)[: options.probe_samples])
    values, labels = features_of(Samples(samples.images, chosen), data, features)
    probe = train_probe(values, labels, data.classes, stream, **options.recipe)
    return lambda x: probe(features(x))
