"""Metrics of the local test split besides accuracy and loss: the table METRICS lists what a run file may name.

A metric is a function of scores, float [N, K], and labels, int64 [N], both on the CPU, that returns numbers by name.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from p2pfl.errors import PluginError
from p2pfl.learning.tried_functions import function_decorator
from p2pfl.registry import Table

Metric = Callable[[Tensor, Tensor], Any]

METRICS: Table[Metric] = Table("metric")


def _checked(name: str, function: Metric, location: tuple[str, int]) -> Metric:
    """Return the metric of a plug-in so that it raises PluginError unless it returns numbers."""

    @functools.wraps(function)
    def check(scores: Tensor, labels: Tensor) -> Any:
        value = function(scores, labels)
        parts = value.values() if isinstance(value, Mapping) else [value]
        for part in parts:
            try:
                float(part)
            except (TypeError, ValueError, RuntimeError):
                text = f"metric {name!r} must return a number, or a dict of numbers, not {type(part).__name__}"
                raise PluginError(*location, text) from None
        return value

    return check


metric = function_decorator(METRICS, "scores, labels", _checked)
"""Register a function of (scores, labels) that measures predictions on the local test split.

It is given float [N, K] and int64 [N] on the CPU, and returns a number or a dict of numbers. Run files list it:
``metrics: [my-metric]``.
"""

BINS = 15
"""Intervals of confidence of the calibration error."""


@metric("macro-f1")
def macro_f1(scores: Tensor, labels: Tensor) -> float:
    """Mean F1 score of the classes that occur among labels or predictions."""
    classes = scores.shape[1]
    predicted, actual = (one_hot(each, classes).double() for each in (scores.argmax(1), labels))
    hits, both = (predicted * actual).sum(0), predicted.sum(0) + actual.sum(0)
    return float((2 * hits / both)[both > 0].mean())


@metric("ece")
def calibration_error(scores: Tensor, labels: Tensor) -> float:
    """Expected calibration error (Guo et al., 2017): Σ_b |B_b|/N · |accuracy(B_b) − confidence(B_b)|.

    The confidence is the largest softmax of the scores; B_b are the samples in the b-th of 15 equal intervals of it.
    """
    confidence, predicted = scores.double().softmax(1).max(1)
    gap = (predicted == labels).double() - confidence
    bins = (confidence * BINS).ceil().long().clamp(1, BINS) - 1
    return float(torch.zeros(BINS, dtype=torch.float64).index_add(0, bins, gap).abs().sum() / len(labels))


@metric("class-accuracy")
def class_accuracy(scores: Tensor, labels: Tensor) -> dict[str, float]:
    """Accuracy on the samples of each class that occurs."""
    correct = (scores.argmax(1) == labels).double()
    return {str(k): float(correct[labels == k].mean()) for k in sorted(set(labels.tolist()))}


def measure(
    names: Iterable[str], scores: Tensor, labels: Tensor, class_names: Sequence[str] = ()
) -> dict[str, float]:
    """Return the values of these metrics by name, or as ``name.part`` if a metric has several.

    All are NaN if a score is: the model has diverged.

    Args:
        class_names: the parts of ``class-accuracy``; by default the numbers of the classes.
    """
    found: dict[str, float] = {}
    diverged = bool(scores.isnan().any())
    for name in names:
        value = math.nan if diverged else METRICS[name](scores, labels)
        if class_names and METRICS[name] is class_accuracy and isinstance(value, Mapping):
            value = {class_names[int(k)]: accuracy for k, accuracy in value.items()}
        if isinstance(value, Mapping):
            found |= {f"{name}.{part}": float(item) for part, item in value.items()}
        else:
            found[name] = float(value)
    return found
