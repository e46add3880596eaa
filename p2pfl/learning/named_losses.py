"""Losses on the labels that a run file may name: ``algorithm: {name: local, loss: focal}``.

A loss is a function of logits, float [B, K], and labels, int64 [B], that returns their mean loss, a tensor [].
"""

from __future__ import annotations

import functools
from collections.abc import Callable

from torch import Tensor
from torch.nn.functional import cross_entropy

from p2pfl.errors import PluginError
from p2pfl.learning.tried_functions import function_decorator
from p2pfl.options import unknown
from p2pfl.registry import Table

LabelLoss = Callable[[Tensor, Tensor], Tensor]

DEFAULT = "ce"
"""Cross-entropy."""


LOSSES: Table[LabelLoss] = Table("loss")


def _checked(name: str, function: LabelLoss, location: tuple[str, int]) -> LabelLoss:
    """Return the loss of a plug-in so that it raises PluginError unless it returns one number to descend."""

    @functools.wraps(function)
    def check(logits: Tensor, labels: Tensor) -> Tensor:
        value = function(logits, labels)
        if not isinstance(value, Tensor):
            raise PluginError(*location, f"loss {name!r} must return a tensor, not {type(value).__name__}")
        if value.dim() or (logits.requires_grad and not value.requires_grad):
            found = f"one of shape {list(value.shape)}" if value.dim() else "one without a gradient"
            raise PluginError(*location, f"loss {name!r} must return a tensor without dimensions, not {found}")
        return value

    return check


loss = function_decorator(LOSSES, "logits, labels", _checked, gradient=True)
"""Register a function of (logits, labels), float [B, K] and int64 [B], that returns the mean loss, a tensor [].

Methods that train with the cross-entropy of the labels use it in its place: ``algorithm: {…, loss: my-loss}``.
"""


@loss(DEFAULT)
def _cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """Cross-entropy of the softmax of the logits: the default."""
    return cross_entropy(logits, labels)


@loss("label-smoothing")
def label_smoothing(logits: Tensor, labels: Tensor) -> Tensor:
    """Cross-entropy with targets of 0.9 for the label, and 0.1 divided among all classes (Szegedy et al., 2016)."""
    return cross_entropy(logits, labels, label_smoothing=0.1)


@loss("focal")
def focal(logits: Tensor, labels: Tensor) -> Tensor:
    """−(1/B) Σ (1 − p_y)² log p_y (Lin et al., 2017, γ = 2): samples that the model knows well count less."""
    log_p = logits.log_softmax(1).gather(1, labels[:, None])[:, 0]
    return -((1 - log_p.exp()).square() * log_p).mean()


def known_loss(name: str) -> str:
    """Return the name of a loss. Raises ValueError with the known names."""
    if name not in LOSSES:
        raise ValueError(unknown(name, LOSSES))
    return name
