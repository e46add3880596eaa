"""Accuracy and loss of a predictor on a set of samples."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean

import numpy as np
import torch
from torch import Tensor, nn

from p2pfl.errors import PluginError
from p2pfl.learning.metrics import measure
from p2pfl.learning.peer_data import PeerData, Samples
from p2pfl.tensors import widened

PREDICTION_BATCH = 64
"""Samples; a batch of training is as large. Larger ones only take more memory."""


@dataclass(frozen=True)
class Evaluation:
    """Result on one set of samples.

    Attributes:
        accuracy, loss, correct: as the run's ``masked_test`` asks: one of the two below, the mean cross-entropy and
            the number of correct predictions of the same scores.
        masked_accuracy: only the scores of the peer's local classes count.
        unmasked_accuracy: the scores of all classes count.
        metrics: further ones by name, of the same scores as ``accuracy``.
    """

    accuracy: float
    loss: float
    correct: int
    samples: int
    masked_accuracy: float
    unmasked_accuracy: float
    metrics: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class ExtraMetric:
    """An evaluation in addition to the model's on the local test split.

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


def on_test_samples(
    name: str, predict: Callable[[Tensor], Tensor], data: PeerData, whole: bool
) -> Iterable[ExtraMetric]:
    """Evaluate on the local test split, and if ``whole`` on the whole test set too."""
    yield ExtraMetric(name, predict, data.test)
    if whole:
        yield ExtraMetric(f"{name}_global", predict, data.global_test)


def mean_of(evaluations: Sequence[Evaluation]) -> Evaluation:
    """Average accuracies and loss with equal weights; sum ``correct`` and ``samples``."""
    return Evaluation(
        fmean(evaluation.accuracy for evaluation in evaluations),
        fmean(evaluation.loss for evaluation in evaluations),
        sum(evaluation.correct for evaluation in evaluations),
        sum(evaluation.samples for evaluation in evaluations),
        fmean(evaluation.masked_accuracy for evaluation in evaluations),
        fmean(evaluation.unmasked_accuracy for evaluation in evaluations),
    )


@torch.no_grad()
def evaluate(
    predict: Callable[[Tensor], Tensor],
    data: PeerData,
    samples: Samples,
    *,
    masked: bool = False,
    metrics: Sequence[str] = (),
) -> Evaluation | None:
    """Classify ``samples`` by the largest score: of all classes, and of the local classes only.

    The local classes are those in the local training samples or in ``samples``. Both accuracies come from one pass.

    Args:
        predict: maps inputs [B, C, H, W] to scores [B, K].
        data: the peer's data, which makes network input of the samples.
        samples: the samples to classify.
        masked: ``accuracy``, ``loss``, ``correct`` and ``metrics`` are those of the local classes, otherwise those of
            all: the scores of the others are −inf.
        metrics: names of further metrics.

    Returns:
        None if ``samples`` is empty.
    """
    loss, total = 0.0, len(samples)
    if total == 0:
        return None
    correct = {False: 0, True: 0}
    measured: list[Tensor] = []
    excluded = np.setdiff1d(np.arange(data.classes), data.scored_classes(samples))
    for x, labels in data.sweep(samples):
        parts = [_scores(predict, part, data.classes) for part in torch.split(x, PREDICTION_BATCH)]
        scores = widened(torch.cat(parts))
        local = scores.index_fill(1, torch.from_numpy(excluded).to(data.device), -torch.inf)
        for mask, considered in ((False, scores), (True, local)):
            correct[mask] += int((considered.argmax(1) == labels).sum())
        if metrics:
            measured.append((local if masked else scores).cpu())
        loss += float(nn.functional.cross_entropy(local if masked else scores, labels, reduction="sum"))
    return Evaluation(
        accuracy=correct[masked] / total,
        loss=loss / total,
        correct=correct[masked],
        samples=total,
        masked_accuracy=correct[True] / total,
        unmasked_accuracy=correct[False] / total,
        metrics=measure(metrics, torch.cat(measured), torch.from_numpy(samples.labels), data.class_names)
        if metrics
        else {},
    )


def _scores(predict: Callable[[Tensor], Tensor], x: Tensor, classes: int) -> Tensor:
    scores: object = predict(x)
    if isinstance(scores, Tensor) and scores.is_floating_point() and scores.shape == (len(x), classes):
        return scores
    found = f"{scores.dtype} {list(scores.shape)}" if isinstance(scores, Tensor) else f"a {type(scores).__name__}"
    name = getattr(predict, "__name__", "predict")
    text = f"{name} should return class scores, float [B, K], here {[len(x), classes]}, not {found}"
    raise PluginError.of(predict, text.replace("torch.", ""))
