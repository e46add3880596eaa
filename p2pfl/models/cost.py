"""Parameters, FLOPs and message sizes of models, counted on torch's meta device without allocating them.

What does not work there is built and run on the CPU.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import Tensor, nn

from p2pfl.errors import ModelError, PluginError
from p2pfl.inputs import Size, zeros
from p2pfl.models.backbone import kept_random_states
from p2pfl.models.building import build
from p2pfl.models.splitting import called
from p2pfl.tensors import buffers_of, parameters_of

if TYPE_CHECKING:
    from torch.utils.flop_counter import FlopCounterMode

T = TypeVar("T")


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


@dataclass(frozen=True)
class Flops:
    """Floating-point operations of one architecture on one input; a multiply-add counts as two.

    torch counts matrix products, convolutions and attention.

    Attributes:
        forward: of the forward pass.
        training: of the forward and the backward pass.
    """

    forward: int
    training: int


def cost(name: str, channels: int, size: Size, classes: int, features: int | None = None) -> Cost:
    """Count the costs of one architecture; arguments and errors as for ``build``."""

    def counted() -> Cost:
        model = build(name, 0, channels, size, classes, features).eval()
        with torch.no_grad():
            forward, _ = _counted_call(name, model, zeros(1, channels, size))
        return Cost(
            name=model.name,
            parameters=sum(parameter.numel() for parameter in parameters_of(model).values()),
            features=model.features,
            flops=forward,
            model_bytes=_bytes(model),
            head_bytes=_bytes(model.head),
            prototype_bytes=4 * classes * model.features,
        )

    return _without_memory(counted)


def flops(name: str, channels: int, size: Size, classes: int, features: int | None = None) -> Flops:
    """Count the operations of one architecture; arguments and errors as for ``build``."""

    def counted() -> Flops:
        model = build(name, 0, channels, size, classes, features).eval()  # batch normalization may refuse one sample
        forward, output = _counted_call(name, model, zeros(1, channels, size))
        with _counter() as counter:
            if output.requires_grad:
                output.sum().backward()  # type: ignore[no-untyped-call]
        return Flops(forward, forward + counter.get_total_flops())

    return _without_memory(counted)


def _without_memory(count: Callable[[], T]) -> T:
    """Return ``count()`` on the meta device, or on the CPU if that fails."""
    try:
        with warnings.catch_warnings(), torch.device("meta"):
            warnings.simplefilter("ignore")  # weights that are loaded there have no values
            return count()
    except (ModelError, PluginError):  # users' modules may need numbers while they are built or run
        with kept_random_states(), torch.device("cpu"):
            return count()


def _counter() -> FlopCounterMode:
    from torch.utils.flop_counter import FlopCounterMode  # imports Triton: a quarter of a second

    return FlopCounterMode(display=False)


def _counted_call(name: str, model: nn.Module, inputs: Tensor) -> tuple[int, Tensor]:
    """Return the operations of a forward pass, and its output."""
    with _counter() as counter:
        output: Tensor = called(name, model, inputs, "for one input")
    return counter.get_total_flops(), output


def _bytes(module: nn.Module) -> int:
    """Bytes of what a message with the module holds: no frozen parameters."""
    return sum(tensor.nbytes for tensor in (parameters_of(module) | buffers_of(module)).values())
