"""Parameters, FLOPs and message sizes of models, counted on torch's meta device without allocating them.

What does not work there is built and run on the CPU.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass

import torch
from torch import nn

from p2pfl.errors import ModelError, PluginError
from p2pfl.inputs import Size, zeros
from p2pfl.models.backbone import kept_random_states
from p2pfl.models.building import build
from p2pfl.models.splitting import called
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
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # weights that are loaded there have no values
            return _cost(name, channels, size, classes, features, torch.device("meta"))
    except (ModelError, PluginError):  # users' modules may need numbers while they are built or run
        with kept_random_states():
            return _cost(name, channels, size, classes, features, torch.device("cpu"))


def _cost(name: str, channels: int, size: Size, classes: int, features: int | None, device: torch.device) -> Cost:
    from torch.utils.flop_counter import FlopCounterMode  # imports Triton: a quarter of a second

    with device:
        model = build(name, 0, channels, size, classes, features).eval()
        image = zeros(1, channels, size)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        called(name, model, image, "for one input")
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
