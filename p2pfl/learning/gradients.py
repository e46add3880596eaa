"""How a batch is drawn and how its gradient is made: the rules that ``gradient`` in a run file can name."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_

from p2pfl.errors import PluginError
from p2pfl.learning.peer_data import PeerData
from p2pfl.options import Options
from p2pfl.registry import Table, options_decorator
from p2pfl.rng import Streams

LossTerms = Callable[[Tensor, Tensor], Mapping[str, Tensor]]
"""Returns the terms of the loss by name, scalar tensors, of network input and labels, int64, one for each row."""


@dataclass(frozen=True)
class Batch:
    """What a rule makes a gradient of.

    Attributes:
        loss: of the whole input, or of some rows of it, such as the views of one sample.
        x: network input, [views * B, …], the first views of all samples first.
        labels: int64 [B].
        parameters: of the optimizer.
        streams: the peer's random numbers.
        state: what the rule keeps from batch to batch, in checkpoints too: tensors and plain values. Initially empty.
    """

    loss: LossTerms
    x: Tensor
    labels: Tensor
    views: int
    parameters: Sequence[nn.Parameter]
    streams: Streams
    state: dict[str, Any]

    def terms(self) -> Mapping[str, Tensor]:
        """Return the terms of the loss on the whole batch. Raises PluginError if they are not what they should be."""
        terms = self.loss(self.x, self.labels if self.views == 1 else self.labels.repeat(self.views))
        check_terms(self.loss, terms)
        return terms


@dataclass(frozen=True)
class GradientRule(Options):
    """The gradient of the loss on a batch; base of all rules. The fields of a subclass are its parameters."""

    def batches(
        self, data: PeerData, size: int, order: np.random.Generator, drop_last: bool
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Draw the batches of an epoch, as ``PeerData.batches`` does."""
        return data.batches(size, order, drop_last=drop_last)

    def backward(self, batch: Batch) -> Mapping[str, Tensor]:
        """Set ``grad`` of the parameters, which is None; return the terms of the loss, for the records."""
        terms = batch.terms()
        first, *others = terms.values()
        total = torch.stack([first, *others]).sum() if others else first
        total.backward()  # type: ignore[no-untyped-call]
        return terms


@dataclass(frozen=True)
class Clipped(GradientRule):
    """Another rule, whose gradient is scaled down if its norm is larger than ``norm``."""

    rule: GradientRule
    norm: float
    parts: Sequence[Sequence[nn.Parameter]] = ()
    """Groups of parameters, each scaled by the norm of its gradient; default: one group of all."""

    def batches(
        self, data: PeerData, size: int, order: np.random.Generator, drop_last: bool
    ) -> Iterator[tuple[Tensor, Tensor]]:
        return self.rule.batches(data, size, order, drop_last)

    def backward(self, batch: Batch) -> Mapping[str, Tensor]:
        terms = self.rule.backward(batch)
        for parameters in self.parts or (batch.parameters,):
            clip_grad_norm_(parameters, self.norm)
        return terms


GRADIENTS: Table[type[GradientRule]] = Table("gradient", {"mean": GradientRule})
gradient = options_decorator(GRADIENTS, GradientRule)


def check_terms(loss: Callable[..., object], terms: object) -> None:
    """Check what a loss has returned. Raises PluginError with the line where it is defined."""
    if not isinstance(terms, Mapping):
        wrong = f"not {_shown(terms)}"
    elif not terms:
        wrong = "but the dict is empty"
    elif bad := [name for name, value in terms.items() if not isinstance(value, Tensor) or value.numel() != 1]:
        wrong = f"but {bad[0]!r} is {_shown(terms[bad[0]])}"
    elif len(shapes := {tuple(value.shape) for value in terms.values()}) > 1:
        wrong = f"but their shapes differ: {', '.join(map(str, sorted(shapes)))}"
    elif not any(value.requires_grad for value in terms.values()):
        wrong = "but none has a gradient: compute one from the model's output, without detach or no_grad"
    else:
        return
    text = f'loss should return its terms by name, scalar tensors, such as {{"ce": tensor}}, {wrong}'
    raise PluginError.of(loss, text)


def _shown(value: object) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of shape {list(value.shape)}" if value.dim() else "a tensor"
    return "None" if value is None else f"of type {type(value).__name__}"
