"""What a model costs: to keep, to compute, to send. Nothing is allocated: it is counted on torch's meta device."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from p2pfl.models import build
from p2pfl.models.parts import Size


@dataclass(frozen=True)
class Cost:
    """One architecture's figures.

    Attributes:
        name: of the architecture.
        parameters: trained numbers, head included.
        features: d, between backbone and head.
        flops: of one image's way through the model, forward; a multiplication and an addition are two.
        model_bytes: all parameters and buffers as tensors of a message, headers not included.
        head_bytes: those of the head.
        prototype_bytes: K prototypes of d float32.
    """

    name: str
    parameters: int
    features: int
    flops: int
    model_bytes: int
    head_bytes: int
    prototype_bytes: int


def cost(name: str, channels: int, size: Size, classes: int, features: int | None = None) -> Cost:
    """The figures of one member of a group; arguments as for ``build``, and the same errors."""
    with torch.device("meta"):
        model = build(name, 0, channels, size, classes, features).eval()
        image = torch.empty(1, channels, *size)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(image)
    return Cost(
        name=model.name,
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        features=model.features,
        flops=counter.get_total_flops(),
        model_bytes=_bytes(model),
        head_bytes=_bytes(model.head),
        prototype_bytes=4 * classes * model.features,
    )


def _bytes(module: nn.Module) -> int:
    """Of what ``state_dict`` holds."""
    return sum(tensor.numel() * tensor.element_size() for tensor in module.state_dict().values())
