"""Parameters, FLOPs and message sizes of models, counted on torch's meta device without allocating them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from p2pfl.inputs import Size, zeros
from p2pfl.models import build
from p2pfl.tensors import buffers_of, parameters_of


@dataclass(frozen=True)
class Cost:
    """Costs of one architecture.

    Attributes:
        name: of the architecture.
        parameters: number of trainable parameters, head included.
        features: d, the size of the feature vector.
        flops: of one input's forward pass; a multiply-add counts as two.
        model_bytes: tensor bytes of a message with all of these and all buffers, without its header.
        head_bytes: the same for the head only.
        prototype_bytes: the same for K prototypes of d float32 each.
    """

    name: str
    parameters: int
    features: int
    flops: int
    model_bytes: int
    head_bytes: int
    prototype_bytes: int


def cost(name: str, channels: int, size: Size, classes: int, features: int | None = None) -> Cost:
    """Count the costs of one architecture; arguments and errors as for ``build``."""
    with torch.device("meta"):
        model = build(name, 0, channels, size, classes, features).eval()
        image = zeros(1, channels, size)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(image)
    return Cost(
        name=model.name,
        parameters=sum(parameter.numel() for parameter in parameters_of(model).values()),
        features=model.features,
        flops=counter.get_total_flops(),
        model_bytes=_bytes(model),
        head_bytes=_bytes(model.head),
        prototype_bytes=4 * classes * model.features,
    )


def _bytes(module: nn.Module) -> int:
    """Bytes of what a message with the module holds: no frozen parameters."""
    return sum(tensor.nbytes for tensor in (parameters_of(module) | buffers_of(module)).values())
