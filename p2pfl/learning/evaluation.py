"""Accuracy and loss of a predictor on a set of samples."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean

import numpy as np
import torch
from torch import Tensor, nn

from p2pfl.learning.peer_data import PeerData, Samples

PREDICTION_BATCH = 64
"""Samples; a batch of training is as large. Larger ones only take more memory."""


@dataclass(frozen=True)
class Evaluation:
    """Result on one set of samples. ``loss`` is the mean cross-entropy."""

    accuracy: float
    loss: float
    correct: int
    samples: int


@dataclass(frozen=True)
class ExtraMetric:
    """An evaluation besides that of the model on the local test split.

    Attributes:
        name: key in the records.
        predict: maps inputs [B, C, H, W] to scores [B, K].
        samples: the samples to classify.
        part_of: metrics with the same value are also averaged, with equal weights, under that name.
    """

    name: str
    predict: Callable[[Tensor], Tensor]
    samples: Samples
    part_of: str = ""


def mean_of(evaluations: Sequence[Evaluation]) -> Evaluation:
    """Average accuracy and loss with equal weights; sum ``correct`` and ``samples``."""
    return Evaluation(
        fmean(evaluation.accuracy for evaluation in evaluations),
        fmean(evaluation.loss for evaluation in evaluations),
        sum(evaluation.correct for evaluation in evaluations),
        sum(evaluation.samples for evaluation in evaluations),
    )


@torch.no_grad()
def evaluate(
    predict: Callable[[Tensor], Tensor], data: PeerData, samples: Samples, *, masked: bool = False
) -> Evaluation | None:
    """Classify ``samples`` by the largest score.

    Args:
        predict: maps inputs [B, C, H, W] to scores [B, K].
        data: the peer's data, which makes network input of the samples.
        samples: the samples to classify.
        masked: consider only the scores of classes in the local training samples or in ``samples`` (L2C, Table 2).

    Returns:
        None if ``samples`` is empty.
    """
    correct, loss, total = 0, 0.0, len(samples)
    if total == 0:
        return None
    excluded = np.setdiff1d(np.arange(data.classes), [*data.local_classes, *samples.labels]) if masked else None
    for x, labels in data.sweep(samples):
        scores = torch.cat([predict(part) for part in torch.split(x, PREDICTION_BATCH)])
        if excluded is not None:
            scores = scores.index_fill(1, torch.from_numpy(excluded).to(data.device), -torch.inf)
        correct += int((scores.argmax(1) == labels).sum())
        loss += float(nn.functional.cross_entropy(scores, labels, reduction="sum"))
    return Evaluation(correct / total, loss / total, correct, total)
